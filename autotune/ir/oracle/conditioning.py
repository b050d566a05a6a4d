"""Bounds on the difference of correct kernels for programs that magnify rounding.

Examples are a small difference of large numbers, a square root near zero, and a variance of almost equal numbers.
Float32's rounding then grows beyond any fixed tolerance, and every correct kernel returns different digits. If a
candidate misses the tolerance, the oracle runs again with a random rounding error in every computed value. Elements may
deviate by a few times the effect of that.

Another example is a norm of a sum in bfloat16 that is also a result. Eager mode reads the stored sum, other kernels the
sum before rounding. Both are right, so the oracle runs once more with such values rounded to the stored type.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from autotune.ir.graph import FLOATS, Graph, Value
from autotune.ir.oracle.interpret import Disturb, interpret

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
            squares = args[0].nan_to_num(0.0, 0.0, 0.0).square()
            size = size.clamp(min=math.sqrt(float(squares.sum()) / max(1, size.numel())))
            if v.op == "sum":
                axes = graph.values[v.args[0]].axes
                size = size.maximum(squares.sum([axes.index(a) for a in v.over]).sqrt())
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
