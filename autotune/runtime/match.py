"""Which stored schedule fits a workload, and how well.

``exact``: the very workload was tuned on an equal device. ``other_rows``: a workload of its family was, which differs
only in the extent of axis 0, and its kernels, which take that extent as an argument, mean the same on the extent at
hand; that is checked here by planning both. ``none``: neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from autotune.compiler.planner.plan import Plan, make_plan
from autotune.compiler.program.program import Program
from autotune.compiler.schedules.configurations import group_configs
from autotune.compiler.schedules.limits import improper
from autotune.compiler.targets.cpu import columns as cpu_columns
from autotune.compiler.targets.cuda.counts import check_launch
from autotune.device import DeviceIdentity, Environment
from autotune.errors import Unsupported
from autotune.ir.graph import Graph
from autotune.runtime.database import warn_once
from autotune.store.health.damage import BROKEN
from autotune.store.records import Schedule
from autotune.task import Config, Kernel
from autotune.workload import Workload

if TYPE_CHECKING:
    from autotune.store import Store


TRIED = 16
"""Schedules for other rows that a look-up tries, from the nearest on. Planning each takes milliseconds."""

_misfits: dict[Any, str] = {}
"""Why a schedule for other rows does not fit a workload, so that a process plans that once."""


class Level(StrEnum):
    """How well a stored schedule fits; ``rank`` orders them, best first."""

    EXACT = "exact"
    OTHER_ROWS = "other_rows"
    NONE = "none"

    @property
    def rank(self) -> int:
        return list(Level).index(self)


@dataclass(frozen=True)
class Match:
    """What was found for one workload.

    Attributes:
        level: how well it fits.
        schedule: what to deploy; None at level ``none``. Its ``config`` is None where a baseline won.
        tuned: the workload that the schedule was tuned for: the same one at level ``exact``.
        reason: why there is no better match; empty at level ``exact``.
    """

    level: Level
    schedule: Schedule | None = None
    tuned: Workload | None = None
    reason: str = ""


def match(
    workload: Workload,
    store: Store | None,
    device: DeviceIdentity,
    env: Environment,
    *,
    strict: bool = False,
) -> Match:
    """Look a workload up.

    Args:
        workload: of kind "fusion".
        store: None finds nothing.
        device: must equal the device that a schedule was tuned on.
        env: the software at hand.
        strict: whether ``env`` must equal the software that a schedule was tuned with, or only the minor versions of
            torch and CUDA.

    Raises:
        UserError: the database failed.
    """
    if store is None:
        return Match(Level.NONE, reason="there is no database")
    how: Any = "strict" if strict else "loose"
    schedule = store.get_schedule(workload.fingerprint, device.fingerprint, env, match=how)
    if schedule is not None:
        why = unusable(schedule) or _foreign(schedule, workload, device)
        if not why:
            return Match(Level.EXACT, schedule, workload)
    else:
        why = "not tuned on this device"
    near = store.nearest(workload.family, device.fingerprint, env, workload.extent, match=how, limit=TRIED + 1)
    refused: list[str] = []
    graph: Graph | None = None
    for found in [n for n in near if n.workload != workload.fingerprint][:TRIED]:
        known = (workload.fingerprint, found, device.fingerprint, env.strict, strict)
        not_fit = _misfits.get(known, "")
        if not not_fit:
            full = store.get_schedule(found.workload, device.fingerprint, env, match=how)
            tuned = store.get_workload(found.workload) if full is not None else None
            if full is None or tuned is None:
                not_fit = "it is damaged"
            else:
                graph = graph or Graph.from_json(workload.spec)
                not_fit = _misfit(graph, tuned, full, device)
            if full is not None and tuned is not None and not not_fit:
                reasons = "".join([why, *refused])
                return Match(Level.OTHER_ROWS, full, tuned, f"{reasons}; {found.extent} rows are the nearest tuned")
            if len(_misfits) >= 10_000:
                _misfits.clear()
            _misfits[known] = not_fit
        if len(refused) < 3:
            refused.append(f"; the schedule for {found.extent} rows does not fit: {not_fit}")
    return Match(Level.NONE, reason="".join([why, *refused]))


def deployed(fingerprint: str, store: Store, device: DeviceIdentity, env: Environment) -> Schedule:
    """The schedule that code was compiled for, checked again, since the database may have changed meanwhile.

    Args:
        fingerprint: of the workload that it was tuned for.

    Raises:
        Unsupported: it is no longer stored, or cannot be used.
        UserError: the database failed.
    """
    schedule = store.get_schedule(fingerprint, device.fingerprint, env, match="loose")
    tuned = store.get_workload(fingerprint)
    if schedule is None or tuned is None:
        raise Unsupported("its schedule is no longer stored")
    if why := unusable(schedule) or _foreign(schedule, tuned, device):
        raise Unsupported(why)
    return schedule


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
        return _differ(here, there) or _launch_misfit(graph, here, there, schedule)
    except Unsupported as e:
        return str(e)


def _misfit(graph: Graph, tuned: Workload, schedule: Schedule, device: DeviceIdentity) -> str:
    """As :func:`misfit`, for a workload from the database."""
    try:
        there = Graph.from_json(tuned.spec)
    except BROKEN as error:
        return f"its graph is damaged ({error})"
    return unusable(schedule) or _foreign(schedule, tuned, device) or misfit(graph, there, schedule)


def _foreign(schedule: Schedule, tuned: Workload, device: DeviceIdentity) -> str:
    """Why a schedule's kernels are not those of its configuration on this device; "" where they are, or are made here
    (on a CPU)."""
    artifact = schedule.artifact
    if schedule.config is None or artifact is None or artifact.target == "cpu":
        return ""
    from autotune.compiler.audit import foreign

    why = foreign(artifact, Graph.from_json(tuned.spec), schedule.config, device.units)
    return _damaged(schedule, why, "the stored kernels") if why else ""


def _damaged(schedule: Schedule, why: str, what: str) -> str:
    """Tells once that a schedule is not used."""
    short = schedule.key.workload[:12]
    warn_once(f"damaged {short}", f"autotune: {what} of {short} are not used: {why}; search it again")
    return f"its schedule is damaged: {why}"


def _differ(here: Plan, there: Plan) -> str:
    """How two plans differ in more than the extent of axis 0."""
    if len(here.groups) != len(there.groups) or len(here.scratch) != len(there.scratch):
        return "it is planned as other kernels"
    for a, b in zip(here.groups, there.groups, strict=True):
        one, two = a.graph, b.graph
        if (one.values, one.inputs, one.outputs) != (two.values, two.inputs, two.outputs):
            return "a kernel's operators or strides differ"
        if one.extents[1:] != two.extents[1:] or (a.inputs, a.outputs) != (b.inputs, b.outputs):
            return "a kernel's extents or arguments differ"
    return ""


def _launch_misfit(graph: Graph, plan: Plan, there: Plan, schedule: Schedule) -> str:
    assert schedule.artifact is not None
    assert schedule.config is not None
    kernels = schedule.artifact.kernels
    open_ = [g.graph.extents != t.graph.extents for g, t in zip(plan.groups, there.groups, strict=True)]
    if schedule.artifact.target == "cpu":
        for k, meets in enumerate(open_):
            if meets and group_program(plan, k, schedule.config).dynamic < 0:
                return "a kernel is compiled for one number of rows"
    elif not _one_each(plan, kernels) and not all(kernel.launch.get("dynamic") for kernel in kernels):
        return "a kernel is compiled for one number of rows"  # which of them meet the rows is not written down
    for k, kernel in enumerate(kernels):
        if _one_each(plan, kernels) and not open_[k]:
            continue  # the kernel never meets the rows
        if kernel.code and not kernel.launch.get("dynamic"):
            return "a kernel is compiled for one number of rows"
        multiple = int(kernel.launch.get("multiple", 1) or 1)
        if graph.extents[0] % multiple:
            return f"a kernel takes a multiple of {multiple} rows"
        if "inner" in kernel.launch:
            own = plan.groups[int(kernel.launch.get("group", 0))].graph
            check_launch(kernel.launch, own.extents[0] if own.extents else 1)
    return ""


def _one_each(plan: Plan, kernels: Sequence[Kernel]) -> bool:
    """Whether every group has a kernel of its own."""
    return len(kernels) == len(plan.groups) and all(len(launch) == 1 for launch in plan.launches)


def group_program(plan: Plan, k: int, config: Config) -> Program:
    """The program of the ``k``-th group of a plan for the CPU under a configuration of the region."""
    own = group_configs(plan, config)[k]
    return cpu_columns.group_program(plan.groups[k].graph, own)
