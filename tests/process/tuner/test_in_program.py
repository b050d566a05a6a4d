"""The process that searches while its program compiles: what it answers and stores, and when."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.device import one_each_core
from autotune.domain import domain_of
from autotune.in_program import searching, turns
from autotune.measure.outcome import Outcome
from autotune.measure.pool import BaselinePool, CompilePool
from autotune.measure.worker import Worker
from autotune.store import Store
from autotune.task import Status
from autotune.tuner.result import Result
from tests.support.toy import toy_domain
from tests.support.toy.policy import QUICK
from tests.support.toy.toy_domain import workload

A, B = workload(rows=64), workload(rows=32)


class Program:
    """The other end of the process's pipe.

    Attributes:
        answers: frames so far.
    """

    def __init__(self, search: searching.Search) -> None:
        self.answers: list[dict[str, Any]] = []
        self._search, self._changed = search, threading.Condition()

    def send(self, message: dict[str, Any], blob: bytes = b"") -> None:
        with self._changed:
            self.answers.append(message)
            self._changed.notify_all()

    def tell(self, **message: Any) -> None:
        link: Any = self
        self._search.handle(link, message, b"")

    def wait(self, ready: Callable[[], bool]) -> None:
        with self._changed:
            while not ready():
                self._changed.wait(0.02)

    @property
    def done(self) -> bool:
        return any("done" in answer for answer in self.answers)

    @property
    def results(self) -> list[Result]:
        return [Result(**answer["result"]) for answer in self.answers if "result" in answer]


@pytest.fixture
def db(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    file = str(tmp_path / "tuned.db")
    monkeypatch.setenv("AUTOTUNE_DB", file)
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    return file


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch, db: str) -> searching.Search:
    monkeypatch.setattr(searching, "_KIND", toy_domain.KIND)
    monkeypatch.setattr(searching, "_WITHOUT", ())  # toys have no other baseline
    monkeypatch.setattr(type(domain_of(toy_domain.KIND)), "policy", lambda self, device: QUICK)
    return searching.Search()


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The workers that are started. A search starts them when its fixture is made, in another thread."""
    found: list[object] = []
    begin = Worker.__enter__
    monkeypatch.setattr(Worker, "__enter__", lambda self: (found.append(self), begin(self))[1])
    return found


@pytest.fixture
def program(search: searching.Search) -> Iterator[Program]:
    made = Program(search)
    made.tell(device="cpu", numerics={}, seconds=600.0)
    yield made
    made.tell(stop=True)
    made.wait(lambda: made.done)


def listed(*workloads: Any) -> list[Any]:
    return [(w.to_json(), 1) for w in workloads]


def stored(db: str) -> int:
    with Store.open(db) as store:
        return len(store.schedules())


def test_nothing_is_reported_or_stored_before_inductor_has_finished(
    program: Program, search: searching.Search, monkeypatch: pytest.MonkeyPatch, db: str
) -> None:
    monkeypatch.setattr(searching, "_overlaps", lambda device: True)
    monkeypatch.setattr("autotune.tuner.context.Context.baselines", lambda self, workload: None)
    program.tell(workloads=listed(A))
    program.wait(lambda: len(search.graph.queue.results) > 0)
    assert program.answers == []
    assert stored(db) == 0
    with Store.open(db) as store:
        assert {m.key.workload for m in store.measurements()} == {A.fingerprint}
    program.tell(workloads=listed(A, B), end=500.0)
    program.wait(lambda: program.done)
    assert program.answers[-1] == {"done": ""}
    assert {r.workload for r in program.results} == {A.fingerprint, B.fingerprint}
    assert all(r.winner for r in program.results)
    assert stored(db) == 2
    with Store.open(db) as store:
        (run,) = store.runs()
        assert (run.command, run.state) == ("search in the program", "done")
        assert store.stats()["claims"] == 0


