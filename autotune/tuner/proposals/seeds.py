"""Additions to a sampler: the candidates that are measured first, and proposals that are skipped.

A search begins with the default, the best of the workload elsewhere, the best of neighbouring workloads, suggestions of
heuristics and picks of the domain's cost model. Later the model vetoes candidates that it expects to be slow.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from autotune.device import DeviceIdentity
from autotune.space import Space
from autotune.store.records import Key
from autotune.store.store import Store
from autotune.task import Config, Status, Task, config_key
from autotune.tuner.context import Context, Session

PICKS = 6
"""Candidates that the cost model may suggest."""
_DRAWS = 400
_ALIKE = 0.05
"""A candidate much like an earlier pick has to be expected faster than one unlike all of them, by this share at most.
The model sees no difference between many candidates. Where it is wrong about one, it is about those like it."""
BEST = 3
"""Candidates of other places that a search begins with."""
HOPELESS = 3.0
"""A candidate that is expected to take more than so many times the best is not measured."""
_ENOUGH = 3  # measured candidates that the model's scale is taken from
_Proposal = tuple[str, Config | None]
"""An origin, and a configuration or None where nothing could be made of it."""


@dataclass(frozen=True)
class Seed:
    """A configuration to measure before the sampler is asked; ``origin`` is "default", "asked" (by the
    caller), "elsewhere", "heuristic", "neighbour", "model" or "composed"."""

    config: Config
    origin: str


def plan(
    task: Task,
    space: Space,
    neighbours: Iterable[Config],
    seed: int = 0,
    *,
    asked: Iterable[Config] = (),
    elsewhere: Iterable[Config] = (),
    liked: Sequence[Config] | None = None,
) -> list[Seed]:
    """The configurations to begin with, in order, each once.

    The default comes first and is kept even where a user's narrowed space leaves it out, since everything is compared
    with it. Then come ``asked``, ``elsewhere`` and the nearest neighbour's. Picks of the cost model and suggestions of
    heuristics follow in turn, and the other neighbours'. All but the default are moved to the nearest point of the
    space.

    Args:
        neighbours: configurations that were best for other workloads of the family, nearest first.
        seed: of the candidates drawn for the cost model to choose from.
        asked: configurations that the caller wants to see measured.
        elsewhere: configurations that were best for this workload on other devices or with other software.
        liked: of :func:`picks`, where they are known.
    """
    modelled = (("model", config) for config in (picks(task, space, seed) if liked is None else liked))
    adapted = (("neighbour", task.adapt(config)) for config in neighbours)
    first = itertools.chain(_known(asked, elsewhere), itertools.islice(adapted, 1))
    return list(_distinct(task, space, itertools.chain(first, _in_turn(modelled, _heuristic(task)), adapted)))


def suggested(task: Task, space: Space, asked: Iterable[Config], elsewhere: Iterable[Config]) -> Iterator[Seed]:
    """The candidates of :func:`plan` without neighbours and the cost model."""
    return _distinct(task, space, itertools.chain(_known(asked, elsewhere), _heuristic(task)))


def _known(asked: Iterable[Config], elsewhere: Iterable[Config]) -> Iterator[_Proposal]:
    return itertools.chain((("asked", c) for c in asked), (("elsewhere", c) for c in elsewhere))


def _heuristic(task: Task) -> Iterator[_Proposal]:
    return (("heuristic", config) for config in itertools.chain([task.default()], task.seeds()))


def _in_turn(first: Iterable[_Proposal], second: Iterable[_Proposal]) -> Iterator[_Proposal]:
    """Of both alternately, then what is left of the longer one."""
    for pair in itertools.zip_longest(first, second):
        yield from (proposal for proposal in pair if proposal is not None)


def _distinct(task: Task, space: Space, proposals: Iterable[_Proposal]) -> Iterator[Seed]:
    """The default, then the proposals' nearest points of the space, each once."""
    first = Seed(task.default(), "default")
    yield first
    seen = {config_key(first.config)}
    for origin, config in proposals:
        fitted = None if config is None else space.project(config)
        if fitted is not None and config_key(fitted) not in seen:
            seen.add(config_key(fitted))
            yield Seed(fitted, origin)


def picks(task: Task, space: Space, seed: int, n: int = PICKS) -> list[Config]:
    """What the cost model likes best of the default, the heuristics and candidates drawn from ``space``, the best first
    and each unlike those before it.

    Empty where the domain has no cost model, or it cannot tell.
    """
    if task.predict(task.default()) is None:
        return []
    rng = random.Random(seed)
    drawn = [task.normalize(space.sample(rng)) for _ in range(min(_DRAWS, 2 * space.size))]
    found: list[tuple[float, Config]] = []
    for config in {config_key(c): c for c in (task.default(), *task.seeds(), *drawn)}.values():
        if expected := task.predict(config):
            found.append((math.log(expected), config))
    found.sort(key=lambda f: f[0])
    picked: list[Config] = []
    alike = [0.0] * len(found)
    while found and len(picked) < n:
        k = min(range(len(found)), key=lambda k: found[k][0] + _ALIKE * alike[k])
        (_, config), _ = found.pop(k), alike.pop(k)
        if task.reject(config) is None:
            picked.append(config)
            alike = [max(a, _in_common(config, other)) for a, (_, other) in zip(alike, found, strict=True)]
    return picked


def remembered(context: Context, task: Task, space: Space) -> Sequence[Config]:
    """The result of :func:`picks` in a run, computed once."""
    key = task.workload.fingerprint, space.fingerprint
    return context.picked.get(key, lambda: picks(task, space, context.options.seed))


def _in_common(one: Config, other: Config) -> float:
    """The share of parameters in which two candidates agree."""
    return sum(other.get(name) == value for name, value in one.items()) / max(len(one), len(other), 1)


def winners(store: Store, key: Key) -> list[Config]:
    """The best candidates of a workload elsewhere, each once. Those of this device with other software come first, then
    those of devices of its architecture, then of others of its kind; a GPU's are nothing for a CPU."""
    measured = store.elsewhere(key, BEST)
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
    """The cost model's veto in one session."""

    def __init__(self, session: Session) -> None:
        self._s = session
        self._expected: dict[str, float | None] = {}
        self._scale: tuple[int, float | None] = (-1, None)

    def hopeless(self, config: Config) -> float | None:
        """The latency expected of ``config`` in microseconds if that is hopeless; None if it may be worth a try."""
        best = self._s.best_us
        scale = self.scale()
        if best is None or scale is None:
            return None
        expected = self._s.task.predict(config)
        if expected is None or expected * scale <= HOPELESS * best:
            return None
        return expected * scale

    def scale(self) -> float | None:
        """Measured over predicted latency, in the median; None while too little is measured."""
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
