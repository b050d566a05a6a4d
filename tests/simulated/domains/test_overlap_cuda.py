"""In which order a strategy enqueues on CUDA, on which streams, and what it holds back: seen on faked devices."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.domains.c3.collectives.streams import new_event
from autotune.domains.c3.run import cuda as overlap_cuda
from autotune.domains.c3.run.cuda import CudaOverlap
from autotune.domains.c3.strategy import Strategy
from tests.support.c3.fake_calls import Party
from tests.support.c3.fake_device import BIASES, QUEUES, World
from tests.support.c3.fake_driver import Device
from tests.support.c3.fake_streams import CaptureFault, Stream

CUDA = torch.device("cuda", 0)


@pytest.fixture
def device() -> Iterator[Device]:
    with pytest.MonkeyPatch.context() as patch:
        told = SimpleNamespace(multi_processor_count=132)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: told)
        yield Device(patch)


class Notes:
    """A computation and a collective that note what is enqueued, where, and in which order it then runs."""

    engine = "notes"
    met: Any = None

    def __init__(self, world: World, panels: int = 1, chunks: int = 1) -> None:
        self.world, self.panels, self.chunks = world, panels, chunks
        self.input = self.output = torch.zeros(1)
        self.enqueued: list[str] = []
        self.where: dict[str, Stream] = {}
        self.ran: list[str] = []

    def note(self, what: str, stream: Stream) -> None:
        self.enqueued.append(what)
        self.where[what[0]] = stream
        stream.add("call", lambda: self.ran.append(what))

    def run(self, panel: int) -> None:
        self.note(f"p{panel}", self.world.current())

    def enqueue(self, chunk: int, stream: Any = None) -> None:
        self.note(f"c{chunk}", stream)

    def close(self) -> None:
        raise AssertionError("the collective is its owner's to close")


def opened(notes: Notes, compute: bool = True, collective: bool = True, **strategy: Any) -> CudaOverlap:
    parts: tuple[Any, Any] = (notes if compute else None, notes if collective else None)
    return CudaOverlap(*parts, Strategy(**{"launch": "eager", **strategy}), CUDA)


def enqueued(device: Device, panels: int, chunks: int, **strategy: Any) -> str:
    notes = Notes(device.open(1, 0), panels, chunks)
    opened(notes, **strategy)()
    return " ".join(notes.enqueued)


@pytest.mark.parametrize(
    ("order", "panels", "chunks", "wanted"),
    [
        ("sequential", 2, 3, "p0 p1 c0 c1 c2"),
        ("comm_first", 1, 1, "c0 p0"),
        ("gemm_first", 1, 1, "p0 c0"),
        ("comm_first", 2, 2, "c0 p0 c1 p1"),
        ("gemm_first", 2, 2, "p0 c0 p1 c1"),
        ("gemm_first", 4, 2, "p0 c0 p1 p2 c1 p3"),
        ("comm_first", 2, 4, "c0 p0 c1 c2 p1 c3"),
        ("comm_first", 1, 4, "c0 p0 c1 c2 c3"),
        ("gemm_first", 4, 1, "p0 c0 p1 p2 p3"),
    ],
)
def test_pieces_are_enqueued_in_turn(device: Device, order: str, panels: int, chunks: int, wanted: str) -> None:
    assert enqueued(device, panels, chunks, order=order) == wanted


@pytest.mark.parametrize(("order", "panels", "chunks"), [("comm_first", 4, 1), ("gemm_first", 1, 4)])
def test_the_order_says_who_begins(device: Device, order: str, panels: int, chunks: int) -> None:
    assert enqueued(device, panels, chunks, order=order)[0] == ("c" if order == "comm_first" else "p")


@pytest.mark.parametrize("panels", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("order", ["comm_first", "gemm_first"])
def test_every_piece_once_and_in_its_order(device: Device, order: str, panels: int, chunks: int) -> None:
    steps = enqueued(device, panels, chunks, order=order).split()
    assert [s for s in steps if s[0] == "p"] == [f"p{k}" for k in range(panels)]
    assert [s for s in steps if s[0] == "c"] == [f"c{k}" for k in range(chunks)]


@pytest.mark.parametrize("queues", QUEUES)
def test_a_computation_that_would_hold_every_sm_waits_for_the_handshake(device: Device, queues: str) -> None:
    """Not for the whole piece behind it."""

    class Meeting(Notes):
        def enqueue(self, chunk: int, stream: Any = None) -> None:
            self.note("handshake", stream)
            self.met.record(stream)
            self.note("kernel", stream)

    seen = set()
    for seed in range(12):
        notes = Meeting(device.open(1, seed, queues))
        notes.met = new_event()
        opened(notes, order="comm_first", priority="comm")()
        notes.world.run()
        assert notes.ran[0] == "handshake"
        seen.add(" ".join(notes.ran))
    assert queues != "own" or len(seen) == 2


def between(device: Device, seed: int, queues: str, **strategy: Any) -> set[str]:
    """In which orders the pieces of three calls run; a failed assertion where one runs before or after its call."""
    world = device.open(1, seed, queues)
    notes = Notes(world, 2, 2)
    overlap = opened(notes, priority="gemm", **strategy)
    overlap.prepare()
    world.run()
    notes.ran.clear()
    main = world.main[0]
    for call in range(3):
        notes.note(f"begin {call}", main)
        overlap()
        notes.note(f"end {call}", main)
    world.run()
    seen = set()
    for call in range(3):
        one = notes.ran[6 * call :][:6]
        assert (one[0], one[-1]) == (f"begin {call}", f"end {call}")
        assert sorted(one[1:-1]) == ["c0", "c1", "p0", "p1"]
        seen.add(" ".join(one[1:-1]))
    return seen


@pytest.mark.parametrize("launch", ["eager", "graph"])
@pytest.mark.parametrize("order", ["sequential", "comm_first", "gemm_first"])
@pytest.mark.parametrize("queues", QUEUES)
def test_fork_and_join(device: Device, queues: str, order: str, launch: str) -> None:
    """Neither begins before what the stream had, and what follows waits for both, in calls and in replays."""
    seen = set().union(*(between(device, seed, queues, order=order, launch=launch) for seed in range(12)))
    if order == "sequential":
        assert seen == {"p0 p1 c0 c1"}
    elif queues == "own":
        assert len(seen) > 2  # they do run side by side


@pytest.mark.parametrize("launch", ["eager", "graph"])
@pytest.mark.parametrize("end", ["fork", "join"])
def test_a_missing_fork_or_join_is_found(
    device: Device, monkeypatch: pytest.MonkeyPatch, end: str, launch: str
) -> None:
    wait = Stream.wait_stream

    def some(self: Stream, other: Stream) -> None:
        joins = self is self.world.current()
        if joins != (end == "join"):
            wait(self, other)

    monkeypatch.setattr(Stream, "wait_stream", some)

    def attempts() -> None:
        for seed in range(12):
            between(device, seed, "own", order="comm_first", launch=launch)

    with pytest.raises(CaptureFault if launch == "graph" else AssertionError):
        attempts()


@pytest.mark.parametrize(
    ("order", "priority", "comm", "gemm"),
    [
        ("comm_first", "equal", 0, None),
        ("comm_first", "comm", -5, None),
        ("gemm_first", "gemm", 0, -5),
    ],
)
def test_priorities(device: Device, order: str, priority: str, comm: int, gemm: int | None) -> None:
    world = device.open(1, 0)
    notes = Notes(world)
    opened(notes, order=order, priority=priority)()
    assert notes.where["c"].priority == comm
    assert notes.where["c"] is not world.main[0]
    if gemm is None:
        assert notes.where["p"] is world.main[0]
    else:
        assert notes.where["p"].priority == gemm
        assert notes.where["p"] is not world.main[0]


@pytest.mark.parametrize("priority", ["equal", "gemm"])
def test_reserved_sms(device: Device, monkeypatch: pytest.MonkeyPatch, priority: str) -> None:
    world, asked = device.open(1, 0), []

    def part(index: int, sms: int, high: bool) -> tuple[Stream, int]:
        asked.append((index, sms, high))
        return Stream(world), sms // 8 * 8

    monkeypatch.setattr(overlap_cuda, "partition_stream", part)
    notes = Notes(world)
    overlap = opened(notes, order="comm_first", priority=priority, reserve=8)
    overlap()
    assert asked == [(0, 124, priority == "gemm")]
    assert overlap.sms == 120
    assert notes.where["p"] not in (world.main[0], notes.where["c"])
    assert opened(notes, order="sequential", reserve=8).sms == 0  # one after the other, each has all
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("compute", "collective", "wanted"), [(True, False, ["p0", "p1"]), (False, True, ["c0", "c1"])]
)
@pytest.mark.parametrize("launch", ["eager", "graph"])
def test_one_alone(device: Device, compute: bool, collective: bool, wanted: list[str], launch: str) -> None:
    world = device.open(1, 0)
    notes = Notes(world, 2, 2)
    overlap = opened(notes, compute, collective, order="comm_first", launch=launch)
    overlap()
    overlap()
    world.run()
    calls = 2 if launch == "eager" else 3  # the first makes what is made lazily before the capture
    assert notes.ran == wanted * calls
    assert len(notes.enqueued) == len(wanted) * 2


def test_a_graph_is_captured_once_and_by_the_first_call(device: Device) -> None:
    world = device.open(1, 0)
    notes = Notes(world)
    overlap = opened(notes, order="comm_first", launch="graph")
    for _ in range(4):
        overlap()
    assert notes.enqueued == ["c0", "p0"] * 2  # once for itself, once for the capture
    world.run()
    assert len(notes.ran) == 2 * 5
    overlap.close()
    overlap()
    assert len(notes.enqueued) == 2 * 4  # what was let go is captured anew


def test_under_a_callers_capture_it_is_a_part_of_that_graph(device: Device) -> None:
    world = device.open(1, 0)
    notes = Notes(world)
    overlap = opened(notes, order="gemm_first", launch="graph")
    overlap.prepare()
    world.run()
    notes.ran.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        overlap()
    assert notes.ran == []
    world.run()
    assert notes.ran == []
    graph.replay()
    world.run()
    assert sorted(notes.ran) == ["c0", "p0"]


class Panels:
    """A computation that only takes its turns."""

    panels = 2

    def __init__(self, world: World) -> None:
        self.world = world

    def run(self, panel: int) -> None:
        self.world.current().add("call", lambda: None)


@pytest.mark.parametrize("op", ["all_gather", "all_to_all", "reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("engine", ["copy", "sm"])
def test_real_collectives_beside_a_computation(device: Device, engine: str, op: str) -> None:
    """Every call, replayed or not, is checked after the join, with new inputs each, on 3 ranks."""
    for seed in range(6):
        world = device.open(3, seed, QUEUES[seed % len(QUEUES)], BIASES[seed % len(BIASES)])
        party = Party(world, op, 200, engine=engine, chunks=2)
        told = Strategy(
            order=("sequential", "comm_first", "gemm_first")[seed % 3],
            launch=("eager", "graph")[seed % 2],
            priority="comm",
            chunks=2,
            panels=2,
        )
        for rank in range(3):
            world.on(rank)
            compute: Any = Panels(world)
            overlap = CudaOverlap(compute, party.collectives[rank], told, CUDA)
            overlap.prepare()
            for call in range(3):
                party.fill(rank, call, world.main[rank])
                overlap()
                party.check(rank, call, world.main[rank])
        world.run()
        assert world.down()
