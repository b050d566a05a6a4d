"""What can be tuned: a folder a domain."""
