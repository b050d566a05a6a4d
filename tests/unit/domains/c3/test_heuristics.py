"""Heuristics: what is chosen with and without a calibration."""

from __future__ import annotations

import pytest

from autotune.domains.c3.calibration.heuristics import MOST, choose, default, predict
from autotune.domains.c3.calibration.model import Model
from autotune.domains.c3.calibration.tables import parse_strategy, strategy_name
from autotune.domains.c3.scenario import COLLECTIVES, Gemm, Program, Scenario
from autotune.domains.c3.strategy import HostStrategy, Strategy, normalize, reject
from autotune.task import Config

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
    for size, expected in ((1, 100.0), (16, 100.0), (32, 400 / 3), (64, 200.0), (256, 600.0)):
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


def test_fewer_thread_blocks_than_were_measured_take_longer_in_proportion() -> None:
    model = Model.of({f"comm_us.all_gather.sm,push,ctas={n}.512MiB": us for n, us in ((16, 2000.0), (32, 1500.0))})

    def us(ctas: int) -> float | None:
        return model.comm_us(scenario(), Strategy("comm_first", "sm", ctas=ctas).config())

    assert [us(n) for n in (4, 8, 16, 32, 64)] == [8000.0, 4000.0, 2000.0, 1500.0, 1500.0]


def test_what_hides_with_SMs_of_its_own_tells_nothing_of_what_has_none() -> None:
    figures = {"gemm_us.8192x8192x8192.bf16": 1500.0, "gemm_slowdown.8192x8192x8192.bf16.reserve=8": 1.1}
    for op in ("reduce_scatter", "all_gather"):
        figures |= {f"comm_us.{op}.{way}.512MiB": 1000.0 for way in ("copy,push", "sm,push,ctas=8", "sm,pull,ctas=8")}
    held = Strategy("comm_first", "sm", priority="comm", reserve=8, ctas=8, direction="pull").config()
    free = {**held, "reserve": 0}
    s, name = scenario("reduce_scatter"), "8192x8192x8192.bf16.67pct"
    figures[f"unhidden.reduce_scatter.{strategy_name(held)}.{name}"] = 0.1
    assert predict(s, held, figures) == pytest.approx(1600, rel=1e-3)  # a ratio of 67%, not of two thirds
    assert Model.of(figures).expect(s, free).table is None  # type: ignore[union-attr]
    # Of another collective, without SMs of its own as well, is as near as it gets.
    figures[f"unhidden.all_gather.sm,comm_first,priority=comm,ctas=8.{name}"] = 0.9
    assert predict(s, free, figures) > 2400  # type: ignore[operator]
    assert predict(s, held, figures) == pytest.approx(1600, rel=1e-3)


def two_gemms(pull: tuple[float, float]) -> dict[str, float]:
    """Two GEMMs beside copies, of which 0.2 are not hidden where they are pushed, and ``pull`` where pulled."""
    figures = {f"comm_us.all_gather.copy,{way}.512MiB": 1000.0 for way in ("push", "pull")}
    for shape, us, share in (("4096x8192x8192", 750.0, pull[0]), ("16384x8192x8192", 3000.0, pull[1])):
        figures[f"gemm_us.{shape}.bf16"] = us
        for way, value in (("", 0.2), (",direction=pull", share)):
            figures[f"unhidden.all_gather.copy,gemm_first,priority=comm{way}.{shape}.bf16.67pct"] = value
    return figures


def gain(figures: dict[str, float], s: Scenario, config: Config, over: Config) -> float:
    model = Model.of(figures)
    new, old = model.expect(s, config), model.expect(s, over)
    assert new is not None
    assert old is not None
    return model.gain(s, new, old)


@pytest.mark.parametrize(
    ("pull", "direction"), [((0.1, 0.1), "pull"), ((0.0, 0.3), "push"), ((0.19, 0.19), "pull"), ((0.3, 0.3), "push")]
)
def test_the_choice_by_rule_gives_way_to_what_is_surely_better(pull: tuple[float, float], direction: str) -> None:
    """(0, 0.3): a gain of 0.05 in the mean, where the one GEMM is wrong about the other by 0.3."""
    figures, s = two_gemms(pull), scenario()
    assert choose(s, figures, "cuda")[0]["direction"] == direction
    rule = default(s, "cuda")
    pulled = {**rule, "direction": "pull"}
    assert (gain(figures, s, pulled, rule) > 0) == (direction == "pull")
    assert -1 < gain(figures, s, rule, rule) <= 0
    assert pulled in choose(s, figures, "cuda")  # a search tries it all the same


def test_far_from_every_measured_ratio_a_gain_has_to_be_larger() -> None:
    figures, rule = two_gemms((0.15, 0.15)), default(scenario(), "cuda")
    pulled = {**rule, "direction": "pull"}
    assert gain(figures, scenario(), pulled, rule) > 0
    assert gain(figures, scenario(nbytes=4096 * MIB), pulled, rule) < 0


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
