"""Construction of a graph value by value, with common-subexpression elimination and constant folding.

Folding is exact for every input, including NaN, infinities and the sign of zero: ``x * 1``, ``x / 1`` and ``x - 0`` are
removed, ``x + 0`` is kept (it turns -0 into 0).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from autotune.errors import Unreachable, Unsupported
from autotune.ir.graph import Value
from autotune.ir.nodes import MAX_VALUES, POINTWISE

if TYPE_CHECKING:
    import torch

_FOLD: dict[str, Callable[..., float | int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "neg": operator.neg,
    "maximum": max,
    "minimum": min,
}
_WRAP = {"int32": 1 << 31, "int64": 1 << 63}
_DEEPEST = 16
_ROUNDED = ("round", "trunc", "floor", "ceil", "cast")
Span = tuple[float, float]
"""The minimum and maximum of a value."""
_ANYTHING: Span = (-math.inf, math.inf)


def position_type(*reached: int) -> str:
    """The arithmetic type of indices along an axis that reach these numbers."""
    return "int32" if all(abs(n) < _WRAP["int32"] for n in reached) else "int64"


def number_as(number: float | int | bool, dtype: str) -> float | int | bool:
    """A Python number as a constant of an arithmetic type. Raises Unsupported if it does not fit."""
    if dtype == "float32":
        return float(number)
    if dtype == "bool":
        return bool(number)
    if isinstance(number, float) and not math.isfinite(number):
        raise Unsupported(f"the constant {number} as {dtype}")
    whole = int(number)
    if not -_WRAP[dtype] <= whole < _WRAP[dtype]:
        raise Unsupported(f"the constant {number} does not fit {dtype}")
    return whole


def within(values: Sequence[Value], i: int, dtype: torch.dtype) -> bool:
    """True if an integer type holds every possible number of value ``i``, except NaN: as after a clamp to its range."""
    import torch

    least, most = _span(values, i, _DEEPEST)
    info = torch.iinfo(dtype)
    return info.min <= least and most <= info.max


def in_memory(values: Sequence[Value], i: int) -> bool:
    """True if a value is a loaded element, or a select among loaded elements and zeros."""
    v = values[i]
    if v.op == "where":
        return all(in_memory(values, k) for k in v.args[1:])
    return v.op in ("load", "gather") or (v.op == "const" and v.number == 0)


class Builder:
    """A graph under construction. All methods return the index of a value, which is new or reused."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.extents: list[int] = []
        self._seen: dict[tuple[object, ...], int] = {}

    def axis(self, extent: int) -> int:
        self.extents.append(extent)
        return len(self.extents) - 1

    def emit(self, value: Value) -> int:
        # Text of the number, since 0.0 == -0.0, 1 == True and NaN differs from itself.
        key = (value, repr(value.number)) if value.op != "const" else ("const", value.dtype, repr(value.number))
        found = self._seen.get(key)
        if found is None:
            if len(self.values) >= MAX_VALUES:
                raise Unsupported(f"a region of more than {MAX_VALUES} values")
            self.values.append(value)
            found = self._seen[key] = len(self.values) - 1
        return found

    def const(self, number: float | int | bool, dtype: str) -> int:
        return self.emit(Value("const", dtype=dtype, number=number_as(number, dtype)))

    def load(
        self,
        slot: int,
        dtype: str,
        terms: Sequence[tuple[int, int]],
        offset: int,
        pick: tuple[int, int, int] | None = None,
        guards: Sequence[tuple[int, int, int]] = (),
    ) -> int:
        """A load, or a gather with ``pick`` = (index value, stride, bound)."""
        if any(s < 0 for _, s in terms):
            raise Unreachable("an access with a negative stride")
        strides = dict(terms)
        if pick is not None:
            if pick[1] <= 0:
                raise Unreachable("a gather with a stride that is not positive")
            for a in self.values[pick[0]].axes:
                strides.setdefault(a, 0)
        axes = tuple(sorted(strides))
        kept = tuple(sorted(g for g in guards if g[0] in strides and (g[1] > 0 or g[2] < self.extents[g[0]])))
        for a, lo, high in kept:
            if high - lo == 1:  # one index only: the load does not vary over the axis
                offset, strides[a] = offset + lo * strides[a], 0
        low = offset + sum(strides[a] * lo for a, lo, _ in kept)
        if low < 0:
            raise Unsupported("an access that starts before its tensor")
        along = tuple(strides[a] for a in axes)
        load = Value("load", axes=axes, dtype=dtype, slot=slot, strides=along, offset=offset, guards=kept)
        if pick is not None:
            load = replace(load, op="gather", args=(pick[0],), index_stride=pick[1], bound=pick[2])
        return self.emit(load)

    def index(
        self, terms: Sequence[tuple[int, int]], offset: int, pick: tuple[int, int, int] | None, dtype: str
    ) -> int:
        """The integer ``offset + sum(coefficient * axis) + coefficient * picked`` as a value."""
        if not terms and pick is None:
            return self.const(offset, dtype)
        total: int | None = None
        for n, (a, c) in enumerate(terms):
            shift = offset if n == 0 else 0
            part = self.emit(Value("index", axes=(a,), dtype=dtype, scale=c, shift=shift))
            total = part if total is None else self.pointwise("add", [total, part])
        if pick is not None:
            part = self.pointwise("mul", [self.cast(pick[0], dtype), self.const(pick[1], dtype)])
            total = self.pointwise("add", [self.const(offset, dtype) if total is None else total, part])
        assert total is not None
        return total

    def cast(self, arg: int, dtype: str) -> int:
        """Convert to another arithmetic type: to bool is "differs from 0" (NaN does), float to integer truncates."""
        v = self.values[arg]
        if v.dtype == dtype:
            return arg
        if v.op == "const":
            return self.const(v.number, dtype)
        if dtype == "bool":
            return self.pointwise("ne", [arg, self.const(0, v.dtype)])
        return self.emit(Value("cast", (arg,), v.axes, dtype))

    def unless_nan(self, number: int, whole: int) -> int:
        """``whole``, an integer made of the float ``number``, or 0 where that is NaN."""
        test = self.pointwise("isnan", [number])
        return self.pointwise("where", [test, self.const(0, self.values[whole].dtype), whole])

    def bits_of(self, i: int) -> int:
        """A value with the low bits of ``i``, without the select of :meth:`unless_nan`: NaN as int32 has none set."""
        return self.values[i].args[2] if _spares_nan(self.values, i) and self.values[i].dtype == "int32" else i

    def pointwise(self, op: str, args: Sequence[int]) -> int:
        """Any operator except ``cast``. Raises Unsupported if the arguments' types differ."""
        spec = POINTWISE[op]
        vals = [self.values[a] for a in args]
        typed = vals[1:] if op == "where" else vals
        if len({v.dtype for v in typed}) != 1 or (op == "where" and vals[0].dtype != "bool"):
            raise Unsupported(f"{op} of {', '.join(v.dtype for v in vals)}")
        dtype = {"same": vals[0].dtype, "bool": "bool", "where": vals[-1].dtype}[spec.result]
        folded = self._fold(op, list(args), vals, dtype)
        if folded is not None:
            return folded
        ordered = tuple(sorted(args)) if spec.commutative else tuple(args)
        axes = tuple(sorted({a for v in vals for a in v.axes}))
        return self.emit(Value(op, ordered, axes, dtype))

    def _fold(self, op: str, args: list[int], vals: list[Value], dtype: str) -> int | None:
        if op == "where" and (vals[0].op == "const" or args[1] == args[2]):
            return args[1] if vals[0].op != "const" or vals[0].number else args[2]
        if op == "mul":
            for one, other in ((0, 1), (1, 0)):
                if vals[one].op == "const" and vals[one].number == 1:
                    return args[other]
        if op == "div" and vals[1].op == "const" and vals[1].number == 1:
            return args[0]
        if op in ("sub", "add") and vals[1].op == "const" and vals[1].number == 0:
            positive = dtype != "float32" or math.copysign(1.0, vals[1].number) > 0
            if (op == "sub") == positive or dtype != "float32":
                return args[0]
        if op == "add" and vals[0].op == "const" and dtype != "float32" and vals[0].number == 0:
            return args[1]
        if op in _FOLD and all(v.op == "const" for v in vals) and dtype in ("float32", "int32", "int64"):
            numbers = [v.number for v in vals]
            if all(math.isfinite(n) for n in numbers):
                result = _FOLD[op](*numbers)
                if dtype == "float32" or -_WRAP[dtype] <= result < _WRAP[dtype]:
                    return self.const(result, dtype)
        return None

    def reduce(self, op: str, arg: int, axes: Sequence[int]) -> int:
        """Reduce over ``axes``; for axes that the argument does not vary over, by arithmetic."""
        v = self.values[arg]
        if op == "sum" and (picked := self._picked(v, set(axes))) is not None:
            value, walked = picked
            return self.reduce(op, value, [a for a in axes if a not in walked])
        over = tuple(sorted(a for a in axes if a in v.axes))
        times = math.prod([self.extents[a] for a in axes if a not in v.axes])
        if over:
            kept = tuple(a for a in v.axes if a not in over)
            arg = self.emit(Value(op, (arg,), kept, v.dtype, over=over))
        if times != 1 and op == "sum":
            return self.pointwise("mul", [arg, self.const(times, v.dtype)])
        if times != 1 and op == "prod":
            if v.dtype != "float32":
                raise Unsupported("a product of integers over a broadcast dimension")
            return self.pointwise("pow", [arg, self.const(times, v.dtype)])
        return arg

    def sum_at(self, term: int, place: int, over: Sequence[int], axis: int) -> int:
        """The sums over ``over`` of the terms for each index along ``axis``."""
        axes = tuple(sorted({a for a in self.values[term].axes if a not in over} | {axis}))
        return self.emit(Value("sum_at", (term, place), axes, self.values[term].dtype, over=tuple(sorted(over))))

    def _picked(self, v: Value, axes: set[int]) -> tuple[int, set[int]] | None:
        """A sum over a one-hot row without a reduction: ``where(k == t, x, 0)`` over k is x where t is some k.

        The row sum in the backward of a cross entropy has this form, times a number of the row. The result is the sum's
        value, and the ``axes`` that it sums over; None if the sum of ``v`` over ``axes`` has another form.
        """
        if v.op in ("mul", "div") and v.dtype == "float32":
            for term, factor in (v.args, v.args[::-1])[: 1 + (v.op == "mul")]:
                if not axes & set(self.values[factor].axes) and (inner := self._picked(self.values[term], axes)):
                    return self.pointwise(v.op, [inner[0], factor]), inner[1]
            return None
        if v.op != "where" or self.values[v.args[2]].op != "const" or self.values[v.args[2]].number != 0:
            return None
        terms, rest = [v.args[0]], []
        while terms:
            at = terms.pop()
            value = self.values[at]
            if value.op == "and" and value.dtype == "bool":
                terms += value.args
            else:
                rest.append(at)
        for at in rest:
            if self.values[at].op != "eq":
                continue
            for place, target in (self.values[at].args, self.values[at].args[::-1]):
                walked = self._walk(place)
                if walked is None or not walked[0] <= axes:
                    continue
                own, first = walked
                others = [a for a in rest if a != at]
                if any(own & set(self.values[a].axes) for a in (target, v.args[1], *others)):
                    continue
                kind = self.values[place].dtype
                beyond = first + math.prod([self.extents[a] for a in own])
                if first < -_WRAP[kind] or beyond >= _WRAP[kind]:  # indices or a bound that wrap around
                    continue
                inside = [self.pointwise("ge", [target, self.const(first, kind)]),
                          self.pointwise("lt", [target, self.const(beyond, kind)])]  # fmt: skip
                found = functools.reduce(lambda a, b: self.pointwise("and", [a, b]), [*others, *inside])
                there = v.args[1]
                if v.dtype == "float32":  # a sum with zeros is never -0
                    there = self.pointwise("add", [there, self.const(0.0, v.dtype)])
                return self.pointwise("where", [found, there, v.args[2]]), own
        return None

    def _walk(self, at: int) -> tuple[set[int], int] | None:
        """(axes, first) of a value that counts the elements of ``axes`` from ``first`` on; None for any other."""
        steps: dict[int, int] = {}
        first, parts = 0, [at]
        while parts:
            v = self.values[parts.pop()]
            if v.op == "add":
                parts += v.args
            elif v.op == "index" and v.axes[0] not in steps:
                steps[v.axes[0]] = v.scale
                first += v.shift
            elif v.op == "const":
                first += int(v.number)
            else:
                return None
        expected = 1
        for a, step in sorted(steps.items(), key=lambda item: item[1]):
            if step != expected:
                return None
            expected *= self.extents[a]
        return (set(steps), first) if steps else None


