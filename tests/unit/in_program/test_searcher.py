"""The program's side of the process that searches: its time, its end, and its failures."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.errors import UserError
from autotune.in_program import searcher
from autotune.in_program.searcher import GRACE_S, Companion, Searcher
from autotune.measure.child import ChildDied, ChildSilent
from autotune.runtime.inductor.verdict import Surveyed, occurrences
from autotune.task import SHARED_BUILDS
from autotune.tuner.result import Progress, Result
from autotune.workload import Workload
from tests.support.clock import Clock
from tests.support.zoo import Case, T, workloads_of

WORKLOAD = Workload("fusion", {}, label="norm")
WON = {"result": asdict(Result("a", "norm", "fusion", "cpu", "", winner="autotune"))}
LOST = {"result": asdict(Result("b", "gelu", "fusion", "cpu", "", winner="inductor"))}
PROGRESS = {"progress": asdict(Progress("norm", "done", 3, 8, 0, 0, 9.0, 1.0, None))}


class Process:
    """In the place of the child. Each answer takes a second; then it is silent.

    Attributes:
        answers: frames, or what happens in their place.
        sent: frames that it was sent.
    """

    def __init__(self, clock: Clock) -> None:
        self.answers: list[dict[str, Any] | Callable[[], Any]] = []
        self.sent: list[dict[str, Any]] = []
        self.kills = 0
        self.alive = True
        self._clock = clock

    def __call__(self, module: str) -> Process:
        assert module == "autotune.in_program.searching"
        return self

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    def receive(self, deadline: float) -> tuple[dict[str, Any], bytes]:
        if not self.answers:
            self._clock.ns = max(self._clock.ns, round(deadline * 1e9))
            raise ChildSilent
        self._clock.sleep(1.0)
        answer = self.answers.pop(0)
        found = answer() if callable(answer) else answer
        if found is None:
            raise ChildSilent
        return found, b""

    def kill(self) -> None:
        self.kills += 1
        self.alive = False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(searcher, "time", made)
    return made


@pytest.fixture
def process(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    made = Process(clock)
    monkeypatch.setattr(searcher, "_Process", made)
    yield made
    assert made.kills == 1


def ended(seconds: float = 40.0, told: Callable[[Progress], object] = lambda progress: None) -> list[Result]:
    with Searcher("cpu", 80.0) as found:
        return found.end([(WORKLOAD, 3)], seconds, told)


def test_results_and_progress_are_passed_on(process: Process) -> None:
    process.answers = [PROGRESS, WON, LOST, {"done": ""}]
    told: list[Progress] = []
    assert [r.winner for r in ended(told=told.append)] == ["autotune", "inductor"]
    assert told == [Progress("norm", "done", 3, 8, 0, 0, 9.0, 1.0, None)]
    begin, end = process.sent
    assert (begin["device"], begin["seconds"]) == ("cpu", 80.0)
    assert end == {"workloads": [(WORKLOAD.to_json(), 3)], "end": 40.0}


@pytest.mark.parametrize(
    ("workload", "says"),
    [("a", "the last region did not end in time"), (WORKLOAD.fingerprint, "its first result stays")],
)
def test_a_search_never_takes_longer_than_its_time_and_a_grace(
    process: Process, clock: Clock, capsys: pytest.CaptureFixture[str], workload: str, says: str
) -> None:
    process.answers = [{"result": {**WON["result"], "workload": workload}}]
    assert [r.winner for r in ended(40.0)] == ["autotune"], "what has ended in time is kept"
    assert clock.ns / 1e9 == pytest.approx(40.0 + GRACE_S)
    assert says in capsys.readouterr().err


def test_a_search_that_ends_early_takes_no_more_time(process: Process, clock: Clock) -> None:
    process.answers = [WON, {"done": ""}]
    ended(40.0)
    assert clock.ns / 1e9 == pytest.approx(2.0)


def died() -> dict[str, Any]:
    raise ChildDied("was killed by SIGKILL")


@pytest.mark.parametrize("failure", [died, {"done": "no space left on device"}])
def test_a_failure_keeps_the_kernels_that_were_found(
    process: Process, capsys: pytest.CaptureFixture[str], failure: Any
) -> None:
    process.answers = [WON, failure]
    assert [r.winner for r in ended()] == ["autotune"]
    assert "the search ended early: " in capsys.readouterr().err


@pytest.mark.parametrize("failure", [died, {"done": "no space left on device"}])
def test_a_failure_without_a_kernel_is_an_error(process: Process, failure: Any) -> None:
    process.answers = [LOST, failure]
    with pytest.raises(UserError, match=r"SIGKILL|no space left"):
        ended()


def test_ctrl_c_ends_the_region_in_an_orderly_way(process: Process, clock: Clock) -> None:
    process.answers = [WON, lambda: os.kill(os.getpid(), signal.SIGINT), {"done": ""}]
    with pytest.raises(KeyboardInterrupt):
        ended()
    assert process.sent[-1] == {"stop": True}
    assert clock.ns / 1e9 == pytest.approx(3.0)


def test_the_programs_own_handler_decides_the_effect_of_ctrl_c(process: Process) -> None:
    process.answers = [WON, lambda: os.kill(os.getpid(), signal.SIGINT), {"done": ""}]
    handled: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: handled.append(number))
    try:
        assert [r.winner for r in ended()] == ["autotune"], "the program goes on with what was found"
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.sent[-1] == {"stop": True}
    assert handled == [signal.SIGINT]


def test_after_ctrl_c_a_hanging_process_is_not_waited_for_long(process: Process, clock: Clock) -> None:
    process.answers = [lambda: os.kill(os.getpid(), signal.SIGINT)]
    with pytest.raises(KeyboardInterrupt):
        ended(1000.0)
    assert clock.ns / 1e9 == pytest.approx(1.0 + searcher._STOP_S)


def test_a_second_ctrl_c_ends_it_at_once(process: Process, clock: Clock) -> None:
    process.answers = [lambda: os.kill(os.getpid(), signal.SIGINT)] * 2
    with pytest.raises(KeyboardInterrupt):
        ended(1000.0)
    assert clock.ns / 1e9 == pytest.approx(2.0)


def test_a_graph_is_sent_while_inductor_compiles_it(
    process: Process, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searcher, "lacking", lambda graphs: {"cuda:0": [(WORKLOAD, 2)]})
    with Searcher("cuda:0", 80.0) as found:
        assert found.searched_s == 0.0
        found.add(Surveyed("", "default", (), frozenset()))
        clock.sleep(7.0)
        assert found.searched_s == pytest.approx(7.0)
    assert process.sent[1] == {"workloads": [(WORKLOAD.to_json(), 2)], "quiet": False}


def test_nothing_is_measured_while_inductor_measures(
    process: Process, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import config

    monkeypatch.setattr(searcher, "lacking", lambda graphs: {"cuda:0": [(WORKLOAD, 2)]})
    with Searcher("cuda:0", 80.0) as found, config.patch(max_autotune=True):
        found.add(Surveyed("", "default", (), frozenset()))
        clock.sleep(7.0)
        assert found.searched_s == 0.0
    assert process.sent[1]["quiet"]


def test_a_process_that_cannot_be_started_does_not_fail_the_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(module: str) -> None:
        raise TypeError("expected str, bytes or os.PathLike object, not NoneType")

    monkeypatch.setattr(searcher, "_Process", fail)
    with Searcher("cpu", 80.0) as found:
        found.start()
        with pytest.raises(UserError, match="not NoneType"):
            found.end([(WORKLOAD, 1)], 10.0, lambda progress: None)


def test_a_failed_look_up_does_not_fail_the_compilation(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(graphs: object) -> None:
        raise RuntimeError("the database is locked")

    monkeypatch.setattr(searcher, "lacking", fail)
    with Searcher("cpu", 80.0) as found:
        found.add(Surveyed("", "default", (), frozenset()))
        with pytest.raises(UserError, match="the database is locked"):
            found.end([(WORKLOAD, 1)], 10.0, lambda progress: None)


def graph_of(*extents: int) -> Surveyed:
    """A graph with a softmax of each number of rows."""
    cases = [Case("", lambda x: torch.softmax(x, -1), (T(rows, 1024),)) for rows in extents]
    return Surveyed("", "default", tuple(("cuda:0", workloads_of(case)[0]) for case in cases), frozenset())


def test_a_small_graph_behind_a_large_one_of_its_function_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeBERTa's loss: three regions of 5 us were searched for 29 s by a second process, behind a graph of 26 ms."""
    step, head, number = graph_of(1 << 20, 1 << 16), graph_of(2, 3), 1
    monkeypatch.setattr(searcher, "function_number", lambda: number)
    monkeypatch.setattr(searcher, "lacking", occurrences)
    searcher.reset()
    names = [{w.fingerprint for _, w in graph.regions if w is not None} for graph in (step, head)]
    assert searcher.to_search([head]) == (occurrences([head]), set())
    assert searcher.to_search([step, head]) == (occurrences([step]), names[1])
    assert searcher.to_search([step], last=True) == (occurrences([step]), set())
    assert searcher.to_search([head], last=True) == ({}, names[1])
    number = 2
    assert searcher.to_search([head]) == (occurrences([head]), set()), "another function's step has no other regions"
    searcher.reset()


