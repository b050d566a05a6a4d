"""The fusion domain: memory-intensive regions of a PyTorch program."""
