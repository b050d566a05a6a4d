"""A strategy's threads and order on CPUs, seen from inside a computation and a collective that only take notes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from autotune.domains.c3.overlap import CudaOverlap, HostOverlap, open_overlap
from autotune.domains.c3.strategy import HostStrategy

CPU = torch.device("cpu")


class Notes:
    """A computation and a collective that note (thread, torch's threads, gradients) as they run."""

    engine = "notes"
    met = None

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.seen: list[str] = []
        self.where: dict[str, tuple[str, int, bool]] = {}
        self.input = self.output = torch.zeros(1)

    def _note(self, what: str) -> None:
        self.seen.append(what)
        self.where[what] = (threading.current_thread().name, torch.get_num_threads(), torch.is_grad_enabled())
        if self.fails == what:
            raise RuntimeError(f"{what} broke")

    def run(self) -> None:
        self._note("gemm")

    def enqueue(self, stream: Any = None) -> None:
        self._note("comm")

    def close(self) -> None:
        raise AssertionError("the collective is its owner's to close")


def opened(notes: Notes, **strategy: Any) -> CudaOverlap | HostOverlap:
    return open_overlap(notes, notes, HostStrategy(**strategy).config(), CPU)


def test_sequential_is_one_after_the_other_in_the_callers_thread() -> None:
    notes = Notes()
    run = opened(notes)
    run()
    run.close()
    assert notes.seen == ["gemm", "comm"]
    assert notes.where["gemm"][0] == notes.where["comm"][0] == threading.current_thread().name


@pytest.mark.parametrize("order", ["comm_first", "gemm_first"])
def test_the_second_begins_while_the_first_is_under_way(order: str) -> None:
    notes = Notes()
    both, held = threading.Event(), []
    enqueue, run_gemm = notes.enqueue, notes.run

    def comm(stream: Any = None) -> None:
        enqueue(stream)
        if order == "comm_first":
            held.append(both.wait(250))
        both.set()

    def gemm() -> None:
        run_gemm()
        if order == "gemm_first":
            held.append(both.wait(250))
        both.set()

    notes.enqueue, notes.run = comm, gemm  # type: ignore[method-assign]
    run = opened(notes, order=order)
    run()
    run.close()
    assert held == [True]
    assert notes.where["gemm"][0] == threading.current_thread().name
    assert notes.where["comm"][0].startswith("autotune-comm")
    assert notes.where["comm"][1] == 1  # torch leaves the processors to the computation there


@pytest.mark.parametrize("order", ["comm_first", "gemm_first"])
def test_who_is_second_waits_until_the_first_has_begun(order: str) -> None:
    """The collective's thread is busy: with "comm_first" the computation waits for it, with "gemm_first" it does not,
    and the thread is let go by the computation."""
    notes, computed = Notes(), threading.Event()
    run_gemm = notes.run

    def gemm() -> None:
        run_gemm()
        computed.set()

    def busy() -> None:
        if order == "gemm_first":
            assert computed.wait(250)
        notes.seen.append("busy")

    notes.run = gemm  # type: ignore[method-assign]
    run = opened(notes, order=order)
    assert isinstance(run, HostOverlap)
    assert run._comm is not None
    run._comm.submit(busy)
    run()
    run.close()
    seen = [what for what in notes.seen if what != "comm"]
    assert seen == (["busy", "gemm"] if order == "comm_first" else ["gemm", "busy"])


def test_the_computation_gets_its_threads_and_the_caller_keeps_its_own() -> None:
    mine = torch.get_num_threads()
    notes = Notes()
    run = opened(notes, order="comm_first", threads=mine + 1)
    with torch.no_grad():
        run()
    assert notes.where["gemm"] == ("autotune-compute_0", mine + 1, False)
    assert torch.get_num_threads() == mine
    run.close()
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert found == [mine]  # as has every thread that comes later


@pytest.mark.parametrize("order", ["comm_first", "gemm_first"])
def test_a_computation_that_fails_leaves_no_peer_waiting(order: str) -> None:
    notes = Notes(fails="gemm")
    run = opened(notes, order=order)
    with pytest.raises(RuntimeError, match="gemm broke"):
        run()
    assert sorted(notes.seen) == ["comm", "gemm"]
    run.close()


@pytest.mark.parametrize("order", ["sequential", "comm_first", "gemm_first"])
def test_a_collective_that_fails_is_reported(order: str) -> None:
    notes = Notes(fails="comm")
    run = opened(notes, order=order)
    with pytest.raises(RuntimeError, match="comm broke"):
        run()
    run.close()


@pytest.mark.parametrize("order", ["sequential", "comm_first", "gemm_first"])
def test_either_part_may_be_missing(order: str) -> None:
    notes = Notes()
    config = HostStrategy(order=order).config()
    for compute, collective, seen in [(notes, None, "gemm"), (None, notes, "comm")]:
        notes.seen.clear()
        run = open_overlap(compute, collective, config, CPU)
        run.prepare()
        run.close()
        assert notes.seen == [seen]
