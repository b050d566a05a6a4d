"""The snapshots that come with autotune can be deployed from, without a GPU as far as that goes."""

from __future__ import annotations

from pathlib import Path

import pytest

import autotune
from autotune.cli import app
from autotune.errors import UserError
from autotune.runtime.control import unload
from autotune.runtime.ladder import Level, Match
from autotune.runtime.match import from_package, match
from autotune.store import Store
from autotune.store.snapshots.packaged import files_for, packaged, path_of
from autotune.store.snapshots.reader import Snapshot
from tests.support import ROOT


@pytest.mark.parametrize("name", packaged())
def test_every_schedule_is_found_on_its_device(name: str) -> None:
    """Kernels are printed anew and compared with the stored ones: a changed printer shows here."""
    snapshot = Snapshot(path_of(f"package:{name}"))
    snapshot.check()
    (device,) = snapshot.devices
    assert files_for(device)[0] == Path(path_of(f"package:{name}")), "a look-up asks it by itself"
    schedules = snapshot.schedules()
    kernels = 0
    for schedule in schedules:
        work = snapshot.get_workload(schedule.key.workload)
        env = snapshot.get_environment(schedule.key.environment)
        assert work is not None
        assert env is not None
        found = match(work, snapshot, device, env)
        assert found.level is Level.EXACT, f"{work.label}: {found.reason}"
        assert found.schedule is not None
        assert found.schedule.key == schedule.key, "the same software's, where there are two"
        kernels += found.schedule.config is not None
        by_itself, _ = from_package(work, Match(Level.NONE), None, device, env)
        assert (by_itself.level, by_itself.schedule) == (Level.PACKAGED, found.schedule)
    assert kernels > len(schedules) / 2


def test_the_documents_have_its_figures() -> None:
    schedules = Snapshot(path_of("package:h200")).schedules()
    kernels = sum(s.config is not None for s in schedules)
    regions = len({s.key.workload for s in schedules})
    said = (
        f"{len(schedules)} schedules of {regions} regions are in it: {kernels} are kernels, {len(schedules) - kernels}"
    )
    assert said in (ROOT / "docs" / "deploy.md").read_text()


def test_it_is_named_wherever_a_snapshot_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert autotune.load("package:h200").schedules()
    finally:
        unload()
    monkeypatch.setenv("AUTOTUNE_DB", "package:h200")
    assert app.main(["show", "--limit", "1"]) == 0
    assert "NVIDIA H200" in capsys.readouterr().out
    mine = str(tmp_path / "mine.db")
    assert app.main(["import", "package:h200", "--db", mine]) == 0
    with Store.open(mine) as store:
        assert len(store.schedules()) == len(Snapshot(path_of("package:h200")).schedules())


def test_none_of_that_name_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = "package:h100: no such snapshot comes with autotune; there is h200"
    for words in (["show", "--db", "package:h100"], ["import", "package:h100", "--db", str(tmp_path / "mine.db")]):
        assert app.main(words) == 2
        assert capsys.readouterr().err == f"autotune: {said}\n"
    with pytest.raises(UserError, match=said):
        autotune.load("package:h100")
    assert list(tmp_path.iterdir()) == []
