"""Several targets in one search: what they share is searched once, and each has its answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autotune.cli.app import main
from autotune.store import Store


@pytest.mark.slow
def test_also_searches_shared_workloads_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AUTOTUNE_DOMAINS", "gelu=examples.blocked_gelu.domain")
    db = str(tmp_path / "x.db")
    words = ["search", "gelu", "65536", "--also", "32768", "--device", "cpu", "--db", db, "--trials", "2"]
    assert main([*words, "--json"]) == 0
    out, err = capsys.readouterr()
    answer = json.loads(out)
    other = answer["gelu 32768"]
    assert (answer["workload"], answer["measured"], len(answer["workloads"])) == ("65536", 2, 1)
    assert (other["workload"], other["measured"], other["match"]) == ("32768", 2, "exact")
    assert "65536, 32768: 2 workloads" in err
    with Store.open(db) as store:
        (run,) = store.runs()
        assert "--also 32768" in run.command
        assert len(store.schedules()) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--also", "layer_norm"], "this target is given twice"),
        (["--also", "softmax_mask", "a:b", "c:d"], "give one target and at most one SPEC"),
    ],
)
def test_also_refuses_an_invalid_second_target(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["search", "fusion", "layer_norm", *words, "--device", "cpu", "--db", str(tmp_path / "x.db")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
