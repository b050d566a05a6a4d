"""The oracle: runs a graph in fp64, on inputs made for what it multiplies, and says how far kernels may be off."""
