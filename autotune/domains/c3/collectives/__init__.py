"""The collectives, by engine: NCCL, copy engines, Numba kernels, and on CPUs gloo and shared memory."""
