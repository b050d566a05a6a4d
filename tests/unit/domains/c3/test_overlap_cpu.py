"""A strategy's threads and order on CPUs, seen from inside a computation and a collective that only take notes."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from autotune.domains.c3.run.base import Overlap
from autotune.domains.c3.run.open import open_overlap
from autotune.domains.c3.strategy import HostStrategy

CPU = torch.device("cpu")


class Notes:
    """A computation and a collective that note (what, piece, thread, torch's threads, gradients) as they run."""

    engine = "notes"
    met = None

    def __init__(self, panels: int = 1, chunks: int = 1, fails: str = "") -> None:
        self.panels, self.chunks, self.fails = panels, chunks, fails
        self.seen: list[tuple[str, int]] = []
        self.where: dict[str, tuple[str, int, bool]] = {}
        self.input = self.output = torch.zeros(1)
        self.begun = threading.Event()

    def _note(self, what: str, piece: int) -> None:
        self.seen.append((what, piece))
        self.where[what] = (threading.current_thread().name, torch.get_num_threads(), torch.is_grad_enabled())
        if self.fails == what and piece == 1:
            raise RuntimeError(f"{what} broke")

    def run(self, panel: int) -> None:
        self._note("panel", panel)
        time.sleep(0.01)

    def enqueue(self, chunk: int, stream: Any = None) -> None:
        self._note("chunk", chunk)

    def close(self) -> None:
        raise AssertionError("the collective is its owner's to close")


def opened(notes: Notes, **strategy: Any) -> Overlap:
    return open_overlap(notes, notes, HostStrategy(**strategy).config(), CPU)


def test_sequential_is_one_after_the_other_in_the_callers_thread() -> None:
    notes = Notes(panels=2, chunks=3)
    run = opened(notes, panels=2, chunks=3)
    run()
    run.close()
    assert notes.seen == [("panel", 0), ("panel", 1), ("chunk", 0), ("chunk", 1), ("chunk", 2)]
    assert notes.where["panel"][0] == notes.where["chunk"][0] == threading.current_thread().name


def test_comm_first_begins_with_the_collective_and_does_not_wait_for_it() -> None:
    notes = Notes(panels=2)
    both, held = threading.Event(), []
    enqueue = notes.enqueue

    def slow(chunk: int, stream: Any = None) -> None:
        enqueue(chunk, stream)
        held.append(both.wait(250))

    run_panel = notes.run

    def panel(k: int) -> None:
        run_panel(k)
        both.set()

    notes.enqueue, notes.run = slow, panel  # type: ignore[method-assign]
    run = opened(notes, order="comm_first")
    run()
    run.close()
    assert held == [True]  # the collective was still under way while the computation ran
    assert notes.where["panel"][0] == threading.current_thread().name
    assert notes.where["chunk"][0].startswith("autotune-comm")
    assert notes.where["chunk"][1] == 1  # torch leaves the processors to the computation there


def test_gemm_first_lets_pieces_go_with_their_panels() -> None:
    notes = Notes(panels=4, chunks=8)
    run = opened(notes, order="gemm_first", panels=4, chunks=8)
    for _ in range(5):
        notes.seen.clear()
        run()
        assert sorted(notes.seen) == sorted([("panel", p) for p in range(4)] + [("chunk", c) for c in range(8)])
        assert [e for e in notes.seen if e[0] == "chunk"] == [("chunk", c) for c in range(8)]
        begun = -1
        for what, piece in notes.seen:
            # A piece is let go just before its panel runs, so it may be noted one panel early.
            begun = piece if what == "panel" else begun
            assert what == "panel" or piece * 4 // 8 <= begun + 1, notes.seen
    run.close()


def test_the_computation_gets_its_threads_and_the_caller_keeps_its_own() -> None:
    mine = torch.get_num_threads()
    notes = Notes()
    run = opened(notes, order="comm_first", threads=mine + 1)
    with torch.no_grad():
        run()
    assert notes.where["panel"] == ("autotune-compute_0", mine + 1, False)
    assert torch.get_num_threads() == mine
    run.close()
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert found == [mine]  # as has every thread that comes later


@pytest.mark.parametrize("order", ["comm_first", "gemm_first"])
def test_a_computation_that_fails_leaves_no_peer_waiting(order: str) -> None:
    notes = Notes(panels=4, chunks=4, fails="panel")
    run = opened(notes, order=order, panels=4, chunks=4)
    with pytest.raises(RuntimeError, match="panel broke"):
        run()
    assert [e for e in notes.seen if e[0] == "chunk"] == [("chunk", c) for c in range(4)]
    run.close()


@pytest.mark.parametrize("order", ["sequential", "comm_first", "gemm_first"])
def test_a_collective_that_fails_is_told(order: str) -> None:
    notes = Notes(panels=2, chunks=4, fails="chunk")
    run = opened(notes, order=order, panels=2, chunks=4)
    with pytest.raises(RuntimeError, match="chunk broke"):
        run()
    run.close()


@pytest.mark.parametrize("order", ["sequential", "comm_first", "gemm_first"])
def test_either_part_may_be_missing(order: str) -> None:
    notes = Notes(panels=2, chunks=2)
    config = HostStrategy(order=order, panels=2, chunks=2).config()
    for compute, collective, seen in [(notes, None, "panel"), (None, notes, "chunk")]:
        notes.seen.clear()
        run = open_overlap(compute, collective, config, CPU)
        run.prepare()
        run.close()
        assert notes.seen == [(seen, 0), (seen, 1)]
