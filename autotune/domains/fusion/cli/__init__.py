"""The commands of the fusion domain."""
