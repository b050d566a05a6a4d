"""Matrix products with an epilogue as a domain."""
