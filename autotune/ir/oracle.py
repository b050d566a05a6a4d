"""The oracle: evaluates a region graph with torch, slowly and exactly, and bounds the differences of correct kernels.

Floats are computed in float64 but in float32's *range*: a value that must overflow to infinity, or flush to zero, in a
float32 kernel does so here. So ``exp(200)`` is infinite for the oracle as it is for every kernel. Integers are exact.

Some programs magnify rounding: a small difference of large numbers, a square root near zero, a variance of almost equal
numbers. Float32's rounding then grows beyond any fixed tolerance, and every correct kernel returns different digits. If
a candidate misses the tolerance, the oracle runs again with a random rounding error in every computed value. Elements
may deviate by a few times the effect of that (:func:`slack`).

Another example is a norm of a sum in bfloat16 that is also a result. Eager mode reads the stored sum, other kernels the
sum before rounding. Both are right, so the oracle runs once more with such values rounded to the stored type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from autotune.ir.graph import EIGHT_BIT_FLOATS, FLOATS, Graph, Output, Value, at_axis
from autotune.ir.nodes import LIBRARY

_COMPUTE = {"float32": torch.float64, "int32": torch.int32, "int64": torch.int64, "bool": torch.bool}
_MAX = float(torch.finfo(torch.float32).max) * (1 + 2**-25)
_TINY = 2.0**-150
_CHUNK = 1 << 26
"""Elements above which a value is computed in pieces (64 Mi, 512 MiB in float64)."""
_HALVES = ("bfloat16", "float16")

_UNARY = {"not": torch.bitwise_not} | {
    name: getattr(torch, name)
    for name in (
        *("neg", "abs", "sign", "sqrt", "rsqrt", "reciprocal", "exp", "exp2", "log", "log2", "erf", "tanh", "sigmoid"),
        *("floor", "ceil", "round", "trunc", "isnan", "isinf", *LIBRARY),
    )
}
_BINARY = {
    "floordiv": torch.floor_divide,
    "mod": torch.remainder,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "shr": torch.bitwise_right_shift,
} | {
    name: getattr(torch, name)
    for name in ("add", "sub", "mul", "div", "maximum", "minimum", "pow", "lt", "le", "gt", "ge", "eq", "ne")
}
_MAY_OVERFLOW = frozenset(
    ["add", "sub", "mul", "div", "pow", "reciprocal", "exp", "exp2", "sum", "sum_at", "prod", "sigmoid", *LIBRARY]
)


Disturb = Callable[[Value, Tensor, Sequence[Tensor]], Tensor]
"""Maps a float value of the graph, its elements and its arguments' elements to the elements to continue with."""


def interpret(graph: Graph, inputs: Sequence[Tensor], disturb: Disturb | None = None) -> list[Tensor]:
    """Evaluate ``graph``.

    Args:
        inputs: for each slot a one-dimensional tensor of the slot's storage type with at least
            ``graph.input_numel(slot)`` elements. All on one device, where the evaluation runs.
        disturb: called on every float value that is computed (not loaded), with the arguments of its operator; an
            index-add's first argument is the sums of its terms' squares. Noise of the size of float32's rounding
            shows how much correct kernels may differ.

    Returns:
        For each output ``k`` a contiguous tensor of shape ``[extents[a] for a in outputs[k].axes]``: float64 for float
        outputs (float32 for a large one stored in half precision), else the storage type. Results are not rounded to
        the storage type.
    """
    flat = [_read(t) for t in inputs]
    device = flat[0].device if flat else torch.device("cpu")
    evaluation = _Evaluation(graph, flat, device, disturb)
    every = range(len(graph.outputs))
    if not evaluation.large or evaluation.axis_of(graph.live) is not None:
        return evaluation.outputs(every, {})
    # The small values, then the results, are computed one after the other, each together with the large values that it
    # needs. A large value is recomputed for each of them and is never held as a whole.
    known: dict[int, Tensor] = {}
    for i in graph.live:
        if i not in evaluation.large:
            known[i] = evaluation.value(i, known)
    return [evaluation.outputs([k], known)[0] for k in every]


