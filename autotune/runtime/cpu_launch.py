"""CPU kernels of a stored schedule: they have no cubin, so they are emitted and compiled again when loaded.

``codegen.cpu`` keeps what Numba compiled on disk, so that this costs milliseconds from the second process on. The
source comes from our own emitter and a checked graph; nothing that is stored is executed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autotune.fusion.plan import Plan
from autotune.fusion.schedules import group_configs
from autotune.task import Config


def make_launches(plan: Plan, config: Config) -> list[Callable[[int, Sequence[int]], None]]:
    """For each group of ``plan``, in launch order, a function of (ignored stream, addresses of inputs then outputs).

    Raises:
        Unsupported, BuildError: a group that cannot be emitted for the CPU.
    """
    from autotune.codegen.cpu import CpuSchedule, load_group

    out = []
    for group, own in zip(plan.groups, group_configs(plan, config), strict=True):
        schedule = CpuSchedule.from_config(own)
        kernel = load_group(group.graph, schedule)
        extent0 = group.graph.extents[0] if group.graph.extents else 1
        out.append(_bind(kernel, extent0))
    return out


def _bind(kernel: Callable[[Sequence[int], int], None], extent0: int) -> Callable[[int, Sequence[int]], None]:
    def run(stream: int, pointers: Sequence[int]) -> None:
        kernel(pointers, extent0)

    return run
