"""Packaged schedules: the last rung, for the exact device only, and never against the user's decision."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch.nn import functional as F

import autotune
from autotune import device
from autotune.cli import app
from autotune.device import environment, identify
from autotune.errors import UserError
from autotune.runtime.backend import trial_backend
from autotune.runtime.deployment import Deployment, deployment, use
from autotune.runtime.inductor.verdict import Trial
from autotune.runtime.ladder import Level, Match, Outcome
from autotune.runtime.launch.verify import Check
from autotune.runtime.match import from_package
from autotune.runtime.settings import Settings
from autotune.store import Schedule, Snapshot, Store, Verdict, opening
from autotune.store.snapshot_writer import export_snapshot
from autotune.task import Status
from tests.endtoend.runtime.test_backend import close, compiled
from tests.support.deployment import Tune, baseline, tune_in
from tests.support.runtime.agreement_checks import softmax as plain
from tests.support.runtime.ranks import Ranks
from tests.support.snapshots import keys

Pack = Callable[..., Path]


def softmax(x: torch.Tensor) -> torch.Tensor:
    return F.softmax(x * 3, -1)


X = torch.randn(32, 48, generator=torch.Generator().manual_seed(1))
OTHER = torch.randn(64, 48, generator=torch.Generator().manual_seed(2))


@pytest.fixture
def pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pack]:
    """``pack(fn, args)`` makes a snapshot that comes with autotune for this CPU, of a function's regions."""
    folder = tmp_path / "schedules"
    folder.mkdir()
    monkeypatch.setattr(opening, "FOLDER", folder)

    def make(fn: Callable[..., Any], args: Sequence[Any], name: str = "", **how: Any) -> Path:
        source = str(tmp_path / f"source{time.monotonic_ns()}.db")
        tune_in(source)(fn, args, **how)
        file = folder / f"{name or opening.name_for(identify('cpu').name)}.atdb"
        with Store.open(source) as store:
            export_snapshot(store, file)
        use(Deployment())
        opening._files_for.cache_clear()  # which files there are never changes, but here
        return file

    yield make
    opening._files_for.cache_clear()


def anew() -> None:
    """As another process would begin."""
    use(Deployment())
    torch._dynamo.reset()


def level(x: torch.Tensor = X) -> Level:
    return autotune.lookup(softmax, (x,)).level


def rung(x: torch.Tensor = X) -> Any:
    (region,) = autotune.lookup(softmax, (x,), explain=True)
    assert [step.rung for step in region.ladder][-2:] == ["packaged", "none"]
    return region.ladder[-2]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """All warnings except for the creation of a named database."""
    told = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    return [text for text in told if "is a new database" not in text]


def counted() -> dict[str, int]:
    found = {name: n for name, n in autotune.counters().items() if n}
    deployment().reset_counters()
    return found


def deployed(x: torch.Tensor = X, fn: Callable[..., torch.Tensor] = softmax) -> dict[str, int]:
    """The counters of a new process that compiles a function."""
    anew()
    close(compiled(fn, dynamic=False)(x), fn(x))
    return counted()


def test_it_runs_where_nothing_was_tuned(pack: Pack, db: str, caplog: pytest.LogCaptureFixture) -> None:
    assert level() is Level.NONE
    pack(softmax, (X,))
    (region,) = autotune.lookup(softmax, (X,), explain=True)
    assert (region.level, region.tuned) == (Level.PACKAGED, region.workload)
    assert "packaged with autotune" in region.reason
    assert [s.outcome for s in region.ladder] == [Outcome.EMPTY, Outcome.TAKEN, Outcome.NOT_ASKED]
    assert level(OTHER) is Level.PACKAGED, "of other rows, within the ratio"
    assert "tuned for 32 rows" in rung(OTHER).why
    assert level(torch.randn(32 * 17, 48)) is Level.NONE
    assert deployed() == {"graphs": 1, "hits": 1, "hits_packaged": 1}
    assert deployed(OTHER) == {"graphs": 1, "hits": 1, "hits_packaged": 1}
    assert warnings(caplog) == []
    with Store.open(db) as store:
        missed = store.get_workloads(m.workload for m in store.misses()).values()
        assert sorted(w.extent for w in missed) == [32, 64], "a search is to measure it here"
        assert store.schedules() == []


