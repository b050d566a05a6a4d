"""The collectives, a file an engine: NCCL, copy engines, a Numba kernel that adds, and on CPUs gloo and copies."""
