"""Collectives on the fake devices of :mod:`tests.support.c3.fake_device`: one on every rank, called and checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autotune.domains.c3.collectives.dma import _DONE, _READY, CopyCollective
from autotune.domains.c3.collectives.nccl import DTYPES, Collective, Spec
from autotune.domains.c3.collectives.sm import SmCollective
from autotune.domains.c3.strategy import Strategy
from tests.support.c3.fake_device import BIASES, Fault, World
from tests.support.c3.fake_driver import Device, kernels
from tests.support.c3.fake_streams import CaptureFault, Graph, Stream

ENGINES: dict[str, Any] = {"copy": CopyCollective, "sm": SmCollective}
SIZES = (1, 3, 64, 67, 200, 777)
"""Elements of a rank's share: less than a cache line, one, and several; of 777 some chunks are shorter than others."""
_MODULUS = 13  # whole numbers below this: sums over 8 ranks are exact in bf16; no chunk begins at a multiple of it


class Wrong(Fault):
    """A call had an unexpected result."""


class Party:
    """One collective on all ranks.

    Args:
        part: elements of a rank's share; of an all-reduce the last share has one less, unless that is none.
        mean: of a reduce-scatter, whose means are exact for 2, 4 and 8 ranks.
    """

    def __init__(
        self, world: World, op: str, part: int, dtype: str = "f32", mean: bool = False, **strategy: Any
    ) -> None:
        self.world, self.op, self.dtype = world, op, DTYPES[dtype]
        numel = part * world.ranks
        self.spec = Spec(op, numel - 1 if op == "all_reduce" else numel, dtype, mean)
        self.part = self.spec.part(world.ranks)
        self.strategy = Strategy(order="comm_first", **strategy)
        artifact = kernels(self.strategy, op, world.ranks, dtype, mean)
        self.collectives: list[Collective] = []
        for rank in range(world.ranks):
            made = ENGINES[self.strategy.engine](self.spec, world.on(rank), self.strategy, artifact)
            self.collectives.append(made)
        self.graphs: dict[int, Graph] = {}
        self._ramp = (torch.arange(numel + _MODULUS) * 5 % _MODULUS).to(self.dtype)

    def _value(self, rank: int, numel: int, call: int) -> torch.Tensor:
        begin = (rank * 3 + call * 7) % _MODULUS
        return self._ramp[begin : begin + numel]

    def _wanted(self, me: int, call: int) -> torch.Tensor:
        ranks, part, numel = self.world.ranks, self.part, self.spec.numel
        mine = slice(me * part, (me + 1) * part)
        if self.op == "all_gather":
            return torch.cat([self._value(r, part, call) for r in range(ranks)])
        if self.op == "all_to_all":
            return torch.cat([self._value(r, numel, call)[mine] for r in range(ranks)])
        whole = torch.stack([self._value(r, numel, call) for r in range(ranks)]).sum(0)
        whole = whole / ranks if self.spec.mean else whole
        return whole[mine] if self.op == "reduce_scatter" else whole

    def fill(self, rank: int, call: int, stream: Stream) -> None:
        """Enqueue new inputs; what the last call made is gone."""
        c = self.collectives[rank]
        value = self._value(rank, c.input.numel(), call)

        def run() -> None:
            c.output.fill_(-1)  # before the input, which is in it where a collective works in place
            c.input.copy_(value)

        stream.add("call", run)

    def check(self, rank: int, call: int, stream: Stream) -> None:
        """Enqueue a look at the output."""
        c, wanted = self.collectives[rank], self._wanted(rank, call)

        def run() -> None:
            if not torch.equal(c.output, wanted):
                raise Wrong(f"{self.op} x{self.world.ranks} {self.strategy.label}: rank {rank}, call {call}")

        stream.add("call", run)

    def record(self, rank: int) -> None:
        """From here on, calls of this rank replay one that is recorded now."""
        graph = self.graphs[rank] = Graph(self.world)
        with self.world.capture(graph):
            self.collectives[rank].enqueue(self.world.current())

    def call(self, rank: int, stream: Stream) -> None:
        if rank not in self.graphs:
            self.collectives[rank].enqueue(stream)
            return
        with self.world.using(stream):
            self.graphs[rank].replay()

    def close(self) -> None:
        for rank, collective in enumerate(self.collectives):
            self.world.on(rank)
            collective.close()


def play(world: World, party: Party, calls: int = 3, replayed: bool = False) -> None:
    """Back-to-back calls with new inputs each, in every rank's main stream; recorded after one if ``replayed``."""
    for rank in range(world.ranks):
        world.on(rank)
        for call in range(calls):
            party.fill(rank, call, world.main[rank])
            party.call(rank, world.main[rank])
            party.check(rank, call, world.main[rank])
            if replayed and call == 0:
                party.record(rank)
    world.run()
    if not world.down():
        raise Wrong("a flag is still up")


def play_two(world: World, both: list[Party], calls: int = 3, swapped: tuple[int, ...] = ()) -> None:
    """Two collectives in flight on two streams, enqueued in the same order on all ranks but those that are swapped."""
    for rank in range(world.ranks):
        world.on(rank)
        main, sides = world.main[rank], [Stream(world), Stream(world)]
        for call in range(calls):
            jobs = list(zip(both, sides, strict=True))
            for party, side in jobs:
                party.fill(rank, call, main)
                side.wait_stream(main)
            for party, side in reversed(jobs) if rank in swapped else jobs:
                party.call(rank, side)
            for party, side in jobs:
                main.wait_stream(side)
                party.check(rank, call, main)
    world.run()
    if not world.down():
        raise Wrong("a flag is still up")


def found_where_spoilt(device: Device, op: str, spoil: Callable[[Any], None], **strategy: Any) -> None:
    """Three ranks play without a fault, and with one where ``spoil`` has changed each one's collective."""

    def attempt(seed: int, spoilt: bool) -> None:
        world = device.open(3, seed, bias=BIASES[seed % len(BIASES)])
        party = Party(world, op, 67, **strategy)
        for collective in party.collectives:
            if spoilt:
                spoil(collective)
        play(world, party)

    assert not fault(lambda seed: attempt(seed, False), 4)
    assert fault(lambda seed: attempt(seed, True))


def nothing(raw: int) -> None:
    """In the place of a step of the protocol."""


def no_ready(c: Any) -> None:
    c._signal[_READY] = c._wait[_READY] = nothing


def no_done(c: Any) -> None:
    c._signal[_DONE] = c._wait[_DONE] = nothing


def fault(attempt: Callable[[int], None], seeds: int = 24) -> str:
    """The kind of the first fault that some seed brings about; empty where all go well."""
    for seed in range(seeds):
        try:
            attempt(seed)
        except (Fault, CaptureFault) as found:
            return type(found).__name__
    return ""