@pytest.fixture
def half_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (50, 100))


def of_graph(process: Process, device: str = "cuda:0", *, more: bool, answers: list[Any] | None = None) -> None:
    """Search a graph of a function; ``more`` graphs follow."""
    process.answers = [WON, {"done": ""}] if answers is None else answers
    with Searcher(device, 80.0, more=more) as found:
        found.end([(WORKLOAD, 3)], 40.0, lambda progress: None)


def test_the_graphs_of_a_function_have_one_process(process: Process, half_free: None) -> None:
    made: list[str] = []
    of_graph(process, more=True)
    assert (process.kills, process.sent[-1]) == (0, {"rest": True})
    begin = process.sent[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(searcher, "_Process", made.append)
        of_graph(process, more=True)
        of_graph(process, more=False)
    assert made == []
    assert begin["more"]
    assert [frame for frame in process.sent if "device" in frame] == [begin, begin, begin | {"more": False}]


def test_the_next_graph_s_search_is_told_what_the_earlier_ones_take(process: Process, half_free: None) -> None:
    took = {"result": {**WON["result"], "workload": WORKLOAD.fingerprint, "best_us": 120.0, "deployed_us": 100.0}}
    of_graph(process, more=True, answers=[took, {"done": ""}])
    of_graph(process, more=True)
    searcher._step().measured_us += 1.0
    searcher.reset()
    process.kills = 0
    of_graph(process, more=False)
    assert [frame["measured_us"] for frame in process.sent if "device" in frame] == [0.0, 300.0, 0.0]


def test_a_process_that_waits_ends_with_the_last_graph_though_nothing_is_searched(
    process: Process, half_free: None
) -> None:
    of_graph(process, more=True)
    with Searcher("cuda:0", 80.0):
        assert process.kills == 0


def test_one_process_waits_if_two_threads_search(process: Process, half_free: None, clock: Clock) -> None:
    other = Process(clock)
    process.answers = [WON, {"done": ""}]
    with Searcher("cuda:0", 80.0, more=True) as found:
        found.end([(WORKLOAD, 3)], 40.0, lambda progress: None)
        searcher._resting = "cuda:0", other  # type: ignore[assignment]
    assert (other.kills, process.kills) == (1, 0)
    searcher.reset()


def test_a_process_that_has_ended_or_is_of_another_device_is_not_used(process: Process, half_free: None) -> None:
    for device, alive in (("cuda:1", True), ("cuda:0", False)):
        of_graph(process, more=True)
        process.alive = alive
        made: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(searcher, "_Process", lambda module: (made.append(module), process)[1])  # noqa: B023
            of_graph(process, device, more=False)
        assert len(made) == 1
        assert process.kills == 2, "the one that waited, and the one of the last graph"
        process.kills, process.alive = 0, True
    process.kills = 1


@pytest.mark.parametrize(
    ("device", "free", "answers"),
    [("cpu", 50, None), ("cuda:0", 49, None), ("cuda:0", 50, [WON, {"done": "no space left"}]), ("cuda:0", 50, [WON])],
)
def test_a_process_does_not_wait_where_it_could_not_serve_or_would_disturb(
    process: Process, monkeypatch: pytest.MonkeyPatch, device: str, free: int, answers: list[Any] | None
) -> None:
    """On a CPU its pools have ended, a full GPU is the program's, and a search that failed or is silent may again."""
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (free, 100))
    of_graph(process, device, more=True, answers=answers)
    assert process.kills == 1


@pytest.mark.usefixtures("new_interpreters")
def test_the_folder_of_builds_ends_with_the_killed_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Companion("autotune.measure.pool", "cpu") as companion:
        companion._child = companion._opened()  # it gets no frame, so it waits
        (folder,) = tmp_path.iterdir()
        (folder / "a kernel").touch()
        environment = Path(f"/proc/{companion._child.pid}/environ")
        while not environment.read_bytes():  # empty while the kernel replaces the process's image
            time.sleep(0.01)
        assert f"{SHARED_BUILDS}={folder}".encode() in environment.read_bytes()
    assert list(tmp_path.iterdir()) == []
