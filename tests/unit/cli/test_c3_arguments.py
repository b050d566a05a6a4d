"""Descriptions of scenarios on the command line, and messages for mistakes."""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path

import pytest

from autotune.cli.app import build_parser, main
from autotune.domain import identity_of
from autotune.domains.c3.cli import ranks_of, scenario_of
from autotune.domains.c3.scenario import Gemm, Program
from autotune.errors import UserError
from autotune.runtime.deployment import deployment
from autotune.store import Store
from benchmarks.c3.__main__ import main as suite

MINE = ["--collective", "all_gather", "--bytes", "4MiB", "--device", "cpu"]


def parsed(*words: str) -> argparse.Namespace:
    return build_parser().parse_args(["lookup", "c3", *words])


def test_a_scenario_is_named_or_described() -> None:
    named, name = scenario_of(parsed("a2a-equal-proj-2k", "--ranks", "4"), "cpu")
    assert name == "a2a-equal-proj-2k"
    assert (named.ranks, named.dtype, named.nbytes) == (4, "bf16", 128 << 20)
    assert named.compute == Gemm(2048, 8192, 8192, "bf16")
    narrow, _ = scenario_of(parsed("a2a-equal-proj-2k", "--dtype", "f32"), "cpu")
    assert (narrow.ranks, narrow.dtype, narrow.compute.label) == (2, "f32", "2048x8192x8192 f32")
    own, name = scenario_of(parsed("--gemm", "64x32x16", "--layout", "nt", *MINE), "cpu")
    assert own.compute == Gemm(64, 32, 16, "f32", "nt")
    assert (own.collective, own.nbytes, own.ranks, name) == ("all_gather", 4 << 20, 2, own.label)
    built_in, _ = scenario_of(parsed("--compute", "layer_norm", *MINE), "cpu")
    assert built_in.compute == Program("layer_norm")


def test_a_users_own_computation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_compute.py").write_text("def f(x):\n    return x\n\ndef i():\n    return None\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    own, _ = scenario_of(parsed("--compute", "my_compute:f", "--inputs", "my_compute:i", *MINE), "cpu")
    assert own.compute == Program("my_compute:f", "my_compute:i")
    with pytest.raises(UserError, match="has no 'g'"):
        scenario_of(parsed("--compute", "my_compute:g", "--inputs", "my_compute:i", *MINE), "cpu")


def test_the_number_of_ranks_is_torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "3", "RANK": "0", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    assert ranks_of(parsed("x"), "cpu") == 3
    with pytest.raises(UserError, match="torchrun started 3 processes"):
        ranks_of(parsed("x", "--ranks", "2"), "cpu")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["search", "c3"], "name a scenario"),
        (["lookup", "c3", "--device", "cpu"], "name a scenario"),
        (["lookup", "c3", "ag-equal-prj", "--device", "cpu"], "did you mean 'ag-equal-proj'"),
        (["search", "c3", "ag-equal-proj", "--gemm", "1x1x1", "--device", "cpu"], "leave out --gemm"),
        (["search", "c3", "ag-equal-proj", "--ranks", "1", "--device", "cpu"], "needs 2 ranks or more, not 1"),
        (["search", "c3", "ag-equal-proj", "--ranks", "7", "--device", "cpu"], "are not divisible among 7 ranks"),
        (["search", "c3", "--gemm", "1x1", *MINE], "write MxNxK"),
        (["search", "c3", "--gemm", "0x1x1", *MINE], "1 or more"),
        (["search", "c3", "--gemm", "1x1x1", "--device", "cpu"], "also needs --collective and --bytes"),
        (["search", "c3", "--gemm", "1x1x1", "--compute", "layer_norm", *MINE], "exclude each other"),
        (["search", "c3", "--gemm", "1x1x1", "--dtype", "f8", *MINE], "unknown dtype 'f8'"),
        (["search", "c3", "--gemm", "1x1x1", "--layout", "nx", *MINE], "layout 'nx'"),
        (["search", "c3", "--gemm", "1x1x1", *MINE, "--collective", "gather"], "unknown collective 'gather'"),
        (["search", "c3", "--gemm", "1x1x1", *MINE, "--bytes", "4XB"], "write a size such as 512MiB"),
        (["search", "c3", "--compute", "no_such", *MINE], "--compute no_such"),
        (["search", "c3", "--compute", "layer_norm", "--layout", "nt", *MINE], "--layout goes with --gemm"),
        (["search", "c3", "--compute", "no.such:f", "--inputs", "no.such:i", *MINE], "no.such"),
        (["search", "c3", "ag-equal-proj", "--missed"], "leave out ag-equal-proj"),
        (["search", "c3", "--missed", "--device", "cpu"], "no missed c3 scenario"),
        (["search", "c3", "ag-equal-proj", "--device", "cpu", "--space", "no/such.toml"], "no/such.toml"),
        (["lookup", "fusion"], "required: TARGET"),
        (["calibrate", "c3"], "c3 has no cost model to calibrate; `autotune calibrate` takes fusion"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.startswith("autotune: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--out", "x.txt"], "ends in .json"),
        (["--scenarios", "no/such.toml"], "no such file of scenarios"),
        (["--cases", "nothing"], "scenario 'nothing'"),
        (["--cases", "equal", "--timeline", "ag-comm-proj"], "not among the scenarios"),
    ],
)
def test_the_suite_refuses_in_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert suite(["--device", "cpu", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


def test_scenarios_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["workloads"]) == 0
    assert "rs-equal-proj" in capsys.readouterr().out
    assert suite(["--list", "--cases", "all_reduce"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert lines[0].split() == ["ar-equal-proj", "equal", "8192x8192x8192", "beside", "all_reduce", "of", "512", "MiB"]


def test_misses_are_reported_with_the_command_that_searches_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    db = str(tmp_path / "t.db")
    workload, _ = scenario_of(parsed("--gemm", "64x64x64", *MINE), "cpu")
    with Store.open(db) as store:
        device = store.put_device(identity_of(workload.workload(), "cpu"))
        store.add_miss(workload.workload(), device, "not tuned")
    assert main(["show", "--db", db]) == 0
    assert f"1 missed workload: `autotune search c3 --missed --db {db}` searches it." in capsys.readouterr().out


@pytest.mark.parametrize("before", [None, "other.db"])
def test_ranks_look_up_where_the_command_stores(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOTUNE_DB", raising=False)
    if before is not None:
        monkeypatch.setenv("AUTOTUNE_DB", before)
    with deployment().deploying_from(None):
        assert os.environ.get("AUTOTUNE_DB") == before
    with contextlib.suppress(KeyboardInterrupt), deployment().deploying_from("mine.db"):
        assert os.environ["AUTOTUNE_DB"] == "mine.db"
        raise KeyboardInterrupt
    assert os.environ.get("AUTOTUNE_DB") == before
