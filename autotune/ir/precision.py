"""The precision of kernels' arithmetic, as the user asks for it.

A region's graph says it (``Graph.precision``), and with that the key of its workload: what was found under one
precision is never deployed under another. By default kernels have the approximations of CUDA's fast math, or on a CPU
divide by a row's value through its inverse; under ``strict`` every operator is within a few roundings of fp32.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from autotune.errors import UserError

VARIABLE = "AUTOTUNE_PRECISION"
DEFAULT, STRICT = "default", "strict"
PRECISIONS = (DEFAULT, STRICT)


def asked() -> str:
    """The precision of regions that are captured now, by $AUTOTUNE_PRECISION, as graphs have it: "" by default. Raises
    UserError where the variable has another value."""
    name = os.environ.get(VARIABLE) or DEFAULT
    if name not in PRECISIONS:
        raise UserError(f"{VARIABLE}={name!r} is no precision: it may be {' or '.join(PRECISIONS)}")
    return "" if name == DEFAULT else name


@contextmanager
def asking(name: str | None) -> Iterator[None]:
    """While open, in processes started meanwhile too, regions are captured with a precision; None leaves it as it is.
    Raises UserError where there is no such precision."""
    before = os.environ.get(VARIABLE)
    if name is not None:
        if name not in PRECISIONS:
            raise UserError(f"there is no precision {name!r}: it may be {' or '.join(PRECISIONS)}")
        os.environ[VARIABLE] = name
    try:
        asked()
        yield
    finally:
        if name is not None:
            os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before
