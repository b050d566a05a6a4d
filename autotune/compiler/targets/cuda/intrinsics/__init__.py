"""Operations that Numba CUDA lacks, as intrinsics that generated code calls by name."""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def resolve(name: str) -> Any:
    """The object behind a name that generated code uses, made on first use, or None if the name is not an intrinsic."""
    from autotune.compiler.targets.cuda.intrinsics import memory, operations

    return operations.resolve(name) or memory.resolve(name)
