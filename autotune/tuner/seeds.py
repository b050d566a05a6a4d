"""Additions to a sampler: the candidates measured first, and pruned proposals.

A search begins with the default, the best of the workload elsewhere, the best of neighbouring workloads, suggestions of
heuristics and picks of the domain's cost model. Later the model prunes candidates that it expects to be slow.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.device import DeviceIdentity
from autotune.space import Choice, Space
from autotune.store.records import Key
from autotune.store.store import Store
from autotune.task import Config, Status, Task, config_key
from autotune.tuner.context import Context, Session
from autotune.tuner.threads import Shared

PICKS = 6
"""Maximum number of the cost model's picks."""
_DRAWS = 400
_ALIKE = 0.05
"""Maximum penalty, as a share of the expected latency, of a candidate similar to an earlier pick. The model predicts
equal latencies for many candidates, and its errors are shared by similar ones."""
BEST = 3
"""Maximum number of seeds from other devices or software."""
HOPELESS = 3.0
"""A candidate is pruned if its expected latency exceeds the best one by more than this factor."""
_ENOUGH = 3  # minimum of measured candidates for the model's scale
_Proposal = tuple[str, Config | None]
"""An origin, and a configuration, or None if it could not be adapted."""


@dataclass(frozen=True)
class Seed:
    """A configuration to measure before the sampler's proposals.

    ``origin`` is "default", "asked" (by the caller), "elsewhere", "heuristic", "neighbour", "model" or "composed".
    """

    config: Config
    origin: str


def plan(task: Task, space: Space, neighbours: Iterable[Config], seed: int = 0, **options: Any) -> list[Seed]:
    """Return the configurations of :func:`planned`."""
    return list(planned(task, space, neighbours, seed, **options))


def planned(
    task: Task,
    space: Space,
    neighbours: Iterable[Config],
    seed: int = 0,
    *,
    asked: Iterable[Config] = (),
    elsewhere: Iterable[Config] = (),
    liked: Iterable[Config] | None = None,
) -> Iterator[Seed]:
    """Yield the configurations to begin with, in order, each once. Each is computed when it is needed.

    The default is first and is kept even if a user's narrowed space excludes it, since it is the reference. ``asked``,
    ``elsewhere`` and the nearest neighbour's configuration follow. Picks of the cost model and suggestions of
    heuristics then alternate, and the other neighbours' configurations are last. All but the default are projected to
    the nearest point of the space.

    Args:
        neighbours: configurations that were best for other workloads of the family, nearest first.
        seed: of the candidates drawn for the cost model to choose from.
        asked: configurations requested by the caller.
        elsewhere: configurations that were best for this workload on other devices or with other software.
        liked: the result of :func:`picks`, if already computed.
    """
    liked = itertools.islice(_picks(task, space, seed), PICKS) if liked is None else liked
    known = (*(("asked", c) for c in asked), *(("elsewhere", c) for c in elsewhere))
    modelled = (("model", config) for config in liked)
    adapted = (("neighbour", task.adapt(config)) for config in neighbours)
    first = itertools.chain(known, itertools.islice(adapted, 1))
    return _distinct(task, space, itertools.chain(first, _in_turn(modelled, _heuristic(task)), adapted))


def _heuristic(task: Task) -> Iterator[_Proposal]:
    for config in itertools.chain([task.default()], task.seeds()):
        yield "heuristic", config


def _in_turn(first: Iterable[_Proposal], second: Iterable[_Proposal]) -> Iterator[_Proposal]:
    """Yield from both alternately, then the rest of the longer one."""
    for pair in itertools.zip_longest(first, second):
        yield from (proposal for proposal in pair if proposal is not None)


def _distinct(task: Task, space: Space, proposals: Iterable[_Proposal]) -> Iterator[Seed]:
    """Yield the default, then the proposals' nearest points of the space, each once."""
    first = Seed(task.default(), "default")
    yield first
    seen = {config_key(first.config)}
    for origin, config in proposals:
        fitted = None if config is None else space.project(config)
        if fitted is not None and config_key(fitted) not in seen:
            seen.add(config_key(fitted))
            yield Seed(fitted, origin)


def picks(task: Task, space: Space, seed: int, n: int = PICKS) -> list[Config]:
    """Return the cost model's best and mutually dissimilar candidates, the best first.

    The model ranks the default, the heuristics and candidates drawn from ``space``. The result is empty without a
    prediction of a cost model.
    """
    return list(itertools.islice(_picks(task, space, seed), n))


