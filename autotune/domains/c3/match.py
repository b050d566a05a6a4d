"""The look-up of a scenario's strategy at deployment, and its match level.

``exact``: this scenario was tuned on equal devices. ``nearest``: a scenario with the same collective, dtypes and ranks
was tuned. No extent differs by more than a factor of two; the GEMM's matrices may have another layout.
``other_device``: this scenario was tuned on an equal number of other devices of the same architecture, with the same
links; used only if a setting allows it (:mod:`autotune.runtime.settings`).
``default``: no similar scenario was tuned, and the rule selects (:func:`autotune.domains.c3.strategy.by_rule`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from autotune.device import DeviceIdentity, Environment
from autotune.domains.c3.scenario import LAYOUTS, Gemm, Scenario
from autotune.domains.c3.strategy import BASELINES, KINDS, by_rule, improper, kernel_of, normalize, reject
from autotune.errors import UserError
from autotune.runtime.deployment import deployment
from autotune.runtime.ladder import (
    Difference,
    Outcome,
    Rung,
    differences,
    on_other_devices,
    on_this_device,
    relatives,
    software,
)
from autotune.store.damage import BROKEN
from autotune.store.reading import Match as How
from autotune.store.reading import Reader
from autotune.store.records import Schedule
from autotune.task import Artifact, Choice, Config
from autotune.workload import Workload

NEAR = 1.0
"""Largest distance at which another scenario's strategy is used: a factor of two, as ``|log2|``, in an extent of the
GEMM or in the bytes."""


class C3Level(StrEnum):
    """Match level of a look-up; ``rank`` orders them, best first."""

    EXACT = "exact"
    NEAREST = "nearest"
    OTHER_DEVICE = "other_device"
    DEFAULT = "default"

    @property
    def rank(self) -> int:
        return list(C3Level).index(self)


@dataclass(frozen=True)
class C3Match:
    """The strategy found for a scenario.

    Attributes:
        level: the match level.
        config: the strategy to deploy, normalised, with every parameter of its device type.
        schedule: the schedule it comes from; None at level ``default``. The schedule's own ``config`` is None if a
            baseline won.
        tuned: the scenario that the schedule was tuned for; the same scenario at level ``exact``.
        distance: distance from the scenario to :attr:`tuned`; None without a schedule.
        reason: reason why there is no better match; empty at level ``exact``.
        differences: differences between the tuning run's devices and software and the current ones; not included in
            the message in which rank 0 sends a match to all ranks.
    """

    level: C3Level
    config: Config
    schedule: Schedule | None = None
    tuned: Scenario | None = None
    distance: float | None = None
    reason: str = ""
    differences: tuple[Difference, ...] = field(default=(), compare=False)

    @property
    def artifact(self) -> Artifact | None:
        """The kernels that the strategy needs, if any."""
        return self.schedule.artifact if self.schedule else None

    @property
    def label(self) -> str:
        """A short text of the strategy, such as ``copy comm_first reserve=8``."""
        found: str = KINDS["cpu" if "copies" in self.config else "cuda"].of(self.config).label
        return found

    @property
    def latency_us(self) -> float | None:
        """Measured time of both parts together, in microseconds; at ``nearest`` that of :attr:`tuned`."""
        return self.schedule.latency_us if self.schedule else None


def match_scenario(
    scenario: Scenario,
    store: Reader | None,
    identity: DeviceIdentity,
    env: Environment,
    *,
    strict: bool = False,
) -> C3Match:
    """Look up a scenario; always returns a match.

    Args:
        store: the database; None gives the default.
        identity: identity of all devices together, see ``autotune.domain.identity_of``.
        env: the current software.
        strict: require the software of the tuning run exactly, whatever the settings.

    Raises:
        UserError: the database failed.
    """
    side = identity.kind
    if store is None:
        return _unfounded(scenario, side, "there is no database")
    sms = identity.units if side == "cuda" else 0
    rules = deployment().settings
    how: How = "strict" if strict else rules.environment
    workload = scenario.workload()
    schedule = store.get_schedule(workload.fingerprint, identity.fingerprint, env, match=how)
    if schedule is None:
        why = store.lost or "not tuned on these devices"
    else:
        config, why = deployable(schedule, scenario, side, sms=sms)
        if not why:
            differ = software(schedule, store, env)
            return C3Match(C3Level.EXACT, config, schedule, scenario, 0.0, differences=differ)
        why = f"its schedule cannot be used: {why}"
    for away, tuned in _neighbours(scenario, store, identity, env, how):
        near = store.get_schedule(tuned.workload().fingerprint, identity.fingerprint, env, match=how)
        if near is None:
            continue  # damaged; the store has warned
        config, unfit = deployable(near, scenario, side, sms=sms)
        if unfit:
            why += f"; the strategy of {tuned.label} does not fit: {unfit}"
            continue
        reason = f"{why}; {tuned.label} is the nearest tuned, {2**away:.3g} times off at most"
        return C3Match(C3Level.NEAREST, config, near, tuned, away, reason, software(near, store, env))
    for other in relatives(workload, store, identity) if rules.other_device == "warn" else ():
        there = store.get_schedule(workload.fingerprint, other.fingerprint, env, match=how)
        config, unfit = deployable(there, scenario, side, sms=sms) if there is not None else ({}, "damaged")
        if there is not None and not unfit:
            differ = (*differences(other, identity), *software(there, store, env))
            reason = f"{why}; tuned on {other.label}"
            return C3Match(C3Level.OTHER_DEVICE, config, there, scenario, 0.0, reason, differ)
    return _unfounded(scenario, side, why, sms=sms)


def explain(
    scenario: Scenario, found: C3Match, store: Reader | None, identity: DeviceIdentity, env: Environment
) -> tuple[Rung, ...]:
    """Each step of the look-up that returned ``found``, from the top, and why its strategy is or is not used."""
    workload, level = scenario.workload(), found.level
    if store is None:
        return (Rung("exact", Outcome.EMPTY, found.reason), Rung(str(level), Outcome.TAKEN, found.label))

    def reached(rung: C3Level) -> bool:
        return level.rank >= rung.rank

    if level is C3Level.EXACT:
        rungs = [Rung("exact", Outcome.TAKEN, "tuned for it on these devices", found.differences)]
    else:
        rungs = [on_this_device(workload, store, identity, env, found.reason.partition(";")[0])]
    if level is C3Level.NEAREST and found.tuned is not None:
        rungs.append(Rung("nearest", Outcome.TAKEN, f"tuned for {found.tuned.label}", found.differences))
    elif reached(C3Level.NEAREST):
        rungs.append(Rung("nearest", Outcome.EMPTY, f"nothing tuned here is within a factor of {2**NEAR:g} and fits"))
    else:
        rungs.append(Rung("nearest", Outcome.NOT_ASKED))
    if reached(C3Level.OTHER_DEVICE):
        taken = level is C3Level.OTHER_DEVICE
        rungs.append(on_other_devices(workload, store, identity, taken, deployment().settings.other_device))
    else:
        rungs.append(Rung("other_device", Outcome.NOT_ASKED))
    last = (Outcome.TAKEN, "chosen by rule") if level is C3Level.DEFAULT else (Outcome.NOT_ASKED,)
    return (*rungs, Rung("default", *last))


def deployable(schedule: Schedule, scenario: Scenario, side: str, *, sms: int = 0) -> tuple[Config, str]:
    """The strategy of a schedule for ``scenario``, and the reason why it cannot be used ("" if it can)."""
    if schedule.config is None:
        config = BASELINES[side].get(schedule.winner)
        return (dict(config), "") if config else ({}, f"its winner {schedule.winner!r} is not a strategy")
    if why := improper(schedule.config, side):
        # Warn once: the default would otherwise replace the searched strategy silently.
        short = schedule.key.workload[:12]
        text = f"autotune: the stored strategy of {short} is damaged and not used: {why}; search the scenario again"
        deployment().warn_once(f"strategy {short}", text)
        return {}, f"it is damaged: {why}"
    config, why = fit(schedule.config, scenario, side, sms=sms)
    if not why and kernel_of(config, scenario.collective) and not (schedule.artifact and schedule.artifact.kernels):
        why = "its kernels are not stored"
    return config, why


def fit(config: Mapping[str, Choice], scenario: Scenario, side: str, *, sms: int = 0) -> tuple[Config, str]:
    """Normalise a strategy, which may come from a database, for ``scenario``.

    Returns the strategy and the reason why it cannot run ("" if it can).
    """
    if why := improper(config, side):
        return {}, why
    whole = normalize(KINDS[side].of(config).config(), scenario, side)
    return whole, reject(whole, scenario, side, sms=sms) or ""


def without_search(scenario: Scenario, side: str, *, sms: int = 0) -> list[Config]:
    """Strategies that need no search results, best first; the last one works everywhere."""
    out: list[Config] = []
    for guess in [*by_rule(scenario, side), BASELINES[side]["sequential"]]:
        config, why = fit(guess, scenario, side, sms=sms)
        if not why and not kernel_of(config, scenario.collective) and config not in out:
            out.append(config)
    return out


def _unfounded(scenario: Scenario, side: str, why: str, *, sms: int = 0) -> C3Match:
    return C3Match(C3Level.DEFAULT, without_search(scenario, side, sms=sms)[0], reason=why)


def _neighbours(
    scenario: Scenario, store: Reader, identity: DeviceIdentity, env: Environment, how: Any
) -> list[tuple[float, Scenario]]:
    """Tuned scenarios within :data:`NEAR` and their distances: those of the same family first, then by distance."""
    near = []
    for nth, variant in enumerate(_layouts(scenario)):
        family = variant.workload().family
        tuned = store.family_schedules(
            family, identity.fingerprint, env, match=how, artifacts=False,
            extents=(scenario.nbytes / 2**NEAR, scenario.nbytes * 2**NEAR),
        )  # fmt: skip
        wanted = {s.key.workload for s in tuned} - {scenario.workload().fingerprint}
        for workload in store.get_workloads(wanted).values():
            other = _scenario(workload)
            if other is None:
                continue
            ratios = _ratios(scenario, other)
            near.append((min(nth, 1), max(ratios), sum(ratios), other.label, other))
    return [(away, other) for _, away, _, _, other in sorted(near, key=lambda n: n[:4]) if away <= NEAR]


def _scenario(workload: Workload) -> Scenario | None:
    """The scenario of a stored workload; None if it is damaged."""
    try:
        return Scenario.from_json(workload.spec)
    except (UserError, *BROKEN):
        return None


def _layouts(scenario: Scenario) -> list[Scenario]:
    """The scenario, then its variants with other matrix layouts, which hardly affect the overlap."""
    gemm = scenario.compute
    if not isinstance(gemm, Gemm):
        return [scenario]
    others = [replace(scenario, compute=replace(gemm, layout=way)) for way in LAYOUTS if way != gemm.layout]
    return [scenario, *others]


def _ratios(a: Scenario, b: Scenario) -> list[float]:
    pairs = [(a.nbytes, b.nbytes)]
    if isinstance(a.compute, Gemm) and isinstance(b.compute, Gemm):
        pairs += [(a.compute.m, b.compute.m), (a.compute.n, b.compute.n), (a.compute.k, b.compute.k)]
    return [abs(math.log2(x / y)) for x, y in pairs]
