"""The protocol of the kernels that move data themselves, in random orders of all that ranks and streams do."""

from __future__ import annotations

import random
from typing import Any

import pytest

from autotune.domains.c3.collectives.base import Spec
from autotune.domains.c3.collectives.sm import _DONE, _READY, SmCollective
from autotune.domains.c3.scenario import COLLECTIVES, REDUCING
from autotune.domains.c3.strategy import Strategy
from autotune.errors import Unsupported
from autotune.task import Artifact
from tests.support.c3.fake_calls import SIZES, Party, found_where_spoilt, no_done, no_ready, nothing, play, play_two
from tests.support.c3.fake_device import BIASES, QUEUES
from tests.support.c3.fake_driver import Device, kernels


def some(rng: random.Random, op: str) -> dict[str, Any]:
    """A random strategy of the kernels."""
    direction = "pull" if op in REDUCING else rng.choice(("push", "pull"))
    return {"engine": "sm", "chunks": rng.choice((1, 2, 3, 4)), "direction": direction}


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("op", COLLECTIVES)
def test_calls_back_to_back(device: Device, op: str, ranks: int) -> None:
    """New inputs in every call, recorded ones too; sizes that no chunk divides; ranks ahead and behind."""
    rng = random.Random(f"{op} {ranks}")
    for seed, (bias, queues) in enumerate((b, q) for b in BIASES for q in QUEUES):
        world = device.open(ranks, seed, queues, bias)
        party = Party(world, op, SIZES[seed % len(SIZES)], rng.choice(("f32", "bf16")), **some(rng, op))
        play(world, party, 2, replayed=seed % 2 == 1)
        party.close()


@pytest.mark.parametrize("op", COLLECTIVES)
def test_branches_of_a_graph_in_any_order(device: Device, op: str) -> None:
    for seed in range(6):
        world = device.open(2, seed, "one")
        world.shuffle = True
        play(world, Party(world, op, 200, **some(random.Random(seed), op)), replayed=True)


@pytest.mark.parametrize("queues", QUEUES)
def test_beside_the_copy_engines(device: Device, queues: str) -> None:
    """Two in flight, one of each engine, on streams that may share a hardware queue."""
    rng = random.Random(queues)
    for seed in range(8):
        world = device.open(rng.choice((2, 3, 4)), seed, queues, BIASES[seed % len(BIASES)])
        one, other = rng.sample(COLLECTIVES, 2)
        copied = Party(world, other, rng.choice(SIZES), engine="copy", chunks=2)
        play_two(world, [Party(world, one, rng.choice(SIZES), **some(rng, one)), copied])


def test_buffers_are_used_again_by_the_other_engine(device: Device) -> None:
    rng = random.Random(1)
    world = device.open(3, 1, bias="strict")
    for op in COLLECTIVES:
        for told in (some(rng, op), {"engine": "copy"}):
            party = Party(world, op, 200, **told)
            play(world, party, 2)
            party.close()
    assert len({len(g.kept["symmetric buffers"]) for g in world.groups}) == 1


@pytest.mark.parametrize("op", COLLECTIVES)
def test_missing_kernels(device: Device, op: str) -> None:
    world = device.open(2, 0)
    strategy, spec = Strategy(engine="sm"), Spec(op, 128, "bf16")
    with pytest.raises(Unsupported, match=f"the kernels of {op} are not there"):
        SmCollective(spec, world.on(0), strategy)
    another = "all_gather" if op in REDUCING else "all_reduce"
    some_of = kernels(strategy, another, 2, "bf16").kernels
    with pytest.raises(Unsupported, match=f"the kernels of {op} are not there: (copy|reduce)$"):
        SmCollective(spec, world.on(0), strategy, Artifact("sm_90", some_of))


# ---- protocols with a fault, which the simulator has to find --------------------------------------------------------


def done_before_the_kernels(c: Any) -> None:
    tell, wait = c._tell[_DONE], c._wait[_READY]
    c._tell[_DONE] = nothing

    def early(raw: int) -> None:
        wait(raw)
        tell(raw)

    c._wait[_READY] = early


def one_set_of_flags(c: Any) -> None:
    c._tell[_DONE], c._wait[_DONE] = c._tell[_READY], c._wait[_READY]


def no_second_half(c: Any) -> None:
    c._spread = nothing


@pytest.mark.parametrize(
    ("op", "direction", "spoil"),
    [
        *((op, d, no_ready) for op in ("all_gather", "all_to_all") for d in ("push", "pull")),
        *((op, "pull", no_ready) for op in REDUCING),
        *((op, "push", done_before_the_kernels) for op in ("all_gather", "all_to_all")),
        *((op, "pull", done_before_the_kernels) for op in REDUCING),
        *((op, "pull", no_done) for op in COLLECTIVES),
        *((op, "pull", one_set_of_flags) for op in ("all_to_all", "all_reduce")),
        ("all_reduce", "pull", no_second_half),
    ],
)
def test_a_spoilt_protocol_is_found(device: Device, op: str, direction: str, spoil: Any) -> None:
    found_where_spoilt(device, op, spoil, engine="sm", chunks=2, direction=direction)