def test_results_are_reported_at_the_end_of_the_compilation_while_a_turn_lasts(
    program: Program, search: searching.Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program gives up a turn that does not end, with the results of the others."""
    from autotune.tuner import study

    monkeypatch.setattr(searching, "_overlaps", lambda device: True)
    monkeypatch.setattr("autotune.tuner.context.Context.baselines", lambda self, workload: None)
    ends, tune = threading.Event(), study.tune

    def slow(context: Any, subject: Any, *more: Any) -> Result:
        if subject == B:
            ends.wait()
        return tune(context, subject, *more)

    monkeypatch.setattr(study, "tune", slow)
    program.tell(workloads=listed(A))
    program.wait(lambda: len(search.graph.queue.results) > 0)
    program.tell(workloads=listed(A, B))
    try:
        program.tell(workloads=listed(A, B), end=500.0)
        assert {r.workload for r in program.results} == {A.fingerprint}
    finally:
        ends.set()
    program.wait(lambda: program.done)
    assert {r.workload for r in program.results} == {A.fingerprint, B.fingerprint}


def test_the_processes_serve_the_next_graph_too(
    workers: list[object], program: Program, search: searching.Search, monkeypatch: pytest.MonkeyPatch, db: str
) -> None:
    """Its schedules are held back until it has been compiled, and its results are its own."""
    monkeypatch.setattr(searching, "_overlaps", lambda device: True)
    monkeypatch.setattr("autotune.tuner.context.Context.baselines", lambda self, workload: None)
    program.tell(workloads=listed(A), end=500.0)
    program.wait(lambda: program.done)
    program.tell(rest=True)
    program.answers.clear()
    program.tell(device="cpu", numerics={}, seconds=600.0)
    program.tell(workloads=listed(B))
    program.wait(lambda: search.graph is not None and len(search.graph.queue.results) > 0)
    assert (program.answers, stored(db)) == ([], 1)
    program.tell(workloads=listed(B), end=500.0)
    program.wait(lambda: program.done)
    assert {r.workload for r in program.results} == {B.fingerprint}
    assert (stored(db), len(workers)) == (2, 1)
    with Store.open(db) as store:
        assert [run.state for run in store.runs()] == ["done", "done"]
    assert not search._rest.is_alive(), "another graph has come"


def test_a_cpu_measures_nothing_before_inductor_has_finished(program: Program, search: searching.Search) -> None:
    program.tell(workloads=listed(A))
    program.wait(lambda: search.graph._context is not None)
    assert not search.graph.queue.results
    program.tell(workloads=listed(A), end=500.0)
    program.wait(lambda: program.done)
    assert program.results[0].ok


def test_a_cpu_measures_with_the_programs_threads(
    search: searching.Search, db: str, tmp_path: Path, threads: None
) -> None:
    """The deployed kernels obey them, and so does the key of the measurements."""
    given = {"num_threads": 1} if len(one_each_core()) > 1 else {}
    subject, program = workload(numerics=str(tmp_path / "found")), Program(search)
    program.tell(device="cpu", numerics=given, seconds=600.0)
    program.tell(workloads=listed(subject), end=500.0)
    program.wait(lambda: program.done)
    assert json.loads((tmp_path / "found").read_text()) == given
    with Store.open(db) as store:
        assert {m.key.policy for m in store.measurements()} == {QUICK.under(given).key}
        assert [s.key.policy for s in store.schedules()] == [QUICK.under(given).key]


def test_a_cpu_compiles_regions_while_inductor_compiles_and_no_longer(
    program: Program, search: searching.Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Baselines and candidates of the regions that the search can reach."""
    begun: list[str] = []
    monkeypatch.setattr(BaselinePool, "begin", lambda self, workload, device: begun.append(workload.fingerprint))
    for module in (searching, turns):
        monkeypatch.setattr(module, "REGION_S", 600.0)
    program.tell(workloads=listed(A, B))
    program.wait(lambda: search.graph._context is not None and bool(search.graph._context.pool._prefetched))
    assert search.graph._context is not None
    ahead = [workload for workload, *_ in search.graph._context.pool._prefetched]
    assert set(ahead) == set(begun)
    assert len(set(ahead)) == 1
    pool = search.graph._baselines
    assert pool is not None
    program.tell(workloads=listed(A, B), end=500.0)
    assert search.graph._baselines is None
    assert not pool._children
    program.wait(lambda: program.done)
    assert all(r.ok for r in program.results)
    assert len(set(begun)) == 1


def test_a_stop_keeps_measurements(program: Program, search: searching.Search, tmp_path: Path, db: str) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    program.tell(workloads=listed(workload(rows=64, hold=str(hold)), B), end=500.0)
    program.wait(lambda: any(answer.get("progress", {}).get("measured") for answer in program.answers))
    program.tell(stop=True)
    hold.unlink()
    program.wait(lambda: program.done)
    (result,) = program.results
    assert result.interrupted
    with Store.open(db) as store:
        assert store.measurements()
        assert [run.state for run in store.runs()] == ["interrupted"]


@pytest.mark.parametrize("ended", [False, True])
def test_the_processes_are_warm_before_the_first_region(
    ended: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """By real small regions, on a CPU; the search does not wait for them once the program has been compiled."""
    begun: list[str] = []
    measured: list[Outcome] = []
    real = Worker.measure
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def measure(self: Worker, *args: Any, **named: Any) -> Outcome:
        measured.append(real(self, *args, **named))
        return measured[-1]

    monkeypatch.setattr(Worker, "measure", measure)
    monkeypatch.setattr(BaselinePool, "begin", lambda self, workload, device: begun.append(workload.fingerprint))
    caplog.set_level(logging.DEBUG, "autotune")
    with Worker(None, "cpu", QUICK) as worker, CompilePool(1) as pool, BaselinePool(2) as baselines:
        searching._warm_up("cpu", worker, pool, baselines, lambda: ended)
    assert [outcome.status for outcome in measured] == [Status.OK] * (not ended), caplog.text
    assert len(set(begun)) == 2, "each process compiles one"
    assert bool(list(tmp_path.rglob("*.so"))) != ended, "the worker has compiled a baseline"


def test_a_failed_warm_up_is_left_to_the_search() -> None:
    class Dead:
        processes = 2

        def __getattr__(self, name: str) -> Any:
            raise OSError("no processes are left")

    dead: Any = Dead()
    searching._warm_up("cpu", dead, dead, dead, lambda: False)


def test_an_unusable_database_is_named(search: searching.Search, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_DB", "/dev/null/tuned.db")
    program = Program(search)
    program.tell(device="cpu", numerics={}, seconds=600.0)
    program.tell(workloads=listed(A), end=500.0)
    program.wait(lambda: program.done)
    assert "cannot create the folder /dev/null" in program.answers[-1]["done"]
