"""Importing: the faster of two schedules stays, both are kept, and conflicts are reported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from autotune.cli.app import main
from autotune.errors import UserError
from autotune.store import Snapshot, Store, attach
from autotune.store.merge import merge
from autotune.store.snapshot_writer import export_snapshot
from autotune.task import Status
from tests.support.rows import ENVIRONMENT, GPU, workload
from tests.support.snapshots import faster, import_file, keys


def test_into_an_empty_database_and_again(store: Store, file: Path, tmp_path: Path) -> None:
    with Store.open(tmp_path / "other.db") as other:
        found = import_file(other, file)
        assert (found.schedules, found.stored, found.conflicts) == (6, 6, [])

        def listed(of: Store) -> list[object]:
            return sorted(of.schedules(artifacts=True), key=lambda s: vars(s.key)["workload"] + s.key.device)

        assert len(listed(other)) == len(listed(store))
        assert other.get_schedule(workload(64).fingerprint, GPU.fingerprint, ENVIRONMENT) == store.get_schedule(
            workload(64).fingerprint, GPU.fingerprint, ENVIRONMENT
        )
        (verdict,) = other.verdicts()
        assert verdict.record["numerics"] == {"cuda.matmul.fp32_precision": "tf32"}
        state = other.state()
        assert import_file(other, file).stored == 0
        assert other.state() == state


@pytest.mark.parametrize(("theirs", "stays"), [(1.0, 1.0), (100.0, 42.0)])
def test_the_faster_stays_and_the_other_is_kept(
    store: Store, file: Path, tmp_path: Path, theirs: float, stays: float
) -> None:
    """The file has 42 us for 32 rows; the database another configuration."""
    with Store.open(tmp_path / "other.db") as other:
        import_file(other, file)
        mine = next(s for s in other.schedules(artifacts=True) if s.extent == 32 and s.latency_us == 42.0)
        other.put_schedule(faster(mine, theirs), replace=True)
        found = import_file(other, file)
        assert len(found.conflicts) == 1
        assert "layer_norm f32 32x8" in found.conflicts[0]
        assert found.stored == int(stays == 42.0)
        now = other.schedule_of(mine.key)
        assert now is not None
        assert now.latency_us == stays
        (kept,) = other.measurements(workload=mine.key.workload)
        assert kept.latency_us == (theirs if stays == 42.0 else 42.0)
        assert kept.config == ({"threads": 999} if stays == 42.0 else mine.config)


@pytest.mark.parametrize("how", ["imported", "merged"])
def test_a_slower_one_takes_the_place_of_one_that_failed_here(
    store: Store, file: Path, tmp_path: Path, how: str
) -> None:
    """As for every other stored schedule; the messages and the kept rows are the same."""
    with Store.open(tmp_path / "other.db") as other:
        import_file(other, file)
        mine = next(s for s in other.schedules(artifacts=True) if s.extent == 32 and s.latency_us == 42.0)
        failed = faster(mine, 1.0)
        other.put_schedule(failed, replace=True)
        assert other.put_failure(mine.key, failed.config or {}, Status.LAUNCH_ERROR, "refused")
        if how == "imported":
            lines: Sequence[str] = import_file(other, file).conflicts
        else:
            lines = [line for line in merge(other, store).conflicts if line.startswith("schedule")]
        (line,) = lines
        assert line.endswith("us there: that one takes its place")
        now = other.schedule_of(mine.key)
        assert now is not None
        assert (now.latency_us, now.config) == (42.0, mine.config)
        kept = [m for m in other.measurements(workload=mine.key.workload) if m.reason == "merged"]
        assert [(m.latency_us, m.config) for m in kept] == [(1.0, failed.config)]


def test_calibrations_travel(store: Store, file: Path, tmp_path: Path) -> None:
    with Store.open(tmp_path / "other.db") as other:
        import_file(other, file)
        found = other.get_calibration(GPU.fingerprint, "fusion")
        assert found is not None
        assert found.figures == {"copy_gbs": 4000.0}


def test_a_pinned_key(store: Store, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine, theirs = keys(tmp_path)
    signed = tmp_path / "signed.atdb"
    export_snapshot(store, signed, key=mine)
    with Store.open(tmp_path / "other.db") as other:
        with pytest.raises(UserError, match="not signed"):
            import_file(other, file, key=str(theirs))
        assert import_file(other, signed, key=str(theirs)).stored == 6
    assert main(["import", str(file), "--db", other.url, "--key", ""]) == 2  # as a variable that is not set
    assert "cannot read the key" in capsys.readouterr().err
    with pytest.raises(UserError, match="cannot read the key"):
        attach(file, key="")


@pytest.mark.parametrize("command", [["import"], ["db", "import"]])
def test_a_refused_file_makes_no_database(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    whole, new = file.read_bytes(), tmp_path / "folder" / "new.db"
    for wrong in (["--key", str(keys(tmp_path)[1])], []):
        if not wrong:
            file.write_bytes(whole[: len(whole) // 2])
        assert main([*command, str(file), "--db", str(new), *wrong]) == 2
        assert capsys.readouterr().err.count("\n") == 1
        assert not new.parent.exists()
    file.write_bytes(whole)
    assert main([*command, str(file), "--db", str(new)]) == 0
    assert new.exists()


def test_there_and_back(store: Store, file: Path, tmp_path: Path) -> None:
    """A snapshot of imported rows equals the imported snapshot, except for the time."""
    again = tmp_path / "again.atdb"
    with Store.open(tmp_path / "other.db") as other:
        import_file(other, file)
        export_snapshot(other, again)
    one, two = Snapshot(file), Snapshot(again)
    assert list(one.schedules(artifacts=True)) == list(two.schedules(artifacts=True))
    assert one.verdicts() == two.verdicts()
    assert one.calibrations() == two.calibrations()
