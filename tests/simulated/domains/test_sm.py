"""The protocol of the kernels that read their peers, in random orders of all that ranks and streams do."""

from __future__ import annotations

import random
from typing import Any

import pytest

from autotune.domains.c3.collectives.nccl import Spec
from autotune.domains.c3.collectives.sm import _DONE, _READY, SmCollective
from autotune.domains.c3.scenario import COLLECTIVES, REDUCING
from autotune.domains.c3.strategy import Strategy
from autotune.errors import Superseded, Unsupported
from autotune.task import Artifact, Kernel
from tests.support.c3.fake_calls import SIZES, Party, found_where_spoilt, no_done, no_ready, nothing, play, play_two
from tests.support.c3.fake_device import BIASES, QUEUES
from tests.support.c3.fake_driver import Device, kernels


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("op", REDUCING)
def test_calls_back_to_back(device: Device, op: str, ranks: int) -> None:
    """New inputs in every call, recorded ones too; ranks ahead and behind."""
    rng = random.Random(f"{op} {ranks}")
    for seed, (bias, queues) in enumerate((b, q) for b in BIASES for q in QUEUES):
        world = device.open(ranks, seed, queues, bias)
        party = Party(world, op, SIZES[seed % len(SIZES)], rng.choice(("f32", "bf16")), engine="sm")
        play(world, party, 2, replayed=seed % 2 == 1)
        party.close()


@pytest.mark.parametrize("op", REDUCING)
def test_branches_of_a_graph_in_any_order(device: Device, op: str) -> None:
    for seed in range(6):
        world = device.open(2, seed, "one")
        world.shuffle = True
        play(world, Party(world, op, 200, engine="sm"), replayed=True)


@pytest.mark.parametrize("queues", QUEUES)
def test_beside_the_copy_engines(device: Device, queues: str) -> None:
    """Two in flight, one of each engine, on streams that may share a hardware queue."""
    rng = random.Random(queues)
    for seed in range(8):
        world = device.open(rng.choice((2, 3, 4)), seed, queues, BIASES[seed % len(BIASES)])
        one, other = rng.choice(REDUCING), rng.choice(COLLECTIVES)
        copied = Party(world, other, rng.choice(SIZES), engine="copy", chunks=2)
        play_two(world, [Party(world, one, rng.choice(SIZES), engine="sm"), copied])


def test_buffers_are_used_again_by_the_other_engine(device: Device) -> None:
    world = device.open(3, 1, bias="strict")
    for op in COLLECTIVES:
        for engine in ("sm", "copy") if op in REDUCING else ("copy",):
            party = Party(world, op, 200, engine=engine)
            play(world, party, 2)
            party.close()
    assert len({len(g.kept["symmetric buffers"]) for g in world.groups}) == 1


@pytest.mark.parametrize("op", REDUCING)
def test_missing_kernels(device: Device, op: str) -> None:
    world = device.open(2, 0)
    strategy, spec = Strategy(engine="sm"), Spec(op, 128, "bf16")
    of_before = Artifact("sm_90", (Kernel("copy", b"", {"op": "copy"}),))
    for artifact in (None, of_before):
        with pytest.raises(Unsupported, match=f"the kernel of {op} is missing"):
            SmCollective(spec, world.on(0), strategy, artifact)


@pytest.mark.parametrize("op", ["all_gather", "all_to_all"])
def test_kernels_that_only_move_are_of_earlier_versions(device: Device, op: str) -> None:
    world = device.open(2, 0)
    artifact = kernels(Strategy(engine="sm"), "all_reduce", 2, "bf16")
    with pytest.raises(Superseded, match=f"{op} by kernels that only move data, which this autotune lacks"):
        SmCollective(Spec(op, 128, "bf16"), world.on(0), Strategy(engine="sm"), artifact)


# ---- protocols with a fault, which the simulator has to find --------------------------------------------------------


def done_before_the_kernels(c: Any) -> None:
    signal, wait = c._signal[_DONE], c._wait[_READY]
    c._signal[_DONE] = nothing

    def early(raw: int) -> None:
        wait(raw)
        signal(raw)

    c._wait[_READY] = early


def one_set_of_flags(c: Any) -> None:
    c._signal[_DONE], c._wait[_DONE] = c._signal[_READY], c._wait[_READY]


def no_second_half(c: Any) -> None:
    c._spread = nothing


@pytest.mark.parametrize(
    ("op", "spoil"),
    [
        *((op, spoil) for op in REDUCING for spoil in (no_ready, done_before_the_kernels, no_done)),
        ("all_reduce", one_set_of_flags),
        ("all_reduce", no_second_half),
    ],
)
def test_a_spoilt_protocol_is_found(device: Device, op: str, spoil: Any) -> None:
    found_where_spoilt(device, op, spoil, engine="sm")
