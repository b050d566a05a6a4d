"""The copy engines' protocol, in random orders of all that ranks and streams do, and that its faults are found so."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autotune.domains.c3.collectives import symmetric
from autotune.domains.c3.collectives.dma import _CHUNKS, _DONE
from autotune.domains.c3.collectives.symmetric import MemOps
from autotune.domains.c3.scenario import COLLECTIVES
from autotune.errors import Unsupported
from tests.support.c3.fake_calls import (
    SIZES,
    Party,
    fault,
    found_where_spoilt,
    no_done,
    no_ready,
    nothing,
    play,
    play_two,
)
from tests.support.c3.fake_device import BIASES, QUEUES, Fault, World
from tests.support.c3.fake_driver import Device
from tests.support.c3.fake_streams import Graph

RANKS = (2, 3, 4, 5, 8)


def some(rng: random.Random) -> dict[str, Any]:
    """A random strategy of the copy engines."""
    return {"engine": "copy", "chunks": rng.choice((1, 2, 3, 4))}


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("op", COLLECTIVES)
def test_calls_back_to_back(device: Device, op: str, ranks: int) -> None:
    """New inputs in every call, recorded ones too; sizes that no chunk divides; ranks ahead and behind."""
    rng = random.Random(f"{op} {ranks}")
    for seed, (bias, queues) in enumerate((b, q) for b in BIASES for q in QUEUES):
        world = device.open(ranks, seed, queues, bias)
        party = Party(world, op, SIZES[seed % len(SIZES)], rng.choice(("f32", "bf16")), **some(rng))
        play(world, party, 2, replayed=seed % 2 == 1)
        party.close()


@pytest.mark.parametrize("strategy", [{"engine": "sm"}, {"engine": "copy"}])
def test_means_over_ranks(device: Device, strategy: dict[str, Any]) -> None:
    for seed, ranks in enumerate((2, 4, 8)):
        world = device.open(ranks, seed)
        play(world, Party(world, "reduce_scatter", 200, "bf16", mean=True, **strategy))


@pytest.mark.parametrize("order", ["gemm_first", "comm_first"])
def test_own_part_is_copied_first_or_last(device: Device, order: str) -> None:
    for seed in range(4):
        world = device.open(3, seed, bias="strict")
        party = Party(world, "all_to_all", 67, engine="copy")
        collectives: list[Any] = list(party.collectives)
        for collective in collectives:
            collective._own_last = order == "gemm_first"
        play(world, party)


@pytest.mark.parametrize("queues", QUEUES)
def test_two_in_flight(device: Device, queues: str) -> None:
    """On two streams, which may share a hardware queue, enqueued in the same order on every rank."""
    rng = random.Random(queues)
    for seed in range(12):
        world = device.open(rng.choice((2, 3, 4)), seed, queues, BIASES[seed % len(BIASES)])
        both = [Party(world, op, rng.choice(SIZES), **some(rng)) for op in rng.sample(COLLECTIVES, 2)]
        if seed % 2:
            for rank in range(world.ranks):
                world.on(rank)
                both[0].record(rank)
        play_two(world, both)


def test_two_enqueued_in_different_orders(device: Device) -> None:
    """An unavoidable wait: if streams share a queue, ranks of different order wait for each other."""

    def attempt(seed: int, queues: str) -> None:
        world = device.open(2, seed, queues)
        both = [Party(world, op, 67, engine="copy") for op in ("all_gather", "all_to_all")]
        play_two(world, both, swapped=(1,))

    assert not fault(lambda seed: attempt(seed, "own"), 8)
    assert fault(lambda seed: attempt(seed, "one"), 2) == "Deadlock"


def test_buffers_and_flags_are_used_again(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    world = device.open(3, 1, bias="strict")
    for op in (*COLLECTIVES, *reversed(COLLECTIVES)):
        party = Party(world, op, 200, **some(rng))
        play(world, party, 2)
        party.close()
    made = world._asked[0]
    again = Party(world, "all_reduce", 200, engine="copy")
    play(world, again)
    again.close()
    assert world._asked == [made] * 3  # no new memory for sizes that fit free memory
    monkeypatch.setattr(symmetric, "KEPT_BYTES", 0)
    play(world, Party(world, "all_gather", 5000, engine="copy"))
    assert [len(g.kept["symmetric buffers"]) for g in world.groups] == [0] * 3  # all let go, alike on all ranks


def test_flags_run_out(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric, "FLAGS", 16)
    world = device.open(2, 0)
    first = Party(world, "reduce_scatter", 64, engine="copy", chunks=4)  # 2 ranks x 6 flags
    with pytest.raises(Unsupported, match="more than 16 flags in use"):
        Party(world, "reduce_scatter", 64, engine="copy", chunks=4)
    play(world, first)


def test_symmetric_memory_of_another_backend_is_not_taken(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program has set NCCL's or NVSHMEM's for the process, as FSDP2's ``set_symm_mem_for_comm`` does."""
    world = device.open(2, 0)
    group = world.on(0)
    group.device = torch.device("cuda", 0)
    monkeypatch.setattr(symmetric.symmetric, "get_backend", lambda device: "NCCL")
    with pytest.raises(Unsupported, match="its backend is NCCL, and peers cannot read such memory"):
        symmetric.take(group, 1 << 10)


