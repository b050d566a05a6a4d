"""The oracle: runs a graph in fp64, on random inputs made for it, and bounds the errors of kernels."""
