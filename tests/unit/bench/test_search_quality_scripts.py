"""``benchmarks/search_quality`` on given measurements, without a GPU and without Triton."""

from __future__ import annotations

import json
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.files import resource_dir
from benchmarks.replay.recording import SUFFIX, Recording
from benchmarks.search_quality import expect, hub, plot, record, triton_autotune
from benchmarks.search_quality.spaces import GPU_SPACES, GROUPS, HELD_OUT
from benchmarks.search_quality.triton_autotune import judged, key_of, line
from tests.support import ROOT
from tests.support.landscape import recording

A, B, C = {"T": 1}, {"T": 2}, {"T": 4}


def every(when: dict[str, float], **us: float | None) -> dict[str, Any]:
    names = {"a": key_of(A), "b": key_of(B), "c": key_of(C)}
    return {"latency_us": {names[n]: v for n, v in us.items()}, "when": {names[n]: when[n] for n in us}}


def test_search_quality_judges_results_near_tritons_choice() -> None:
    measured = every({"a": 103.0, "b": 108.0, "c": 130.0}, a=12.0, b=10.2, c=10.0)
    told = judged({"seconds": 20.0}, measured, C, 100.0)
    assert told == {"measured": 2, "best": B, "best_us": 10.2, "least_us": 10.0, "chosen_us": 10.0, "near_s": 8.0}


def test_a_search_that_never_came_near_is_reported() -> None:
    measured = every({"a": 103.0, "b": 130.0, "c": 104.0}, a=12.0, b=10.2, c=None)
    told = judged({"seconds": 20.0}, measured, B, 100.0)
    assert (told["near_s"], told["measured"], told["best_us"]) == (None, 2, 12.0)


def test_without_triton_s_choice_there_is_nothing_to_be_near() -> None:
    measured = every({"a": 103.0, "c": 104.0}, a=12.0, c=None)
    assert "near_s" not in judged({"seconds": 20.0}, measured, None, 100.0)
    assert "near_s" not in judged({"seconds": 20.0}, measured, C, 100.0)


def test_a_part_that_fails_is_reported_and_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def part(name: str, *_: object) -> dict[str, Any]:
        return {"seconds": 1.0, "failed": "first\nlast"} if name == "record" else {"seconds": 1.0, "call_us": 5.0}

    monkeypatch.setattr(triton_autotune, "_part", part)
    monkeypatch.setattr(triton_autotune, "_command", lambda *_: {"seconds": 2.0})
    found = dict(triton_autotune.measure(tmp_path, "cuda:0", 64))
    assert found["look-up"] == {"seconds": 1.0, "call_us": 5.0}
    assert line("all", found["all"]) == "all: FAILED: last"
    assert line("search", found["search"]) == "search: seconds 2.0"


def test_a_process_s_failure_and_time_are_reported() -> None:
    failed = triton_autotune._command([sys.executable, "-c", "import sys; sys.exit('no device')"], {})
    assert failed["failed"] == "no device"
    assert failed["seconds"] > 0


def test_groups_on_a_gpu_have_spaces_that_narrow_the_shipped_one() -> None:
    shipped = tomllib.loads((resource_dir("search_spaces") / "fusion.toml").read_text())["cuda"]
    assert set(GPU_SPACES) == {*GROUPS, *HELD_OUT}
    for name in set(GPU_SPACES.values()):
        own = tomllib.loads((Path(record.__file__).parent / name).read_text())["cuda"]
        for parameter, said in own.items():
            assert set(said["choices"]) <= set(shipped[parameter]["choices"]), (name, parameter)


class Recorder(record.Recorder):
    """One whose recordings are given."""

    made: Any = None

    def context(self, name: str, workload: Any) -> Any:
        return type("Context", (), {"interrupt": type("I", (), {"requested": False})()})()

    def recorded(self, context: Any, workload: Any, found: Any) -> Recording | str:
        made = self.made[workload]
        if isinstance(made, Exception):
            raise made
        return made  # type: ignore[no-any-return]


