"""Comparison of whole steps under each compiler, and of the kernels that they launch."""
