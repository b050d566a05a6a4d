"""The stored schedule that fits a workload best.

A look-up tries the levels of a ladder from the top:

``exact``: this workload was tuned on an equal device.

``heuristic``: the workload was not searched, but a predicted schedule was verified here and timed once against
Inductor's code (``AUTOTUNE_UNSEARCHED=default``). The region counts as missed: a search replaces the schedule.

``other_rows``: a workload of the same family was tuned, which differs only in the extent of axis 0. Its kernels take
that extent as an argument and are valid for the actual extent (:mod:`autotune.runtime.fitting`). The nearest number of
rows by ratio is used, within a limit.

``other_device``: the workload was tuned on another device of the same architecture. Its kernels are correct here, since
no kernel depends on the number of multiprocessors. Their speed here is unknown, so a setting must allow them.

``packaged``: the schedule is shipped with autotune for this device, or else for a GPU of the same architecture (an
H200's on an H100). Its kernels are device code that uses none of torch's, and a region's fingerprint covers its whole
computation. So it is used under any version of torch and CUDA, except with ``strict``, and its first call verifies it.
This level never matches if the user's database has a schedule for the workload on this device. Such a schedule may
even be damaged, of other software or failed here.

``none``: no match.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from autotune.device import DeviceIdentity, Environment, environment, identify
from autotune.errors import Unsupported, UserError
from autotune.ir.graph import Graph
from autotune.runtime.deployment import deployment
from autotune.runtime.fitting import foreign, old_generator, unfit_for, unusable
from autotune.runtime.ladder import (
    Level,
    Match,
    Outcome,
    Rung,
    differences,
    on_this_device,
    related,
    relatives,
    software,
)
from autotune.runtime.settings import Settings
from autotune.store.opening import files_for
from autotune.store.reading import Match as How
from autotune.store.reading import Reader
from autotune.store.records import Schedule
from autotune.store.snapshot import Snapshot
from autotune.workload import PRODUCT, Workload, extent_ratio

PREDICTED = "predicted and timed once, not searched"
TRIED = 16
"""Maximum number of schedules for other rows that a look-up tries, nearest first; planning each takes milliseconds."""


def look_up(workload: Workload, device: str, *, rows: float | None = None, packaged: bool = True) -> Match:
    """Look up a workload on "cpu" or "cuda:N". Never raises: an error logs one warning.

    Matches from a snapshot opened by :func:`autotune.load` are cached.

    Args:
        rows: the largest ratio of rows, in place of the setting.
        packaged: look in the shipped snapshots if the database has no match.
    """
    if workload.kind == PRODUCT:
        from autotune.runtime.inductor import product_call  # it loads torch

        return product_call.look_up(workload, device)
    own, key = deployment(), (workload.fingerprint, device, packaged)
    changes = own.changes
    if rows is not None:
        return _look_up(workload, device, rows, packaged)
    found = own.cached_match(key)
    if found is None:
        found = _look_up(workload, device, None, packaged)
        own.cache_match(key, found, changes)
    return found


def _look_up(workload: Workload, device: str, rows: float | None, packaged: bool) -> Match:
    try:
        own = deployment()
        rules = own.settings if rows is None else replace(own.settings, rows=rows)
        store, place, env = own.store(), identify(device), environment(device)
        found = match(workload, store, place, env, rules=rules)
        if found.level is Level.NONE and packaged and files_for(place) and not (store is None and own.is_shut()):
            found, _ = from_package(workload, found, store, place, env, rules=rules)
        own.warn_differences(found.differences, other_device=found.level is Level.OTHER_DEVICE)
        return found
    except UserError as e:
        deployment().warn_once("match", f"autotune: {e}; no schedule is looked up")
    except Exception as e:
        deployment().warn_once(
            f"match {workload.fingerprint}", f"autotune: the look-up of {workload.label} failed: {e!r}"
        )
    return Match(Level.NONE, reason="the look-up failed")


def match(
    workload: Workload, store: Reader | None, device: DeviceIdentity, env: Environment, *, rules: Settings | None = None
) -> Match:
    """Look a workload up.

    Args:
        workload: of kind "fusion" or "product".
        store: the database; None never matches.
        device: must equal the device that a schedule was tuned on, unless ``rules`` allow another.
        env: the current software.
        rules: None for this process's settings.

    Raises:
        UserError: the database failed.
    """
    if store is None:
        return Match(Level.NONE, reason="there is no database")
    rules = rules or deployment().settings
    how = rules.environment
    if workload.kind == PRODUCT:
        from autotune.runtime.inductor import product_call  # it loads torch

        return product_call.match(workload, store, device, env, how)
    exact, why = exact_match(workload, store, device, env, how)
    if exact is not None and exact.predicted:
        return Match(Level.HEURISTIC, exact, workload, PREDICTED, software(exact, store, env))
    if exact is not None:
        return Match(Level.EXACT, exact, workload, differences=software(exact, store, env))
    found, refused = other_rows(workload, store, device, env, how, rules.rows)
    if found is not None:
        full, tuned = found
        reason = f"{''.join([why, *refused])}; {tuned.extent} rows are the nearest tuned"
        return Match(Level.OTHER_ROWS, full, tuned, reason, software(full, store, env))
    why = "".join([why, *refused])
    if rules.other_device == "refuse":
        return Match(Level.NONE, reason=why)
    for other in relatives(workload, store, device):
        there, _ = exact_match(workload, store, other, env, how)
        if there is not None:
            differ = (*differences(other, device), *software(there, store, env))
            return Match(Level.OTHER_DEVICE, there, workload, f"{why}; tuned on {other.label}", differ)
    return Match(Level.NONE, reason=why)


def exact_match(
    workload: Workload, store: Reader, device: DeviceIdentity, env: Environment, how: How
) -> tuple[Schedule | None, str]:
    """The schedule of a workload on a device, or None and the reason why no schedule can be used."""
    schedule = store.get_schedule(workload.fingerprint, device.fingerprint, env, match=how)
    if schedule is None:
        return None, store.lost or "not tuned on this device"
    why = unusable(schedule) or deployment().disabled(schedule) or foreign(schedule, workload, device, store.trusted)
    if not why and how == "strict" and (generator := old_generator(schedule)):
        why = f"printed by generator {generator}"
    return (None, why) if why else (schedule, "")


def other_rows(
    workload: Workload, store: Reader, device: DeviceIdentity, env: Environment, how: How, limit: float
) -> tuple[tuple[Schedule, Workload] | None, list[str]]:
    """The schedule of the nearest number of rows that fits, with its workload; and the reasons against nearer ones."""
    near = store.nearest(workload.family, device.fingerprint, env, workload.extent, match=how, limit=TRIED + 1)
    misfits = deployment().misfits
    refused: list[str] = []
    graph: Graph | None = None
    for found in [n for n in near if n.workload != workload.fingerprint][:TRIED]:
        if (ratio := extent_ratio(found.extent, workload.extent)) > limit:
            refused.append(f"; {found.extent} rows, the nearest tuned, are {ratio:.3g} times off, beyond {limit:g}")
            break
        known = (workload.fingerprint, found, device.fingerprint, env.strict, how)
        not_fit = misfits.get(known, "")
        if not not_fit:
            full = store.get_schedule(found.workload, device.fingerprint, env, match=how)
            tuned = store.get_workload(found.workload) if full is not None else None
            if full is None or tuned is None:
                not_fit = "it is damaged, or failed here"
            elif full.predicted:
                not_fit = PREDICTED
            else:
                graph = graph or Graph.from_json(workload.spec)
                not_fit = unfit_for(graph, tuned, full, device, store.trusted)
            if full is not None and tuned is not None and not not_fit and not (not_fit := deployment().disabled(full)):
                return (full, tuned), refused
            if len(misfits) >= 10_000:
                misfits.clear()
            misfits[known] = not_fit
        if len(refused) < 3:
            refused.append(f"; the schedule for {found.extent} rows does not fit: {not_fit}")
    return None, refused


def deployed(
    fingerprint: str, store: Reader, device: DeviceIdentity, env: Environment, *, rules: Settings | None = None
) -> Match:
    """Look up and check again the schedule that code was compiled for, since the database may have changed.

    Args:
        fingerprint: of the workload that the schedule was tuned for.
        rules: None for this process's settings.

    Raises:
        Unsupported: the schedule is no longer stored, or cannot be used.
        UserError: the database failed.
    """
    rules, tuned = rules or deployment().settings, store.get_workload(fingerprint)
    if tuned is None:
        raise Unsupported(store.lost or "its schedule is no longer stored")
    found = match(tuned, store, device, env, rules=replace(rules, rows=1.0))
    if found.schedule is None or found.schedule.config is None or found.tuned != tuned:
        raise Unsupported(f"its schedule is no longer stored, or cannot be used: {found.reason}")
    return found


_NOTHING = Rung("packaged", Outcome.EMPTY, "autotune has no packaged schedules for this device")


def from_package(
    workload: Workload,
    found: Match,
    store: Reader | None,
    device: DeviceIdentity,
    env: Environment,
    *,
    rules: Settings | None = None,
) -> tuple[Match, Rung]:
    """Look up in the shipped snapshots, after the user's database had no match; also returns the level's step.

    Args:
        found: result of :func:`match` with the other arguments; returned if this level has no match.
        store: the user's database; None if it does not exist, not if it cannot be read.

    Raises:
        UserError: the user's database failed, or a setting has an invalid value.
    """
    rules = _any_software(replace(rules or deployment().settings, other_device="refuse"))
    last = _NOTHING
    for path in files_for(device):
        snapshot, why = _asked(path, store)
        if snapshot is None:
            last = Rung("packaged", Outcome.REFUSED, why) if last is _NOTHING else last
            continue
        for of in _devices(snapshot, device):
            there = match(workload, snapshot, of, env, rules=rules)
            if there.tuned is not None:
                return _taken(workload, found, there, path, store, device, of)
            if of is device and last is _NOTHING:
                step = on_this_device(workload, snapshot, device, env, there.reason)
                last = replace(step, rung="packaged")
    return found, last


def _taken(
    workload: Workload,
    found: Match,
    there: Match,
    path: Path,
    store: Reader | None,
    device: DeviceIdentity,
    of: DeviceIdentity,
) -> tuple[Match, Rung]:
    """The match in a shipped snapshot, tuned on the device ``of``, unless the user's database has a schedule."""
    assert there.tuned is not None
    if _decided(store, device, workload, there.tuned):
        why = f"the database has a schedule for this device, which it passes over: {found.reason}"
        return found, Rung("packaged", Outcome.REFUSED, why)
    rows = "" if there.level is Level.EXACT else f", tuned for {there.tuned.extent} rows"
    where = "another such device" if of is device else of.label
    why = f"{path.stem} is packaged with autotune{rows}; measured on {where}, not in your step"
    reason = f"{found.reason}; {path.stem} is packaged with autotune{rows}"
    taken = replace(there, level=Level.PACKAGED, reason=reason)
    return taken, Rung("packaged", Outcome.TAKEN, why, (*differences(of, device), *there.differences))


