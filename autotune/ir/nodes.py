"""What a graph is made of: storage types, values and outputs. :mod:`autotune.ir.graph` says what they mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_VALUES = 20_000
"""A graph that is larger is given up: it would not make one region's kernels anyway."""

STORAGE_BYTES: Mapping[str, int] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Storage types of inputs and outputs, with their size in bytes."""
SHORT: Mapping[str, str] = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
    "bool": "b1",
}
"""Their short names, for people and in generated source."""

EIGHT_BIT_FLOATS = ("float8_e4m3fn", "float8_e5m2")
FLOATS = ("float32", "float16", "bfloat16", *EIGHT_BIT_FLOATS)
"""Storage types that are read into float32."""

COMPUTE_TYPES = ("float32", "int32", "int64", "bool")
REDUCTIONS = ("sum", "max", "min", "prod", "sum_at")
LEAVES = ("load", "gather", "const", "index")


def compute_type(storage: str) -> str:
    """The arithmetic type a storage type is read into."""
    if storage in FLOATS:
        return "float32"
    if storage in ("int64", "bool"):
        return storage
    return "int32"


@dataclass(frozen=True)
class Value:
    """One node. ``args`` are indices of earlier values in the graph.

    ``axes`` (sorted axis numbers) is what the value varies over. The other fields are used by the ops named:

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

    def to_json(self) -> dict[str, Any]:
        """Fields that differ from their defaults; infinities and NaN as strings, since JSON has none."""
        out: dict[str, Any] = {"op": self.op, "dtype": self.dtype}
        for name in ("args", "axes", "strides", "over"):
            if getattr(self, name):
                out[name] = list(getattr(self, name))
        if self.guards:
            out["guards"] = [list(g) for g in self.guards]
        for name, default in (
            ("slot", -1),
            ("offset", 0),
            ("index_stride", 0),
            ("bound", 0),
            ("scale", 1),
            ("shift", 0),
        ):
            if getattr(self, name) != default:
                out[name] = getattr(self, name)
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
            slot=int(data.get("slot", -1)),
            strides=tuple(data.get("strides", ())),
            offset=int(data.get("offset", 0)),
            guards=tuple((int(a), int(lo), int(hi)) for a, lo, hi in data.get("guards", ())),
            index_stride=int(data.get("index_stride", 0)),
            bound=int(data.get("bound", 0)),
            number=float(number) if isinstance(number, str) else number,
            scale=int(data.get("scale", 1)),
            shift=int(data.get("shift", 0)),
            over=tuple(data.get("over", ())),
        )


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
        return {
            "value": self.value,
            "axes": list(self.axes),
            "strides": list(self.strides),
            "dtype": self.dtype,
            "offset": self.offset,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Output:
        return cls(
            int(data["value"]),
            tuple(data["axes"]),
            tuple(data["strides"]),
            str(data["dtype"]),
            int(data.get("offset", 0)),
        )
