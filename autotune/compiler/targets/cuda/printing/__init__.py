"""From the kernel IR to Numba CUDA source."""
