"""Operators and memory accesses of CPU kernels, as Numba intrinsics."""
