"""A strategy's order of work on CUDA, its streams, and its waits: on faked devices."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.domains.c3 import overlap as overlap_module
from autotune.domains.c3.collectives.symmetric import new_event
from autotune.domains.c3.overlap import CudaOverlap
from autotune.domains.c3.scenario import COLLECTIVES, REDUCING
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

    def __init__(self, world: World) -> None:
        self.world = world
        self.input = self.output = torch.zeros(1)
        self.enqueued: list[str] = []
        self.where: dict[str, Stream] = {}
        self.ran: list[str] = []

    def note(self, what: str, stream: Stream) -> None:
        self.enqueued.append(what)
        self.where[what] = stream
        stream.add("call", lambda: self.ran.append(what))

    def run(self) -> None:
        self.note("gemm", self.world.current())

    def enqueue(self, stream: Any = None) -> None:
        self.note("comm", stream)

    def close(self) -> None:
        raise AssertionError("the collective is its owner's to close")


def opened(
    notes: Notes, compute: bool = True, collective: bool = True, graph: bool = False, **strategy: Any
) -> CudaOverlap:
    parts: tuple[Any, Any] = (notes if compute else None, notes if collective else None)
    return CudaOverlap(*parts, Strategy(**strategy), CUDA, graph)


@pytest.mark.parametrize(
    ("order", "wanted"),
    [("sequential", ["gemm", "comm"]), ("comm_first", ["comm", "gemm"]), ("gemm_first", ["gemm", "comm"])],
)
def test_the_order_of_enqueuing(device: Device, order: str, wanted: list[str]) -> None:
    notes = Notes(device.open(1, 0))
    opened(notes, order=order)()
    assert notes.enqueued == wanted


@pytest.mark.parametrize("queues", QUEUES)
def test_a_computation_that_would_hold_every_sm_waits_for_the_handshake(device: Device, queues: str) -> None:
    """Not for the kernel behind it."""

    class Meeting(Notes):
        def enqueue(self, stream: Any = None) -> None:
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
    """In which orders the halves of three calls run; a failed assertion where one runs before or after its call."""
    world = device.open(1, seed, queues)
    notes = Notes(world)
    overlap = opened(notes, **strategy)
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
        one = notes.ran[4 * call :][:4]
        assert (one[0], one[-1]) == (f"begin {call}", f"end {call}")
        assert sorted(one[1:-1]) == ["comm", "gemm"]
        seen.add(" ".join(one[1:-1]))
    return seen


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("order", ["sequential", "comm_first", "gemm_first"])
@pytest.mark.parametrize("queues", QUEUES)
def test_fork_and_join(device: Device, queues: str, order: str, graph: bool) -> None:
    """Neither begins before the stream's earlier work, and later work waits for both, in calls and in replays."""
    seen = set().union(*(between(device, seed, queues, order=order, graph=graph) for seed in range(12)))
    if order == "sequential":
        assert seen == {"gemm comm"}
    elif queues == "own":
        assert len(seen) == 2  # they do run side by side


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("end", ["fork", "join"])
def test_a_missing_fork_or_join_is_found(
    device: Device, monkeypatch: pytest.MonkeyPatch, end: str, graph: bool
) -> None:
    wait = Stream.wait_stream

    def some(self: Stream, other: Stream) -> None:
        joins = self is self.world.current()
        if joins != (end == "join"):
            wait(self, other)

    monkeypatch.setattr(Stream, "wait_stream", some)

    def attempts() -> None:
        for seed in range(12):
            between(device, seed, "own", order="comm_first", graph=graph)

    with pytest.raises(CaptureFault if graph else AssertionError):
        attempts()


@pytest.mark.parametrize(("priority", "level"), [("equal", 0), ("comm", -5)])
def test_priorities(device: Device, priority: str, level: int) -> None:
    world = device.open(1, 0)
    notes = Notes(world)
    opened(notes, order="comm_first", priority=priority)()
    assert notes.where["comm"].priority == level
    assert notes.where["comm"] is not world.main[0]
    assert notes.where["gemm"] is world.main[0]


def test_reserved_sms(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    world, asked = device.open(1, 0), []

    def part(index: int, sms: int) -> tuple[Stream, int]:
        asked.append((index, sms))
        return Stream(world), sms // 8 * 8

    monkeypatch.setattr(overlap_module, "partition_stream", part)
    notes = Notes(world)
    overlap = opened(notes, order="comm_first", reserve=8)
    overlap()
    assert asked == [(0, 124)]
    assert overlap.sms == 120
    assert notes.where["gemm"] not in (world.main[0], notes.where["comm"])
    assert opened(notes, order="sequential", reserve=8).sms == 0  # one after the other, each has all
    assert len(asked) == 1


@pytest.mark.parametrize(("compute", "collective", "wanted"), [(True, False, ["gemm"]), (False, True, ["comm"])])
@pytest.mark.parametrize("graph", [False, True])
def test_one_alone(device: Device, compute: bool, collective: bool, wanted: list[str], graph: bool) -> None:
    world = device.open(1, 0)
    notes = Notes(world)
    overlap = opened(notes, compute, collective, graph, order="comm_first")
    overlap()
    overlap()
    world.run()
    calls = 3 if graph else 2  # the first makes what is made lazily before the capture
    assert notes.ran == wanted * calls
    assert len(notes.enqueued) == len(wanted) * 2


def test_a_graph_is_captured_once_and_by_the_first_call(device: Device) -> None:
    world = device.open(1, 0)
    notes = Notes(world)
    overlap = opened(notes, order="comm_first", graph=True)
    for _ in range(4):
        overlap()
    assert notes.enqueued == ["comm", "gemm"] * 2  # once for itself, once for the capture
    world.run()
    assert len(notes.ran) == 2 * 5
    overlap.close()
    overlap()
    assert len(notes.enqueued) == 2 * 4  # a dropped one is captured again


def test_under_a_callers_capture_it_is_a_part_of_that_graph(device: Device) -> None:
    world = device.open(1, 0)
    notes = Notes(world)
    overlap = opened(notes, order="gemm_first", graph=True)
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
    assert sorted(notes.ran) == ["comm", "gemm"]


class Turns:
    """A computation that only takes its turn."""

    def __init__(self, world: World) -> None:
        self.world = world

    def run(self) -> None:
        self.world.current().add("call", lambda: None)


@pytest.mark.parametrize(
    ("engine", "op"),
    [*(("copy", op) for op in COLLECTIVES), *(("sm", op) for op in REDUCING)],
)
def test_real_collectives_during_a_computation(device: Device, engine: str, op: str) -> None:
    """Every call, replayed or not, is checked after the join, with new inputs each, on 3 ranks."""
    for seed in range(6):
        world = device.open(3, seed, QUEUES[seed % len(QUEUES)], BIASES[seed % len(BIASES)])
        party = Party(world, op, 200, engine=engine, chunks=2)
        told = Strategy(order=("sequential", "comm_first", "gemm_first")[seed % 3], priority="comm", chunks=2)
        for rank in range(3):
            world.on(rank)
            overlap = CudaOverlap(Turns(world), party.collectives[rank], told, CUDA, graph=seed % 2 == 1)
            overlap.prepare()
            for call in range(3):
                party.fill(rank, call, world.main[rank])
                overlap()
                party.check(rank, call, world.main[rank])
        world.run()
        assert world.down()