def test_no_beat_in_a_capture(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective whose end nothing waits for would make the program's capture fail."""
    world = device.open(2, 0)
    group, beats = world.on(0), list[object]()
    monkeypatch.setattr(dist, "all_reduce", lambda word, **given: beats.append(word))
    group.kept["beat"] = word = torch.zeros(1)
    group.beat()
    assert beats == []
    group.device = torch.device("cuda", 0)
    group.beat()
    with world.capture(Graph(world)):
        group.beat()
    assert [beat is word for beat in beats] == [True]


# ---- meetings -------------------------------------------------------------------------------------------------------


def meet(device: Device, seed: int, one_set: bool = False) -> None:
    """Ranks that synchronise repeatedly; none may leave before all have arrived."""
    world = device.open(3, seed, bias=BIASES[seed % len(BIASES)])
    come = [0] * 3
    for rank in range(3):
        barrier = symmetric.DeviceBarrier(world.on(rank))
        for meeting in range(1, 6):
            stream = world.main[rank]
            stream.add("call", lambda rank=rank: come.__setitem__(rank, come[rank] + 1))
            if one_set:
                barrier._turn = 0
            barrier(stream.cuda_stream)
            stream.add("call", lambda meeting=meeting: _all_came(come, meeting))
    world.run()


def _all_came(come: list[int], meeting: int) -> None:
    if min(come) < meeting:
        raise Fault(f"meeting {meeting} of {come}")


def test_device_barrier(device: Device) -> None:
    assert not fault(lambda seed: meet(device, seed))
    assert fault(lambda seed: meet(device, seed, one_set=True))  # a rank is one ahead, and its flag is lost


# ---- protocols with a fault, which the simulator has to find --------------------------------------------------------

Spoil = Callable[[Any], None]


def done_before_the_copies(c: Any) -> None:
    signal, copies = c._signal[_DONE], c._copies[-1]
    c._signal[_DONE] = nothing

    def early(raw: int) -> None:
        signal(raw)
        copies(raw)

    c._copies[-1] = early


def chunk_told_before_its_copies(c: Any) -> None:
    signal, copies = c._signal[_CHUNKS], c._copies[0]
    c._signal[_CHUNKS] = nothing

    def early(raw: int) -> None:
        signal(raw)
        copies(raw)

    c._copies[0] = early


def sums_added_before_they_have_come(c: Any) -> None:
    c._wait[_CHUNKS] = nothing


def sums_not_waited_for(c: Any) -> None:
    c._finish = lambda stream: None


def one_peer_not_told(c: Any) -> None:
    if c.group.rank == 0:
        c._signal[_DONE] = nothing


@pytest.mark.parametrize(
    ("op", "spoil"),
    [  # an all-reduce works without its first barrier: the last one of the previous call is enough
        ("all_gather", no_ready),
        ("all_to_all", no_ready),
        ("reduce_scatter", no_ready),
        ("all_gather", no_done),
        ("all_reduce", no_done),
        ("all_gather", done_before_the_copies),
        ("all_to_all", done_before_the_copies),
        ("reduce_scatter", chunk_told_before_its_copies),
        ("all_reduce", chunk_told_before_its_copies),
        ("reduce_scatter", sums_added_before_they_have_come),
        ("all_reduce", sums_added_before_they_have_come),
        ("reduce_scatter", sums_not_waited_for),
        ("all_to_all", one_peer_not_told),
    ],
)
def test_a_spoilt_protocol_is_found(device: Device, op: str, spoil: Spoil) -> None:
    found_where_spoilt(device, op, spoil, engine="copy", chunks=2)


@pytest.mark.parametrize("op", COLLECTIVES)
def test_a_flag_that_stays_up_is_found(device: Device, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def waits_only(self: symmetric.Flags, slot: int) -> MemOps:
        return MemOps([("wait", self._word(self._rank, p, slot), 1) for p in self.peers])

    monkeypatch.setattr(symmetric.Flags, "wait", waits_only)

    def attempt(seed: int) -> None:
        world = device.open(2, seed)
        play(world, Party(world, op, 67, engine="copy", chunks=2))

    assert fault(attempt, 4)


def test_flags_that_two_share_are_found(device: Device) -> None:
    def attempt(seed: int) -> None:
        world = device.open(2, seed, bias=BIASES[seed % len(BIASES)])
        one, other = (Party(world, "all_gather", part, engine="copy") for part in (67, 200))
        pairs: Any = zip(one.collectives, other.collectives, strict=True)
        for a, b in pairs:
            b._signal, b._wait = a._signal, a._wait
        play_two(world, [one, other])

    assert fault(attempt)


def test_capture_detects_streams_that_are_not_joined(device: Device) -> None:
    world: World = device.open(2, 0)
    party = Party(world, "reduce_scatter", 67, engine="copy")
    for collective in party.collectives:
        sums_not_waited_for(collective)
    assert fault(lambda seed: play(world, party, replayed=True), 1) == "CaptureFault"


# ---- branches of a graph that share a queue, in an order that the capture did not have ------------------------------


@pytest.mark.parametrize("op", COLLECTIVES)
def test_branches_of_a_graph_in_any_order(device: Device, op: str) -> None:
    def attempt(seed: int) -> None:
        world = device.open(2, seed, "one")
        world.shuffle = True
        play(world, Party(world, op, 200, engine="copy", chunks=2), replayed=True)

    assert not fault(attempt, 8)
