"""Which stored schedule fits a workload, and how well.

The rungs of a ladder, tried from the top:

``exact``: the very workload was tuned on an equal device. ``other_rows``: a workload of its family was, which differs
only in the extent of axis 0, and its kernels, which take that extent as an argument, mean the same on the extent at
hand; that is checked here by planning both. The numbers of rows that were tuned are the buckets: the nearest by ratio
is taken, within a limit. ``other_device``: the workload was tuned on another device of the same architecture. Its
kernels run here and are right, since no kernel of ours counts on how many multiprocessors there are; how fast they are
nobody knows, so that it takes a setting to use them. ``packaged``: it comes with autotune for an equal device
(:mod:`autotune.runtime.matching.packaged`). ``none``: none of these.
"""

from __future__ import annotations

from dataclasses import replace

from autotune.compiler.planner.plan import make_plan
from autotune.compiler.schedules.limits import improper
from autotune.device import DeviceIdentity, Environment
from autotune.errors import Unsupported
from autotune.ir.graph import Graph
from autotune.runtime.deployment import deployment
from autotune.runtime.matching.audits import foreign_kernels
from autotune.runtime.matching.fitting import differ, launch_misfit
from autotune.runtime.matching.ladder import Level, Match, differences, relatives, software
from autotune.runtime.settings import Settings
from autotune.store.health.damage import BROKEN
from autotune.store.reading import Match as How
from autotune.store.reading import Reader
from autotune.store.records import Schedule
from autotune.workload import Workload

TRIED = 16
"""Schedules for other rows that a look-up tries, from the nearest on. Planning each takes milliseconds."""


def match(
    workload: Workload,
    store: Reader | None,
    device: DeviceIdentity,
    env: Environment,
    *,
    strict: bool = False,
    rules: Settings | None = None,
) -> Match:
    """Look a workload up.

    Args:
        workload: of kind "fusion".
        store: None finds nothing.
        device: must equal the device that a schedule was tuned on, unless ``rules`` allow for another.
        env: the software at hand.
        strict: whether ``env`` must equal the software that a schedule was tuned with, whatever ``rules`` say.
        rules: None for those that hold in this process.

    Raises:
        UserError: the database failed.
    """
    if store is None:
        return Match(Level.NONE, reason="there is no database")
    rules = rules or deployment().settings
    how: How = "strict" if strict else rules.environment
    exact, why = exact_match(workload, store, device, env, how)
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
    """The schedule of a workload on a device, or why there is none to be used."""
    schedule = store.get_schedule(workload.fingerprint, device.fingerprint, env, match=how)
    if schedule is None:
        return None, store.lost or "not tuned on this device"
    why = unusable(schedule) or deployment().disabled(schedule) or _foreign(schedule, workload, device, store.trusted)
    if not why and how == "strict" and (generator := old_generator(schedule)):
        why = f"printed by generator {generator}"
    return (None, why) if why else (schedule, "")


def other_rows(
    workload: Workload, store: Reader, device: DeviceIdentity, env: Environment, how: How, limit: float
) -> tuple[tuple[Schedule, Workload] | None, list[str]]:
    """The schedule of the nearest number of rows that fits, with its workload; and why nearer ones do not."""
    near = store.nearest(workload.family, device.fingerprint, env, workload.extent, match=how, limit=TRIED + 1)
    misfits = deployment().misfits
    refused: list[str] = []
    graph: Graph | None = None
    for found in [n for n in near if n.workload != workload.fingerprint][:TRIED]:
        if (ratio := _ratio(found.extent, workload.extent)) > limit:
            refused.append(f"; {found.extent} rows, the nearest tuned, are {ratio:.3g} times off, beyond {limit:g}")
            break
        known = (workload.fingerprint, found, device.fingerprint, env.strict, how)
        not_fit = misfits.get(known, "")
        if not not_fit:
            full = store.get_schedule(found.workload, device.fingerprint, env, match=how)
            tuned = store.get_workload(found.workload) if full is not None else None
            if full is None or tuned is None:
                not_fit = "it is damaged, or failed here"
            else:
                graph = graph or Graph.from_json(workload.spec)
                not_fit = _misfit(graph, tuned, full, device, store.trusted)
            if full is not None and tuned is not None and not not_fit and not (not_fit := deployment().disabled(full)):
                return (full, tuned), refused
            if len(misfits) >= 10_000:
                misfits.clear()
            misfits[known] = not_fit
        if len(refused) < 3:
            refused.append(f"; the schedule for {found.extent} rows does not fit: {not_fit}")
    return None, refused


