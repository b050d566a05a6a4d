"""``calibrate c3``: what is measured is stored for these devices together, and look-ups go by it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from autotune.cli.app import main
from autotune.domains.c3.calibration import calibrate
from autotune.domains.c3.measuring import ranks
from autotune.measure.worker import WorkerFault

LOOKUP = ["lookup", "c3", "--gemm", "64x64x64", "--collective", "all_gather", "--bytes", "48KiB", "--device", "cpu"]


class NoRanks:
    """In the place of rank processes."""

    closed = 0

    def __init__(self, workload: object, device: str, policy: object, *, ranks: int) -> None:
        assert (workload, device) == (None, "cpu")
        self.ranks = ranks

    def close(self) -> None:
        NoRanks.closed += 1


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Mapping[str, float]]], None]:
    monkeypatch.setattr(ranks, "Ranks", NoRanks)
    monkeypatch.setattr(NoRanks, "closed", 0)

    def set_(answer: Callable[[], Mapping[str, float]]) -> None:
        def run(group: NoRanks, told: Callable[[str, float | None], None]) -> Mapping[str, float]:
            assert group.ranks == 3
            told("a probe", 1.25)
            told("another", None)
            return answer()

        monkeypatch.setattr(calibrate, "calibrate", run)

    return set_


def test_figures_are_stored_for_as_many_ranks(
    measured: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    db = ["--db", str(tmp_path / "t.db")]
    measured(lambda: {"comm_us.all_gather.copy.1MiB": 2.5, "gemm_us.64x64x64.f32": 1.0})
    assert main(["calibrate", "c3", "--device", "cpu", "--ranks", "3", *db]) == 0
    out, err = capsys.readouterr()
    assert "comm_us: 1 figures\ngemm_us: 1 figures" in out
    assert "a probe: 1.2 s\nanother: could not be measured\n" in err
    assert NoRanks.closed == 1
    levels = {}
    for count in ("2", "3"):
        assert main([*LOOKUP, "--ranks", count, "--json", *db]) == 0
        levels[count] = json.loads(capsys.readouterr().out)["match"]
    assert levels == {"2": "default", "3": "heuristic"}


def test_ranks_that_do_not_start_leave_nothing_behind(
    measured: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> Mapping[str, float]:
        raise WorkerFault("3 ranks on cpu do not start")

    measured(fail)
    db = ["--db", str(tmp_path / "t.db")]
    assert main(["calibrate", "c3", "--device", "cpu", "--ranks", "3", *db]) == 1
    assert "NOT CALIBRATED: 3 ranks on cpu do not start" in capsys.readouterr().err
    assert main([*LOOKUP, "--ranks", "3", "--json", *db]) == 0
    assert json.loads(capsys.readouterr().out)["match"] == "default"
