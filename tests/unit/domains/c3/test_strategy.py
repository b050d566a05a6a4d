"""Strategies: which of them are the same, and which cannot work."""

from __future__ import annotations

import random

import pytest

from autotune.domains.c3.scenario import COLLECTIVES, REDUCING, Gemm, Program, Scenario
from autotune.domains.c3.strategy import (
    HOST_NAIVE,
    HOST_SEQUENTIAL,
    NAIVE,
    SEQUENTIAL,
    SM_BLOCKS,
    HostStrategy,
    Strategy,
    normalize,
    reject,
)
from autotune.space import load_space

SIDES = ("cuda", "cpu")
SQUARE = Gemm(4096, 4096, 4096)


def scenario(op: str = "all_gather", compute: Gemm | Program = SQUARE) -> Scenario:
    return Scenario(compute, op, 1 << 24, 4)


@pytest.mark.parametrize("side", SIDES)
def test_the_file_and_the_fields_agree(side: str) -> None:
    kind = Strategy if side == "cuda" else HostStrategy
    space = load_space("c3", side)
    assert [p.name for p in space] == list(kind.__dataclass_fields__)
    for plain in [SEQUENTIAL, NAIVE] if side == "cuda" else [HOST_SEQUENTIAL, HOST_NAIVE]:
        assert space.contains(plain)
        assert kind.of(plain).config() == plain


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("op", COLLECTIVES)
@pytest.mark.parametrize("compute", [SQUARE, Program("softmax")])
def test_normalising_is_idempotent_and_stays_in_the_space(op: str, side: str, compute: Gemm | Program) -> None:
    space, where, rng = load_space("c3", side), scenario(op, compute), random.Random(0)
    for _ in range(300):
        config = normalize(space.sample(rng), where, side)
        assert space.contains(config), config
        assert normalize(config, where, side) == config


def same(changes: dict[str, object], op: str = "all_gather", side: str = "cuda", **base: object) -> bool:
    """Whether the changes make no difference to the strategy ``base``."""
    kind = Strategy if side == "cuda" else HostStrategy
    plain = kind.of(base).config()  # type: ignore[arg-type]
    return normalize({**plain, **changes}, scenario(op), side) == normalize(plain, scenario(op), side)  # type: ignore[dict-item]


def test_what_plays_no_part_makes_no_difference() -> None:
    assert same({"priority": "comm", "reserve": 16, "panels": 4}, order="sequential")
    assert not same({"reserve": 16}, order="comm_first")
    assert same({"streams": 3, "batch": True, "direction": "pull"}, engine="nccl")
    assert not same({"ctas": 16}, engine="nccl")
    assert same({"ctas": 32}, engine="copy")
    assert not same({"ctas": 32}, "all_reduce", engine="copy")
    assert same({"ctas": SM_BLOCKS}, "all_reduce", engine="copy")
    assert same({"ctas": SM_BLOCKS}, engine="sm")
    for op in COLLECTIVES:
        for engine in ("copy", "sm"):
            assert same({"direction": "pull"}, op, engine=engine) == (op in REDUCING), (op, engine)
    assert same({"copies": 4}, side="cpu", engine="gloo", order="comm_first")
    assert not same({"copies": 4}, side="cpu", engine="copy", order="comm_first")
    assert same({"chunks": 4, "panels": 2}, side="cpu", order="sequential")


def test_only_a_gemm_has_panels() -> None:
    config = Strategy(order="comm_first", panels=4).config()
    assert normalize(config, scenario(compute=Program("softmax")), "cuda")["panels"] == 1
    assert normalize(config, scenario(), "cuda")["panels"] == 4


@pytest.mark.parametrize("side", SIDES)
def test_what_cannot_work_says_why(side: str) -> None:
    plain = SEQUENTIAL if side == "cuda" else HOST_SEQUENTIAL
    small = Scenario(Gemm(256, 64, 64), "all_gather", 4 * 4096, 4)
    assert reject(plain, small, side) is None
    assert reject({**plain, "panels": 4}, small, side) is None
    assert reject({**plain, "panels": 8}, small, side) == "256 rows in 8 panels"
    if side == "cuda":
        assert reject({**plain, "chunks": 2}, small, side) is None
        assert "in 4 chunks" in str(reject({**plain, "chunks": 4}, small, side))
        assert reject({**plain, "reserve": 48}, small, side) is None
        assert "48 SMs kept" in str(reject({**plain, "reserve": 48}, small, side, sms=48))


def test_labels_name_what_differs() -> None:
    assert Strategy().label == "nccl sequential"
    assert Strategy("comm_first", "copy", reserve=8).label == "copy comm_first reserve=8"
    assert HostStrategy("gemm_first", copies=2).label == "gloo gemm_first copies=2"


def test_streams_differ_in_priority_where_only_nccl_need_not() -> None:
    s = scenario()
    for engine, priority in (("copy", "comm"), ("sm", "comm"), ("nccl", "equal")):
        config = Strategy("gemm_first", engine).config()
        assert normalize(config, s, "cuda")["priority"] == priority
    kept = Strategy("gemm_first", "copy", priority="gemm").config()
    assert normalize(kept, s, "cuda")["priority"] == "gemm"
