"""Is a candidate wrong, or does its program magnify rounding so much that nobody could tell?

Correct kernels part from the oracle by float32's rounding, which programs magnify: a small difference of large sums, a
variance of numbers that are almost equal. Random programs are made to avoid that, and some do it still. Where a
candidate misses the tolerance, the oracle is run again with every computed value off by a rounding, drawn at random: if
that alone moves the result nearly as far, the program says nothing about the candidate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from autotune.fusion.graph import REDUCTIONS, Graph, Value
from autotune.fusion.interpret import Disturb, interpret, make_inputs
from autotune.fusion.task import FusionBench
from autotune.measure.verify import tolerance
from autotune.task import Runnable

EPS = 2.0**-23
MARGIN = 16.0
"""Noise is one rounding an operator; kernels round several times (fast approximations, sums in another order)."""
_EXACT = frozenset(
    ["neg", "abs", "maximum", "minimum", "where", "sign", "floor", "ceil", "round", "trunc", "max", "min"]
)


def noise(seed: int, device: torch.device) -> Disturb:
    """Every inexact float value off by up to one rounding; sums by one of their terms' root of squares."""
    rng = torch.Generator(device=device).manual_seed(seed)

    def disturb(v: Value, out: Tensor, args: Sequence[Tensor]) -> Tensor:
        if v.op in _EXACT or (v.op == "const" and float(torch.tensor(v.number, dtype=torch.float32)) == v.number):
            return out
        if v.op == "cast":
            return out
        size = out.abs()
        if v.op in REDUCTIONS and v.op == "sum":
            finite = args[0].nan_to_num(0.0, 0.0, 0.0)
            size = size.maximum(
                torch.full_like(size, float(finite.square().sum().sqrt()) / math.sqrt(max(1, size.numel())))
            )
        random = torch.rand(out.shape, generator=rng, device=device, dtype=out.dtype) * 2 - 1
        moved = out + random * size * EPS
        return torch.where(torch.isfinite(moved), moved, out)

    return disturb


def sensitivity(bench: FusionBench, seed: int, special: bool) -> float:
    """How far rounding noise moves the oracle's outputs on verification's inputs, in tolerances; infinite where it
    makes a number infinite or NaN, or changes an integer."""
    graph: Graph = bench.graph
    inputs = make_inputs(graph, seed=seed, device=bench.device, special=special)
    base = interpret(graph, inputs)
    worst = 0.0
    for draw in range(4):
        for o, want, got in zip(graph.outputs, base, interpret(graph, inputs, noise(draw, bench.device)), strict=True):
            if o.dtype not in ("float32", "float16", "bfloat16"):
                worst = max(worst, math.inf if bool((want != got).any()) else 0.0)
                continue
            rtol = tolerance(o.dtype, bench.reduction_length)
            finite = torch.isfinite(want)
            if bool((finite != torch.isfinite(got)).any()):
                return math.inf
            some = want[finite]
            if some.numel():
                typical = float(some.square().mean().sqrt()) or 1.0
                worst = max(worst, float(((some - got[finite]).abs() / (rtol * (some.abs() + typical))).max()))
    return worst


def verify(bench: FusionBench, run: Runnable, seed: int) -> tuple[str, str]:
    """("right" | "wrong" | "blurred", detail); blurred: the program magnifies rounding too much to tell."""
    verdict = bench.verify(run, seed)
    if verdict.ok:
        return "right", ""
    moved = sensitivity(bench, seed, special="NaN and infinities" in verdict.detail)
    if moved * MARGIN >= verdict.error:
        return "blurred", f"{verdict.detail}; rounding noise alone: {moved:.2g} tolerances"
    return "wrong", f"{verdict.detail}; rounding noise alone: {moved:.2g} tolerances"