def test_a_space_that_fails_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def workload_of(name: str, device: str) -> str:
        if name == "m:none":
            raise RuntimeError("no such kernel")
        return name

    monkeypatch.setattr(record, "workload_of", workload_of)
    monkeypatch.setattr(record, "build_ahead", lambda _, begun: [f[2].set_result(None) for f in begun.values()])
    store: Any = type("Store", (), {"put_workload": lambda self, w: w})()
    made = Recorder(store, "cpu")
    made.made = {"softmax": "2 of 9 are missing", "layer_norm": OSError("full"), "m:good": recording()}
    done = record.record_all(made, ["softmax", "m:none", "layer_norm", "m:good"], tmp_path)
    assert [isinstance(d, Recording) for d in done.values()] == [False, False, False, True]
    assert [p.name for p in tmp_path.iterdir()] == [f"good{SUFFIX}"]
    told = capsys.readouterr().out
    for text in ("NOT RECORDED: softmax: 2 of 9", "m:none: RuntimeError: no such kernel", "OSError: full", "the best"):
        assert text in told


def test_seconds_for_a_space_end_with_those_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = None
    assert record.Recorder(store, "cpu").left() is None
    assert record.Recorder(store, "cpu", limit_s=5.0).left() == 5.0
    made = record.Recorder(store, "cpu", limit_s=50.0, all_s=60.0, began=0.0)
    monkeypatch.setattr(record.time, "monotonic", lambda: 20.0)
    assert made.left() == 40.0
    monkeypatch.setattr(record.time, "monotonic", lambda: 100.0)
    assert made.left() == 1.0


@pytest.mark.parametrize("name", ["product", "column_sum"])
def test_a_recording_as_a_cache_file_comes_back_with_its_candidates(name: str, tmp_path: Path) -> None:
    first = Recording.load(ROOT / "benchmarks" / "recordings" / "h200" / f"{name}{SUFFIX}")
    file = tmp_path / f"{name}.json"
    file.write_text(json.dumps(hub.cache(first)))
    again = hub.recording(file)
    inside = [first.rows[k] for k in {k for k in first.points if k >= 0}]
    assert len(again.rows) == len(inside)
    assert again.optimum_us == pytest.approx(first.optimum_us)
    assert sum(r.latency_us is None for r in again.rows) == sum(r.latency_us is None for r in inside)


def test_a_choice_that_is_no_number_becomes_its_position() -> None:
    assert hub._numbers([1, 2.5]) == [1, 2.5]
    assert hub._numbers(["global", "shared"]) == hub._numbers([False, True]) == [0, 1]


def test_the_plot_has_a_line_for_each_search() -> None:
    searches = {name: {"regret": [0.5, 0.1]} for name in plot.LINES}
    values = plot.chart({"budgets": [5, 10], "cases": [{"searches": searches}]})["data"]["values"]
    assert [(v["candidates"], round(v["regret"], 6)) for v in values] == [(5, 0.5), (10, 0.1)] * 3


def test_expect_recomputes_predictions_of_recordings(tmp_path: Path) -> None:
    path = tmp_path / f"softmax{SUFFIX}"
    before = Recording.load(ROOT / "benchmarks" / "recordings" / "h200" / path.name)
    replace(before, rows=tuple(replace(row, expected_us=1.0) for row in before.rows)).save(path)
    assert expect.main([str(tmp_path)]) == 0
    after = Recording.load(path)
    assert [row.expected_us for row in after.rows] == [pytest.approx(row.expected_us, rel=1e-3) for row in before.rows]
    assert [row.latency_us for row in after.rows] == [row.latency_us for row in before.rows]


def test_a_folder_without_recordings_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        expect.main([str(tmp_path)])
    assert ended.value.code == 2
    assert f"no recording in {tmp_path}" in capsys.readouterr().err
