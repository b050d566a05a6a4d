"""The script that checks C3 on a GPU host, run on ranks without GPUs: right results pass, wrong ones are reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autotune.domains.c3 import task
from autotune.domains.c3.measuring.ranks import Ranks
from autotune.domains.c3.scenario import COLLECTIVES, REDUCING, Gemm, Scenario
from autotune.domains.c3.strategy import HostStrategy, Strategy
from tests.gpu import c3_check as script
from tests.gpu.c3.check import Batch, batches


def test_batches_have_every_way_to_move_and_to_share() -> None:
    found = batches(8, "cuda")
    assert {(b.engine, b.scenario.collective) for b in found} == {
        *((engine, op) for engine in ("nccl", "copy") for op in COLLECTIVES),
        *(("sm", op) for op in REDUCING),
    }
    odd = [Strategy.of(c) for b in found if b.size == "odd" for c in b.configs]
    for name, values in {
        "chunks": {1, 3},
        "ctas": {0, 4, 8, 16},
        "reserve": {0, 8},
        "priority": {"equal", "comm"},
        "order": {"sequential", "comm_first", "gemm_first"},
    }.items():
        assert {getattr(s, name) for s in odd} == values, name
    assert all(b.scenario.nbytes % 16 for b in found if b.size == "odd" and b.scenario.collective == "all_reduce")
    assert batches(3, "cpu", seed=1) == batches(3, "cpu", seed=1) != batches(3, "cpu", seed=2)


@pytest.mark.slow
def test_everything_is_right_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "check.json"
    assert script.main(["--device", "cpu", "--variants", "1", "--out", str(out)]) == 0
    assert capsys.readouterr().out.endswith(" bad 0\n")
    data = json.loads(out.read_text())
    assert (data["bad"], data["ranks"]) == ([], 2)
    checked = {case["name"]: case["checked"] for case in data["cases"]}
    assert checked["copy"] >= 12
    assert set(script.CHECKS) <= set(checked)
    assert data["commit"]


def test_check_script_runs_only_the_named_engines_collectives_and_checks() -> None:
    def left(*names: str) -> tuple[set[str], list[str]]:
        options = script.options_of(["--only", *names])
        todo, checks = script.chosen(2, "cuda:0", options)
        return {b.engine for b in todo} | {b.scenario.collective for b in todo}, checks

    assert left("sm", "all_reduce") == ({"sm", "all_reduce"}, [])
    assert left("linear") == (set(), ["linear"])
    assert left("copy", "training") == ({"copy", *COLLECTIVES}, ["training"])


@pytest.mark.slow
def test_errors_are_reported_and_the_rest_still_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "STRATEGIES", "tests.support.c3.check_jobs:faulty")
    monkeypatch.setattr(script, "DEPLOYED", "tests.support.c3.check_jobs:deployed_faulty")
    scenario = Scenario(Gemm(64, 64, 64, "f32"), "all_gather", 4 * 5003 * 2, 2, "f32")
    strategies = [
        HostStrategy(engine="copy"),
        HostStrategy(engine="copy", order="comm_first", copies=3),
        HostStrategy(engine="copy", order="gemm_first", copies=3),  # rank 1 dies
        HostStrategy(engine="copy", order="comm_first"),
        HostStrategy(engine="copy", order="sequential", copies=3),
    ]
    batch = Batch("copy", "odd", scenario, tuple(s.config() for s in strategies))
    with Ranks(None, "cpu", task.policy("cpu"), ranks=2) as ranks:
        check = script.Check(ranks, 0, tmp_path)
        check.batch(batch)
        assert check.checked == {"copy": 5}
        died, off, unsupported = check.bad
        assert died.startswith(f"{batch.told(2)}: ")
        assert "rank 1 killed by SIGKILL" in died
        check.deployment("linear")
    assert "unsupported: no such threads" in unsupported
    assert off.startswith(f"{batch.told(1)}: rank 0: all_gather, call 0, rank 0: 1 of ")
    assert any("all_reduce by copy" in line and "elements are wrong" in line for line in check.bad)
    assert not any("by gloo" in line for line in check.bad)
