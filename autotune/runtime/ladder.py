"""The result of a look-up: its level, the differences from the tuning conditions, and each level that was tried.

Domains have their own ladders (:mod:`autotune.runtime.match`, ``autotune.domains.c3.match``), whose rungs are
the same class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from autotune.device import DeviceIdentity, Environment
from autotune.store.reading import Reader
from autotune.store.records import Schedule
from autotune.workload import Workload


@dataclass(frozen=True)
class Difference:
    """A field of a device or of an environment that differs between the tuning and the current process."""

    field: str
    tuned: str
    here: str

    def __str__(self) -> str:
        return f"{self.field} {self.tuned or 'none'} (here {self.here or 'none'})"


class Level(StrEnum):
    """The fit of a stored schedule; ``rank`` orders them, best first."""

    EXACT = "exact"
    HEURISTIC = "heuristic"
    OTHER_ROWS = "other_rows"
    OTHER_DEVICE = "other_device"
    PACKAGED = "packaged"
    NONE = "none"

    @property
    def rank(self) -> int:
        return list(Level).index(self)

    @property
    def own(self) -> bool:
        """True for a searched schedule of this device in the user's database; any other is a miss, to be searched."""
        return self in (Level.EXACT, Level.OTHER_ROWS)


@dataclass(frozen=True)
class Match:
    """The result of a look-up for one workload.

    Attributes:
        level: the match level.
        schedule: the schedule to deploy; None at level ``none``. Its ``config`` is None if a baseline won.
        tuned: the workload that the schedule was tuned for: the same one at level ``exact``.
        reason: the reason why there is no better match; empty at level ``exact``.
        differences: fields of the device and of the software that differ from those of the tuning.
    """

    level: Level
    schedule: Schedule | None = None
    tuned: Workload | None = None
    reason: str = ""
    differences: tuple[Difference, ...] = ()

    @property
    def proven(self) -> bool:
        """True if a search verified this kernel under the current conditions."""
        return self.level is Level.EXACT and not self.differences


def relatives(workload: Workload, store: Reader, device: DeviceIdentity) -> list[DeviceIdentity]:
    """Other devices that a workload was tuned on and whose kernels run on ``device``: the same architecture, number and
    links. Devices with the fewest different fields come first."""
    names = {name for name, _ in store.tuned_under(workload.fingerprint)} - {device.fingerprint}
    found = [d for d in map(store.get_device, sorted(names)) if d is not None and related(d, device)]
    return sorted(found, key=lambda d: (len(differences(d, device)), d.label))


def related(other: DeviceIdentity, device: DeviceIdentity) -> bool:
    """True if kernels for one device run on another."""
    same = ("kind", "capability", "count", "links")
    return all(getattr(other, name) == getattr(device, name) for name in same)


def differences(tuned: DeviceIdentity | Environment, here: DeviceIdentity | Environment) -> tuple[Difference, ...]:
    """The fields in which two devices, or two environments, differ."""
    one, two = tuned.to_json(), here.to_json()
    return tuple(Difference(name, str(one[name]), str(two[name])) for name in one if one[name] != two[name])


def software(schedule: Schedule, store: Reader, env: Environment) -> tuple[Difference, ...]:
    """Differences of the software, except compilers that are not installed here and not needed."""
    if schedule.key.environment == env.strict or schedule.config is None:
        return ()
    tuned = store.get_environment(schedule.key.environment)
    found = differences(tuned, env) if tuned is not None else (Difference("environment", "unknown", ""),)
    return tuple(d for d in found if d.here or d.field not in ("numba", "numba_cuda"))


class Outcome(StrEnum):
    """The outcome of a level: its schedule is used, must not be used, does not exist, or was not looked up, since a
    better level matched."""

    TAKEN = "taken"
    REFUSED = "refused"
    EMPTY = "empty"
    NOT_ASKED = "not asked"


@dataclass(frozen=True)
class Rung:
    """A level of the ladder with its outcome in a look-up.

    Attributes:
        rung: the name of the level.
        why: the schedule found, and the reason for using it or not.
        differences: different fields of the nearest schedule at this level.
    """

    rung: str
    outcome: Outcome
    why: str = ""
    differences: tuple[Difference, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        fields = [{"field": d.field, "tuned": d.tuned, "here": d.here} for d in self.differences]
        return {"rung": self.rung, "outcome": str(self.outcome), "why": self.why, "differences": fields}

    def lines(self) -> list[str]:
        """Lines of text for printing."""
        state = "not looked up" if self.outcome is Outcome.NOT_ASKED else str(self.outcome)
        own = [f"  {self.rung:13s} {state}{f': {self.why}' if self.why else ''}"]
        return own + [
            f"  {'':13s}   {d.field}: tuned {d.tuned or 'none'}, here {d.here or 'none'}" for d in self.differences
        ]


def on_this_device(workload: Workload, store: Reader, device: DeviceIdentity, env: Environment, why: str) -> Rung:
    """The step of level ``exact`` without a match, with the differences of the software tuned with on this device."""
    found = [store.get_environment(e) for d, e in store.tuned_under(workload.fingerprint) if d == device.fingerprint]
    near = sorted((differences(e, env) for e in found if e is not None), key=len)
    if not near or not near[0]:
        return Rung("exact", Outcome.REFUSED if near else Outcome.EMPTY, why)
    return Rung("exact", Outcome.REFUSED, "tuned on this device with other software only", near[0])


def on_other_devices(workload: Workload, store: Reader, device: DeviceIdentity, taken: bool, policy: str) -> Rung:
    """The step of level ``other_device``: schedules of other devices for this workload, and their permission here."""
    names = {name for name, _ in store.tuned_under(workload.fingerprint)} - {device.fingerprint}
    found = [d for d in map(store.get_device, sorted(names)) if d is not None]
    if not found:
        return Rung("other_device", Outcome.EMPTY, "no other device has it")
    near = min(found, key=lambda d: (not related(d, device), len(differences(d, device)), d.label))
    why = f"tuned on {near.label}; AUTOTUNE_OTHER_DEVICE is {policy}"
    if not related(near, device):
        why = f"tuned on {near.label}, of another architecture, number or links"
    return Rung("other_device", Outcome.TAKEN if taken else Outcome.REFUSED, why, differences(near, device))


def text(label: str, rungs: Sequence[Rung]) -> str:
    """A ladder as text for printing."""
    taken = next((r.rung for r in rungs if r.outcome is Outcome.TAKEN), "none")
    return "\n".join([f"{label}: {taken}", *(line for rung in rungs for line in rung.lines())])
