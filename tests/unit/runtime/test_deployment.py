"""The state of deployment is one object: several are apart, and each may be used by any thread or forked process."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import autotune
from autotune.compiler.targets.cpu import launcher
from autotune.errors import UserError
from autotune.runtime.control import unload
from autotune.runtime.deployment import Deployment, deployment, use
from autotune.runtime.ladder import Level, Match
from autotune.store import Schedule, Store, opening
from autotune.store.snapshot_writer import export_snapshot
from tests.support.rows import GPU, workload
from tests.support.snapshots import filled

KEY = "workload", "cpu", True


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Deployment]:
    monkeypatch.delenv("AUTOTUNE_KEY", raising=False)
    monkeypatch.setenv("AUTOTUNE_DB", str(tmp_path / "environment.db"))
    monkeypatch.setenv("AUTOTUNE_DB_READ", "")
    use(Deployment())
    yield deployment()
    use(Deployment())


@pytest.fixture
def schedules(tmp_path: Path) -> list[Schedule]:
    """Of a database ``tuned.db`` and its snapshot ``tuned.atdb``."""
    with Store.open(tmp_path / "tuned.db") as store:
        made = filled(store)
        export_snapshot(store, tmp_path / "tuned.atdb")
    return made


def name(own: Deployment) -> str:
    """The name of the file that look-ups read; "" for none."""
    store = own.store()
    return "" if store is None else Path(store.name).name


def in_threads(action: Callable[[], object], times: int = 8) -> None:
    begin = threading.Barrier(times)

    def run() -> None:
        begin.wait()
        action()

    threads = [threading.Thread(target=run) for _ in range(times)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_several_are_apart(own: Deployment, schedules: list[Schedule], caplog: pytest.LogCaptureFixture) -> None:
    other = Deployment()
    autotune.configure(rows=2.0, background="cuda:3")
    own.count("hits")
    assert own.disable(schedules[0], "it failed")
    assert not own.disable(schedules[0], "it failed again")
    for each in (own, own, other):
        each.warn_once("key", "a warning")
    assert (own.settings.rows, other.settings.rows) == (2.0, 16.0)
    assert (own.background.wanted, other.background.wanted) == ("cuda:3", False)
    assert (own.counters().hits, other.counters().hits) == (1, 0)
    assert (own.disabled(schedules[0]), other.disabled(schedules[0])) == ("it failed", "")
    assert [r.getMessage() for r in caplog.records] == ["a warning"] * 2
    use(other)
    assert deployment() is other
    assert autotune.counters().hits == 0


def test_the_last_source_counts(own: Deployment, schedules: list[Schedule], tmp_path: Path) -> None:
    other = str(tmp_path / "other.db")
    Store.open(other).close()
    assert name(own) == "", "that of the environment, which is not there"
    with own.deploying_from(str(tmp_path / "tuned.db")):
        assert name(own) == "tuned.db"
        autotune.load(tmp_path / "tuned.atdb")
        assert name(own) == "tuned.db", "what is named stands before what is loaded"
        with own.deploying_from(other):
            assert name(own) == "other.db"
        with own.deploying_from(None):
            assert name(own) == "tuned.db"
        with own.opened() as store:
            assert store is not None
            assert Path(store.name).name == "tuned.db"
    assert name(own) == "tuned.atdb"
    with own.opened() as store:
        assert store is own.store()
    assert own.store(other) is not None, "an argument stands before all"
    with pytest.raises(UserError):
        autotune.load(tmp_path / "nowhere.atdb")
    assert name(own) == "tuned.atdb", "what was loaded stays"
    unload()
    assert name(own) == ""


def test_a_new_one_within_a_named_source(own: Deployment, schedules: list[Schedule], tmp_path: Path) -> None:
    before = os.environ["AUTOTUNE_DB"]
    with own.deploying_from(str(tmp_path / "tuned.db")):
        store = own.store()
        assert store is not None
        use(new := Deployment())
        assert name(new) == "tuned.db", "the environment names it, for processes too"
    assert os.environ["AUTOTUNE_DB"] == before
    assert name(deployment()) == ""


def test_databases_that_the_environment_names_in_turn(
    own: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in ("one.db", "two.db"):
        Store.open(tmp_path / file).close()
        monkeypatch.setenv("AUTOTUNE_DB", str(tmp_path / file))
        assert name(own) == file
    first = own.store()
    monkeypatch.setenv("AUTOTUNE_DB", str(tmp_path / "one.db"))
    assert name(own) == "one.db"
    assert own.store() is not first
    assert own.store() is own.store(), "it is opened once"


def test_match_cache_holds_until_a_change(own: Deployment, schedules: list[Schedule], tmp_path: Path) -> None:
    found = Match(Level.NONE, reason="not tuned")

    def noted() -> bool:
        changes = own.changes
        own.cache_match(KEY, found, changes)
        return own.cached_match(KEY) is found

    assert not noted(), "a database may change at any time"
    autotune.load(tmp_path / "tuned.atdb")
    for change in (
        lambda: autotune.configure(rows=3.0),
        lambda: own.disable(schedules[0], "it failed"),
        lambda: autotune.load(tmp_path / "tuned.atdb"),
    ):
        assert noted()
        change()
        assert own.cached_match(KEY) is None
    before = own.changes
    autotune.configure(rows=4.0)
    own.cache_match(KEY, found, before)
    assert own.cached_match(KEY) is None, "a look-up that a change overtook"
    with own.deploying_from(str(tmp_path / "tuned.db")):
        assert not noted()
    assert noted()


def test_kept_matches_hold_until_another_state(own: Deployment, schedules: list[Schedule]) -> None:
    def match(k: int) -> Match:
        return Match(Level.EXACT, schedules[k], workload())

    own.load_from(b"one")
    own.keep_match("cpu", match(0))
    own.calls["text"] = print
    own.keep_match("cpu", match(0))
    assert own.calls, "the same schedule"
    own.keep_match("cpu", match(1))
    assert not own.calls, "some may run what was stored before"
    own.calls["text"] = print
    own.load_from(b"one")
    assert own.kept_match(workload().fingerprint, "cpu") == match(1)
    assert own.calls
    own.load_from(b"two")
    assert own.kept_match(workload().fingerprint, "cpu") is None
    assert not own.calls


def test_threads_share_one(
    own: Deployment, schedules: list[Schedule], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setenv("AUTOTUNE_DB", str(tmp_path / "tuned.db"))
    opened: list[object] = []
    met: list[object] = []
    real = opening.attach
    monkeypatch.setattr("autotune.store.attach", lambda url: opened.append(url) or real(url), raising=False)

    def run() -> None:
        assert deployment() is own
        for _ in range(1000):
            own.count("hits")
        own.warn_once("key", "a warning")
        met.append(own.store())
        own.record_misses([(workload(9), "not tuned")], "cpu", identity=GPU)

    with caplog.at_level(logging.WARNING):
        in_threads(run)
    assert own.counters().hits == 8000
    assert [r.getMessage() for r in caplog.records] == ["a warning"]
    assert len(opened) == len(set(map(id, met))) == 1
    with Store.open(tmp_path / "tuned.db") as store:
        (miss,) = store.misses()
        assert miss.count == 1


def _forked(own: Deployment, answers: multiprocessing.SimpleQueue[object]) -> None:
    own.count("hits")
    own.warn_once("key", "a warning")
    autotune.configure(rows=5.0)
    answers.put((deployment() is own, own.counters().hits, own.settings.rows, name(own)))


def test_a_forked_process_has_its_own_copy(
    own: Deployment, schedules: list[Schedule], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    autotune.load(tmp_path / "tuned.atdb")
    own.count("hits")
    context = multiprocessing.get_context("fork")
    answers: multiprocessing.SimpleQueue[object] = context.SimpleQueue()
    child = context.Process(target=_forked, args=(own, answers))
    child.start()
    assert answers.get() == (True, 2, 5.0, "tuned.atdb")
    child.join()
    assert (own.counters().hits, own.settings.rows) == (1, 16.0)
    assert not caplog.records


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_does_not_wait_for_threads_of_its_parent(own: Deployment, schedules: list[Schedule]) -> None:
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with own.loading, own._lock, own._counting, launcher._lock:
            held.set()
            over.wait()

    def use_them() -> None:
        own.count("graphs")
        with own.loading, launcher._lock:
            os._exit(0 if own.store() is None else 1)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = multiprocessing.get_context("fork").Process(target=use_them)
    child.start()
    child.join(250)
    child.kill()
    over.set()
    thread.join()
    assert child.exitcode == 0


def test_unrecorded_misses_are_listed(own: Deployment) -> None:
    with own.unrecorded() as outer:
        with own.unrecorded() as inner:
            assert own.record_misses([(workload(1), "not tuned")], "cpu", identity=GPU) == 0
        assert own.record_misses([(workload(2), "not tuned")], "cpu", identity=GPU) == 0
    assert list(inner) == [workload(1).fingerprint]
    assert list(outer) == [workload(1).fingerprint, workload(2).fingerprint]
    assert not Path(os.environ["AUTOTUNE_DB"]).exists()
    assert own.record_misses([(workload(n), "not tuned") for n in (1, 2)], "cpu", identity=GPU) == 2
    assert own.record_misses([(workload(1), "not tuned")], "cpu", identity=GPU) == 0, "each once"


def test_the_process_s_own_closes_its_databases(own: Deployment, schedules: list[Schedule], tmp_path: Path) -> None:
    closed: list[str] = []
    store = own.store(str(tmp_path / "tuned.db"))
    assert store is not None
    store.close = lambda: closed.append(store.name)  # type: ignore[method-assign]
    use(own)
    assert closed == []
    use(Deployment())
    assert len(closed) == 1
