"""Heuristics: what is chosen with and without a calibration."""

from __future__ import annotations

import pytest

from autotune.c3.heuristics import MOST, choose, default, predict
from autotune.c3.model import Model, parse_strategy, strategy_name
from autotune.c3.scenario import COLLECTIVES, Gemm, Program, Scenario
from autotune.c3.strategy import HostStrategy, Strategy, normalize, reject

MIB = 1 << 20
SQUARE = Gemm(8192, 8192, 8192)


def scenario(collective: str = "all_gather", nbytes: int = 512 * MIB, compute: Gemm | Program = SQUARE) -> Scenario:
    return Scenario(compute, collective, nbytes, 4)


@pytest.mark.parametrize("side", ["cuda", "cpu"])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_without_figures_there_is_a_choice_for_everything(collective: str, side: str) -> None:
    for compute in (SQUARE, Gemm(64, 64, 64), Program("layer_norm")):
        for nbytes in (512 * MIB, 64):
            s = scenario(collective, nbytes, compute)
            found = choose(s, {}, side)
            assert 1 <= len(found) <= MOST
            assert found[0] == default(s, side)
            names = set((HostStrategy if side == "cpu" else Strategy)().config())
            for config in found:
                assert set(config) == names
                assert normalize(config, s, side) == config
                assert reject(config, s, side) is None
            assert len({str(c) for c in found}) == len(found)


def test_the_default_uses_copy_engines_except_for_all_reduce() -> None:
    engines = {c: default(scenario(c), "cuda")["engine"] for c in COLLECTIVES}
    assert engines.pop("all_reduce") == "nccl"
    assert set(engines.values()) == {"copy"}
    assert default(scenario(), "cpu")["engine"] == "gloo"
    assert all(default(scenario(c), side)["order"] != "sequential" for c in COLLECTIVES for side in ("cuda", "cpu"))


def test_names_of_strategies_lead_back_to_them() -> None:
    for side, space in (("cuda", Strategy()), ("cpu", HostStrategy())):
        for collective in COLLECTIVES:
            for config in [space.config(), *choose(scenario(collective), {}, side)]:
                assert parse_strategy(strategy_name(config), side) == config
    odd = Strategy("gemm_first", "copy", "eager", "comm", 8, 16, 4, 2, 3, "pull", True).config()
    assert parse_strategy(strategy_name(odd), "cuda") == odd


def test_times_between_and_beyond_what_was_measured() -> None:
    model = Model.of(
        {
            "comm_us.all_gather.copy,push.16MiB": 100.0,
            "comm_us.all_gather.copy,push.64MiB": 200.0,
            "gemm_us.4096x4096x4096.bf16": 200.0,
            "gemm_us.64x8192x8192.bf16": 40.0,
            "gemm_slowdown.4096x4096x4096.bf16.reserve=32": 1.4,
        }
    )
    copy = default(scenario(), "cuda")
    for size, expected in ((1, 100.0), (16, 100.0), (32, 100.0 * 2**0.5), (64, 200.0), (256, 800.0)):
        assert model.comm_us(scenario(nbytes=size * MIB), copy) == pytest.approx(expected)
    assert model.comm_us(scenario("all_to_all"), copy) is None
    large = model.gemm_us(Gemm(8192, 8192, 8192))
    assert large == pytest.approx(8 * 200.0, rel=0.02)
    small = model.gemm_us(Gemm(64, 16384, 8192))
    assert small == pytest.approx(2 * 40.0, rel=0.02)  # twice the weights to read
    assert model.gemm_us(Gemm(64, 64, 64, "f32")) is None
    assert model.slowdown(SQUARE, "reserve", 16) == pytest.approx(1.2)
    assert model.slowdown(SQUARE, "reserve", 0) == 1.0


def test_what_was_measured_together_is_found_again() -> None:
    figures = {
        "comm_us.all_gather.copy,push.512MiB": 1000.0,
        "comm_us.all_gather.nccl.512MiB": 1200.0,
        "gemm_us.8192x8192x8192.bf16": 1500.0,
        "unhidden.all_gather.copy,comm_first,priority=comm.8192x8192x8192.bf16.67pct": 0.4,
        "unhidden.all_gather.copy,gemm_first,priority=comm.8192x8192x8192.bf16.67pct": 0.1,
        "unhidden.all_gather.nccl,comm_first,priority=comm.8192x8192x8192.bf16.80pct": 0.3,
    }
    s = scenario()
    other = {**default(s, "cuda"), "order": "comm_first"}
    assert predict(s, other, figures) == pytest.approx(1500 + 0.4 * 1000)
    first = choose(s, figures, "cuda")[0]
    assert (first["engine"], first["order"]) == ("copy", "gemm_first")
    assert predict(s, first, figures) == pytest.approx(1500 + 0.1 * 1000)
    sequential = Strategy(engine="nccl").config()
    assert predict(s, sequential, figures) == pytest.approx(2700)
    # What was not tried is never thought better than its nearest relative.
    unknown = normalize({**first, "streams": 3}, s, "cuda")
    assert predict(s, unknown, figures) > predict(s, first, figures)  # type: ignore[operator]
    assert predict(scenario(compute=Program("layer_norm")), first, figures) is None
    assert predict(s, first, {}) is None


def test_names_of_another_version_are_left_out() -> None:
    model = Model.of({"ranks": 4.0, "gemm_us.big.bf16": 1.0, "unhidden.a.b": 1.0, "comm_us.all_gather.nccl.many": 2.0})
    assert model == Model()
    assert choose(scenario(), {"ranks": 4.0}, "cuda") == choose(scenario(), {}, "cuda")


def test_the_best_few_differ() -> None:
    figures = {"gemm_us.4096x4096x4096.bf16": 200.0}
    figures |= {f"comm_us.all_gather.{way}.64MiB": 100.0 + k for k, way in enumerate(("copy,push", "nccl", "sm,push"))}
    found = choose(scenario(), figures, "cuda")
    assert len(found) == MOST
    kinds = [(c["engine"], c["order"]) for c in found]
    assert len(set(kinds)) >= 3
    assert max(kinds.count(k) for k in kinds[:6]) <= 3
