"""The snapshots that come with autotune can be deployed from, without a GPU as far as that goes."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import autotune
from autotune.cli import app
from autotune.device import DeviceIdentity
from autotune.errors import UserError
from autotune.runtime.control import unload
from autotune.runtime.deployment import Deployment, use
from autotune.runtime.ladder import Level, Match, Outcome
from autotune.runtime.match import deployed_from_package, from_package, match
from autotune.store import Store
from autotune.store import opening as packages
from autotune.store.merge import checked
from autotune.store.opening import files_for, packaged, path_of
from autotune.store.snapshot import Snapshot
from tests.support import ROOT


@pytest.mark.parametrize("name", packaged())
def test_every_schedule_is_found_on_its_device(name: str) -> None:
    """Kernels are printed again and compared with the stored ones: a changed printer fails here."""
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
    assert said in (ROOT / "docs" / "how-to" / "deploy.md").read_text()


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
    said = f"package:b200: no such packaged snapshot; autotune has {', '.join(packaged())}"
    for words in (["show", "--db", "package:b200"], ["import", "package:b200", "--db", str(tmp_path / "mine.db")]):
        assert app.main(words) == 2
        assert capsys.readouterr().err == f"autotune: {said}\n"
    with pytest.raises(UserError, match=said):
        autotune.load("package:b200")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Snapshot, DeviceIdentity]]:
    """Packages of two devices: the H200's, and an H100's with one of its kernels, made by the documented command.

    Gives the H200's, and an H100.
    """
    h200 = Snapshot(path_of("package:h200"))
    (device,) = h200.devices
    h100 = replace(device, name="NVIDIA H100 80GB HBM3", memory_mib=81559)
    folder = tmp_path / "schedules"
    folder.mkdir()
    shutil.copy(path_of("package:h200"), folder)
    searched = str(tmp_path / "searched.db")
    with Store.open(searched) as store:
        checked("package:h200").into(store)
        first = next(s for s in store.schedules(artifacts=True) if s.config is not None)
        store.put_device(h100)
        store.put_schedule(replace(first, key=replace(first.key, device=h100.fingerprint), latency_us=1.5))
    words = ["export", str(folder / "h100.atdb"), "--only-best", "--device", "H100", "--domain", "fusion"]
    assert app.main([*words, "--db", searched]) == 0
    monkeypatch.setattr(packages, "FOLDER", folder)
    packages._files_for.cache_clear()
    use(Deployment())
    yield h200, h100
    packages._files_for.cache_clear()
    use(Deployment())


def test_a_device_s_own_package_comes_first_and_then_those_of_its_architecture(
    two: tuple[Snapshot, DeviceIdentity],
) -> None:
    h200, h100 = two
    (device,) = h200.devices
    assert [path.stem for path in files_for(h100)] == ["h100", "h200"]
    assert [path.stem for path in files_for(device)] == ["h200", "h100"]
    (env, *_) = h200.environments
    stems = Counter[str]()
    for schedule in [s for s in h200.schedules() if s.config is not None][:12]:
        work = h200.get_workload(schedule.key.workload)
        assert work is not None
        found, step = from_package(work, Match(Level.NONE, reason="not tuned"), None, h100, env)
        assert (found.level, step.outcome) == (Level.PACKAGED, Outcome.TAKEN)
        assert found.schedule is not None
        of = found.schedule.key.device
        stems["h100" if of == h100.fingerprint else "h200"] += 1
        fields = {d.field for d in step.differences}
        assert ({"name", "memory_mib"} <= fields) == (of == device.fingerprint)
        assert not {d.field for d in found.differences} & {"name", "memory_mib"}, "no warning of other software"
        kept = deployed_from_package(work.fingerprint, None, h100, env)
        assert kept is not None
        assert kept.schedule == found.schedule
        there, _ = from_package(work, Match(Level.NONE), None, device, env)
        assert there.schedule is not None
        assert there.schedule.key.device == device.fingerprint, "an H200 takes its own"
    assert set(stems) == {"h100", "h200"}
    assert stems["h100"] == 1


def test_another_architecture_takes_nothing(two: tuple[Snapshot, DeviceIdentity]) -> None:
    h200, h100 = two
    (env, *_) = h200.environments
    work = h200.get_workload(h200.schedules()[0].key.workload)
    assert work is not None
    for other in (replace(h100, name="NVIDIA A100-SXM4-80GB", capability="8.0"), replace(h100, count=2)):
        found, step = from_package(work, Match(Level.NONE), None, other, env)
        assert (found.level, step.outcome) == (Level.NONE, Outcome.EMPTY)
        assert deployed_from_package(work.fingerprint, None, other, env) is None


def test_a_damaged_package_leaves_the_other(
    two: tuple[Snapshot, DeviceIdentity], caplog: pytest.LogCaptureFixture
) -> None:
    h200, h100 = two
    (packages.FOLDER / "h100.atdb").write_bytes(b"no snapshot")
    (env, *_) = h200.environments
    work = h200.get_workload(next(s for s in h200.schedules() if s.config is not None).key.workload)
    assert work is not None
    found, _ = from_package(work, Match(Level.NONE), None, h100, env)
    assert found.level is Level.PACKAGED
    assert len([r for r in caplog.records if "h100" in r.getMessage()]) == 1


def test_it_is_switched_off_for_all(two: tuple[Snapshot, DeviceIdentity], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_PACKAGED", "refuse")
    h200, h100 = two
    (env, *_) = h200.environments
    work = h200.get_workload(h200.schedules()[0].key.workload)
    assert work is not None
    found, step = from_package(work, Match(Level.NONE), None, h100, env)
    assert (found.level, step.why) == (Level.NONE, "AUTOTUNE_PACKAGED is refuse")
