"""Collectives by engine: NCCL, copy engines, a Numba kernel that reduces, and on CPUs gloo and copies."""
