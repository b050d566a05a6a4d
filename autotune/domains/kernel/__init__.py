"""A user's own kernel: a Triton kernel, a Numba kernel or a plain callable whose keyword parameters are tuned."""
