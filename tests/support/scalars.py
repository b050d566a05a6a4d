"""Inductor's C++ without vectors: what tests check of it is where stored kernels stand in it, not how fast it is."""

from __future__ import annotations


def compile_without_vectors() -> None:
    """Let Inductor write loops over single elements, which g++ compiles in half the time: it reads no vector types."""
    from torch._inductor import config, cpu_vec_isa

    config.cpp.simdlen = 1
    cpu_vec_isa.valid_vec_isa_list = list  # type: ignore[assignment]  # torch's compiles programs to see what runs
