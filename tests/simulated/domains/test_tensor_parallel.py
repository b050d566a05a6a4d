"""The protocol of tensor-parallel products, in random orders of all that ranks and streams do."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from autotune.domains.c3.strategy import Strategy
from autotune.domains.c3.tensor_parallel import outbox, products
from autotune.domains.c3.tensor_parallel.outbox import Exchange, Outbox
from autotune.domains.c3.tensor_parallel.products import Line
from autotune.runtime.deployment import Deployment, deployment, use
from tests.support.c3.fake_calls import Wrong, fault
from tests.support.c3.fake_device import BIASES, QUEUES, World
from tests.support.c3.fake_driver import Device, kernels
from tests.support.c3.fake_streams import Graph

ROWS, WIDTH, INNER = 5, 3, 4
CHUNKS = (1, 2, 3, 4, 8)


@pytest.fixture
def made(device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Line]]]:
    """Makes the lines of all ranks; what torch computes is enqueued on the current stream."""
    for name in ("_multiply", "_add", "_copy"):
        real = getattr(products, name)

        def enqueued(*args: Any, real: Any = real) -> None:
            device.world.current().add("call", lambda: real(*args))

        monkeypatch.setattr(products, name, enqueued)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 40, 1 << 40))

    def lines(world: World) -> list[Line]:
        artifact = kernels(Strategy("gemm_first", "copy"), "reduce_scatter", world.ranks, "f32")
        out = []
        for rank in range(world.ranks):
            group = world.on(rank)
            line = object.__new__(Line)
            line.__dict__ |= {"group": None, "exchange": Exchange(group), "rank": rank, "ranks": world.ranks}
            line.__dict__ |= {"kernels": {}, "_begun": {}, "_moved": []}
            line.take(artifact, "f32")
            out.append(line)
        return out

    before = deployment()
    use(Deployment())  # which has not warned yet
    yield lines
    use(before)


def value(seed: int, *shape: int) -> torch.Tensor:
    """Small whole numbers."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


