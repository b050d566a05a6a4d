"""Recording every candidate of a space, and going on with a recording that was interrupted."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from autotune.domain import policy_for
from autotune.store import Store
from autotune.task import Status
from autotune.tuner.context import Context
from autotune.tuner.threads import Lease
from autotune.workload import Workload
from benchmarks.replay.__main__ import main
from benchmarks.replay.record import Candidates, record, task_of
from benchmarks.replay.recording import SUFFIX, Recording
from benchmarks.replay.search import search
from tests.support.toy import toy_domain

pytestmark = pytest.mark.usefixtures("formula")


def _record(store: Store, folder: Path, *more: str) -> int:
    return main(["record", "toy 64x256", "--device", "cpu", "--db", store.url, "--out", str(folder), *more])


def test_every_candidate_is_measured_once(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    workload = toy_domain.workload(log=str(log), seeds=[{"how": "vector", "block": 1}])
    store.put_workload(workload)
    assert _record(store, tmp_path / "out") == 0
    (path,) = (tmp_path / "out").glob(f"*{SUFFIX}")
    assert str(path) in capsys.readouterr().out
    r = Recording.load(path)
    assert r.workload == workload
    assert len(r.rows) == 12
    assert {row.status for row in r.rows} == {Status.OK}
    best = next(row for row in r.rows if row.latency_us == r.optimum_us)
    assert best.config == {"how": "vector", "block": 8}
    assert r.default == {"how": "rows", "block": 4}
    assert r.seeds == ({"how": "vector", "block": 1},)
    assert r.about["date"]
    assert len(log.read_text().splitlines()) == 12
    assert search(r, "brute", candidates=100).best_us[-1] == r.optimum_us
    assert _record(store, tmp_path / "again") == 0
    assert len(log.read_text().splitlines()) == 12  # nothing is measured again


def test_seconds_may_be_limited(store: Store) -> None:
    workload = toy_domain.workload()
    context = Context(store, "cpu", policy_for(workload, "cpu"))
    with contextlib.closing(context), Lease(store, context.owner):
        left = record(context, workload, limit_s=0.0)
        assert isinstance(left, str)
        assert "of 12 candidates are not measured (the time is up)" in left
        found = Candidates.of(task_of(context, workload))
        made = record(context, workload, found=found)
    assert isinstance(made, Recording)
    assert len(made.rows) == len(found.configs) == 12


def test_a_narrowed_space_and_failures(store: Store, tmp_path: Path) -> None:
    workload = toy_domain.workload(rows=4, bad=True)
    store.put_workload(workload)
    space = tmp_path / "space.toml"
    space.write_text('how = ["vector", "build_error"]\nblock = [2, 4, 8]\n')
    line = ["record", workload.fingerprint[:10], "--space", str(space), "--device", "cpu", "--db", store.url]
    assert main([*line, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob(f"*{SUFFIX}")
    r = Recording.load(path)
    assert r.space.size == 6
    assert r.points.count(-1) == 2  # blocks of 8 of 4 rows
    assert sorted(str(row.status) for row in r.rows) == ["compile_error"] * 2 + ["ok"] * 3  # and the default, outside
    assert r.row(r.default) is not None


def test_mistakes_are_reported_in_a_line(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store.put_workload(toy_domain.workload())
    store.put_workload(toy_domain.workload(slow_us=1))
    assert _record(store, tmp_path) == 2
    assert "is several workloads" in capsys.readouterr().err
    line = ["record", "nothing", "--device", "cpu", "--db", store.url]
    assert main(line) == 2
    assert "has no workload 'nothing'" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main([*line, "--out", str(tmp_path / "file")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_program_of_a_database_is_not_imported(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    spec = {"compute": {"op": "program", "name": "http.server:test", "inputs": "http.server:test"},
            "collective": "all_gather", "nbytes": 1 << 20, "dtype": "bfloat16", "ranks": 2}  # fmt: skip
    workload = Workload("c3", spec, label="theirs")
    store.put_workload(workload)
    assert main(["record", "theirs", "--device", "cpu", "--db", store.url]) == 2
    assert "may not be measured" in capsys.readouterr().err


def test_a_recording_of_an_unsearched_workload_makes_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = ["record", "layer_norm", "--out", "made", "--db"]
    assert main([*line, "typo.db"]) == 2
    assert "there is no database" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    Store.open(tmp_path / "t.db").close()
    assert main([*line, "t.db"]) == 2
    assert "has no workload 'layer_norm'" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()
