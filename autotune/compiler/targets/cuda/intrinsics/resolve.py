"""From a name that generated code uses to what is behind it."""

from __future__ import annotations

import functools
from typing import Any

from autotune.compiler.targets.cuda.intrinsics import async_copy, base, cluster, comm


@functools.cache
def resolve(name: str) -> Any:
    """The object behind a name that generated code uses, or None if the name is not an intrinsic."""
    plain = cluster.PLAIN.get(name) or comm.PLAIN.get(name)
    return plain or base.resolve(name) or async_copy.resolve(name)
