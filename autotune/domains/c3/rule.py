"""Strategies without a search: a fixed rule.

The choice is by the collective alone, as measured on H200s: copy engines, except for all_reduce, and
the computation first. A kernel copies the part of an all-to-all that stays on the device, and a kernel adds for a
reduce-scatter. Both then run in the computation's tail. The collective's stream has the higher priority even where
it launches no kernel: streams of one priority may share a hardware queue, and then run one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from autotune.domains.c3.scenario import Scenario
from autotune.domains.c3.strategy import HostStrategy, Strategy, normalize, reject
from autotune.task import Config

_MOVING: tuple[Mapping[str, Any], ...] = (
    {"engine": "copy", "order": "gemm_first", "priority": "comm"},
    {"engine": "copy", "order": "comm_first", "priority": "comm"},
    {"engine": "copy", "order": "gemm_first", "priority": "comm", "direction": "pull"},
    {"engine": "copy", "order": "comm_first", "priority": "comm", "panels": 2},
    {"engine": "nccl", "order": "comm_first", "priority": "comm", "ctas": 32, "reserve": 32},
    {"engine": "copy", "order": "comm_first", "priority": "comm", "direction": "pull"},
    {"engine": "nccl", "order": "comm_first", "priority": "comm"},
    {"engine": "sm", "order": "comm_first", "priority": "comm", "ctas": 32},
)
_SCATTERING: tuple[Mapping[str, Any], ...] = (
    {"engine": "copy", "order": "gemm_first", "priority": "comm", "ctas": 128},
    {"engine": "copy", "order": "comm_first", "priority": "comm", "ctas": 128},
    {"engine": "copy", "order": "comm_first", "priority": "comm", "ctas": 32, "chunks": 4, "reserve": 4},
    {"engine": "copy", "order": "comm_first", "priority": "comm", "ctas": 128, "chunks": 2},
    {"engine": "nccl", "order": "comm_first", "priority": "comm"},
    {"engine": "sm", "order": "comm_first", "priority": "comm", "ctas": 8},
    {"engine": "sm", "order": "comm_first", "priority": "comm", "ctas": 24},
    {"engine": "nccl", "order": "comm_first", "priority": "comm", "ctas": 16},
)
_REDUCING: tuple[Mapping[str, Any], ...] = (
    {"engine": "nccl", "order": "comm_first", "priority": "comm", "ctas": 32},
    {"engine": "copy", "order": "gemm_first", "priority": "comm", "ctas": 32, "chunks": 4, "reserve": 8},
    {"engine": "nccl", "order": "comm_first", "priority": "comm"},
    {"engine": "copy", "order": "comm_first", "priority": "comm", "ctas": 32, "chunks": 4, "reserve": 8},
    {"engine": "nccl", "order": "comm_first", "priority": "comm", "reserve": 16},
    {"engine": "copy", "order": "comm_first", "priority": "comm", "ctas": 128},
    {"engine": "sm", "order": "comm_first", "priority": "comm", "ctas": 24},
    {"engine": "sm", "order": "comm_first", "priority": "comm", "ctas": 16},
)
_RULES = {
    "all_gather": _MOVING,
    "all_to_all": _MOVING,
    "reduce_scatter": _SCATTERING,
    "all_reduce": _REDUCING,
}
_HOST: tuple[Mapping[str, Any], ...] = (
    {"engine": "gloo", "order": "comm_first"},
    {"engine": "copy", "order": "comm_first"},
    {"engine": "copy", "order": "gemm_first"},
    {"engine": "gloo", "order": "gemm_first"},
    {"engine": "copy", "order": "comm_first", "copies": 2},
    {"engine": "gloo", "order": "comm_first", "threads": 1},
    {"engine": "copy", "order": "sequential"},
)


def default(scenario: Scenario, side: str) -> Config:
    """The strategy for a scenario of which nothing is known.

    Args:
        side: "cuda" or "cpu".
    """
    return choose(scenario, side)[0]


def choose(scenario: Scenario, side: str) -> list[Config]:
    """Strategies to expect most of, by rule, the best first.

    Args:
        side: "cuda" or "cpu".
    """
    return distinct(_HOST if side == "cpu" else _RULES[scenario.collective], scenario, side)


def distinct(found: Iterable[Mapping[str, Any]], scenario: Scenario, side: str) -> list[Config]:
    """The strategies that can work, each once, normalised and with every parameter of the side; the order stays."""
    kind = HostStrategy if side == "cpu" else Strategy
    out: list[Config] = []
    for part in found:
        config = normalize(kind.of(part).config(), scenario, side)
        if reject(config, scenario, side) is None and config not in out:
            out.append(config)
    return out


__all__ = ["choose", "default", "distinct"]
