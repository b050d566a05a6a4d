"""The rule: strategies without a search."""

from __future__ import annotations

import pytest

from autotune.domains.c3.rule import choose, default
from autotune.domains.c3.scenario import COLLECTIVES, Gemm, Program, Scenario
from autotune.domains.c3.strategy import HostStrategy, Strategy, normalize, reject

MIB = 1 << 20
SQUARE = Gemm(8192, 8192, 8192)


def scenario(collective: str = "all_gather", nbytes: int = 512 * MIB, compute: Gemm | Program = SQUARE) -> Scenario:
    return Scenario(compute, collective, nbytes, 4)


@pytest.mark.parametrize("side", ["cuda", "cpu"])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_there_is_a_choice_for_everything(collective: str, side: str) -> None:
    for compute in (SQUARE, Gemm(64, 64, 64), Program("layer_norm")):
        for nbytes in (512 * MIB, 64):
            s = scenario(collective, nbytes, compute)
            found = choose(s, side)
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
