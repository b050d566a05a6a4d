"""Choosing a strategy without a search.

Without figures the choice is by the collective alone, as first measurements on H200s had it: copy engines where nothing
must be added, else NCCL, and the collective enqueued first, since a large GEMM leaves no SM to what comes after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autotune.c3.scenario import REDUCING, Scenario
from autotune.c3.strategy import HostStrategy, Strategy, normalize, reject
from autotune.task import Config

MOST = 8
"""Strategies that :func:`choose` returns at most."""

_MOVING: tuple[Mapping[str, Any], ...] = (
    {"engine": "copy", "order": "comm_first"},
    {"engine": "copy", "order": "gemm_first"},
    {"engine": "copy", "order": "comm_first", "direction": "pull"},
    {"engine": "nccl", "order": "comm_first", "priority": "comm"},
    {"engine": "copy", "order": "gemm_first", "direction": "pull"},
    {"engine": "copy", "order": "comm_first", "batch": True},
    {"engine": "nccl", "order": "comm_first", "priority": "comm", "reserve": 24},
    {"engine": "sm", "order": "comm_first", "priority": "comm", "ctas": 32},
)
_REDUCING: tuple[Mapping[str, Any], ...] = (
    {"engine": "nccl", "order": "comm_first", "priority": "comm"},
    {"engine": "copy", "order": "comm_first", "priority": "comm", "chunks": 4, "reserve": 16},
    {"engine": "copy", "order": "comm_first", "priority": "comm", "chunks": 4},
    {"engine": "nccl", "order": "comm_first", "priority": "comm", "reserve": 24},
    {"engine": "nccl", "order": "gemm_first", "priority": "comm"},
    {"engine": "sm", "order": "comm_first", "priority": "comm", "ctas": 32},
    {"engine": "sm", "order": "comm_first", "priority": "comm", "ctas": 16, "reserve": 16},
    {"engine": "copy", "order": "comm_first", "priority": "comm"},
)
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
    return distinct(_by_rule(scenario, side), scenario, side)[0]


def choose(scenario: Scenario, figures: Mapping[str, float], side: str) -> list[Config]:
    """Strategies to expect most of, the best first, at most :data:`MOST`.

    Args:
        figures: what ``autotune calibrate c3`` measured; empty where it did not.
        side: "cuda" or "cpu".
    """
    return distinct(_by_rule(scenario, side), scenario, side)[:MOST]


def distinct(found: Iterable[Mapping[str, Any]], scenario: Scenario, side: str) -> list[Config]:
    """The strategies that can work, each once, normalised and with every parameter of the side; the order stays."""
    kind = HostStrategy if side == "cpu" else Strategy
    out: list[Config] = []
    for part in found:
        config = normalize(kind.of(part).config(), scenario, side)
        if reject(config, scenario, side) is None and config not in out:
            out.append(config)
    return out


def _by_rule(scenario: Scenario, side: str) -> Sequence[Mapping[str, Any]]:
    if side == "cpu":
        return _HOST
    return _REDUCING if scenario.collective in REDUCING else _MOVING
