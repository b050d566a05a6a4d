"""Where a search begins: the default, what heuristics suggest, and what was best for a neighbouring workload."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from autotune.task import Config, Task, config_key
from autotune.tuner.space import Space


@dataclass(frozen=True)
class Seed:
    """A configuration to measure before the sampler is asked; ``origin`` is "default", "heuristic" or "neighbour"."""

    config: Config
    origin: str


def plan(task: Task, space: Space, neighbours: Iterable[Config]) -> list[Seed]:
    """The configurations to begin with, in order, each once.

    The default comes first and is kept even where a user's narrowed space leaves it out, since everything is compared
    with it; then the point of the space that is nearest to it is next. Heuristics and neighbours must be in the space,
    or are moved to the nearest point of it.

    Args:
        neighbours: configurations that were best for other workloads of the family, nearest first.
    """
    seeds = [Seed(task.default(), "default")]
    seen = {config_key(seeds[0].config)}
    adapted = (task.adapt(config) for config in neighbours)
    suggested = itertools.chain([seeds[0].config], task.seeds())
    for origin, configs in (("heuristic", suggested), ("neighbour", adapted)):
        for config in configs:
            fitted = None if config is None else space.project(config)
            if fitted is not None and config_key(fitted) not in seen:
                seen.add(config_key(fitted))
                seeds.append(Seed(fitted, origin))
    return seeds
