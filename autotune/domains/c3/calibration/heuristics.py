"""Choosing a strategy without a search.

Without figures the choice is by the collective alone, as measured on H200s: copy engines, except for all_reduce, and
the computation first. What an all-to-all keeps on the device is copied by a kernel, and what a reduce-scatter adds is
added by one, which both then run in the computation's tail. The collective's stream has the higher priority even where
it launches no kernel: streams of one priority may share a hardware queue, and then run one after the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from autotune.domains.c3.calibration.model import Expected, Model, predict
from autotune.domains.c3.calibration.tables import parse_strategy
from autotune.domains.c3.scenario import Scenario
from autotune.domains.c3.strategy import HostStrategy, Strategy, normalize, reject
from autotune.task import Config

MOST = 8
"""Strategies that :func:`choose` returns at most."""
_ALIKE = 3

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
    return distinct(_by_rule(scenario, side), scenario, side)[0]


def choose(scenario: Scenario, figures: Mapping[str, float], side: str) -> list[Config]:
    """Strategies to expect most of, the best first, at most :data:`MOST`.

    Args:
        figures: what ``autotune calibrate c3`` measured; empty where it did not.
        side: "cuda" or "cpu".
    """
    plain = distinct(_by_rule(scenario, side), scenario, side)
    if not figures:
        return plain[:MOST]
    model = Model.of(figures)
    expected: list[tuple[Expected, Config]] = []
    for config in distinct((*_tried(model, scenario, side), *plain, *_more(side)), scenario, side):
        found = model.expect(scenario, config)
        if found is not None:
            expected.append((found, config))
    expected.sort(key=lambda e: e[0].us)
    first = _first(model, scenario, plain, expected)
    return distinct((*first, *_unlike(config for _, config in expected), *plain), scenario, side)[:MOST]


def _first(
    model: Model, scenario: Scenario, plain: Sequence[Config], expected: Sequence[tuple[Expected, Config]]
) -> list[Config]:
    """The choice: the first by rule of which anything is known (an engine may not work here), or what is expected to
    gain more on that than expectations are off by. None where nothing is known of those by rule."""
    for rule in plain:
        for old, config in expected:
            if config == rule:
                gains = [(model.gain(scenario, new, old), other) for new, other in expected]
                gain, best = max(gains, key=lambda e: e[0])
                return [best] if gain > 0 else [rule]
    return []


def distinct(found: Iterable[Mapping[str, Any]], scenario: Scenario, side: str) -> list[Config]:
    """The strategies that can work, each once, normalised and with every parameter of the side; the order stays."""
    kind = HostStrategy if side == "cpu" else Strategy
    out: list[Config] = []
    for part in found:
        config = normalize(kind.of(part).config(), scenario, side)
        if reject(config, scenario, side) is None and config not in out:
            out.append(config)
    return out


def _tried(model: Model, scenario: Scenario, side: str) -> list[Config]:
    """The strategies that the calibration tried beside this collective."""
    return [parse_strategy(name, side) for op, name in model.shares if op == scenario.collective]


def _more(side: str) -> Iterator[Mapping[str, Any]]:
    """Strategies that are not tried beside GEMMs, and follow from the other tables."""
    if side == "cpu":
        for order, copies, chunks in product(("comm_first", "gemm_first"), (1, 2), (1, 4)):
            yield {"engine": "copy", "order": order, "copies": copies, "chunks": chunks}
    else:
        for engine, ctas, reserve in product(("nccl", "sm"), (0, 8, 16, 24, 32, 64), (0, 16, 32)):
            yield {"engine": engine, "order": "comm_first", "priority": "comm", "ctas": ctas, "reserve": reserve}
        for order, reserve, chunks in product(("comm_first", "gemm_first"), (0, 8, 16), (1, 4)):
            yield {"engine": "copy", "order": order, "reserve": reserve, "chunks": chunks}
    for engine in ("gloo", "copy") if side == "cpu" else ("nccl", "copy", "sm"):
        yield {"engine": engine, "order": "sequential"}


def _unlike(ranked: Iterable[Config]) -> Iterator[Config]:
    """At most :data:`_ALIKE` of each engine and issue order: a search learns little from more of a kind."""
    seen: Counter[tuple[Any, Any]] = Counter()
    for config in ranked:
        kind = (config["engine"], config["order"])
        seen[kind] += 1
        if seen[kind] <= _ALIKE:
            yield config


def _by_rule(scenario: Scenario, side: str) -> Sequence[Mapping[str, Any]]:
    if side == "cpu":
        return _HOST
    return _RULES[scenario.collective]


__all__ = ["MOST", "choose", "default", "distinct", "predict"]