def _span(values: Sequence[Value], i: int, depth: int) -> Span:
    v = values[i]
    if v.op == "const":
        return (float(v.number), float(v.number)) if v.number == v.number else _ANYTHING
    if v.dtype == "bool":
        return 0.0, 1.0
    if depth == 0:
        return _ANYTHING
    if v.op in ("maximum", "minimum"):
        choose = max if v.op == "maximum" else min
        a, b = (_span(values, k, depth - 1) for k in v.args)
        return choose(a[0], b[0]), choose(a[1], b[1])
    if _spares_nan(values, i):
        least, most = _rounded(_span(values, values[v.args[2]].args[0], depth - 1))
        return min(least, 0.0), max(most, 0.0)
    if v.op == "where":
        a, b = (_span(values, k, depth - 1) for k in v.args[1:])
        return min(a[0], b[0]), max(a[1], b[1])
    if v.op == "cast" and v.dtype in _WRAP:
        least, most = _rounded(_span(values, v.args[0], depth - 1))
        beyond = least < -_WRAP[v.dtype] or most >= _WRAP[v.dtype]
        # NaN, and a number that the type does not hold, may become its smallest number.
        if beyond or values[v.args[0]].dtype == "float32":
            return float(-_WRAP[v.dtype]), (_WRAP[v.dtype] - 1.0 if beyond else most)
        return least, most
    if v.op in _ROUNDED:
        return _rounded(_span(values, v.args[0], depth - 1))
    return _ANYTHING


def _rounded(span: Span) -> Span:
    least, most = span
    return math.floor(least) if math.isfinite(least) else least, math.ceil(most) if math.isfinite(most) else most


def _spares_nan(values: Sequence[Value], i: int) -> bool:
    """True for the value of :meth:`Builder.unless_nan`."""
    if values[i].op != "where":
        return False
    test, other, whole = (values[a] for a in values[i].args)
    return test.op == "isnan" and other.is_zero and whole.op == "cast" and whole.args == test.args
