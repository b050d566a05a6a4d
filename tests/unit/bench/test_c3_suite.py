"""The C3 suite's list, families and metrics, and its summary."""

from __future__ import annotations

import copy
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from autotune.domains.c3 import scenario as suite
from autotune.domains.c3.results import Isolated
from autotune.domains.c3.scenario import COLLECTIVES, Gemm, Program
from autotune.domains.c3.strategy import BASELINES, Strategy
from autotune.errors import UserError
from autotune.task import config_key
from benchmarks import pictures
from benchmarks.c3 import families, figure, report
from benchmarks.c3.case import FAMILIES, c3_problems, timeline
from benchmarks.c3.run import choose

SVG = "{http://www.w3.org/2000/svg}"


def test_the_projects_list_has_the_scenarios_of_the_paper_and_the_reductions() -> None:
    entries = suite.named_scenarios()
    assert len(entries) == 40
    count = {(c, k): sum((e.collective, e.expected) == (c, k) for e in entries.values())
             for c in COLLECTIVES for k in suite.EXPECTED}  # fmt: skip
    assert count == {(c, k): 5 if k == "equal" or c in ("all_gather", "all_to_all") else 0
                     for c in COLLECTIVES for k in suite.EXPECTED}  # fmt: skip
    for ranks in (2, 4, 8):
        scenarios = [entry.scenario(ranks, "bf16") for entry in entries.values()]
        assert len({s.workload().fingerprint for s in scenarios}) == 40
    largest = entries["ag-comm-405b-proj"]
    assert largest.compute == Gemm(8192, 16384, 16384, "bf16")
    assert largest.nbytes == 4 << 30
    assert largest.label == "8192x16384x16384 beside all_gather of 4096 MiB"
    f32 = largest.scenario(4, "f32")
    assert (f32.dtype, f32.compute.dtype) == ("f32", "f32")  # type: ignore[union-attr]


def test_scenarios_are_chosen_by_name_collective_and_class() -> None:
    entries = suite.named_scenarios()
    assert len(choose(entries, [])) == 40
    assert len(choose(entries, ["equal"])) == 20
    chosen = choose(entries, ["all_to_all.equal", "ag-equal-proj", "a2a-equal-proj"])
    assert [e.name for e in chosen][:2] == ["ag-equal-proj", "a2a-equal-proj"]  # in the file's order, each once
    assert len(chosen) == 6
    with pytest.raises(UserError, match="did you mean 'ag-equal-proj'"):
        choose(entries, ["ag-equal-prj"])
    assert suite.named_scenario("rs-equal-qkv").collective == "reduce_scatter"
    with pytest.raises(UserError, match="--list"):
        suite.named_scenario("whatever")
    with pytest.raises(UserError, match=r"ag-equal-proj: .* are not divisible among 7 ranks"):
        entries["ag-equal-proj"].scenario(7, "bf16")


