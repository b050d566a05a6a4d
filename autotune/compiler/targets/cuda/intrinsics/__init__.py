"""What Numba CUDA does not offer, as intrinsics."""