def test_it_runs_under_other_software_and_is_verified(pack: Pack, db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pack(softmax, (X,))
    real = device._environment
    monkeypatch.setattr(device, "_environment", lambda kind: replace(real(kind), torch="9.9.0", cuda="99.0"))
    checked: list[Check] = []
    expected = Check.expected
    monkeypatch.setattr(Check, "expected", lambda self, x: (checked.append(self), expected(self, x))[1])
    assert [d.field for d in rung().differences] == ["torch", "cuda"]
    for _ in range(2):  # the second one takes Inductor's code from its cache
        assert deployed() == {"graphs": 1, "hits": 1, "hits_packaged": 1}
    assert len(checked) == 2
    monkeypatch.setenv("AUTOTUNE_ENVIRONMENT", "strict")  # a process that begins forgets what was configured
    assert "hits" not in deployed()
    assert (level(), rung().outcome) == (Level.NONE, Outcome.REFUSED)
    assert "other software" in rung().why


def test_a_baseline_of_it_leaves_the_region_to_inductor(pack: Pack, db: str) -> None:
    pack(softmax, (X,), edit=baseline("inductor"))
    assert level() is Level.PACKAGED
    assert deployed() == {"graphs": 1, "hits": 1, "hits_packaged": 1, "baseline_wins": 1}


def test_the_users_own_comes_first(pack: Pack, tune: Tune, tmp_path: Path) -> None:
    pack(softmax, (X,))
    tune(softmax, (X,), edit=lambda s: replace(s, latency_us=77.0))
    (region,) = autotune.lookup(softmax, (X,), explain=True)
    assert (region.level, region.latency_us) == (Level.EXACT, 77.0)
    assert region.ladder[-2].outcome is Outcome.NOT_ASKED
    assert level(OTHER) is Level.OTHER_ROWS
    assert deployed() == {"graphs": 1, "hits": 1}
    frozen = tmp_path / "mine.atdb"
    with Store.open() as store:
        export_snapshot(store, frozen)
    autotune.load(frozen)
    assert level() is Level.EXACT


def test_regions_that_the_user_left_to_inductor_stay_there(pack: Pack, tune: Tune) -> None:
    pack(softmax, (X,))
    tune(softmax, (X,), edit=baseline("inductor"))
    assert deployed() == {"graphs": 1, "hits": 1, "baseline_wins": 1}
    assert deployed(OTHER) == {"graphs": 1, "hits": 1, "hits_other_rows": 1, "baseline_wins": 1}


def failed(store: Store, own: Schedule) -> None:
    store.put_failure(own.key, own.config or {}, Status.WRONG_RESULT, "by hand")


def other_software(store: Store, own: Schedule) -> None:
    old = replace(environment("cpu"), torch="1.2.3")
    store.put_environment(old)
    with store.writing() as c:
        c.exec_driver_sql("DELETE FROM autotune_schedules")
    store.put_schedule(replace(own, key=replace(own.key, environment=old.strict)))


@pytest.mark.parametrize("refused", [failed, other_software])
def test_packaged_schedule_does_not_replace_one_refused_in_the_database(
    pack: Pack, tune: Tune, refused: Callable[[Store, Schedule], None]
) -> None:
    """That kernel may be the one that failed, and a search under other software may have another result."""
    pack(softmax, (X,))
    tune(softmax, (X,))
    with Store.open() as store:
        (own,) = store.schedules(artifacts=True)
        refused(store, own)
    assert level() is Level.NONE
    assert level(OTHER) is Level.NONE, "nor by way of other rows"
    assert rung().outcome is Outcome.REFUSED
    assert "the database has a schedule" in rung().why
    assert deployed() == {"graphs": 1, "misses": 1}


def both(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.tanh(x) @ x.mT, -1)


def test_a_step_that_the_user_decided_stays_as_it_was_measured(pack: Pack, tune: Tune, db: str) -> None:
    pack(both, (X,))
    tune(both, (X,), select=lambda w: "tanh" in w.label)
    assert deployed(fn=both) == {"graphs": 1, "hits": 2, "hits_packaged": 1}
    trial = Trial()
    anew()
    torch.compile(both, backend=trial_backend(trial))(X)
    assert {f.label.split()[0] for f in trial.families.values()} == {"tanh"}, "what is decided is the user's own"
    ((graph, _),) = trial.graphs
    with Store.open(db) as store:
        here, env = identify("cpu").fingerprint, environment("cpu").strict
        store.put_verdicts([Verdict(graph, here, env, "default", (), {}, time.time())])
    assert deployed(fn=both) == {"graphs": 1, "hits": 1, "misses": 1}
    with Store.open(db) as store:
        store.put_verdicts([Verdict(graph, here, env, "default", tuple(trial.families), {}, time.time())])
    assert deployed(fn=both) == {"graphs": 1, "left": 1, "misses": 1}


def test_it_is_switched_off(pack: Pack, db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pack(softmax, (X,))
    before = deployment().state()
    autotune.configure(packaged="refuse")
    assert (level(), rung().why) == (Level.NONE, "AUTOTUNE_PACKAGED is refuse")
    assert deployment().state() != before, "compiled code in Inductor's caches is not taken for current"
    monkeypatch.setenv("AUTOTUNE_PACKAGED", "refuse")
    assert deployed() == {"graphs": 1, "misses": 1}
    with pytest.raises(UserError, match="packaged: 'no' must be one of use, refuse"):
        autotune.configure(packaged="no")  # type: ignore[arg-type]


def test_a_missing_signature(pack: Pack, tune: Tune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a pinned key, only schedules with its owner's signature are deployed."""
    tune(softmax, (torch.randn(32, 40),))
    mine, theirs = keys(tmp_path)
    with Store.open() as store:
        export_snapshot(store, tmp_path / "signed.atdb", key=mine)
    pack(softmax, (X,))
    autotune.load(tmp_path / "signed.atdb", key=theirs)
    assert (level(), rung().outcome) == (Level.NONE, Outcome.REFUSED)
    assert "packaged ones are not signed" in rung().why
    autotune.load(tmp_path / "signed.atdb")
    assert level() is Level.PACKAGED
    monkeypatch.setenv("AUTOTUNE_KEY", str(theirs))
    assert level() is Level.NONE


def test_other_devices_are_refused_and_software_is_not(pack: Pack, db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = opening.name_for(identify("cpu").name)
    pack(softmax, (X,), name="another")
    assert rung().why == "autotune has no packaged schedules for this device", "named like another device"
    pack(softmax, (X,))
    (region,) = autotune.lookup(softmax, (X,))
    assert region.level is Level.PACKAGED
    assert region.workload is not None
    miss, env = Match(Level.NONE, reason="not tuned"), environment("cpu")
    for changed in ({"units": 999}, {"memory_mib": 4096}, {"capability": "riscv"}, {"count": 2}, {"name": name + "x"}):
        device = replace(identify("cpu"), **changed)  # type: ignore[arg-type]
        found, step = from_package(region.workload, miss, None, device, env)
        assert (found, step.outcome) == (miss, Outcome.EMPTY), changed
    assert not region.ladder
    for how, level in (("loose", Level.PACKAGED), ("ignore", Level.PACKAGED), ("strict", Level.NONE)):
        autotune.configure(environment=how)
        found, step = from_package(region.workload, miss, None, identify("cpu"), replace(env, torch="1.2.3"))
        assert found.level is level, how
        assert [(d.field, d.here) for d in step.differences] == [("torch", "1.2.3")]
    autotune.configure(environment="loose")
    found, _ = from_package(
        region.workload, miss, None, identify("cpu"), replace(env, torch="1.2.3"), rules=Settings("strict")
    )
    assert found is miss, "lookup --strict"


def test_nothing_is_opened_without_a_miss_or_for_another_device(
    pack: Pack, tune: Tune, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    real = Snapshot.__init__

    def noting(self: Snapshot, path: Any, **how: Any) -> None:
        opened.append(Path(path).stem)
        real(self, path, **how)

    monkeypatch.setattr(Snapshot, "__init__", noting)
    pack(softmax, (X,), name="another")
    assert deployed() == {"graphs": 1, "misses": 1}
    pack(softmax, (X,))
    tune(softmax, (X,))
    assert deployed() == {"graphs": 1, "hits": 1}
    assert opened == []
    wide = torch.randn(32, 56)
    assert deployed(wide) == {"graphs": 1, "misses": 1}
    assert opened == [opening.name_for(identify("cpu").name)]


@pytest.mark.parametrize("how", ["cut short", "a row"])
def test_a_damaged_one_is_told_once_and_has_nothing(
    pack: Pack, db: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = pack(softmax, (X,))
    data = file.read_bytes()
    sound = deployment().state()
    file.write_bytes(data[:-9] if how == "cut short" else data.replace(b'"latency_us":10.0', b'"latency_us":10.5'))
    assert file.read_bytes() != data
    use(Deployment())
    for _ in range(2):
        torch._dynamo.reset()
        close(compiled(softmax)(X), softmax(X))
        close(compiled(lambda x: softmax(x) + 1)(X), softmax(X) + 1)
    assert counted() == {"graphs": 4, "misses": 4}
    (told,) = warnings(caplog)
    assert str(file) in told
    assert ("cut short" if how == "cut short" else "does not match its seal") in told
    assert (level(), rung().outcome) == (Level.NONE, Outcome.REFUSED)
    assert deployment().state() != sound


def test_nothing_stands_in_for_a_database_that_cannot_be_asked(
    pack: Pack, db: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its decision is unknown."""
    pack(softmax, (X,))
    Path(db).write_bytes(b"no database" * 500)
    assert deployed() == {"graphs": 1, "misses": 1}
    assert deployment().state() == b"none"
    assert len(warnings(caplog)) == 1
    Path(db).unlink()
    anew()
    told = deployment().state()
    Path(db).touch()  # another rank begins to make it, for its misses
    assert deployment().state() == told
    close(compiled(softmax)(X), softmax(X))
    assert counted() == {"graphs": 1, "hits": 1, "hits_packaged": 1}


def test_it_is_checked_at_its_first_call(pack: Pack, db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No search verified it on this machine."""
    pack(softmax, (X,))
    checked: list[int] = []
    real = Check.wrong
    monkeypatch.setattr(Check, "wrong", lambda self, *a: checked.append(1) or real(self, *a))  # type: ignore[func-returns-value]
    for how, times in (("auto", 1), ("always", 3), ("never", 0)):
        anew()
        checked.clear()
        run = autotune.compile(softmax, verify=how)  # type: ignore[arg-type]
        for _ in range(3):
            close(run(X), softmax(X))
        assert len(checked) == times, how


def test_a_wrong_one_is_given_up(pack: Pack, db: str, wrong: list[int], caplog: pytest.LogCaptureFixture) -> None:
    pack(softmax, (X,))
    run = compiled(softmax)
    for _ in range(3):
        close(run(X), softmax(X))
    assert counted() == {"graphs": 1, "hits": 1, "hits_packaged": 1, "wrong_results": 1, "fallbacks": 1}
    assert len(wrong) == 1
    assert len(warnings(caplog)) == 1
    assert (level(), rung().outcome) == (Level.NONE, Outcome.REFUSED)
    torch._dynamo.reset()
    close(compiled(softmax)(X), softmax(X))
    assert counted() == {"graphs": 1, "misses": 1}
    with Store.open(db) as store:
        assert store.measurements() == [], "the user's database has no such schedule to pass over"


def test_a_warm_start_finds_it_again(
    pack: Pack, db: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Code out of Inductor's caches names the schedule, whose kernel is loaded without a look-up of the region."""
    with Store.open(db):
        pass  # as a miss would make it, with which the state changes
    pack(softmax, (X,))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    with torch._inductor.config.patch(fx_graph_cache=True):
        assert deployed() == {"graphs": 1, "hits": 1, "hits_packaged": 1}
        assert deployed() == {"hits": 1}
        monkeypatch.setenv("AUTOTUNE_PACKAGED", "refuse")
        assert deployed() == {"graphs": 1, "misses": 1}, "what was cached before is not used"
    assert warnings(caplog) == []


def test_symbolic_sizes(pack: Pack, db: str) -> None:
    pack(softmax, (X,))
    run, x = compiled(softmax), X.clone()
    torch._dynamo.mark_dynamic(x, 0)
    close(run(x), softmax(x))
    close(run(OTHER), softmax(OTHER))
    found = counted()
    assert found["hits"] == 1
    assert found["hits_packaged"] >= 2, "at the sizes of each call"
    assert "fallbacks" not in found


def test_the_command_line(pack: Pack, capsys: pytest.CaptureFixture[str]) -> None:
    pack(softmax, (X,))
    target = ["fusion", "tests.endtoend.runtime.test_packaged_rung:softmax", "--inputs",
              "tests.endtoend.runtime.test_packaged_rung:inputs", "--device", "cpu"]  # fmt: skip
    assert app.main(["lookup", *target, "--explain"]) == 0
    out = capsys.readouterr().out
    assert "32x48: packaged" in out
    assert "  packaged      taken: " in out
    assert "measured on another such device, not in your step" in out


def inputs() -> tuple[torch.Tensor]:
    return (X,)


def test_the_command_line_without_a_database(pack: Pack, capsys: pytest.CaptureFixture[str]) -> None:
    pack(softmax, (X,))
    here = "tests.endtoend.runtime.test_packaged_rung"
    target = ["fusion", f"{here}:softmax", "--inputs", f"{here}:inputs", "--device", "cpu", "--json"]
    assert app.main(["lookup", *target]) == 0
    found = json.loads(capsys.readouterr().out)["workloads"][0]
    assert found["match"] == "packaged"
    assert app.main(["compare", *target, "--rounds", "5"]) == 0
    assert json.loads(capsys.readouterr().out)["counters"]["hits_packaged"] == 1
    assert app.main(["lookup", "fusion", found["workload"][:12], "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["workloads"] == [{**found, "count": 1}]
    assert app.main(["lookup", "fusion", "0" * 12, "--device", "cpu"]) == 2
    assert "no stored region has this id" in capsys.readouterr().err


@pytest.mark.parametrize("equal", [True, False])
def test_two_ranks(pack: Pack, tmp_path: Path, equal: bool) -> None:
    folder, other = pack(plain, (X,)).parent, tmp_path / "without"
    other.mkdir()
    folders, dbs = [str(folder), str(folder if equal else other)], [str(tmp_path / "none.db")] * 2
    with Ranks(tmp_path) as ranks:
        beside = ranks.run("tests.support.runtime.agreement_checks", "deploy", dbs, True, folders)
    assert all(found["right"] for found in beside)
    assert [found["hits"] for found in beside] == ([1, 1] if equal else [0, 0])
