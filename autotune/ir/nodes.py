"""The parts of a graph: storage types, values and outputs, the memory that they access, and the pointwise operators.

:mod:`autotune.ir.graph` documents their meaning. A graph may come from a database that others write to. Capture never
makes an access before a tensor's first element, a negative stride or a number beyond 63 bits. A graph with any of these
is rejected before a kernel is generated from it.

An operator has an arity, a symmetry, a cost and a meaning. ``cost`` is in units of one fused multiply-add. As in
FusionStitching (section 3), it divides operators into *light* ones, which are recomputed freely, and *expensive* ones
(cost above ``LIGHT``), whose results are worth keeping.

The user's setting for the precision of arithmetic is part of a region's graph (``Graph.precision``), and so of its
workload's key: a kernel found under one precision is never deployed under another. By default, kernels use the
approximations of CUDA's fast math. CPU kernels replace a division by a row's value by a multiplication with its
inverse. Under ``strict`` every operator is within a few roundings of fp32.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

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


MAX_VALUES = 20_000
"""Larger graphs are rejected: they could not become the kernels of one region anyway."""

MOST = 1 << 62
"""Bound on every number in a graph, product of extents and reach in elements: kernels multiply and add these in 64
bits."""
_WIDTH = {"int32": 1 << 31, "int64": 1 << 63}

_STORAGE = {
    "float32": (4, "f32"),
    "float16": (2, "f16"),
    "bfloat16": (2, "bf16"),
    "float8_e4m3fn": (1, "e4m3"),
    "float8_e5m2": (1, "e5m2"),
    "int64": (8, "i64"),
    "int32": (4, "i32"),
    "int16": (2, "i16"),
    "int8": (1, "i8"),
    "uint8": (1, "u8"),
    "bool": (1, "b1"),
}
STORAGE_BYTES: Mapping[str, int] = {name: size for name, (size, _) in _STORAGE.items()}
"""Storage types of inputs and outputs, with their size in bytes."""
SHORT: Mapping[str, str] = {name: short for name, (_, short) in _STORAGE.items()}
"""Short names of storage types, for output and in generated source."""

EIGHT_BIT_FLOATS = ("float8_e4m3fn", "float8_e5m2")
FLOATS = ("float32", "float16", "bfloat16", *EIGHT_BIT_FLOATS)
"""Storage types that are read into float32."""

COMPUTE_TYPES = ("float32", "int32", "int64", "bool")
REDUCTIONS = ("sum", "max", "min", "prod", "sum_at")
LEAVES = ("load", "gather", "const", "index")


def compute_type(storage: str) -> str:
    """The arithmetic type into which a storage type is read."""
    if storage in FLOATS:
        return "float32"
    if storage in ("int64", "bool"):
        return storage
    return "int32"


@dataclass(frozen=True)
class Value:
    """One node. ``args`` are indices of earlier values in the graph.

    The value varies over ``axes`` (sorted axis numbers). The other fields belong to these ops:

    * ``slot``, ``strides`` (elements, one for each of ``axes``), ``offset``, ``guards``: load and gather. A gather's
      strides are those of the directly indexed axes; an axis that only the index varies over has stride 0.
    * ``index_stride``, ``bound``: gather.
    * ``number``: const (float, int or bool).
    * ``scale``, ``shift``: index (its one axis is ``axes[0]``).
    * ``over``: reductions; sorted axis numbers.
    """

    op: str
    args: tuple[int, ...] = ()
    axes: tuple[int, ...] = ()
    dtype: str = "float32"
    slot: int = -1
    strides: tuple[int, ...] = ()
    offset: int = 0
    guards: tuple[tuple[int, int, int], ...] = ()
    index_stride: int = 0
    bound: int = 0
    number: float | int | bool = 0
    scale: int = 1
    shift: int = 0
    over: tuple[int, ...] = ()

    def but(self, **fields: Any) -> Value:
        """The value with other fields; ``dataclasses.replace`` takes six times as long, in each plan."""
        made = object.__new__(Value)
        made.__dict__.update(self.__dict__, **fields)
        return made

    @property
    def is_zero(self) -> bool:
        """True for a constant zero, but not for -0."""
        return self.op == "const" and repr(self.number) in ("0", "0.0", "False")

    def to_json(self) -> dict[str, Any]:
        """Fields that differ from their defaults; infinities and NaN as strings, since JSON has none."""
        out: dict[str, Any] = {"op": self.op, "dtype": self.dtype}
        for name in ("args", "axes", "strides", "over"):
            if getattr(self, name):
                out[name] = list(getattr(self, name))
        if self.guards:
            out["guards"] = [list(g) for g in self.guards]
        out |= {name: getattr(self, name) for name, default in _INTEGERS.items() if getattr(self, name) != default}
        if self.op == "const":
            n = self.number
            finite = isinstance(n, (bool, int)) or (n == n and abs(n) != float("inf"))
            out["number"] = n if finite else str(n)
        return out

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Value:
        number = data.get("number", 0)
        return cls(
            op=str(data["op"]),
            args=tuple(data.get("args", ())),
            axes=tuple(data.get("axes", ())),
            dtype=str(data["dtype"]),
            strides=tuple(data.get("strides", ())),
            guards=tuple((int(a), int(lo), int(hi)) for a, lo, hi in data.get("guards", ())),
            number=float(number) if isinstance(number, str) else number,
            over=tuple(data.get("over", ())),
            **{name: int(data.get(name, default)) for name, default in _INTEGERS.items()},
        )


_INTEGERS = {"slot": -1, "offset": 0, "index_stride": 0, "bound": 0, "scale": 1, "shift": 0}
"""Fields of a value that are single integers, with their defaults, in the order of its JSON."""


@dataclass(frozen=True)
class Output:
    """A stored result: ``value`` written at ``offset + sum(index[a] * stride[a])`` over ``axes``.

    ``axes`` may hold axes that the value does not vary over (an expanded output). ``dtype`` is the storage type.
    """

    value: int
    axes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    offset: int = 0

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "axes": list(self.axes), "strides": list(self.strides)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Output:
        axes, strides, offset = tuple(data["axes"]), tuple(data["strides"]), int(data.get("offset", 0))
        return cls(int(data["value"]), axes, strides, str(data["dtype"]), offset)


def check_numbers(extents: Sequence[int], values: Sequence[Value], outputs: Sequence[Output]) -> None:
    """Raise ValueError unless every integer field is an integer in range."""
    for e in extents:
        if type(e) is not int or not 0 <= e < MOST:
            raise ValueError(f"an axis has the extent {e!r}")
    for i, v in enumerate(values):
        guards = [n for g in v.guards for n in g]
        own = (*v.args, *v.axes, *v.strides, *v.over, *guards, v.slot, v.offset, v.index_stride, v.bound)
        if not all(type(n) is int and -MOST < n < MOST for n in (*own, v.scale, v.shift)):
            raise ValueError(f"value {i}: a number that is no integer, or out of range")
        if v.op == "const":
            _check_constant(i, v)
    for o in outputs:
        if not all(type(n) is int and abs(n) < MOST for n in (o.value, o.offset, *o.axes, *o.strides)):
            raise ValueError("an output has a number that is no integer, or out of range")


def check_loads(extents: Sequence[int], values: Sequence[Value]) -> None:
    """Raise ValueError if a load or gather reaches before its tensor's first element, or beyond :data:`MOST`.

    Axes and slots must be valid.
    """
    for i, v in enumerate(values):
        if prod(max(1, extents[a]) for a in {*v.axes, *v.over}) >= MOST:
            raise ValueError(f"value {i}: more elements than 63 bits count")
        if v.op == "index" and (len(v.axes) != 1 or v.args):
            raise ValueError(f"value {i}: an index along {len(v.axes)} axes")
        if v.op not in ("load", "gather"):
            continue
        if any(s < 0 for s in v.strides):
            raise ValueError(f"value {i}: a negative stride")
        walked = [a for a, _, _ in v.guards]
        if len(set(walked)) != len(walked) or not set(walked) <= set(v.axes):
            raise ValueError(f"value {i}: bad guards")
        low, high, empty = reach(extents, v)
        if v.op == "gather":
            _check_gather(values, i, v)
        elif v.args:
            raise ValueError(f"value {i}: a load that takes values")
        if not empty and low < 0:
            raise ValueError(f"value {i}: an access {-low} elements before its tensor")
        if high >= MOST:
            raise ValueError(f"value {i}: an access beyond what 63 bits count")


def reach(extents: Sequence[int], v: Value) -> tuple[int, int, bool]:
    """(lowest, highest) element that a load or gather reaches within its guards, and True if it reaches no element."""
    low = v.offset
    high = v.offset + max(0, v.bound - 1) * v.index_stride
    empty = False
    parts = {a: (lo, hi) for a, lo, hi in v.guards}
    for a, s in zip(v.axes, v.strides, strict=True):
        first, end = parts.get(a, (0, extents[a]))
        first, end = max(0, first), min(end, extents[a])
        empty = empty or first >= end
        low += first * s
        high += max(0, end - 1) * s
    return low, high, empty


def check_outputs(extents: Sequence[int], outputs: Sequence[Output]) -> None:
    """Raise ValueError if a store reaches before its tensor's first element, or beyond :data:`MOST`."""
    for k, o in enumerate(outputs):
        if o.offset < 0 or any(s < 0 for s in o.strides):
            raise ValueError(f"output {k}: a negative offset or stride")
        last = o.offset + sum((extents[a] - 1) * s for a, s in zip(o.axes, o.strides, strict=True))
        if max(1 + last, prod(extents[a] for a in o.axes)) >= MOST:
            raise ValueError(f"output {k}: more elements than 63 bits count")


def _check_constant(i: int, v: Value) -> None:
    """Raise ValueError unless a constant is a number of its type, since it is printed into a kernel's text."""
    width = _WIDTH.get(v.dtype)
    wanted = (int, bool) if v.dtype == "bool" else (int,) if width else (int, float)
    if type(v.number) not in wanted or (width and not -width <= v.number < width):
        raise ValueError(f"value {i}: the constant {v.number!r} of type {v.dtype}")


def _check_gather(values: Sequence[Value], i: int, v: Value) -> None:
    if len(v.args) != 1 or v.bound < 0 or v.index_stride < 1:
        raise ValueError(f"value {i}: bad index, bound or stride of a gather")
    index = values[v.args[0]]
    if index.dtype not in ("int32", "int64") or not set(index.axes) <= set(v.axes):
        raise ValueError(f"value {i}: a gather by what is no integer, or varies over other axes")
