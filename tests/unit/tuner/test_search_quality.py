"""Searches in benchmarks/recordings come as near to the best there is as they did: what makes them worse fails here.

A figure is the mean of ln(best found / best there is) over recordings and 16 seeds. A limit is that mean and three of
its standard errors, so that other random numbers pass. docs/explanation/testing.md lists
the changes for the worse that were tried.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import pytest

from autotune.domains.fusion.task import FusionTask
from autotune.tuner.samplers import DEFAULT
from autotune.tuner.seeds import picks
from benchmarks.replay.recording import SUFFIX, load_all
from benchmarks.replay.search import search
from tests.support import ROOT

FOLDER = ROOT / "benchmarks" / "recordings"
SEEDS = 16


def away(names: Sequence[str], candidates: int, without: Sequence[str] = (), processes: int | None = None) -> float:
    """The regret of searches after so many candidates."""
    found = []
    for r in load_all([FOLDER / f"{name}{SUFFIX}" for name in names]):
        for seed in range(SEEDS):
            trace = search(r, DEFAULT, candidates=candidates, seed=seed, without=without, processes=processes)
            found.append(math.log(trace.best_us[-1] / r.optimum_us))
    return statistics.fmean(found)


@pytest.mark.slow
def test_the_default_search_of_our_spaces_is_as_good_as_it_was() -> None:
    """The two in which random search reaches 0.060. In the other four it is as good: they are small."""
    # 0.027 and 0.007, when the limit was set 0.016 and 0.005. Three errors more would let random search pass: 0.045.
    assert away(["heat", "layer_norm_backward"], 20) < 0.032


@pytest.mark.slow
def test_a_search_without_seeds_and_a_cost_model_is_as_good_as_it_was() -> None:
    """Kernel Tuner's spaces, from a random candidate on; random search reaches 0.46."""
    names = ["convolution-A100", "convolution-MI250X", "pnpoly-RTX_3090"]
    assert away(names, 40, ("seeds", "model", "pruning")) < 0.36  # 0.247 and 0.038


@pytest.mark.slow
def test_heuristics_and_the_cost_model_of_a_gpu_are_as_good_as_they_were() -> None:
    """Three groups on an H200; without heuristics it is 0.015, without the cost model 0.087."""
    assert away(["h200/column_sum", "h200/cross_entropy", "h200/layer_norm"], 10) < 0.0153  # 0.0135 and 0.0006


def test_the_cost_model_s_picks_are_as_good_as_they_were() -> None:
    """Six groups on an H200, by the model of today. Six random candidates reach 0.100."""
    best = []
    for r in load_all(sorted((FOLDER / "h200").glob(f"*{SUFFIX}"))):
        if r.workload.kind == "fusion":
            task = FusionTask(r.workload, r.device, target="sm_90", sms=132)
            for row in r.rows[::40]:
                assert task.predict(row.config) == pytest.approx(row.expected_us, rel=1e-3), (
                    "the model has changed: python -m benchmarks.search_quality.expect benchmarks/recordings/h200"
                )
            for seed in range(4):
                picked = [r.row(config) for config in picks(task, r.space, seed)]
                best.append(math.log(min(row.latency_us for row in picked if row and row.latency_us) / r.optimum_us))
    assert statistics.fmean(best) < 0.0195  # winners of one space use early loads, which are no choice any more


@pytest.mark.slow
def test_the_sampler_and_neighbours_are_as_good_as_they_were_on_a_gpu() -> None:
    """One process compiles, so that results arrive before the next proposal. Random search reaches 0.041."""
    without = ("seeds", "model", "pruning")
    assert away(["h200/convolve", "h200/softmax"], 30, without, processes=1) < 0.0116  # 0.0078 and 0.0013
