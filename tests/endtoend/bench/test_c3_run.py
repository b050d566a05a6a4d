"""The C3 suite run end to end with two ranks on the CPU: search, comparison, files, and going on where it was."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from autotune.domains.c3.task import policy
from benchmarks import c3_timeline, form
from benchmarks.c3.__main__ import main
from benchmarks.c3.case import FAMILIES

pytestmark = pytest.mark.slow

LIST = """
[all_gather.equal]
gather = { gemm = "128x128x128", bytes = "64KiB" }
[reduce_scatter.compute]
scatter = { gemm = "128x128x128", bytes = "64KiB" }
"""


def test_scenarios_are_searched_compared_and_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "two.toml").write_text(LIST)
    out = tmp_path / "results" / "c3.json"
    common = ["--device", "cpu", "--scenarios", str(tmp_path / "two.toml"), "--out", str(out)]
    db = ["--db", str(tmp_path / "t.db")]

    assert main([*common, *db, "--no-search"]) == 1
    assert "NOT MEASURED: gather: nothing is stored for it" in capsys.readouterr().err
    assert not out.exists()

    assert main([*common, *db, "--cases", "gather", "--trials", "1"]) == 0
    first = form.read(out)
    (case,) = first["cases"]
    assert (first["suite"], first["schema"], first["ranks"]) == ("c3", 2, 2)
    assert (case["name"], case["class"], case["collective"]) == ("gather", "equal", "all_gather")
    assert set(case["strategies"]) == set(FAMILIES)
    assert set(case["t_comm_by_engine_ms"]) == {"gloo", "copy"}
    assert case["t_comm_ms"] == min(case["t_comm_by_engine_ms"].values())
    assert case["rounds"] >= policy("cpu").final_rounds
    assert case["t_gemm_ms"] <= case["t_gemm_median_ms"]
    assert all(ms <= case["t_comm_median_by_engine_ms"][name] for name, ms in case["t_comm_by_engine_ms"].items())
    orders = [case["strategies"][name]["label"] for name in ("naive", "naive_swapped")]
    assert orders == ["gloo comm_first", "gloo gemm_first"]
    seen = case["strategies"]["copy_engine"]["engine_seen"]
    assert seen == {"compute": 1, "copy": 1}
    assert set(case["timeline"]) == {"naive", "tuned"}
    assert all(run["spans"][0]["start_us"] == 0 for run in case["timeline"].values())
    labels = {"gloo comm_first", "gloo gemm_first", "copy comm_first", "copy gemm_first"}
    assert labels <= set(case["measured"])
    capsys.readouterr()

    assert main([*common, *db, "--trials", "1", "--resume", "--fixed", "--no-rule", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data == form.read(out)
    assert [c["name"] for c in data["cases"]] == ["gather", "scatter"]
    assert data["cases"][0]["strategies"] == case["strategies"]  # kept, not measured again
    assert data["cases"][1]["default"] is None
    assert data["summary"]["best_fixed"]["compared"] > 0
    assert all(c["fixed"]["label"] == data["summary"]["best_fixed"]["strategy"] for c in data["cases"])
    assert "timeline" not in data["cases"][1]
    assert "| gather |" in out.with_suffix(".md").read_text()
    bars = (out.parent / "c3-bars.svg").read_text()
    assert len(re.findall(r'aria-label="[^"]*scatter; [^"]*tuned', bars)) == 1
    assert "gather" in (out.parent / "c3-timeline.svg").read_text()
    assert "--resume" not in data["command"]

    assert main([*common, *db, "--resume", "--ranks", "3", "--cases", "gather"]) == 2
    assert "are not divisible among 3 ranks" in capsys.readouterr().err


def test_strategies_are_timed_in_turn_and_shown_as_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "lines.json"
    words = ["--device", "cpu", "--ranks", "2", "--gemm", "128x128x128", "--bytes", "64KiB", "--rounds", "5"]
    assert c3_timeline.main([*words, "--seconds", "1", "--out", str(out), "copy comm_first", "gloo comm_first"]) == 0
    shown = capsys.readouterr().out
    found = json.loads(out.read_text())
    assert set(found["us"]) == {*c3_timeline.ALONE, "copy comm_first", "gloo comm_first"}
    assert found["failed"] == {}
    assert set(found["lines"]) == {"copy comm_first", "gloo comm_first"}
    assert re.search(r"us  copy comm_first .* of the longer", shown)
    assert "copy: reduce_scatter" in shown
    assert "compute: the computation" in shown
