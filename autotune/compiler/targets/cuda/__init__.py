"""CUDA: Numba source for groups and launches, and its compilation to cubins."""
