"""Inductor's C++ without vectors: what tests check of it is where stored kernels stand in it, not how fast it is."""

from __future__ import annotations


def compile_without_vectors() -> None:
    """Let Inductor write loops over single elements, which g++ compiles in half the time: it reads no vector types."""
    import torch._inductor.config

    torch._inductor.config.cpp.simdlen = 1
