"""Check of a failed candidate: wrong, or undecidable.

Verification allows for a program's rounding, element by element (``autotune.ir.oracle``). What
it cannot allow for are jumps: an integer or a boolean made of floats near a boundary, an infinity near the end of the
range. If the oracle's own results jump under rounding noise, a random program proves nothing about a candidate.
"""

from __future__ import annotations

import math

import torch

from autotune.domains.fusion.bench import FusionBench
from autotune.ir.inputs import make_inputs
from autotune.ir.oracle import DRAWS, interpret, noise
from autotune.task import Runnable


def jumps(bench: FusionBench, seed: int, special: bool) -> bool:
    """Return True if rounding noise alone changes an integer output of verification's inputs, or makes a number
    infinite or NaN."""
    inputs = make_inputs(bench.graph, seed=seed, device=bench.device, special=special)
    base = interpret(bench.graph, inputs)
    for draw in range(DRAWS):
        for want, got in zip(base, interpret(bench.graph, inputs, noise(bench.graph, draw, bench.device)), strict=True):
            if want.is_floating_point():
                want, got = torch.isfinite(want), torch.isfinite(got)
            if bool((want != got).any()):
                return True
    return False


def verify(bench: FusionBench, run: Runnable, seed: int) -> tuple[str, str]:
    """("right" | "wrong" | "blurred", detail); blurred: the program's results jump where kernels may round."""
    verdict = bench.verify(run, seed)
    if verdict.ok:
        return "right", ""
    all_or_nothing = verdict.error in (0.0, math.inf)  # 0 where the graph itself differs from its operators
    blurred = all_or_nothing and jumps(bench, seed, special="NaN and infinities" in verdict.detail)
    return "blurred" if blurred else "wrong", verdict.detail
