"""The commands of the C3 domain."""
