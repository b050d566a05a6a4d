"""The look-up of a call's configuration, and its level.

``exact``: this key was tuned on an equal device. ``nearest``: another key of the kernel was, not too far by its
distance. ``default``: neither; the kernel runs as it would have without autotune. What comes out of a database is data:
a configuration is used if the space of the code at hand has it, and nothing of a row is imported or called.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from autotune.domains.kernel.kernel import Kernel, log_distance, words
from autotune.errors import UserError, first_line
from autotune.task import Config

if TYPE_CHECKING:
    from autotune.device import DeviceIdentity, Environment
    from autotune.store.reading import Reader
    from autotune.store.records import Schedule
    from autotune.workload import Workload


DEFAULT = "default"
"""The baseline that a search compares with: the kernel's default configuration."""
CHANGED = "the kernel changed since it was tuned"


class KernelLevel(StrEnum):
    """Level of a look-up, best first."""

    EXACT = "exact"
    NEAREST = "nearest"
    DEFAULT = "default"


@dataclass(frozen=True)
class KernelMatch:
    """The configuration found for a key.

    Attributes:
        level: how well it is founded.
        config: what the kernel runs with.
        key: that was looked up.
        tuned: the key that ``config`` was tuned for; None at level ``default``.
        distance: from ``key`` to ``tuned``; None at level ``default``.
        schedule: what was stored for ``tuned``.
        reason: why there is no better match; empty at level ``exact``.
        changed: whether what is stored is of an earlier version of the kernel.
    """

    level: KernelLevel
    config: Config
    key: Mapping[str, Any]
    tuned: Mapping[str, Any] | None = None
    distance: float | None = None
    schedule: Schedule | None = None
    reason: str = ""
    changed: bool = False

    @property
    def latency_us(self) -> float | None:
        """Measured time of ``config``, in microseconds, for ``tuned``."""
        return self.schedule.latency_us if self.schedule else None


def find(
    kernel: Kernel,
    key: Mapping[str, Any],
    store: Reader | None,
    device: DeviceIdentity,
    env: Environment,
    *,
    strict: bool = False,
) -> KernelMatch:
    """Look a key up; there is always an answer.

    Args:
        store: None finds nothing.
        strict: whether ``env`` must equal the software that was tuned with, or only the minor versions of torch and
            CUDA.

    Raises:
        UserError: the database failed, or the kernel's own distance or constraint did.
    """
    default = dict(kernel.space.default)
    if store is None:
        return KernelMatch(KernelLevel.DEFAULT, default, key, reason="there is no database")
    how: Any = "strict" if strict else "loose"
    workload, why = kernel.workload(key), "not tuned on this device"
    schedule = store.get_schedule(workload.fingerprint, device.fingerprint, env, match=how)
    if schedule is not None:
        config, unfit = _usable(kernel, key, schedule, store.get_workload(workload.fingerprint))
        if not unfit:
            return KernelMatch(KernelLevel.EXACT, config, key, key, 0.0, schedule)
        why = f"what is stored cannot be used: {unfit}"
    others = store.family_schedules(workload.family, device.fingerprint, env, match=how, artifacts=False)
    schedules = {s.key.workload: s for s in others if s.key.workload != workload.fingerprint}
    known = store.get_workloads(schedules)
    same = [w for w in known.values() if w.spec.get("source") == kernel.source]
    for away, other in _by_distance(kernel, key, same):
        tuned = dict(other.spec["key"])
        config, unfit = _usable(kernel, key, schedules[other.fingerprint], other)
        if not unfit:
            reason = f"{why}; {words(tuned)} is the nearest tuned"
            return KernelMatch(KernelLevel.NEAREST, config, key, tuned, away, schedules[other.fingerprint], reason)
    changed = len(same) < len(known)
    if changed:
        why = f"{CHANGED}: search it again"
    elif same:
        why += "; no key that was tuned is near enough"
    return KernelMatch(KernelLevel.DEFAULT, default, key, reason=why, changed=changed)


def _by_distance(kernel: Kernel, key: Mapping[str, Any], tuned: list[Workload]) -> list[tuple[float, Workload]]:
    """Workloads of other keys that are near enough, the nearest first."""
    near = []
    for other in tuned:
        its = other.spec.get("key")
        if not isinstance(its, Mapping):
            continue
        try:
            away = float((kernel.distance or log_distance)(key, its))
        except Exception as error:
            raise UserError(f"{kernel.name}: distance= failed: {first_line(error)}") from error
        if away <= (math.nextafter(math.inf, 0) if kernel.distance else kernel.within):
            near.append((away, other.label, other))
    return [(away, other) for away, _, other in sorted(near, key=lambda n: n[:2])]


def _usable(
    kernel: Kernel, key: Mapping[str, Any], schedule: Schedule, workload: Workload | None
) -> tuple[Config, str]:
    """The configuration that a schedule means, and why it cannot be used ("" where it can)."""
    config = schedule.config
    if config is None and schedule.winner == DEFAULT:
        then = workload.source.get(DEFAULT) if workload is not None else None
        config = dict(then) if isinstance(then, Mapping) else dict(kernel.space.default)
    if config is None:
        return {}, f"its winner {schedule.winner!r} is not known"
    if why := kernel.space.reject(config, key):
        return {}, why
    return dict(config), ""
