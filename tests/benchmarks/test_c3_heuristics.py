"""The heuristics' first choices against a result file."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.c3.heuristics import default
from autotune.c3.scenario import Gemm, Scenario
from autotune.c3.strategy import Strategy
from benchmarks.c3_heuristics import held_out, share

SCENARIO = Scenario(Gemm(8192, 8192, 8192), "all_gather", 512 << 20, 4)
CHOSEN = Strategy.of(default(SCENARIO, "cuda"))
TUNED = Strategy("gemm_first", "copy", reserve=8)


def case(name: str, measured: dict[str, float | None], **more: Any) -> dict[str, Any]:
    tuned = {"ms": 2.0, "label": TUNED.label, "strategy": TUNED.config()}
    strategies = {"naive": None, "tuned": tuned}
    return {"name": name, "scenario": SCENARIO.to_json(), "strategies": strategies, "measured": measured, **more}


def test_choices_are_found_in_the_comparison_or_in_the_search() -> None:
    compared = {"ms": 2.4, "label": CHOSEN.label, "strategy": CHOSEN.config()}
    cases = [
        case("compared", {CHOSEN.label: 9.0, TUNED.label: 2.1}, default=compared),
        case("searched", {CHOSEN.label: 2.2, TUNED.label: 2.1}),
        case("failed", {CHOSEN.label: None, TUNED.label: 2.1}),
        case("unknown", {TUNED.label: 2.1}),
    ]
    found = {c.case: c for c in held_out(cases, {}, "cuda")}
    assert all(c.label == CHOSEN.label and c.tuned == TUNED.label for c in found.values())
    assert found["compared"].over_tuned == pytest.approx(1.2)
    assert found["searched"].over_tuned == pytest.approx(2.2 / 2.1)
    assert found["failed"].over_tuned is None
    assert found["unknown"].over_tuned is None
    assert share(found.values()) == 0.5
    assert share([found["unknown"]]) is None


def test_figures_change_the_choice() -> None:
    figures = {"gemm_us.4096x4096x4096.bf16": 200.0}
    for engine, us in (("copy,push", 4e4), ("nccl", 1e3)):
        figures[f"comm_us.all_gather.{engine}.384MiB"] = us
    (found,) = held_out([case("slow copies", {TUNED.label: 2.0})], figures, "cuda")
    assert found.label.startswith("nccl")
