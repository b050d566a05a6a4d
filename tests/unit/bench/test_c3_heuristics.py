"""The heuristics' first choices against a result file."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.domains.c3.calibration.heuristics import default
from autotune.domains.c3.scenario import Gemm, Scenario
from autotune.domains.c3.strategy import Strategy
from benchmarks.c3_heuristics import held_out, left_out, share

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


def test_choices_are_found_beside_the_comparison_and_by_labels_of_older_versions() -> None:
    """A label without the priority that a copy has today, and with blocks that an all-gather by copies does not use."""
    other = "copy comm_first"
    cases = [
        case("beside", {TUNED.label: 2.1}, beside={f"{CHOSEN.label} ctas=128": 2.2}),
        case("older", {CHOSEN.label.replace(" priority=comm", ""): 2.2, other: 2.1, TUNED.label: 2.0}),
    ]
    beside, older = held_out(cases, {}, "cuda")
    assert beside.over_tuned == beside.listed == pytest.approx(1.1)
    assert older.over_tuned == pytest.approx(1.1)
    assert older.listed == pytest.approx(1.05)


def test_what_is_chosen_for_a_GEMM_of_the_calibration_does_not_know_its_figures() -> None:
    shapes = ("4096x8192x8192", "8192x8192x8192", "12288x8192x8192")
    figures: dict[str, float] = {}
    for size, us in (("64MiB", 200.0), ("1GiB", 3000.0)):
        figures |= {f"comm_us.all_gather.copy,{way}.{size}": us for way in ("push", "pull")}
    for shape, us, pull in zip(shapes, (750.0, 1500.0, 2250.0), (0.1, 0.1, 0.6), strict=True):
        figures[f"gemm_us.{shape}.bf16"] = us
        for way, hidden in (("", 0.4), (",direction=pull", pull)):
            figures[f"unhidden.all_gather.copy,gemm_first,priority=comm{way}.{shape}.bf16.100pct"] = hidden
    found = {c.case.split()[3]: c for c in left_out(figures, "cuda")}
    assert set(found) == set(shapes)
    odd = found[shapes[2]]  # the others promise what it does not keep
    assert "pull" in odd.label
    assert "pull" not in odd.tuned
    assert odd.over_tuned == pytest.approx(1.6 / 1.4)
    assert all(c.over_tuned is not None for c in found.values())
    by_rule = left_out(figures, "cuda", by_rule=True)
    assert [c.over_tuned for c in by_rule] == pytest.approx([1.4 / 1.1, 1.4 / 1.1, 1.0])


def test_figures_change_the_choice() -> None:
    figures = {"gemm_us.4096x4096x4096.bf16": 200.0}
    for engine, us in (("copy,push", 4e4), ("nccl", 1e3)):
        figures[f"comm_us.all_gather.{engine}.384MiB"] = us
    (found,) = held_out([case("slow copies", {TUNED.label: 2.0})], figures, "cuda")
    assert found.label.startswith("nccl")
