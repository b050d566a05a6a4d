"""Heuristics: what is chosen with and without a calibration."""

from __future__ import annotations

import pytest

from autotune.c3.heuristics import MOST, choose, default
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


def test_the_default_uses_copy_engines_where_nothing_is_added() -> None:
    assert default(scenario("all_gather"), "cuda")["engine"] == "copy"
    assert default(scenario("all_to_all"), "cuda")["engine"] == "copy"
    assert default(scenario("reduce_scatter"), "cuda")["engine"] == "nccl"
    assert default(scenario("all_reduce"), "cuda")["engine"] == "nccl"
    assert default(scenario(), "cpu")["engine"] == "gloo"
    assert all(default(scenario(c), side)["order"] == "comm_first" for c in COLLECTIVES for side in ("cuda", "cpu"))
