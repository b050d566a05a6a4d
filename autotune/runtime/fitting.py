"""Reasons to refuse a stored schedule: it is damaged, or its kernels do not fit the actual number of rows.

In a group without sums over the rows, a kernel may take the number of rows as an argument; its launch data record that.
Sums over the rows need a main kernel and a finish kernel, which does not take the number. Everything else in such a
group that depends on the rows is in the kernels' source: the constant of a mean, the width of a counter, the split of
the rows. So the source of both kernels is generated for the actual rows, with the stored number of blocks or parts. It
must equal the source for the tuned rows.

An audit (:mod:`autotune.compiler.assemble`) plans a region and generates its kernels again: 10 ms, and more for a large
region. Its result depends only on the workload, the configuration, the artifact with its code, the device's size and
this version. So a digest of these names an empty file in the user's own cache, which other users cannot write. The next
look-up of the same schedule takes 0.1 ms. A database cannot create such a file, and changed data have another
digest.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from autotune import __version__
from autotune.compiler.planner.groups import Plan, group_configs
from autotune.compiler.planner.plan import make_plan
from autotune.compiler.program.columns import finish_graph
from autotune.compiler.schedules.configurations import improper
from autotune.compiler.targets.cuda.device import check_launch
from autotune.compiler.targets.cuda.source import GroupKernels
from autotune.device import DeviceIdentity
from autotune.errors import Unsupported
from autotune.files import cache_folder, make_own
from autotune.ir.graph import Graph
from autotune.runtime.deployment import deployment
from autotune.store.codec import artifact_json
from autotune.store.damage import BROKEN
from autotune.store.records import Schedule
from autotune.task import Artifact, Choice, Config, Kernel
from autotune.workload import Workload, digest

ONE_NUMBER = "a kernel is compiled for one number of rows"

AUDIT = 2
"""Version of the audit, to be incremented when an audit refuses kernels that it accepted before."""


def unfit(schedule: Schedule, workload: Workload, device: DeviceIdentity) -> str:
    """The reason why a schedule cannot be deployed for its own workload on its own device; "" for none."""
    return unusable(schedule) or foreign(schedule, workload, device, False)


def unusable(schedule: Schedule) -> str:
    """The reason why a schedule cannot be deployed even for its own workload; "" for none."""
    if schedule.config is None:
        return ""
    if schedule.artifact is None:
        return "its schedule has no artifact"
    why = improper(schedule.config, "cpu" if schedule.artifact.target == "cpu" else "cuda")
    return _damaged(schedule, why, "the stored parameters") if why else ""


def misfit(graph: Graph, tuned: Graph, schedule: Schedule) -> str:
    """The reason why kernels for graph ``tuned`` cannot run ``graph``, which differs in extent 0; "" for none."""
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


def unfit_for(graph: Graph, tuned: Workload, schedule: Schedule, device: DeviceIdentity, trusted: bool) -> str:
    """As :func:`misfit`, for a workload from the database."""
    try:
        there = Graph.from_json(tuned.spec)
    except BROKEN as error:
        return f"its graph is damaged ({error})"
    return unusable(schedule) or foreign(schedule, tuned, device, trusted) or misfit(graph, there, schedule)


def old_generator(schedule: Schedule) -> str:
    """The generator of a schedule's kernels, if it is not this version's; else ""."""
    from autotune.compiler.targets.cuda import GENERATOR

    artifact = schedule.artifact
    return "" if artifact is None or artifact.target == "cpu" or artifact.generator == GENERATOR else artifact.generator


def foreign(schedule: Schedule, tuned: Workload, device: DeviceIdentity, trusted: bool) -> str:
    """The difference of a schedule's kernels from those of its configuration on the device that it was tuned on.

    "" for none, for a CPU, whose kernels are compiled here, and for a trusted exporter, which compared them already.
    """
    artifact = schedule.artifact
    if schedule.config is None or artifact is None or artifact.target == "cpu" or trusted:
        return ""
    why = foreign_kernels(artifact, tuned, schedule.config, device.units)
    return _damaged(schedule, why, "the stored kernels") if why else ""


def _damaged(schedule: Schedule, why: str, what: str) -> str:
    """Warn once that a schedule is not used; returns the reason."""
    short = schedule.key.workload[:12]
    deployment().warn_once(
        f"damaged {short}", f"autotune: {what} of {short} are not used: {why}; search the workload again"
    )
    return f"its schedule is damaged: {why}"


def foreign_kernels(artifact: Artifact, tuned: Workload, config: Config, sms: int) -> str:
    """The difference of a CUDA artifact from the kernels of its configuration; "" for none.

    Args:
        sms: multiprocessors of the device.
    """
    from autotune.compiler.assemble import foreign
    from autotune.compiler.targets.cuda import GENERATOR

    # The digest covers the code by its SHA-256, which artifact_json computes again.
    about = [AUDIT, __version__, GENERATOR, tuned.fingerprint, dict(config), artifact_json(artifact), sms]
    mark = _mark(digest(about))
    if mark is not None and mark.exists():
        return ""
    why = foreign(artifact, Graph.from_json(tuned.spec), config, sms)
    if not why and mark is not None:
        _keep(mark)
    return why


def _mark(name: str) -> Path | None:
    folder = _own_folder(cache_folder("audits"))
    return None if folder is None else folder / name[:2] / name


@lru_cache(maxsize=4)
def _own_folder(folder: Path) -> Path | None:
    """The folder, created for this user alone; None if that fails, and every process audits for itself."""
    try:
        make_own(folder)
    except OSError:
        return None
    return folder


def _keep(mark: Path) -> None:
    try:
        mark.parent.mkdir(exist_ok=True, mode=0o700)
        os.close(os.open(mark, os.O_CREAT | os.O_WRONLY | getattr(os, "O_CLOEXEC", 0), 0o600))
    except OSError:  # a full disk: the next process audits again
        return


def differ(here: Plan, there: Plan) -> str:
    """The difference of two plans, apart from the extent of axis 0; "" for none."""
    if (len(here.groups), len(here.scratch)) != (len(there.groups), len(there.scratch)):
        return "it is planned as other kernels"
    if here.launches != there.launches:
        return "its kernels are launched otherwise"
    for a, b in zip(here.groups, there.groups, strict=True):
        one, two = a.graph, b.graph
        if (one.values, one.inputs, one.outputs) != (two.values, two.inputs, two.outputs):
            return "a kernel's operators or strides differ"
        if one.extents[1:] != two.extents[1:] or (a.inputs, a.outputs) != (b.inputs, b.outputs):
            return "a kernel's extents or arguments differ"
    return ""


def launch_misfit(graph: Graph, plan: Plan, there: Plan, schedule: Schedule) -> str:
    """The reason why kernels cannot run a plan that differs from theirs in the extent of axis 0; "" for none.

    Args:
        graph: the actual region; ``plan`` its plan.
        there: the plan of the region that the schedule, which has an artifact, was tuned for.

    Raises:
        Unsupported: a counter or the number of blocks exceeds its limit, or a group has no such kernels.
    """
    assert schedule.artifact is not None
    assert schedule.config is not None
    open_ = [g.graph.extents != t.graph.extents for g, t in zip(plan.groups, there.groups, strict=True)]
    configs = group_configs(there, schedule.config)
    if schedule.artifact.target == "cpu":
        for g, t, config, meets in zip(plan.groups, there.groups, configs, open_, strict=True):
            if meets and (why := _cpu_misfit(g.graph, t.graph, config)):
                return why
    return _kernels_misfit(graph, plan, there, configs, open_, schedule.artifact)


def _cpu_misfit(here: Graph, tuned: Graph, config: Config) -> str:
    from autotune.compiler.targets.cpu.columns import LONGEST_ELSEWHERE, column_split, group_program, parts_for
    from autotune.compiler.targets.cpu.kernel import emit_columns
    from autotune.compiler.targets.cpu.schedule import CpuSchedule

    if group_program(here, bool(config.get("parts"))).dynamic < 0:
        return ONE_NUMBER
    own = CpuSchedule.from_config(config)
    parts = parts_for(tuned, own)
    one, two = (column_split(g) if parts else None for g in (here, tuned))
    if one is None or two is None:
        return "" if one is two and not parts_for(here, own) else "its rows are cut otherwise"
    if one.main.size(one.rows) > parts * LONGEST_ELSEWHERE:
        return f"more than {LONGEST_ELSEWHERE} rows for each accumulator"
    same = emit_columns(one, own, parts) == emit_columns(two, own, parts)
    return "" if same and finish_graph(one, parts) == finish_graph(two, parts) else ONE_NUMBER


def _kernels_misfit(
    graph: Graph, plan: Plan, there: Plan, configs: Sequence[Config], open_: Sequence[bool], artifact: Artifact
) -> str:
    by_launch = _by_launch(there, artifact.kernels)
    if by_launch is None:  # the launch data do not record which kernels depend on the rows
        if not all(kernel.launch.get("dynamic") for kernel in artifact.kernels):
            return ONE_NUMBER
        by_launch = [(range(len(plan.groups)), artifact.kernels)]
    for groups, kernels in by_launch:
        if not any(open_[k] for k in groups):
            continue  # no kernel depends on the rows
        if len(groups) == 1 and len(kernels) > 1:
            k = groups[0]
            if why := _sums_misfit(plan.groups[k].graph, there.groups[k].graph, configs[k], kernels, artifact):
                return why
        elif any(kernel.code and not kernel.launch.get("dynamic") for kernel in kernels):
            return ONE_NUMBER
        for kernel in kernels:
            multiple = int(kernel.launch.get("multiple", 1) or 1)
            if graph.extents[0] % multiple:
                return f"a kernel takes a multiple of {multiple} rows"
            if "inner" in kernel.launch:
                own = plan.groups[int(kernel.launch.get("group", 0))].graph
                check_launch(kernel.launch, own.extents[0] if own.extents else 1)
    return ""


def _by_launch(plan: Plan, kernels: Sequence[Kernel]) -> list[tuple[Sequence[int], Sequence[Kernel]]] | None:
    """The groups and the kernels of each launch of a plan; None if the kernels do not record their groups."""
    if len(kernels) == len(plan.groups) == len(plan.launches):
        return [(launch, [kernel]) for launch, kernel in zip(plan.launches, kernels, strict=True)]
    if any(type(kernel.launch.get("group")) is not int for kernel in kernels):
        return None
    found: list[tuple[Sequence[int], Sequence[Kernel]]] = [
        (launch, [n for n in kernels if n.launch["group"] == launch[0]]) for launch in plan.launches
    ]
    in_order = [kernel for _, own in found for kernel in own]
    return found if in_order == list(kernels) and all(own for _, own in found) else None


def _sums_misfit(here: Graph, tuned: Graph, config: Config, kernels: Sequence[Kernel], artifact: Artifact) -> str:
    """The reason why a main kernel and its finish kernel, made for graph ``tuned``, cannot run graph ``here``."""
    from autotune.compiler.schedules.cuda import scheme_of
    from autotune.compiler.targets.cuda import GENERATOR

    if artifact.generator != GENERATOR:
        return f"what its kernels count on is not known: generator {artifact.generator} printed them"
    if scheme_of(tuned).name != "columns":
        return ONE_NUMBER
    grid, tiles = (kernels[0].launch.get(name) for name in ("grid", "tiles"))
    if type(grid) is not int or type(tiles) is not int or tiles < 1 or grid < tiles or grid % tiles:
        return "its launch data are damaged"
    one, two = (_printed(g, tuple(sorted(config.items())), grid // tiles) for g in (here, tuned))
    if (one.args, one.private) != (two.args, two.private) or len(one.sources) != len(kernels):
        return ONE_NUMBER
    for a, b, kernel in zip(one.sources, two.sources, kernels, strict=True):
        if (a.text, a.params, a.launch) != (b.text, b.params, b.launch):
            return ONE_NUMBER
        if bool(kernel.launch.get("dynamic")) != bool(a.launch["dynamic"]):
            return ONE_NUMBER
    return "" if kernels[0].launch.get("dynamic") else ONE_NUMBER


@lru_cache(maxsize=64)
def _printed(graph: Graph, config: tuple[tuple[str, Choice], ...], blocks: int) -> GroupKernels:
    """A main kernel and its finish kernel. Cached, since many numbers of rows are compared with one tuned number."""
    from autotune.compiler.schedules.cuda.columns import SCHEME

    return SCHEME.with_blocks(graph, dict(config), blocks)
