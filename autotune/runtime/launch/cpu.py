"""CPU kernels of a stored schedule: they have no cubin, so they are emitted and compiled again when loaded.

``compiler.targets.cpu`` keeps what Numba compiled on disk, so that this costs milliseconds from the second process
on. The source comes from our own emitter and a checked graph; nothing that is stored is executed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from autotune.compiler.planner.groups import Plan
from autotune.compiler.schedules.configurations import group_configs
from autotune.task import Config

if TYPE_CHECKING:
    from autotune.compiler.targets.cpu.loading.launcher import Entry, Kernel


def make_launches(
    plan: Plan, config: Config, tuned: Plan | None = None
) -> list[tuple[range, Callable[[int, Sequence[int]], None]]]:
    """Launches in order: the numbers of the groups that each runs, and a function of (ignored stream, addresses).

    A launch takes for each of its groups the addresses of inputs then outputs. Groups that follow each other and do not
    wait for each other are one launch.

    Args:
        tuned: the plan at the rows that ``config`` was tuned for, where they are others: sums over the rows are cut as
            there, so that the code is the same.

    Raises:
        Unsupported, BuildError: a group that cannot be emitted for the CPU.
    """
    from autotune.compiler.targets.cpu.columns import parts_for
    from autotune.compiler.targets.cpu.loading.kernel import load_group
    from autotune.compiler.targets.cpu.schedule import CpuSchedule

    schedules = [CpuSchedule.from_config(own) for own in group_configs(plan, config)]
    parts = [0] * len(schedules)
    if tuned is not None:
        parts = [parts_for(group.graph, own) for group, own in zip(tuned.groups, schedules, strict=True)]
    kernels = [load_group(g.graph, own, n) for g, own, n in zip(plan.groups, schedules, parts, strict=True)]
    entries = [getattr(kernel, "entry", None) for kernel in kernels]
    return [(together, _launch(plan, together, kernels, entries)) for together in _together(plan, entries)]


def _together(plan: Plan, entries: Sequence[Entry | None]) -> list[range]:
    """Neighbours that one launch can run; a group of several kernels (no entry) stays alone."""
    out: list[range] = []
    written: set[tuple[str, int]] = set()
    for k, (group, entry) in enumerate(zip(plan.groups, entries, strict=True)):
        last = out[-1] if out else range(0)
        if last and entry is not None and entries[last[0]] is not None and not written & {*group.inputs}:
            out[-1] = range(last.start, k + 1)
        else:
            out.append(range(k, k + 1))
            written = set()
        written |= {*group.outputs}
    return out


def _launch(
    plan: Plan, together: range, kernels: Sequence[Kernel], entries: Sequence[Entry | None]
) -> Callable[[int, Sequence[int]], None]:
    groups = [plan.groups[k] for k in together]
    extents = [group.graph.extents[0] if group.graph.extents else 1 for group in groups]
    if len(together) == 1:
        return _bind(kernels[together[0]], extents[0], len(groups[0].inputs) + len(groups[0].outputs))
    from autotune.compiler.targets.cpu.loading.batch import batch

    parts = []
    for k, group, extent0 in zip(together, groups, extents, strict=True):
        entry = entries[k]
        assert entry is not None
        parts.append((entry, len(group.inputs) + len(group.outputs), extent0))
    run_all = batch(parts)

    def run(stream: int, pointers: Sequence[int]) -> None:
        run_all(pointers)

    return run


def _bind(kernel: Kernel, extent0: int, count: int) -> Callable[[int, Sequence[int]], None]:
    bind = getattr(kernel, "bind", None)  # a group of several kernels has none
    if bind is not None:
        bound: Callable[[int, Sequence[int]], None] = bind(extent0, count)
        return bound

    def run(stream: int, pointers: Sequence[int]) -> None:
        kernel(pointers, extent0)

    return run
