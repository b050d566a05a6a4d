"""Strategies: which of them are the same, which cannot work, and which the rule chooses without a search."""

from __future__ import annotations

import random

import pytest

from autotune.domains.c3.scenario import COLLECTIVES, Gemm, Program, Scenario
from autotune.domains.c3.strategy import (
    BASELINES,
    EARLIER,
    KINDS,
    SM_BLOCKS,
    HostStrategy,
    Strategy,
    by_rule,
    improper,
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
    kind, space = KINDS[side], load_space("c3", side)
    assert [p.name for p in space] == list(kind.__dataclass_fields__)
    for plain in BASELINES[side].values():
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
    """Return True if the changes make no difference to the strategy ``base``."""
    plain = KINDS[side].of(base).config()
    return normalize({**plain, **changes}, scenario(op), side) == normalize(plain, scenario(op), side)  # type: ignore[dict-item]


def test_normalize_ignores_parameters_without_effect() -> None:
    assert same({"priority": "comm", "reserve": 16}, order="sequential")
    assert not same({"reserve": 16}, order="comm_first")
    assert same({"chunks": 4}, "all_reduce", engine="nccl")
    assert same({"chunks": 4}, "all_gather", engine="copy")
    assert not same({"chunks": 4}, "all_reduce", engine="copy")
    assert not same({"ctas": 16}, engine="nccl")
    assert same({"adds": "resident"}, "reduce_scatter", engine="copy")  # of an earlier version
    assert same({"ctas": 32}, engine="copy")
    assert not same({"ctas": 32}, "all_reduce", engine="copy")
    assert same({"ctas": SM_BLOCKS}, "all_reduce", engine="copy")
    assert same({"ctas": SM_BLOCKS}, engine="sm")
    assert same({"copies": 4}, side="cpu", engine="gloo", order="comm_first")
    assert not same({"copies": 4}, side="cpu", engine="copy", order="comm_first")


EVERY_EARLIER_CHOICE = {
    "cuda": {"launch": "eager", "panels": 4, "streams": 3, "direction": "pull", "batch": True, "adds": "resident"},
    "cpu": {"chunks": 8, "panels": 2},
}


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("op", COLLECTIVES)
def test_choices_of_earlier_versions_are_ignored(side: str, op: str) -> None:
    earlier = EVERY_EARLIER_CHOICE[side]
    assert earlier.keys() == EARLIER[side]
    for base in by_rule(scenario(op), side):
        assert improper({**base, **earlier}, side) == ""
        assert normalize({**base, **earlier}, scenario(op), side) == base
        assert KINDS[side].of({**base, **earlier}) == KINDS[side].of(base)
    assert "which this autotune lacks" in improper({"lanes": 3}, side)


def test_a_computation_that_was_favoured_is_so_no_more() -> None:
    stored = {**Strategy("gemm_first").config(), "priority": "gemm"}
    assert improper(stored, "cuda") == ""
    assert normalize(stored, scenario(), "cuda")["priority"] == "equal"
    assert normalize({**stored, "engine": "copy"}, scenario(), "cuda")["priority"] == "comm"


def test_an_invalid_strategy_has_a_reason() -> None:
    plain, small = Strategy().config(), Scenario(Gemm(256, 64, 64), "all_gather", 4 * 4096, 4)
    assert reject(plain, small, "cuda") is None
    assert reject({**plain, "chunks": 2}, small, "cuda") is None
    assert "in 4 chunks" in str(reject({**plain, "chunks": 4}, small, "cuda"))
    assert reject({**plain, "reserve": 48}, small, "cuda") is None
    assert "48 SMs kept" in str(reject({**plain, "reserve": 48}, small, "cuda", sms=48))
    assert "only move data" in str(reject({**plain, "engine": "sm"}, small, "cuda"))
    assert reject({**plain, "engine": "sm"}, scenario("all_reduce"), "cuda") is None
    assert reject(HostStrategy("gemm_first", "copy", 1, 4).config(), small, "cpu") is None


def test_strategy_labels_name_non_default_parameters() -> None:
    assert Strategy().label == "nccl sequential"
    assert Strategy("comm_first", "copy", reserve=8).label == "copy comm_first reserve=8"
    assert HostStrategy("gemm_first", copies=2).label == "gloo gemm_first copies=2"


def test_streams_differ_in_priority_where_only_nccl_need_not() -> None:
    s = scenario()
    for engine, priority in (("copy", "comm"), ("sm", "comm"), ("nccl", "equal")):
        config = Strategy("gemm_first", engine).config()
        assert normalize(config, s, "cuda")["priority"] == priority


# ---- the rule -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("op", COLLECTIVES)
def test_there_is_a_choice_for_everything(op: str, side: str) -> None:
    for compute in (SQUARE, Gemm(64, 64, 64), Program("layer_norm")):
        for nbytes in (1 << 29, 64):
            s = Scenario(compute, op, nbytes, 4)
            found = by_rule(s, side)
            for config in found:
                assert set(config) == set(KINDS[side]().config())
                assert normalize(config, s, side) == config
                assert reject(config, s, side) is None
            assert len({str(c) for c in found}) == len(found) > 0


def test_the_default_uses_copy_engines_except_for_all_reduce() -> None:
    engines = {c: by_rule(scenario(c), "cuda")[0]["engine"] for c in COLLECTIVES}
    assert engines.pop("all_reduce") == "nccl"
    assert set(engines.values()) == {"copy"}
    assert by_rule(scenario(), "cpu")[0]["engine"] == "gloo"
    assert all(by_rule(scenario(c), side)[0]["order"] != "sequential" for c in COLLECTIVES for side in SIDES)