def _picks(task: Task, space: Space, seed: int) -> Iterator[Config]:
    """Yield the candidates of :func:`picks`, each when it is needed: its kernel is built to see if it can work."""
    if task.predict(task.default()) is None:
        return
    rng = random.Random(seed)
    drawn = [task.normalize(space.sample(rng)) for _ in range(min(_DRAWS, 2 * space.size))]
    found: list[tuple[float, Config]] = []
    for config in {frozenset(c.items()): c for c in (task.default(), *task.seeds(), *drawn)}.values():
        if expected := task.predict(config):
            found.append((math.log(expected), config))
    found.sort(key=lambda f: f[0])
    settings = _Settings([c for _, c in found])
    logs, alike, left = np.array([log for log, _ in found]), np.zeros(len(found)), np.arange(len(found))
    while len(left):
        at = np.argmin(logs[left] + _ALIKE * alike[left])
        k = int(left[at])
        left = np.delete(left, at)
        if task.reject(found[k][1]) is None:
            yield found[k][1]
            alike = np.maximum(alike, settings.in_common(k))


class _Settings:
    """Configurations as numbers: a row for each, a column for each parameter."""

    def __init__(self, configs: Sequence[Config]) -> None:
        names = {name: k for k, name in enumerate(dict.fromkeys(name for c in configs for name in c))}
        numbers: dict[tuple[str, Choice], int] = {}
        self._rows = np.zeros((len(configs), len(names)), np.int32)  # 0: without the parameter
        for row, config in zip(self._rows, configs, strict=True):
            for name, value in config.items():
                row[names[name]] = numbers.setdefault((name, value), len(numbers) + 1)
        self._sizes = np.array([max(len(c), 1) for c in configs])

    def in_common(self, k: int) -> NDArray[np.float64]:
        """The share of parameters in which each configuration equals number ``k``."""
        own = self._rows[k]
        equal = np.count_nonzero((self._rows == own) & (own > 0), axis=1)
        shares: NDArray[np.float64] = equal / np.maximum(self._sizes, self._sizes[k])
        return shares


def remembered(context: Context, task: Task, space: Space) -> Iterable[Config]:
    """Return the candidates of :func:`picks`, each computed once in the run, when it is needed."""
    key = task.workload.fingerprint, space.fingerprint
    seed = context.options.seed
    return context.picked.get(key, lambda: Shared(itertools.islice(_picks(task, space, seed), PICKS)))


def winners(store: Store, key: Key) -> list[Config]:
    """Return the best candidates of a workload elsewhere, each once.

    Those of this device with other software come first, then those of the same architecture, then those of the same
    kind. A GPU's candidates are not used on a CPU.
    """
    measured = store.under_other_keys(key, BEST)
    devices = store.get_devices({key.device, *(m.key.device for m in measured)})
    here = devices.get(key.device)
    if here is None:
        return []
    near = [m for m in measured if m.key.device in devices and devices[m.key.device].kind == here.kind]
    near.sort(key=lambda m: (m.key.device != key.device, _architecture(devices[m.key.device]) != _architecture(here)))
    return list(itertools.islice({config_key(m.config): m.config for m in near}.values(), BEST))


def _architecture(device: DeviceIdentity) -> tuple[object, ...]:
    return device.capability, device.count, device.links


class Pruning:
    """Pruning of candidates by the cost model in one session."""

    def __init__(self, session: Session) -> None:
        self._s = session
        self._expected: dict[str, float | None] = {}
        self._scale: tuple[int, float | None] = (-1, None)

    def hopeless(self, config: Config) -> float | None:
        """Return the expected latency of ``config`` in microseconds if it is to be pruned, else None."""
        best = self._s.best_us
        scale = self.scale()
        if best is None or scale is None:
            return None
        expected = self._s.task.predict(config)
        if expected is None or expected * scale <= HOPELESS * best:
            return None
        return expected * scale

    def scale(self) -> float | None:
        """Return the median ratio of measured to predicted latency; None with too few measurements."""
        known = self._s.known
        if self._scale[0] != len(known):
            ratios = []
            for key, m in known.items():
                if m.status is not Status.OK or m.latency_us is None:
                    continue
                if key not in self._expected:
                    self._expected[key] = self._s.task.predict(m.config)
                expected = self._expected[key]
                if expected:
                    ratios.append(m.latency_us / expected)
            self._scale = (len(known), statistics.median(ratios) if len(ratios) >= _ENOUGH else None)
        return self._scale[1]