def test_a_file_of_the_users_own(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text('[all_reduce.compute]\nmine = { compute = "m:f", inputs = "m:i", bytes = "2MiB", dtype = "f16" }\n')
    (entry,) = suite.named_scenarios(file).values()
    assert (entry.compute, entry.dtype, entry.expected) == (Program("m:f", "m:i"), "f16", "compute")


TWICE = """
[all_gather.equal]
a = { gemm = "1x2x3", bytes = "1MiB" }
[all_to_all.equal]
a = { gemm = "1x2x3", bytes = "1MiB" }
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("version = 2", "reads version 1"),
        ("", "the file has no scenarios"),
        ("[gather.equal]", r"\[gather\] is not a collective"),
        ("[all_gather.long]", r"\[all_gather.long\] is not a class"),
        ("[all_gather.equal]\na = 3", "a: write a = "),
        ('[all_gather.equal]\na = { gemm = "1x2x3" }', "a: a scenario needs bytes"),
        ('[all_gather.equal]\na = { gemm = "1x2x3", compute = "m:f", bytes = "1MiB" }', "either gemm or compute"),
        ('[all_gather.equal]\na = { gemm = "1x2x3", bytes = "1MiB", size = "2" }', "unknown key 'size'"),
        ('[all_gather.equal]\na = { gemm = "1x2", bytes = "1MiB" }', "a: .*MxNxK"),
        ('[all_gather.equal]\na = { gemm = "1x2x3", bytes = "3" }', "a: 3 bytes are not divisible"),
        ('[all_gather.equal]\na = { gemm = "1x2x3", bytes = "1MiB", dtype = "f8" }', "a: unknown dtype 'f8'"),
        (TWICE, "a is defined more than once"),
        ("a =", "invalid TOML"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_file_is_reported_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "own.toml"
    file.write_text(text)
    with pytest.raises(UserError, match=said) as caught:
        suite.named_scenarios(file)
    assert str(caught.value).startswith(str(file))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_missing() -> None:
    with pytest.raises(UserError, match=r"no/such\.toml: no such file"):
        suite.named_scenarios("no/such.toml")


def test_metrics_are_those_of_the_paper() -> None:
    alone = Isolated.of({"=compute": 3000.0, "=comm:nccl": 2000.0, "=comm:copy": 1500.0}, 1e-3)
    assert alone is not None
    assert (alone.compute, alone.comm, alone.engine, alone.kind) == (3.0, 1.5, "copy", "compute")
    assert alone.ideal == 1.5
    assert alone.fraction(3.0) == pytest.approx(1.0)
    assert alone.fraction(4.5) == pytest.approx(0.0)
    assert alone.figures(3.6) == {"speedup": 1.25, "fraction": 0.5, "t_over_max": 1.2}
    kinds = {(1.16, 1.0): "compute", (1.15, 1.0): "equal", (1.0, 1.0): "equal", (1.0, 1.15): "equal",
             (1.0, 1.16): "communication"}  # fmt: skip
    assert {both: Isolated(both[0], {"nccl": both[1]}).kind for both in kinds} == kinds
    assert Isolated.of({"compute": 3.0}) is None
    assert Isolated.of({"comm:nccl": 3.0}) is None


@pytest.mark.parametrize(
    ("side", "collective"), [("cuda", "all_gather"), ("cuda", "reduce_scatter"), ("cpu", "all_gather")]
)
def test_families_are_distinguished_and_their_labels_mean_them(side: str, collective: str) -> None:
    found = families.families(side, collective)
    assert [*found, "tuned"] == list(FAMILIES)
    every = [config for members in found.values() for config in members]
    assert [families.from_label(families.label(c, side), side) for c in every] == every
    different = {config_key(c) for c in every}
    assert len(different) == ((14 if collective == "all_gather" else 20) if side == "cuda" else 10)
    assert config_key(BASELINES[side]["naive"]) in different
    if side == "cuda":
        assert {c["engine"] for c in found["order"]} == {"nccl"}
        assert all(c["ctas"] or c["reserve"] for c in found["partition"])
        assert {c["engine"] for c in found["copy_engine"]} == {"copy"}


def test_earlier_strategy_labels_map_to_current_strategies() -> None:
    label = "copy gemm_first launch=eager priority=comm chunks=4 panels=4 streams=2 direction=pull batch=True"
    assert families.from_label(label, "cuda") == Strategy("gemm_first", "copy", "comm", chunks=4).config()
    assert families.from_label("nccl comm_first priority=gemm", "cuda") == Strategy("comm_first").config()


def entry(ms: float, alone: Isolated, label: str) -> dict[str, Any]:
    return {"ms": ms, **alone.figures(ms), "strategy": families.from_label(label, "cuda"), "label": label,
            "engine_seen": None}  # fmt: skip


def case(name: str, collective: str, gemm: float, comm: float, tuned: float, **more: Any) -> dict[str, Any]:
    alone = Isolated(gemm, {"nccl": comm * 1.1, "copy": comm})
    strategies = {
        "naive": entry(gemm + comm, alone, "nccl gemm_first"),
        "naive_swapped": entry(0.95 * (gemm + comm), alone, "nccl comm_first"),
        "order": entry(0.9 * (gemm + comm), alone, "nccl comm_first"),
        "partition": None,
        "copy_engine": entry(1.1 * tuned, alone, "copy comm_first"),
        "tuned": entry(tuned, alone, "copy gemm_first reserve=8"),
    }
    return {
        "name": name, "kind": alone.kind, "class": alone.kind, "collective": collective, "compute": "a GEMM",
        "nbytes": 1 << 20, "t_gemm_ms": gemm, "t_comm_ms": comm, "t_comm_engine": "copy",
        "t_comm_by_engine_ms": dict(alone.engines), "ideal": alone.ideal, "sequential_ms": gemm + 1.1 * comm,
        "strategies": strategies, "default": strategies["copy_engine"],
        "t_gemm_median_ms": 1.02 * gemm, "t_comm_median_by_engine_ms": dict(alone.engines),
        "measured": {"copy comm_first": 1.1 * tuned, "nccl comm_first": None}, **more,
    }  # fmt: skip


CASES = [
    case("a", "all_gather", 2.0, 2.0, 2.0),
    case("b", "all_gather", 4.0, 2.0, 5.0),
    case("c", "reduce_scatter", 1.0, 2.0, 1.9),
    case("d", "all_to_all", 10.0, 1.0, 11.2),
]


def test_the_summary_counts_each_case_as_all_at_most() -> None:
    found = report.summary(CASES)
    tuned = found["all"]["tuned"]
    assert tuned["cases"] == 4
    # c is faster than its longer part by itself, and counts as 1; d is slower than one after the other.
    assert tuned["mean_fraction"] == pytest.approx((1 + 0.4 + 1 + (11 / 11.2 - 1) / 0.1) / 4, abs=1e-4)
    assert (tuned["worst_fraction"], tuned["worst_case"]) == (0.4, "b")  # d has too little to gain to count
    assert tuned["least_over_sequential"] == pytest.approx(11.1 / 11.2, abs=1e-4)
    assert tuned["best_speedup"] == 2.0
    assert tuned["mean_t_over_max"] == pytest.approx((1 + 1.25 + 0.95 + 1.12) / 4)
    assert found["all"]["partition"] is None
    assert found["all_gather_and_all_to_all"]["cases"] == 3
    assert set(found["by_collective"]["all_gather"]) == {"all", "equal", "compute"}
    assert found["by_collective"]["all_gather"]["equal"]["tuned"]["mean_fraction"] == 1.0
    assert found["default"] == {
        "cases": 4, "within_10_percent": 1.0, "geomean_over_tuned": 1.1, "worst_over_tuned": 1.1,
    }  # fmt: skip


def test_the_best_fixed_strategy_worked_everywhere() -> None:
    found = report.best_fixed(CASES)
    assert found == {"strategy": "copy comm_first", "candidates": 1, "geomean_over_tuned": 1.1, "compared": None}
    beside = [{**c, "fixed": {"label": "copy comm_first", "ms": 3.0, "tuned_ms": 2.5}} for c in CASES]
    compared = report.best_fixed(beside)
    assert compared is not None
    assert compared["compared"] == 1.2
    assert report.best_fixed([*CASES, {**CASES[0], "measured": {}}]) is None


def data() -> dict[str, Any]:
    return {"device": "4 x a GPU", "schema": 2, "nccl": {"NCCL_NVLS_ENABLE": "0"}, "ranks": 4,
            "versions": {"torch": "2.11"}, "when": "2026-01-02T00", "command": "c",
            "cases": CASES, "summary": report.summary(CASES)}  # fmt: skip


def test_tables_have_the_figures() -> None:
    text = report.render(data())
    families = "4 (0%) | 3.8 (5%) | 3.6 (11%) | – | 2.2 (82%) | 2 (100%)"
    assert f"| a | a GEMM | 1MiB | 2 | 2 | copy | equal | 2.00 | 4.2 | {families} |" in text
    assert "NCCL ran without NVLink multicast" in text
    assert text.endswith("\n- Faster than the longer part alone ever was: c (1.9 of 2 ms).\n")
    assert "| all_gather, compute | 1 |" in text
    assert "| reduce_scatter | 1 |" in text
    assert "reduce_scatter, " not in text  # of one class only
    assert "`copy comm_first`, taking 1.100 times" in text
    assert "The default: within 10% of tuned in 100% of 4 scenarios" in text


def test_report_omits_columns_that_first_schema_files_lack() -> None:
    new = ("t_gemm_median_ms", "t_comm_median_by_engine_ms")
    cases = [{k: v for k, v in c.items() if k not in new} for c in copy.deepcopy(CASES)]
    for one in cases:
        del one["strategies"]["naive_swapped"]
        assert c3_problems(one) == []
    text = report.render({**data(), "schema": 1, "nccl": {}, "cases": cases, "summary": report.summary(cases)})
    assert "naive swapped" not in text
    assert "multicast" not in text
    assert "Faster than the longer part" not in text
    assert "strategies lacks naive_swapped" in c3_problems({**cases[0], "t_gemm_median_ms": 1.0})


def marks(picture: str, role: str) -> list[str]:
    """The label of each mark of a picture, of marks such as "bar"."""
    every = ET.fromstring(picture).iter(f"{SVG}path")
    return [str(p.get("aria-label")) for p in every if p.get("aria-roledescription") == role]


def test_bars_are_drawn_for_measured_strategies() -> None:
    picture = pictures.svg(figure.bars(data()))
    told = marks(picture, "bar")
    assert len(told) == 4 * 6  # partition is missing
    assert [t for t in told if "scenario: a;" in t and "family: tuned" in t and "speedup: 2.1" in t]
    assert len([t for t in marks(picture, "tick") if "family: ideal" in t]) == 4


def test_a_timeline_has_a_row_for_each_means_on_one_scale() -> None:
    spans = [{"row": "compute", "name": "<gemm>", "start_us": 0.0, "us": 1000.0},
             {"row": "nccl", "name": "ncclKernel", "start_us": 1000.0, "us": 1000.0}]  # fmt: skip
    copies = [spans[0], {"row": "copies", "name": "Memcpy PtoP", "start_us": 10.0, "us": 900.0}]
    runs = {"naive": {"us": 2000.0, "spans": spans}, "tuned": {"us": 1000.0, "spans": copies}}
    picture = pictures.svg(figure.picture(timeline({**CASES[0], "timeline": runs})))
    words = [t.text for t in ET.fromstring(picture).iter(f"{SVG}text")]
    assert [w for w in words if w in ("computation", "NCCL kernels", "copies")] == [
        "computation", "NCCL kernels", "computation", "copies"]  # fmt: skip
    assert "tuned: 1 ms, copy gemm_first reserve=8" in words
    every = [p for p in ET.fromstring(picture).iter(f"{SVG}path") if "<gemm>" in str(p.get("aria-label"))]
    assert len(every) == 2
    assert len({str(p.get("d")).split("h", 1)[1].split("v", 1)[0] for p in every}) == 1  # equally long


def test_a_case_of_the_form_has_no_problems() -> None:
    assert all(c3_problems(c) == [] for c in CASES)


@pytest.mark.parametrize(
    ("where", "value", "said"),
    [
        (("kind",), "", "kind"),
        (("nbytes",), 1.5, "nbytes"),
        (("ideal",), None, "ideal"),
        (("t_comm_by_engine_ms",), {}, "t_comm_by_engine_ms"),
        (("strategies",), [], "strategies"),
        (("strategies", "tuned"), 3, "strategies.tuned"),
        (("strategies", "tuned", "ms"), 0, "strategies.tuned: ms"),
        (("strategies", "naive", "fraction"), float("nan"), "strategies.naive: fraction"),
        (("strategies", "order", "strategy"), "copy", "strategies.order: strategy"),
    ],
)
def test_each_fault_of_a_case_is_named(where: tuple[str, ...], value: object, said: str) -> None:
    bad = copy.deepcopy(CASES[0])
    at: Any = bad
    for key in where[:-1]:
        at = at[key]
    at[where[-1]] = value
    (found,) = c3_problems(bad)
    assert said in found
