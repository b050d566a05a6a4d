"""The pointwise operators: arity, symmetry, cost and meaning; and the user's setting for the precision of arithmetic.

``cost`` is in units of one fused multiply-add. As in FusionStitching (section 3), it divides operators into *light*
ones, which are recomputed freely, and *expensive* ones (cost above ``LIGHT``), whose results are worth keeping.

The precision is part of a region's graph (``Graph.precision``), and so of its workload's key: a kernel found under one
precision is never deployed under another. By default, kernels use the approximations of CUDA's fast math. CPU kernels
replace a division by a row's value by a multiplication with its inverse. Under ``strict`` every operator is within a
few roundings of fp32.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from autotune.errors import UserError

LIGHT = 4


@dataclass(frozen=True)
class Op:
    """
    Attributes:
        result: "same" (type of the first argument), "bool", "where" (type of the second argument), or "cast".
        library: True for a function of one float with this name in torch, and with the name ``<name>f`` in the C
            library and CUDA's libdevice. This entry is sufficient for all stages; a target may have a faster version.
    """

    arity: int
    cost: int = 1
    commutative: bool = False
    result: str = "same"
    library: bool = False


POINTWISE: Mapping[str, Op] = {
    "add": Op(2, commutative=True),
    "sub": Op(2),
    "mul": Op(2, commutative=True),
    "div": Op(2, cost=4),  # floats only; true division
    "neg": Op(1),
    "abs": Op(1),
    "sign": Op(1, cost=2),
    "maximum": Op(2, commutative=True),  # NaN propagates, as torch.maximum
    "minimum": Op(2, commutative=True),
    "sqrt": Op(1, cost=6),
    "rsqrt": Op(1, cost=6),
    "reciprocal": Op(1, cost=4),
    "exp": Op(1, cost=8),
    "exp2": Op(1, cost=6),
    "log": Op(1, cost=8),
    "log2": Op(1, cost=6),
    "log1p": Op(1, cost=12, library=True),
    "expm1": Op(1, cost=12, library=True),
    "erf": Op(1, cost=16),
    "tanh": Op(1, cost=12),
    "sigmoid": Op(1, cost=10),
    "sin": Op(1, cost=16, library=True),
    "cos": Op(1, cost=16, library=True),
    "tan": Op(1, cost=20, library=True),
    "asin": Op(1, cost=16, library=True),
    "acos": Op(1, cost=16, library=True),
    "atan": Op(1, cost=16, library=True),
    "sinh": Op(1, cost=16, library=True),
    "cosh": Op(1, cost=16, library=True),
    "asinh": Op(1, cost=20, library=True),
    "acosh": Op(1, cost=20, library=True),
    "atanh": Op(1, cost=20, library=True),
    "erfc": Op(1, cost=16, library=True),
    "lgamma": Op(1, cost=24, library=True),
    "pow": Op(2, cost=20),
    "floor": Op(1),
    "ceil": Op(1),
    "round": Op(1),  # half to even
    "trunc": Op(1),
    "floordiv": Op(2, cost=8),  # integers; rounds towards minus infinity
    "mod": Op(2, cost=8),  # sign of the divisor, as torch.remainder
    "lt": Op(2, result="bool"),
    "le": Op(2, result="bool"),
    "gt": Op(2, result="bool"),
    "ge": Op(2, result="bool"),
    "eq": Op(2, commutative=True, result="bool"),
    "ne": Op(2, commutative=True, result="bool"),
    "and": Op(2, commutative=True),  # logical on bool, bitwise on integers
    "or": Op(2, commutative=True),
    "xor": Op(2, commutative=True),
    "not": Op(1),
    "shr": Op(2),  # integers; arithmetic shift to the right by a constant below the width
    "isnan": Op(1, result="bool"),
    "isinf": Op(1, result="bool"),
    "where": Op(3, result="where"),  # args: condition, then, else
    "cast": Op(1, result="cast"),  # to the value's own dtype; float to integer truncates
}
"""The arguments of a binary operator have the same type; the translation inserts ``cast`` where needed."""

LIBRARY = tuple(name for name, op in POINTWISE.items() if op.library)
"""Operators with ``Op.library``."""


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