def _ratio(a: int, b: int) -> float:
    low, high = sorted((max(a, 1), max(b, 1)))
    return high / low


def deployed(
    fingerprint: str, store: Reader, device: DeviceIdentity, env: Environment, *, rules: Settings | None = None
) -> Match:
    """The schedule that code was compiled for, checked again, since the database may have changed meanwhile.

    Args:
        fingerprint: of the workload that it was tuned for.
        rules: None for those that hold in this process.

    Raises:
        Unsupported: it is no longer stored, or cannot be used.
        UserError: the database failed.
    """
    rules, tuned = rules or deployment().settings, store.get_workload(fingerprint)
    if tuned is None:
        raise Unsupported(store.lost or "its schedule is no longer stored")
    found = match(tuned, store, device, env, rules=replace(rules, rows=1.0))
    if found.schedule is None or found.schedule.config is None or found.tuned != tuned:
        raise Unsupported(f"its schedule is no longer stored, or cannot be used: {found.reason}")
    return found


def unfit(schedule: Schedule, workload: Workload, device: DeviceIdentity) -> str:
    """Why a schedule cannot be deployed for its own workload on its own device; "" where it can."""
    return unusable(schedule) or _foreign(schedule, workload, device, False)


def unusable(schedule: Schedule) -> str:
    """Why a schedule cannot be deployed even for the workload it was tuned for; "" where it can."""
    if schedule.config is None:
        return ""
    if schedule.artifact is None:
        return "its schedule has no artifact"
    why = improper(schedule.config, "cpu" if schedule.artifact.target == "cpu" else "cuda")
    return _damaged(schedule, why, "the stored parameters") if why else ""


def misfit(graph: Graph, tuned: Graph, schedule: Schedule) -> str:
    """Why kernels tuned for graph ``tuned`` may not run ``graph``, which differs in extent 0; "" where they may."""
    if schedule.config is None:
        return ""  # a baseline takes any number of rows
    if unusable(schedule):
        return unusable(schedule)
    assert schedule.artifact is not None
    try:
        side = "cpu" if schedule.artifact.target == "cpu" else "cuda"
        text = str(schedule.config.get("plan", ""))
        here, there = make_plan(graph, side, text), make_plan(tuned, side, text)
        return differ(here, there) or launch_misfit(graph, here, there, schedule)
    except Unsupported as e:
        return str(e)


def _misfit(graph: Graph, tuned: Workload, schedule: Schedule, device: DeviceIdentity, trusted: bool) -> str:
    """As :func:`misfit`, for a workload from the database."""
    try:
        there = Graph.from_json(tuned.spec)
    except BROKEN as error:
        return f"its graph is damaged ({error})"
    return unusable(schedule) or _foreign(schedule, tuned, device, trusted) or misfit(graph, there, schedule)


def old_generator(schedule: Schedule) -> str:
    """The generator that printed a schedule's kernels, where that is not this version's; else ""."""
    from autotune.compiler.targets.cuda.source import GENERATOR

    artifact = schedule.artifact
    return "" if artifact is None or artifact.target == "cpu" or artifact.generator == GENERATOR else artifact.generator


def _foreign(schedule: Schedule, tuned: Workload, device: DeviceIdentity, trusted: bool) -> str:
    """Why a schedule's kernels are not those of its configuration on the device that it was tuned on; "" where they
    are, are made here (on a CPU), or were compared by whom the deployer trusts, when they were exported."""
    artifact = schedule.artifact
    if schedule.config is None or artifact is None or artifact.target == "cpu" or trusted:
        return ""
    why = foreign_kernels(artifact, tuned, schedule.config, device.units)
    return _damaged(schedule, why, "the stored kernels") if why else ""


def _damaged(schedule: Schedule, why: str, what: str) -> str:
    """Tells once that a schedule is not used."""
    short = schedule.key.workload[:12]
    deployment().warn_once(f"damaged {short}", f"autotune: {what} of {short} are not used: {why}; search it again")
    return f"its schedule is damaged: {why}"