class Calls:
    """Gathers and scatters of a rank in turn, with new inputs in each call."""

    def __init__(self, world: World, lines: list[Line], batches: int, chunks: int, lanes: int) -> None:
        self.world, self.lines, self.batches, self.chunks, self.lanes = world, lines, batches, chunks, lanes
        self.total = ROWS * world.ranks
        self.inputs = [
            [world.allocate(batches, rows, INNER) for rows in (ROWS, self.total)] for _ in range(world.ranks)
        ]
        self.weight = world.allocate(INNER, WIDTH).copy_(value(7, INNER, WIDTH))

    def fill(self, rank: int, call: int) -> None:
        for k, given in enumerate(self.inputs[rank]):
            new = value(100 * call + 10 * rank + k, *given.shape)
            self.world.current().add("call", lambda given=given, new=new: given.copy_(new))

    def enqueue(self, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        line, (rows, whole) = self.lines[rank], self.inputs[rank]
        parts = line.begin_scatter([whole, whole], [self.weight] * 2, self.chunks, "copy", self.lanes)
        gathered, (product,) = line.gather_products(rows, [self.weight], self.chunks, "copy", self.lanes)
        return gathered, product, line.end_scatter(parts)

    def check(self, rank: int, call: int, found: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        ranks, mine = self.world.ranks, slice(rank * ROWS, (rank + 1) * ROWS)
        full = torch.cat([value(100 * call + 10 * r, self.batches, ROWS, INNER) for r in range(ranks)], 1)
        left = sum(value(100 * call + 10 * r + 1, self.batches, self.total, INNER) for r in range(ranks))
        assert isinstance(left, torch.Tensor)
        wanted = (full, full @ self.weight, 2 * (left @ self.weight)[:, mine])

        def run() -> None:
            for a, b in zip(found, wanted, strict=True):
                if not torch.equal(a, b):
                    raise Wrong(f"rank {rank}, call {call}, {self.chunks} products on {self.lanes} streams")

        self.world.current().add("call", run)

    def play(self, calls: int, replayed: bool) -> None:
        for rank in range(self.world.ranks):
            self.world.on(rank)
            graph, results = None, None
            for call in range(calls):
                self.fill(rank, call)
                if graph is None or results is None:
                    results = self.enqueue(rank)
                else:
                    graph.replay()
                self.check(rank, call, results)
                if replayed and call == 0:
                    graph = Graph(self.world)
                    with self.world.capture(graph):
                        results = self.enqueue(rank)
        for rank, line in enumerate(self.lines):
            self.world.on(rank)
            assert line.exchange is not None
            line.exchange.close()
        self.world.run()
        if not self.world.down():
            raise Wrong("a flag is still up")


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("lanes", [1, 2])
def test_calls_back_to_back(device: Device, made: Any, lanes: int, ranks: int) -> None:
    """New inputs in every call, recorded ones too; ranks ahead and behind; streams that share a hardware queue."""
    for seed, (bias, queues) in enumerate((b, q) for b in BIASES for q in QUEUES):
        world = device.open(ranks, seed, queues, bias)
        chunks = CHUNKS[seed % len(CHUNKS)]
        Calls(world, made(world), 1 + seed % 2, chunks, lanes).play(5, replayed=seed % 3 == 1)


def reuse_memory(monkeypatch: pytest.MonkeyPatch, world: World) -> dict[Any, torch.Tensor]:
    """Results of equal shapes get equal addresses in every call, as in a program's steps; by rank and shape."""
    kept: dict[Any, torch.Tensor] = {}
    real = products._empty

    def empty(like: torch.Tensor, *shape: int) -> torch.Tensor:
        if (world.rank, shape) not in kept:
            kept[world.rank, shape] = real(like, *shape)
        return kept[world.rank, shape]

    monkeypatch.setattr(products, "_empty", empty)
    return kept


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("lanes", [1, 2])
def test_calls_that_repeat_are_graphs(
    device: Device, made: Any, monkeypatch: pytest.MonkeyPatch, lanes: int, ranks: int
) -> None:
    """Calls with the addresses of earlier ones run as graphs, others by calls."""
    for seed, (bias, queues) in enumerate((b, q) for b in BIASES for q in QUEUES):
        with monkeypatch.context() as patch:
            world = device.open(ranks, seed, queues, bias)
            patch.setattr(outbox, "_GRAPHS", 2048)
            reuse_memory(patch, world)
            world.shuffle = seed % 2 == 1
            lines = made(world)
            found = [watch(patch, line) for line in lines]
            Calls(world, lines, 1 + seed % 2, CHUNKS[seed % len(CHUNKS)], lanes).play(7, replayed=False)
            for graphs in found:
                assert graphs[:3] == [None] * 3
                assert len(set(graphs[3:])) == 6
                assert None not in graphs[3:]


def test_memory_that_was_freed_ends_its_graphs(device: Device, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results at the addresses of memory that was freed: captured once more, and no replay writes to what is gone."""
    monkeypatch.setattr(outbox, "_GRAPHS", 2048)
    world = device.open(2, 0)
    kept = reuse_memory(monkeypatch, world)
    lines = made(world)
    found = [watch(monkeypatch, line) for line in lines]

    class Freeing(Calls):
        def fill(self, rank: int, call: int) -> None:
            super().fill(rank, call)
            if call in (4, 8):
                for (owner, _), tensor in kept.items():
                    if owner == rank:
                        world.renew(tensor)

    Freeing(world, lines, 1, 3, 2).play(12, replayed=False)
    for graphs in found:
        graphs_before, between, after = (graphs[3 * at : 3 * (at + 4)] for at in (0, 4, 8))
        assert None not in between + after
        assert not {*graphs_before} & {*between}
        assert not {*between} & {*after}
        assert len({*between}) == len({*after}) == 6


def test_memory_of_unknown_allocations_is_not_captured(
    device: Device, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of expandable segments, for which the driver has no number, or several."""
    for numbers in ([0], [1, 2]):
        with monkeypatch.context() as patch:
            patch.setattr(outbox, "_GRAPHS", 2048)
            patch.setattr(outbox, "allocation", lambda address, numbers=numbers: numbers[address % len(numbers)])
            world = device.open(2, 0)
            reuse_memory(patch, world)
            lines = made(world)
            found = [watch(patch, line) for line in lines]
            Calls(world, lines, 1, 3, 1).play(4, replayed=False)
            assert {graph for graphs in found for graph in graphs} == {None}


def watch(monkeypatch: pytest.MonkeyPatch, line: Line) -> list[Graph | None]:
    """The graphs that a line's calls run as, from now on."""
    assert line.exchange is not None
    graphs, found = line.exchange.graphs, list[Graph | None]()
    real = graphs.get

    def get(*given: Any) -> Any:
        found.append(real(*given))
        return found[-1]

    monkeypatch.setattr(graphs, "get", get)
    return found


def test_memory_of_parts_that_an_exception_frees_is_not_written(
    device: Device, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the two calls of a scatter: later work of the stream gets the memory."""

    def attempt(seed: int) -> None:
        world = device.open(3, seed, bias=BIASES[seed % len(BIASES)])
        lines, given = made(world), [world.allocate(1, 3 * ROWS, INNER).zero_() for _ in range(3)]
        weight = world.allocate(INNER, WIDTH).zero_()
        memory = [world.allocate(3, 1, ROWS, WIDTH) for _ in range(3)]

        def borrowed(like: torch.Tensor, *shape: int) -> torch.Tensor:
            own = memory[world.rank]
            block = (ctypes.c_uint8 * own.nbytes).from_address(own.data_ptr())
            return torch.frombuffer(block, dtype=own.dtype).view(shape)

        with monkeypatch.context() as patch:
            patch.setattr(products, "_empty", borrowed)
            for name in ("_add", "_copy"):  # the test's keep the memory until they run
                patch.setattr(products, name, lambda *given: None)
            for rank, line in enumerate(lines):
                world.on(rank)
                line.begin_scatter([given[rank]], [weight], 3, "copy", 1 + seed % 2)
                world.current().add("call", lambda own=memory[rank]: own.fill_(7))
                assert not line._begun
        for rank, line in enumerate(lines):
            world.on(rank)
            line.exchange.close()
        world.run()
        if not all((own == 7).all() for own in memory):
            raise Wrong("a copy into memory that was freed")

    assert not fault(attempt, 8)
    monkeypatch.setattr(Line, "_drop", lambda self, at, main: self._begun.pop(at))
    assert fault(attempt)


@pytest.mark.parametrize("step", ["open", "publish", "arrival", "release"])
def test_each_step_is_needed(device: Device, made: Any, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def attempt(seed: int) -> None:
        world = device.open(3, seed, bias=BIASES[seed % len(BIASES)])
        Calls(world, made(world), 1, 3, 1 + seed % 2).play(6, replayed=False)

    assert not fault(attempt, 4)
    monkeypatch.setattr(Outbox, step, lambda self, *given: None)
    assert fault(attempt)


def test_too_little_memory_leaves_the_sequence(
    device: Device, made: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = device.open(2, 0)
    (first, _) = made(world)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 20, 1 << 40))
    world.on(0)
    first.exchange.group.device = torch.device("cuda", 0)
    assert first.exchange.outbox(1 << 20) is None
    assert first.exchange.outbox(1 << 20) is None
    assert caplog.text.count("2 MiB of buffers do not fit 1 MiB of free memory") == 1


def test_symmetric_memory_that_ends_leaves_the_sequence(
    device: Device, made: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The second outbox has no memory, though as much was free: none is kept, and later calls do not try again."""
    world = device.open(2, 0)
    lines = made(world)
    real, asked = world.symmetric, []

    def symmetric(size: int, **given: Any) -> Any:
        asked.append(size)
        if sum(size == other for other in asked) > 1:
            raise torch.OutOfMemoryError("out of memory\nmore about it")
        return real(size, **given)

    monkeypatch.setattr(world, "symmetric", symmetric)
    exchange = lines[0].exchange
    world.on(0)
    assert exchange.outbox(1 << 20) is None
    tries = len(asked)
    assert exchange.outbox(1 << 20) is None
    assert len(asked) == tries
    assert caplog.text.count("no 1 MiB of symmetric memory: OutOfMemoryError: out of memory\n") == 1
    exchange.close()


def test_outboxes_of_many_sizes_are_few() -> None:
    sizes = {outbox.rounded(nbytes) for nbytes in range(1 << 20, 1 << 22)}
    assert len(sizes) == 9
    for nbytes in (1, 2, 3, 7, 80, 4097, (1 << 30) + 1):
        assert nbytes <= outbox.rounded(nbytes) <= 1.25 * nbytes
