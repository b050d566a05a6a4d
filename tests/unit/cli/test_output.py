"""The sum over a target's regions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from autotune.cli.output import print_table, total


def region(
    name: str, count: int, best: float | None, eager: float | None, inductor: float | None, **more: Any
) -> dict[str, Any]:
    return {
        "workload": name * 64, "label": f"region {name}", "count": count, "match": "none" if best is None else "exact",
        "best": None if best is None else {"config": {"keep": name}, "latency_us": best}, "deployed_us": best,
        "baselines": {"eager": {"latency_us": eager}, "inductor": {"latency_us": inductor}},
        "speedup": None, "winner": "autotune", "measured": 5, "reused": 1, "failed": {"timeout": 1}, **more,
    }  # fmt: skip


def test_one_region_is_its_own_sum() -> None:
    answer = total("t", "cpu", [region("a", 1, 10.0, 30.0, 20.0)])
    assert answer["best"] == {"config": {"keep": "a"}, "latency_us": 10.0}
    assert answer["baselines"] == {"eager": {"latency_us": 30.0}, "inductor": {"latency_us": 20.0}}
    assert answer["speedup"] == 2.0
    assert (answer["workload"], answer["device"], answer["match"]) == ("t", "cpu", "exact")


def test_latencies_are_weighted_by_count_and_counters_are_not() -> None:
    answer = total("t", "cpu", [region("a", 2, 10.0, 30.0, 20.0), region("b", 3, 1.0, 2.0, 4.0)])
    assert answer["best"] == {"config": None, "latency_us": 23.0}
    assert answer["baselines"] == {"eager": {"latency_us": 66.0}, "inductor": {"latency_us": 52.0}}
    assert answer["speedup"] == pytest.approx(52 / 23)
    assert (answer["measured"], answer["reused"], answer["failed"]) == (10, 2, {"timeout": 2})
    assert [r["count"] for r in answer["workloads"]] == [2, 3]
    json.dumps(answer, allow_nan=False)


def test_total_lacks_figures_that_one_region_lacks() -> None:
    answer = total("t", "cpu", [region("a", 1, 10.0, 30.0, None), region("b", 1, None, 2.0, 4.0)])
    assert answer["best"] is None
    assert answer["speedup"] is None
    assert answer["baselines"] == {"eager": {"latency_us": 32.0}, "inductor": {"latency_us": None}}
    assert answer["match"] == "none"


def test_a_baseline_that_won_is_deployed() -> None:
    answer = total("t", "cpu", [region("a", 1, 10.0, 8.0, 20.0, deployed_us=8.0, winner="eager")])
    assert answer["best"] == {"config": {"keep": "a"}, "latency_us": 10.0}
    assert answer["deployed_us"] == 8.0
    assert answer["speedup"] == 1.0


def test_why_a_baseline_failed_is_reported() -> None:
    failed = {"inductor": {"latency_us": None, "error": "no C++ compiler"}, "eager": {"latency_us": 9.0}}
    answer = total("t", "cpu", [region("a", 1, 3.0, None, None, baselines=failed)])
    assert answer["baselines"] == failed
    assert answer["speedup"] == 3.0


def test_the_match_is_the_worst() -> None:
    regions = [region("a", 1, 1.0, 2.0, 2.0), region("b", 1, 1.0, 2.0, 2.0, match="other_rows")]
    assert total("t", "cpu", regions)["match"] == "other_rows"
    assert total("t", "cpu", [])["match"] == "none"


def test_the_table_shows_regions_and_sum(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(
        total("t", "cpu", [region("a", 2, 10.0, 30.0, 20.0, noise=0.051), region("b", 1, 1000.0, 2000.0, 4000.0)])
    )
    lines = capsys.readouterr().out.splitlines()
    assert "inductor" in lines[0]
    assert any("region a" in line and "10 us" in line and "5%" in line for line in lines)
    (last,) = [line for line in lines if line.startswith("sum")]
    assert "1.02 ms" in last
    assert "2.02x" in last
    assert all(line == line.rstrip() or len(line) <= 200 for line in lines)


def test_numbers_stay_whole_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    long = region("a", 1, 10.0, 1e3, 20e3, label="layer_norm_backward+softmax+gelu_backward+sum f32 128x1000")
    print_table(total("t", "cpu", [long]))
    text = capsys.readouterr().out
    for whole in ("speedup", "1 ms", "20 ms", "10 us", "layer_norm", "autotune"):
        assert whole in text
    assert "…" not in text


def test_a_busy_comparison_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    quiet = region("a", 1, 10.0, 30.0, 20.0, others_busy=0.2)
    print_table(total("t", "cpu", [quiet]))
    assert "busy" not in capsys.readouterr().out
    print_table(total("t", "cpu", [quiet, region("b", 1, 10.0, 30.0, 20.0, others_busy=0.9)]))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if "(busy)" in line] == ["b"]
    assert any("search again on a quiet machine" in line for line in lines)


def test_the_sum_lists_deployed_and_best_candidates(capsys: pytest.CaptureFixture[str]) -> None:
    lost = region("a", 2, 100.0, 40.0, 60.0, deployed_us=40.0, winner="eager", speedup=1.0)
    print_table(total("t", "cpu", [lost, region("b", 1, 10.0, 30.0, 20.0)]))
    (last,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("sum")]
    # eager 2 * 40 + 30, inductor 2 * 60 + 20, candidates 2 * 100 + 10, deployed 2 * 40 + 10
    assert " ".join(last.split()) == "sum exact 110 us 140 us 210 us 1.22x 90 us in all"