def _devices(snapshot: Snapshot, device: DeviceIdentity) -> list[DeviceIdentity]:
    """This device; on a GPU, followed by the snapshot's devices with compatible kernels, most similar first."""
    if device.kind != "cuda":
        return [device]
    near = [d for d in snapshot.devices if d.fingerprint != device.fingerprint and related(d, device)]
    return [device, *sorted(near, key=lambda d: (len(differences(d, device)), d.label))]


def deployed_from_package(
    fingerprint: str, store: Reader | None, device: DeviceIdentity, env: Environment
) -> Match | None:
    """As :func:`deployed`, from the shipped snapshots; None without a match."""
    rules = _any_software(deployment().settings)
    for snapshot in packaged_readers(store, device):
        for of in _devices(snapshot, device):
            with contextlib.suppress(Unsupported):
                found = deployed(fingerprint, snapshot, of, env, rules=rules)
                assert found.tuned is not None
                return None if _decided(store, device, found.tuned) else replace(found, level=Level.PACKAGED)
    return None


def packaged_readers(store: Reader | None, device: DeviceIdentity) -> list[Snapshot]:
    """The snapshots shipped for a device, its own first; empty if ``store`` excludes them."""
    asked = (_asked(path, store)[0] for path in files_for(device))
    return [snapshot for snapshot in asked if snapshot is not None]


def _asked(path: Path, store: Reader | None) -> tuple[Snapshot | None, str]:
    """A shipped snapshot, or None and the reason not to use it."""
    if why := deployment().packaged_refused(store):
        return None, why
    snapshot = deployment().packaged.get(path)
    if snapshot is None or snapshot.lost:
        return None, f"{path.name} is damaged: install autotune again"
    return snapshot, ""


def _any_software(rules: Settings) -> Settings:
    return rules if rules.environment == "strict" else replace(rules, environment="ignore")


def _decided(store: Reader | None, device: DeviceIdentity, *workloads: Workload) -> bool:
    """True if the user's database has any schedule on this device for one of these workloads."""
    places = () if store is None else [place for w in workloads for place, _ in store.tuned_under(w.fingerprint)]
    return device.fingerprint in places
