"""The typed operator graph of a memory-intensive region, in axis form.

Views, transposes, broadcasts and reshapes are not nodes here. A region has a set of *axes*, each with an extent. Every
value has the axes that it varies over, and a load has a stride along each. ``x.T``, ``x.expand(...)`` and an aligned
``x.view(...)`` of an input are then the same load with other strides. A row vector and a column vector differ only in
the axes that they vary over. There are five kinds of value:

====================  ==================================================================================================
``load``              element of input ``slot`` at ``offset + sum(index[a] * stride[a])``; ``guard`` bounds (axis, lo,
                      hi) outside which the value is 0 and memory is not touched (slices and concatenations)
``gather``            as load, plus ``index_stride * args[0]``; args[0] is an integer value in ``[0, bound)``
``const``, ``index``  a scalar constant; the index along one axis, ``scale * i + shift``
pointwise             see :mod:`autotune.ir.nodes`
reduction             ``sum`` ``max`` ``min`` ``prod`` of args[0] over the axes ``over``; ``sum_at`` is an index-add of
                      args[0] with the indices args[1]: it has one axis more (:func:`at_axis`), and its element ``p``
                      is the sum over ``over`` of the terms with ``args[1] == p``; other indices are ignored; the
                      indices may vary over axes that the terms and the sum share (``scatter_add``)
====================  ==================================================================================================

Arithmetic types are ``float32`` (every storage float is read into it), ``int32``, ``int64`` and ``bool``. The storage
type is a property of a tensor's slot, so casts among floats are not operators: a stitched kernel rounds once, when it
stores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from math import prod
from typing import Any, NamedTuple

from autotune.ir.nodes import (
    COMPUTE_TYPES,
    EIGHT_BIT_FLOATS,
    FLOATS,
    LEAVES,
    MAX_VALUES,
    POINTWISE,
    REDUCTIONS,
    SHORT,
    STORAGE_BYTES,
    Output,
    Value,
    check_loads,
    check_numbers,
    check_outputs,
    compute_type,
    reach,
)

__all__ = [
    "COMPUTE_TYPES", "EIGHT_BIT_FLOATS", "FLOATS", "LEAVES", "REDUCTIONS", "SHORT", "STORAGE_BYTES",
    "Graph", "Output", "Value", "Walk", "at_axis", "compute_type", "has_sum_at", "is_product", "shared",
]  # fmt: skip


@lru_cache(maxsize=4096)
def shared(graph: Graph) -> Graph:
    """The first of equal graphs: functions that are cached by graph compare one object with itself."""
    return graph


def at_axis(graph: Graph, v: Value) -> int:
    """The axis that a ``sum_at`` indexes: the one axis of its result that its terms do not have."""
    (axis,) = set(v.axes) - set(graph.values[v.args[0]].axes)
    return axis


def has_sum_at(graph: Graph) -> bool:
    """True if a live value of a graph is a ``sum_at``."""
    return any(graph.values[i].op == "sum_at" for i in graph.live)


def is_product(graph: Graph, i: int) -> bool:
    """True if a value is a sum of products over axes of both factors, and one factor lacks an axis of the result."""
    v = graph.values[i]
    if v.op != "sum":
        return False
    terms = graph.values[v.args[0]]
    if terms.op != "mul" or prod(graph.extents[a] for a in v.over) == 1:
        return False
    factors = [set(graph.values[a].axes) for a in terms.args]
    return all(set(v.over) <= f for f in factors) and any(not set(v.axes) <= f for f in factors)


class Walk(NamedTuple):
    """The axes of a tensor, its stride along each, and its storage type."""

    axes: tuple[int, ...]
    strides: tuple[int, ...]
    storage: str


@dataclass(frozen=True)
class Graph:
    """A region.

    In a canonical graph axis 0 is the *row axis*: the one whose extent a family leaves open (see
    ``autotune.ir.canonical``).

    Attributes:
        extents: the extent of each axis.
        values: the values in topological order.
        inputs: the storage types of the inputs.
        outputs: the stores.
        precision: the permitted approximations (:mod:`autotune.ir.nodes`): "" for the default, or "strict".
    """

    extents: tuple[int, ...]
    values: tuple[Value, ...]
    inputs: tuple[str, ...]
    outputs: tuple[Output, ...]
    precision: str = ""

    @cached_property
    def _fields(self) -> tuple[object, ...]:
        """The fields; constants also by their text, since ``0.0 == -0.0`` and ``1 == True``."""
        numbers = tuple(repr(v.number) for v in self.values if v.op == "const")
        return self.extents, self.values, self.inputs, self.outputs, self.precision, numbers

    @cached_property
    def _hash(self) -> int:
        return hash(self._fields)

    def __hash__(self) -> int:  # functions that are cached by graph hash it once for each candidate
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Graph):
            return NotImplemented
        return self is other or (self._hash == other._hash and self._fields == other._fields)

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: hashes of strings differ between processes."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def size(self, axes: Iterable[int]) -> int:
        """Product of the extents of ``axes``."""
        return prod(self.extents[a] for a in axes)

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """For each value, the values that take it as an argument, in order."""
        out: list[list[int]] = [[] for _ in self.values]
        for i, v in enumerate(self.values):
            for a in dict.fromkeys(v.args):
                out[a].append(i)
        return tuple(tuple(u) for u in out)

    @cached_property
    def live(self) -> tuple[int, ...]:
        """The values that some output needs, in order."""
        return tuple(self.making(o.value for o in self.outputs))

    @cached_property
    def pointwise(self) -> bool:
        """True without reductions."""
        return not any(v.op in REDUCTIONS for v in self.values)

    @cached_property
    def walks(self) -> tuple[Walk, ...]:
        """The walks of loads, then those of outputs; gathers have none."""
        loads = (v for v in (self.values[i] for i in self.live) if v.op == "load")
        found = [Walk(v.axes, v.strides, self.inputs[v.slot]) for v in loads]
        return (*found, *(Walk(o.axes, o.strides, o.dtype) for o in self.outputs))

    def making(
        self,
        roots: Iterable[int],
        given: Callable[[int], bool] = lambda i: False,
        ends: Callable[[int], bool] = lambda i: False,
    ) -> list[int]:
        """The values that make ``roots``, these included, in order.

        Args:
            given: true for values that the result leaves out, together with their arguments.
            ends: true for values that the result includes without their arguments.
        """
        seen: set[int] = set()
        stack = list(roots)
        while stack:
            i = stack.pop()
            if i not in seen and not given(i):
                seen.add(i)
                stack.extend(() if ends(i) else self.values[i].args)
        return sorted(seen)

    def input_numel(self, slot: int) -> int:
        """Elements from the slot's base pointer that the region may touch (1 + the largest reachable offset)."""
        return 1 + max((reach(self.extents, v)[1] for v in self.values if v.slot == slot), default=0)

    def moving(self, v: Value) -> set[int]:
        """The axes that a load moves along; a gather moves where its index does too."""
        along = {a for a, s in zip(v.axes, v.strides, strict=True) if s}
        return along.union(self.values[v.args[0]].axes) if v.op == "gather" else along

    def read_extents(self, v: Value) -> tuple[int, ...]:
        """The number of elements that a load reads along each axis that it moves along, within its guards."""
        guards = {a: (lo, hi) for a, lo, hi in v.guards}
        parts = ((guards.get(a, (0, self.extents[a])), self.extents[a]) for a in sorted(self.moving(v)))
        return tuple(max(0, min(hi, extent) - max(lo, 0)) for (lo, hi), extent in parts)

    def output_numel(self, k: int) -> int:
        """Elements from output ``k``'s base pointer that are written (1 + the largest offset)."""
        o = self.outputs[k]
        return 1 + o.offset + sum((self.extents[a] - 1) * s for a, s in zip(o.axes, o.strides, strict=True))

    @cached_property
    def bytes_moved(self) -> int:
        """Bytes a perfect kernel moves: each input element it reads once, and each output element once.

        A gather counts the elements it can pick (one for each index), not the table it picks from.
        """
        per_slot: dict[int, int] = {}
        for v in self.values:
            if v.op in ("load", "gather"):
                n = min(prod(self.read_extents(v)), self.input_numel(v.slot))
                per_slot[v.slot] = max(per_slot.get(v.slot, 0), n)
        read = sum(n * STORAGE_BYTES[self.inputs[slot]] for slot, n in per_slot.items())
        return read + sum(self.size(o.axes) * STORAGE_BYTES[o.dtype] for o in self.outputs)

    @cached_property
    def bytes_held(self) -> int:
        """Bytes of the inputs, as far as the region may touch them, and of the outputs."""
        inputs = sum(self.input_numel(slot) * STORAGE_BYTES[name] for slot, name in enumerate(self.inputs))
        return inputs + sum(self.output_numel(k) * STORAGE_BYTES[o.dtype] for k, o in enumerate(self.outputs))

    def to_json(self) -> dict[str, Any]:
        values, outputs = [v.to_json() for v in self.values], [o.to_json() for o in self.outputs]
        how = {"precision": self.precision} if self.precision else {}
        return {"extents": [*self.extents], "values": values, "inputs": [*self.inputs], "outputs": outputs, **how}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Graph:
        """Rebuild a graph and check everything that a kernel's memory safety depends on.

        Raises ValueError if an index, axis or type is out of range, or a graph is too large.
        """
        for what in ("extents", "values", "inputs", "outputs"):
            if len(data[what]) > MAX_VALUES:
                raise ValueError(f"a graph of more than {MAX_VALUES} {what}")
        graph = cls(
            extents=tuple(int(e) for e in data["extents"]),
            values=tuple(Value.from_json(v) for v in data["values"]),
            inputs=tuple(str(d) for d in data["inputs"]),
            outputs=tuple(Output.from_json(o) for o in data["outputs"]),
            precision=str(data.get("precision", "")),
        )
        graph.check()
        return graph

    def check(self) -> None:
        """Raise ValueError unless the graph is well formed (types, ranges, topological order) and its addresses valid.

        A valid address is at or after its tensor's first element and fits 63 bits.
        """
        check_numbers(self.extents, self.values, self.outputs)
        if self.precision not in ("", "strict"):
            raise ValueError(f"unknown precision {self.precision!r}")
        n_axes = len(self.extents)
        for d in self.inputs:
            if d not in STORAGE_BYTES:
                raise ValueError(f"unknown storage type {d!r}")
        for i, v in enumerate(self.values):
            if v.op not in POINTWISE and v.op not in REDUCTIONS and v.op not in LEAVES:
                raise ValueError(f"value {i}: unknown operator {v.op!r}")
            if v.dtype not in COMPUTE_TYPES:
                raise ValueError(f"value {i}: unknown type {v.dtype!r}")
            if any(not 0 <= a < i for a in v.args):
                raise ValueError(f"value {i}: an argument does not come before it")
            if list(v.axes) != sorted(set(v.axes)) or any(not 0 <= a < n_axes for a in v.axes):
                raise ValueError(f"value {i}: bad axes {v.axes}")
            if v.op in ("load", "gather"):
                if not 0 <= v.slot < len(self.inputs) or len(v.strides) != len(v.axes):
                    raise ValueError(f"value {i}: bad slot or strides")
                if v.dtype != compute_type(self.inputs[v.slot]):
                    raise ValueError(f"value {i}: type {v.dtype} does not follow from {self.inputs[v.slot]}")
            if v.op in POINTWISE:
                if len(v.args) != POINTWISE[v.op].arity:
                    raise ValueError(f"value {i}: {v.op} of {len(v.args)} values")
                want = tuple(sorted({a for j in v.args for a in self.values[j].axes}))
                if v.axes != want:
                    raise ValueError(f"value {i}: axes {v.axes}, its arguments have {want}")
            if v.op == "sum_at":
                self._check_sum_at(i, v)
            elif v.op in REDUCTIONS:
                if len(v.args) != 1:
                    raise ValueError(f"value {i}: {v.op} of {len(v.args)} values")
                arg = self.values[v.args[0]]
                if not v.over or not set(v.over) <= set(range(n_axes)) or set(v.over) & set(v.axes):
                    raise ValueError(f"value {i}: bad reduction axes")
                if set(v.axes) != set(arg.axes) - set(v.over):
                    raise ValueError(f"value {i}: reduction axes do not match its argument")
        for o in self.outputs:
            if not 0 <= o.value < len(self.values) or o.dtype not in STORAGE_BYTES or len(o.axes) != len(o.strides):
                raise ValueError("bad output")
            if len(set(o.axes)) != len(o.axes):
                raise ValueError("an output walks an axis twice")
            if not set(self.values[o.value].axes) <= set(o.axes) or any(not 0 <= a < n_axes for a in o.axes):
                raise ValueError("an output does not cover its value's axes")
        check_loads(self.extents, self.values)
        check_outputs(self.extents, self.outputs)

    def _check_sum_at(self, i: int, v: Value) -> None:
        if len(v.args) != 2:
            raise ValueError(f"value {i}: sum_at of {len(v.args)} values")
        value, place = self.values[v.args[0]], self.values[v.args[1]]
        over = set(v.over)
        if not over or not over <= set(range(len(self.extents))) or over & set(v.axes):
            raise ValueError(f"value {i}: bad reduction axes")
        new = set(v.axes) - set(value.axes)
        shared = set(v.axes) - new
        if len(new) != 1 or shared != set(value.axes) - over or not set(place.axes) <= over | shared:
            raise ValueError(f"value {i}: axes of a sum_at do not match its arguments")
        if place.dtype not in ("int32", "int64") or v.dtype != "float32" or value.dtype != "float32":
            raise ValueError(f"value {i}: sum_at of {value.dtype} at {place.dtype}")
