"""CPU kernels of a stored schedule: they have no cubin, so they are emitted and compiled again when loaded.

``compiler.targets.cpu`` caches Numba's machine code on disk, so that this costs milliseconds from the second process
on. The source comes from autotune's emitter and a checked graph; no stored code is executed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autotune.compiler.planner.groups import Plan, group_configs
from autotune.task import Config

Kernel = Callable[[Sequence[int], int], None]
"""A group's one or several kernels: a function of addresses and the extent of axis 0."""


def make_launches(
    plan: Plan, config: Config, tuned: Plan | None = None
) -> list[tuple[range, Callable[[int, Sequence[int]], None]]]:
    """Launches in order: the indices of the groups that each runs, and a function of (ignored stream, addresses).

    A launch takes the addresses of inputs then outputs for each of its groups. Consecutive groups without dependencies
    are one launch.

    Args:
        tuned: the plan at the rows that ``config`` was tuned for, if they differ. Sums over the rows are split as in
            that plan, so that the code is the same.

    Raises:
        Unsupported, BuildError: a group cannot be emitted for the CPU.
    """
    from autotune.compiler.targets.cpu.columns import parts_for
    from autotune.compiler.targets.cpu.kernel import load_group
    from autotune.compiler.targets.cpu.schedule import CpuSchedule

    schedules = [CpuSchedule.from_config(own) for own in group_configs(plan, config)]
    parts = [0] * len(schedules)
    if tuned is not None:
        parts = [parts_for(group.graph, own) for group, own in zip(tuned.groups, schedules, strict=True)]
    kernels = [load_group(g.graph, own, n) for g, own, n in zip(plan.groups, schedules, parts, strict=True)]
    return [(together, _launch(plan, together, kernels)) for together in _together(plan, kernels)]


def _together(plan: Plan, kernels: Sequence[Kernel]) -> list[range]:
    """Ranges of groups that one launch can run; a group of several kernels is a separate launch."""
    from autotune.compiler.targets.cpu.launcher import CpuKernel

    out: list[range] = []
    written: set[tuple[str, int]] = set()
    alone = [not isinstance(kernel, CpuKernel) for kernel in kernels]
    for k, group in enumerate(plan.groups):
        last = out[-1] if out else range(0)
        if last and not alone[k] and not alone[last[0]] and not written & {*group.inputs}:
            out[-1] = range(last.start, k + 1)
        else:
            out.append(range(k, k + 1))
            written = set()
        written |= {*group.outputs}
    return out


def _launch(plan: Plan, together: range, kernels: Sequence[Kernel]) -> Callable[[int, Sequence[int]], None]:
    from autotune.compiler.targets.cpu.kernel import batch
    from autotune.compiler.targets.cpu.launcher import CpuKernel

    groups = [plan.groups[k] for k in together]
    extents = [group.graph.extents[0] if group.graph.extents else 1 for group in groups]
    counts = [len(group.inputs) + len(group.outputs) for group in groups]
    first = kernels[together[0]]
    if len(together) == 1 and isinstance(first, CpuKernel):
        return first.bind(extents[0], counts[0])
    if len(together) == 1:
        return lambda stream, pointers: first(pointers, extents[0])
    own = [kernel for kernel in kernels[together.start : together.stop] if isinstance(kernel, CpuKernel)]
    run_all = batch(list(zip(own, counts, extents, strict=True)))
    return lambda stream, pointers: run_all(pointers)