class _Evaluation:
    """Evaluation of some of a graph's values, in pieces along an axis if one of them is large.

    Attributes:
        large: the values that are never held as a whole.
    """

    def __init__(
        self, graph: Graph, inputs: Sequence[Tensor], device: torch.device, disturb: Disturb | None = None
    ) -> None:
        self.graph, self.inputs, self.device, self.disturb = graph, inputs, device, disturb
        self.large = {i for i in graph.live if graph.size(graph.values[i].axes) > _CHUNK}

    def axis_of(self, some: Sequence[int]) -> int | None:
        """The longest axis that all large values among ``some`` have and that no value among them reduces over."""
        values = [self.graph.values[i] for i in some]
        shared = [set(self.graph.values[i].axes) for i in some if i in self.large]
        axes = set.intersection(*shared).difference(*(v.over for v in values)) if shared else set()
        return max(axes, key=lambda a: (self.graph.extents[a], -a), default=None)

    def value(self, i: int, known: Mapping[int, Tensor]) -> Tensor:
        """The value ``i`` as a whole."""
        axes, parts = self.graph.values[i].axes, []
        for frame, values in self._pieces([i], known):
            parts.append(values[i])
            if frame.axis not in axes:
                break  # every piece has the whole value
        return parts[0] if len(parts) == 1 else torch.cat(parts, axes.index(frame.axis))

    def outputs(self, some: Sequence[int], known: Mapping[int, Tensor]) -> list[Tensor]:
        """Some of the graph's results."""
        results: dict[int, Tensor] = {}
        chosen = {k: self.graph.outputs[k] for k in some}
        for frame, values in self._pieces([o.value for o in chosen.values()], known):
            for k, o in chosen.items():
                if k in results and frame.axis not in o.axes:
                    continue
                part, whole = frame.output(o, values[o.value]), [self.graph.extents[a] for a in o.axes]
                if list(part.shape) == whole:
                    results[k] = part
                    continue
                if k not in results:
                    results[k] = part.new_empty(whole, dtype=torch.float32 if o.dtype in _HALVES else None)
                dim = o.axes.index(frame.axis)
                results[k].narrow(dim, frame.start[frame.axis], part.shape[dim]).copy_(part)
        return [results[k] for k in some]

    def _pieces(self, wanted: Sequence[int], known: Mapping[int, Tensor]) -> Iterator[tuple[_Frame, dict[int, Tensor]]]:
        """The values ``wanted``, piece by piece; values in ``known`` are not computed."""
        graph = self.graph
        needed = graph.making(wanted, ends=known.__contains__)
        order = [i for i in needed if i not in known]
        axis = self.axis_of(order)
        step = extent = graph.extents[axis or 0] if graph.extents else 1
        if axis is not None:
            step = max(1, extent * _CHUNK // max(graph.size(graph.values[i].axes) for i in order))
        last = {a: i for i in order for a in graph.values[i].args}
        for lo in range(0, extent, step):
            frame = _Frame(graph, self.inputs, self.device, axis or 0, lo, min(lo + step, extent))
            values = {i: frame.cut(known[i], graph.values[i].axes) for i in needed if i in known}
            for i in order:
                v = graph.values[i]
                values[i] = frame.value(v, values)
                if self.disturb is not None and v.dtype == "float32" and v.op not in ("load", "gather"):
                    args = [values[a] for a in v.args]
                    if v.op == "sum_at":
                        args[0] = frame.squares_at(v, *args)
                    values[i] = self.disturb(v, values[i], args)
                for a in set(v.args):
                    if last[a] == i and a not in wanted:
                        del values[a]
            yield frame, values


def _read(t: Tensor) -> Tensor:
    flat = t.detach().reshape(-1) if t.is_contiguous() else t.detach()
    narrow = str(t.dtype).removeprefix("torch.") in EIGHT_BIT_FLOATS
    return flat.to(torch.float32) if narrow else flat  # torch cannot index some of these types


class _Frame:
    """Evaluation of ``[lo, hi)`` of ``axis``, and of all other axes in full."""

    def __init__(
        self, graph: Graph, inputs: Sequence[Tensor], device: torch.device, axis: int, lo: int, hi: int
    ) -> None:
        self.graph, self.inputs, self.device, self.axis = graph, inputs, device, axis
        self.start, self.count = [0] * len(graph.extents), list(graph.extents)
        if graph.extents:
            self.start[axis], self.count[axis] = lo, hi - lo

    def cut(self, whole: Tensor, axes: Sequence[int]) -> Tensor:
        """The part of a value that is in the frame."""
        if self.axis not in axes:
            return whole
        return whole.narrow(axes.index(self.axis), self.start[self.axis], self.count[self.axis])

    def output(self, o: Output, value: Tensor) -> Tensor:
        """The part of a result that is in the frame, contiguous."""
        # An output's axes have any order; those of a value are sorted.
        v, axes = self.graph.values[o.value], sorted(o.axes)
        wide = self.aligned(value, v.axes, axes).expand([self.count[a] for a in axes])
        wide = wide.permute([axes.index(a) for a in o.axes])
        return (wide if v.dtype == "float32" else wide.to(getattr(torch, o.dtype))).contiguous()

    def along(self, axis: int, axes: Sequence[int]) -> Tensor:
        """The positions along ``axis``, shaped to broadcast over ``axes``."""
        positions = torch.arange(self.start[axis], self.start[axis] + self.count[axis], device=self.device)
        return positions.reshape([-1 if a == axis else 1 for a in axes])

    def aligned(self, t: Tensor, own: Sequence[int], axes: Sequence[int]) -> Tensor:
        """``t`` over axes ``own``, reshaped to ``axes`` with extent 1 for those not in ``own``."""
        return t.reshape([self.count[a] if a in own else 1 for a in axes])

    def load(self, v: Value, values: dict[int, Tensor]) -> Tensor:
        data = self.inputs[v.slot]
        if v.op == "load" and not v.guards:
            offset = data.storage_offset() + v.offset
            offset += sum(self.start[a] * s for a, s in zip(v.axes, v.strides, strict=True))
            out = torch.as_strided(data, [self.count[a] for a in v.axes], v.strides, offset)
            return out.to(_COMPUTE[v.dtype])
        address: Tensor = torch.full([1] * len(v.axes), v.offset, dtype=torch.int64, device=self.device)
        for a, s in zip(v.axes, v.strides, strict=True):
            address = address + self.along(a, v.axes) * s
        if v.op == "gather":
            picked = values[v.args[0]].to(torch.int64)
            if picked.numel() and not v.guards and not bool(((picked >= 0) & (picked < v.bound)).all()):
                raise IndexError(f"a gather index is outside [0, {v.bound})")
            address = address + self.aligned(picked, self.graph.values[v.args[0]].axes, v.axes) * v.index_stride
        inside: Tensor | None = None
        for a, lo, hi in v.guards:
            i = self.along(a, v.axes)
            here = (i >= lo) & (i < hi)
            inside = here if inside is None else inside & here
        if inside is not None:
            address = torch.where(inside, address, 0)
        out = data[address.expand([self.count[a] for a in v.axes])].to(_COMPUTE[v.dtype])
        return out if inside is None else torch.where(inside, out, torch.zeros((), dtype=out.dtype, device=self.device))

    def value(self, v: Value, values: dict[int, Tensor]) -> Tensor:
        if v.op in ("load", "gather"):
            return self.load(v, values)
        if v.op == "const":
            return torch.tensor(v.number, dtype=_COMPUTE[v.dtype], device=self.device)
        if v.op == "index":
            return (self.along(v.axes[0], v.axes) * v.scale + v.shift).to(_COMPUTE[v.dtype])
        if v.op == "sum_at":
            return _limited(v, self._sum_at(v, values[v.args[0]], values[v.args[1]]))
        if v.over:
            return _limited(v, self._reduce(v, values[v.args[0]]))
        args = [self.aligned(values[a], self.graph.values[a].axes, v.axes) for a in v.args]
        if v.op == "cast":
            # For NaN and out of range the result depends on the device's instruction, which depends on both types.
            rounded = args[0].to(torch.float32) if args[0].dtype == torch.float64 else args[0]
            return rounded.to(_COMPUTE[v.dtype])
        if v.op == "where":
            return torch.where(args[0], args[1], args[2])
        if v.op == "not":
            return ~args[0]
        out = _UNARY[v.op](args[0]) if len(args) == 1 else _BINARY[v.op](args[0], args[1])
        return _limited(v, out)

    def _sum_at(self, v: Value, arg: Tensor, places: Tensor) -> Tensor:
        """The index-add, for indices inside the frame; it never holds all indices for each term."""
        own, at = self.graph.values[v.args[0]].axes, at_axis(self.graph, v)
        along = self.graph.values[v.args[1]].axes
        rows = [a for a in along if a not in v.over]
        rest = [a for a in v.axes if a != at and a not in rows]
        axes = sorted({*v.over, *own})
        terms = self.aligned(arg, own, axes).expand([self.count[a] for a in axes])
        terms = terms.permute([axes.index(a) for a in (*rows, *v.over, *rest)])
        terms = terms.reshape(-1, *(self.count[a] for a in rest))
        walked = sorted({*v.over, *rows})
        where = self.aligned(places, along, walked).expand([self.count[a] for a in walked])
        where = where.permute([walked.index(a) for a in (*rows, *v.over)]).to(torch.int64) - self.start[at]
        extents = [self.count[a] for a in rows]
        where = where.reshape(math.prod(extents), -1)
        kept = (where >= 0) & (where < self.count[at])
        first = torch.arange(len(where), device=where.device)[:, None] * self.count[at]  # of each row
        where, kept = (where + first).reshape(-1), kept.reshape(-1)
        out = terms.new_zeros(math.prod(extents) * self.count[at], *terms.shape[1:])
        out = out.index_add_(0, where[kept], terms[kept]).reshape(*extents, self.count[at], *terms.shape[1:])
        order = [*rows, at, *rest]
        return out.permute([order.index(a) for a in v.axes]).contiguous()

    def squares_at(self, v: Value, arg: Tensor, places: Tensor) -> Tensor:
        """The sums of squares of an index-add's terms, without those that are NaN or infinite."""
        return self._sum_at(v, arg.nan_to_num(0.0, 0.0, 0.0).square(), places)

    def _reduce(self, v: Value, arg: Tensor) -> Tensor:
        own = self.graph.values[v.args[0]].axes
        dims = [own.index(a) for a in v.over]
        if v.op == "sum":
            return torch.sum(arg, dims, dtype=arg.dtype)
        if v.op == "prod":
            for d in sorted(dims, reverse=True):
                arg = torch.prod(arg, d, dtype=arg.dtype)
            return arg
        if arg.dtype == torch.bool:
            return (torch.amax if v.op == "max" else torch.amin)(arg.to(torch.uint8), dims).bool()
        return (torch.amax if v.op == "max" else torch.amin)(arg, dims)


def _limited(v: Value, t: Tensor) -> Tensor:
    """``t`` in the range of float32: larger numbers become infinite, smaller ones zero."""
    if t.dtype != torch.float64 or v.op not in _MAY_OVERFLOW or t.numel() == 0:
        return t
    size = t.abs()
    least, most = torch.aminmax(size)  # costs a third of the two selects
    if not most <= _MAX:  # also for NaN
        t = torch.where((size > _MAX) & (size < math.inf), torch.sign(t) * math.inf, t)
    return t if least >= _TINY else torch.where(size < _TINY, t * 0.0, t)


EPS = 2.0**-23
MARGIN = 16.0
"""Factor on the effect of noise, which is one rounding per operator.

Kernels round several times (fast approximations, sums in another order).
"""
DRAWS = 8
"""Draws of noise: in one draw the noises of several values cancel; for some of a million elements, in four draws."""
_EXACT = frozenset(
    ["neg", "abs", "maximum", "minimum", "where", "sign", "floor", "ceil", "round", "trunc", "max", "min", "cast"]
)
_ROUNDED = frozenset(["add", "sub", "mul"])
"""Operators whose result is the nearest number in every kernel."""


def noise(graph: Graph, seed: int, device: torch.device, times: float = 1.0) -> Disturb:
    """Noise of half to one rounding, times ``times``, on every inexact float value.

    The noise of a sum is relative to the root of its terms' sum of squares. A sum, difference or product that float32
    represents exactly, with exact arguments, gets no noise.
    """
    rng = torch.Generator(device=device).manual_seed(seed)

    def disturb(v: Value, out: Tensor, args: Sequence[Tensor]) -> Tensor:
        if v.op in _EXACT or (v.op == "const" and float(torch.tensor(v.number, dtype=torch.float32)) == v.number):
            return out
        size = out.abs()
        if v.op in ("sum", "sum_at"):
            squares = args[0]
            if v.op == "sum":
                axes = graph.values[v.args[0]].axes
                squares = squares.nan_to_num(0.0, 0.0, 0.0).square().sum([axes.index(a) for a in v.over])
            size = size.clamp(min=math.sqrt(float(squares.sum()) / max(1, size.numel()))).maximum(squares.sqrt())
        random = torch.rand(out.shape, generator=rng, device=device, dtype=out.dtype) - 0.5
        moved = out + (random + random.sign() * 0.5) * size * (EPS * times)
        kept = ~torch.isfinite(moved)
        if v.op in _ROUNDED:
            exact = out == out.float()  # float32 represents the number exactly
            for i, arg in zip(v.args, args, strict=True):
                own = graph.values[i].axes
                along = [n if a in own else 1 for a, n in zip(v.axes, out.shape, strict=True)]
                exact = exact & (arg == arg.float()).reshape(along)
            kept |= exact
        return torch.where(kept, out, moved)

    return disturb


def as_stored(graph: Graph) -> Disturb | None:
    """Rounding of every value that is stored in half precision and also used; None without such values."""
    used = {i for v in graph.values for i in v.args}
    halves = {o.value: getattr(torch, o.dtype) for o in graph.outputs if o.dtype in ("bfloat16", "float16")}
    stored = {id(graph.values[i]): dtype for i, dtype in halves.items() if i in used}

    def disturb(v: Value, out: Tensor, args: Sequence[Tensor]) -> Tensor:
        return out.to(stored[id(v)]).to(out.dtype) if id(v) in stored else out

    return disturb if stored else None


def slack(graph: Graph, inputs: Sequence[Tensor], want: Sequence[Tensor], device: torch.device) -> list[Tensor | None]:
    """For each output, the deviation beyond the tolerance that rounding explains, in the output's shape.

    For floats it is a float64 bound for each element, infinite where rounding alone gives infinity or NaN. For booleans
    it is True for elements that may have either value. For integers it is None.

    Args:
        want: the results of the oracle for ``inputs``.
    """
    found: list[Tensor | None] = [
        torch.zeros_like(w) if w.dtype.is_floating_point or w.dtype is torch.bool else None for w in want
    ]
    floats = any(w.dtype.is_floating_point for w in want)
    disturbances = [(noise(graph, draw, device), MARGIN) for draw in range(DRAWS) if floats]
    if floats and (rounding := as_stored(graph)) is not None:
        disturbances.append((rounding, 1.0))
    for disturb, margin in disturbances:
        for so_far, base, moved in zip(found, want, interpret(graph, inputs, disturb), strict=True):
            if so_far is not None and so_far.dtype is not torch.bool:
                far = (moved - base).abs_().mul_(margin)
                far = torch.where((moved == base) | (moved.isnan() & base.isnan()), 0.0, far).nan_to_num_(math.inf)
                torch.maximum(so_far, far, out=so_far)
    truths = any(w.dtype is torch.bool for w in want)
    for draw in range(DRAWS if truths else 0):  # both signs: half of all noises move away from the threshold
        far_off = interpret(graph, inputs, noise(graph, draw // 2, device, MARGIN * (-1) ** draw))
        for so_far, base, moved in zip(found, want, far_off, strict=True):
            if so_far is not None and so_far.dtype is torch.bool:
                so_far |= moved != base
    return found


def may_explain(storage: str, error: float) -> bool:
    """True if :func:`slack` may explain an output's error, as a multiple of its tolerance."""
    return storage == "bool" or (storage in FLOATS and math.isfinite(error))


def from_float(graph: Graph, k: int) -> bool:
    """True if output ``k`` is an integer made from floats."""
    made = (graph.values[i] for i in graph.making([graph.outputs[k].value]))
    return any(v.op == "cast" and v.dtype != "bool" and graph.values[v.args[0]].dtype == "float32" for v in made)


def is_exact(graph: Graph, k: int) -> bool:
    """True if output ``k`` is made without floats, so that every right kernel has the same numbers."""
    return all(graph.values[i].dtype != "float32" for i in graph.making([graph.outputs[k].value]))
