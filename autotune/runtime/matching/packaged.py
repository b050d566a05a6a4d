"""The last rung of a region's ladder that has schedules: those that come with autotune for the very device at hand.

Its kernels are code of the device, which no version of torch is part of, and a region's fingerprint has all that it
computes. So a schedule is taken under any version of torch and CUDA. Its first call verifies it, as with all that was
made under other software. ``strict`` asks for equal software here, too.

The user's own database has the first word, and every word that it has counts: a workload that it holds a schedule for
on this device, be that one damaged, of other software or failed here, is not taken from what comes with autotune.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from autotune.device import DeviceIdentity, Environment
from autotune.errors import Unsupported
from autotune.runtime.deployment import deployment
from autotune.runtime.matching.ladder import Level, Match, Outcome, Step, on_this_device
from autotune.runtime.matching.match import deployed, match
from autotune.runtime.settings import Settings
from autotune.store.reading import Reader
from autotune.store.snapshots.packaged import file_for
from autotune.workload import Workload

_NOTHING = Step("packaged", Outcome.EMPTY, "nothing comes with autotune for this device")


def from_package(
    workload: Workload,
    found: Match,
    store: Reader | None,
    device: DeviceIdentity,
    env: Environment,
    *,
    strict: bool = False,
    rules: Settings | None = None,
) -> tuple[Match, Step]:
    """What a look-up comes to that found nothing in the user's own database, and the rung as it came by it.

    Args:
        found: what ``match.match`` came to with the other arguments; given back where this rung has no answer.
        store: the user's own; None where nothing was ever tuned, not where it cannot be asked.

    Raises:
        UserError: the user's database failed, or a setting has a value that it does not take.
    """
    path = file_for(device)
    if path is None:
        return found, _NOTHING
    snapshot, why = _asked(path, store)
    if snapshot is None:
        return found, Step("packaged", Outcome.REFUSED, why)
    rules = _any_software(replace(rules or deployment().settings, other_device="refuse"))
    there = match(workload, snapshot, device, env, strict=strict, rules=rules)
    if there.tuned is None:
        return found, replace(on_this_device(workload, snapshot, device, env, there.reason), rung="packaged")
    if _decided(store, device, workload, there.tuned):
        why = f"the database has a schedule for this device, which it passes over: {found.reason}"
        return found, Step("packaged", Outcome.REFUSED, why)
    rows = "" if there.level is Level.EXACT else f", tuned for {there.tuned.extent} rows"
    why = f"{path.stem} comes with autotune{rows}; measured on another such device, not in your step"
    reason = f"{found.reason}; {path.stem} comes with autotune{rows}"
    taken = replace(there, level=Level.PACKAGED, reason=reason)
    return taken, Step("packaged", Outcome.TAKEN, why, there.differences)


def deployed_from_package(
    fingerprint: str, store: Reader | None, device: DeviceIdentity, env: Environment
) -> Match | None:
    """As ``match.deployed``, of what comes with autotune; None where that has no answer."""
    snapshot = packaged_reader(store, device)
    if snapshot is None:
        return None
    try:
        found = deployed(fingerprint, snapshot, device, env, rules=_any_software(deployment().settings))
    except Unsupported:
        return None
    assert found.tuned is not None
    return None if _decided(store, device, found.tuned) else replace(found, level=Level.PACKAGED)


def packaged_reader(store: Reader | None, device: DeviceIdentity) -> Reader | None:
    """What comes with autotune for a device; None where nothing does, or where it is not used beside ``store``."""
    path = file_for(device)
    return None if path is None else _asked(path, store)[0]


def _asked(path: Path, store: Reader | None) -> tuple[Reader | None, str]:
    """What comes with autotune as ``path``, or None and why it is not asked."""
    if why := deployment().packaged_refused(store):
        return None, why
    snapshot = deployment().packaged.get(path)
    if snapshot is None or snapshot.lost:
        return None, f"{path.name} is damaged: install autotune again"
    return snapshot, ""


def _any_software(rules: Settings) -> Settings:
    return rules if rules.environment == "strict" else replace(rules, environment="ignore")


def _decided(store: Reader | None, device: DeviceIdentity, *workloads: Workload) -> bool:
    """Whether the user's own database holds a schedule on this device for one of these workloads, of whatever worth."""
    places = () if store is None else [place for w in workloads for place, _ in store.places(w.fingerprint)]
    return device.fingerprint in places


__all__ = ["deployed_from_package", "from_package", "packaged_reader"]
