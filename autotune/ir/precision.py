"""The user's setting for the precision of kernels' arithmetic.

It is part of a region's graph (``Graph.precision``), and so of its workload's key: a kernel found under one precision
is never deployed under another. By default, kernels use the approximations of CUDA's fast math. CPU kernels replace a
division by a row's value by a multiplication with its inverse. Under ``strict`` every operator is within a few
roundings of fp32.
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
    """The current value for ``Graph.precision``, from $AUTOTUNE_PRECISION: "" by default.

    Raises UserError if the variable has an unknown value.
    """
    name = os.environ.get(VARIABLE) or DEFAULT
    if name not in PRECISIONS:
        raise UserError(f"{VARIABLE}={name!r}: use {' or '.join(PRECISIONS)}")
    return "" if name == DEFAULT else name


@contextmanager
def asking(name: str | None) -> Iterator[None]:
    """Set the precision of regions captured in the context, also by processes started in it; None does not change it.

    Raises UserError for an unknown precision.
    """
    before = os.environ.get(VARIABLE)
    if name is not None:
        if name not in PRECISIONS:
            raise UserError(f"unknown precision {name!r}: use {' or '.join(PRECISIONS)}")
        os.environ[VARIABLE] = name
    try:
        asked()
        yield
    finally:
        if name is not None:
            os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before
