"""Whether a graph's loads and stores lie where its tensors can: what a kernel's memory safety depends on.

A graph may come from a database that others write to. Capture makes no access before a tensor's first element, no
negative stride and nothing that 63 bits cannot count; what has any of it is refused before a kernel is made of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from autotune.ir.nodes import Output, Value

MOST = 1 << 62
"""What every number in a graph, every product of extents and every reach in elements lies below: kernels multiply and
add these in 64 bits."""
_WIDTH = {"int32": 1 << 31, "int64": 1 << 63}


def check_numbers(extents: Sequence[int], values: Sequence[Value], outputs: Sequence[Output]) -> None:
    """Every field that counts something is an integer in range.

    Raises:
        ValueError: one is not.
    """
    for e in extents:
        if not _is_count(e):
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


def _is_count(n: object) -> bool:
    return type(n) is int and 0 <= n < MOST


def _check_constant(i: int, v: Value) -> None:
    """A constant is a number of its type: a kernel's text is made of it."""
    width = _WIDTH.get(v.dtype)
    wanted = (int, bool) if v.dtype == "bool" else (int,) if width else (int, float)
    if type(v.number) not in wanted or (width and not -width <= v.number < width):
        raise ValueError(f"value {i}: the constant {v.number!r} of type {v.dtype}")


def check_loads(extents: Sequence[int], values: Sequence[Value]) -> None:
    """Every load and gather reaches from its tensor's first element on, and no further than can be counted.

    Expects that axes and slots are those of the graph.

    Raises:
        ValueError: one does not.
    """
    for i, v in enumerate(values):
        _check_size(extents, i, v)
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


def _check_size(extents: Sequence[int], i: int, v: Value) -> None:
    if prod(max(1, extents[a]) for a in {*v.axes, *v.over}) >= MOST:
        raise ValueError(f"value {i}: more elements than 63 bits count")


def _check_gather(values: Sequence[Value], i: int, v: Value) -> None:
    if len(v.args) != 1 or v.bound < 0 or v.index_stride < 1:
        raise ValueError(f"value {i}: bad index, bound or stride of a gather")
    index = values[v.args[0]]
    if index.dtype not in ("int32", "int64") or not set(index.axes) <= set(v.axes):
        raise ValueError(f"value {i}: a gather by what is no integer, or varies over other axes")


def reach(extents: Sequence[int], v: Value) -> tuple[int, int, bool]:
    """(lowest, highest) element that a load or gather reaches within its guards, and whether its axes have none."""
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
    """Every store lies from its tensor's first element on, and no further than can be counted.

    Raises:
        ValueError: one does not.
    """
    for k, o in enumerate(outputs):
        if o.offset < 0 or any(s < 0 for s in o.strides):
            raise ValueError(f"output {k}: a negative offset or stride")
        last = o.offset + sum((extents[a] - 1) * s for a, s in zip(o.axes, o.strides, strict=True))
        if max(1 + last, prod(extents[a] for a in o.axes)) >= MOST:
            raise ValueError(f"output {k}: more elements than 63 bits count")
