"""True if a stored artifact is launched as its workload and configuration say, found out without a compiler.

A cubin is code, and no check makes one safe that somebody else put there. Everything beside it can be known: kernels
are printed again from the graph and the configuration, which takes milliseconds, and their launch data (grids, blocks,
shared memory, what the pointers are) and scratch compared with those stored; what a kernel takes of an SM is read from
its cubin. So a changed number, or a plan beside another plan's kernels, launches nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autotune.compiler.assemble import draft, launch_of
from autotune.compiler.planner.groups import group_configs
from autotune.compiler.planner.plan import make_plan
from autotune.compiler.targets.cuda.cubin import blocks_per_sm, taken
from autotune.compiler.targets.cuda.source import GENERATOR, OVERWRITES
from autotune.errors import BuildError, Superseded, Unsupported
from autotune.ir.graph import Graph
from autotune.task import Artifact, Choice, Kernel
from autotune.workload import canonical_json, digest

BOUND = "of"
"""The name under which a kernel's launch data say what it was compiled for."""


def bind(artifact: Artifact, graph: Graph, config: Mapping[str, Choice]) -> Artifact:
    """The artifact with each kernel's launch data saying what it was compiled for: a workload and a configuration."""
    name = binding(graph, config)
    return replace(artifact, kernels=tuple(replace(k, launch={**k.launch, BOUND: name}) for k in artifact.kernels))


def binding(graph: Graph, config: Mapping[str, Choice]) -> str:
    """SHA-256 of a workload's graph and a configuration, 64 hex digits."""
    return digest({"graph": graph.to_json(), "config": dict(config)})


def foreign(artifact: Artifact, graph: Graph, config: Mapping[str, Choice], sms: int) -> str:
    """The reason why an artifact is not of this configuration and workload; "" where there is none.

    Of an artifact that another version printed, only what it was compiled for is compared, where that is written down.
    Of a form of kernel that this version makes no more, the same, and it has to be written down.

    Args:
        graph: of the workload that it was tuned for.
        sms: multiprocessors of the device.
    """
    name = binding(graph, config)
    if any(k.launch.get(BOUND, name) != name for k in artifact.kernels):
        return "its kernels were compiled for another configuration or workload"
    if artifact.generator != GENERATOR:
        return ""
    try:
        plan = make_plan(graph, "cuda", str(config.get("plan", "")))
        drafts, scratch = draft(graph, plan, group_configs(plan, config), sms)
        if len(drafts) != len(artifact.kernels) or scratch != artifact.scratch:
            return "its kernels or their scratch are not those of its configuration"
        for made, kernel in zip(drafts, artifact.kernels, strict=True):
            fit = _fit(kernel, made.source.block, int(made.source.launch["shared"]), artifact.target)
            launch = launch_of(made, fit, sms)
            if OVERWRITES not in kernel.launch:  # an older kernel, whose loads are of read-only data
                launch.pop(OVERWRITES, None)
            stored = {name: value for name, value in kernel.launch.items() if name != BOUND}
            if canonical_json(launch) != canonical_json(stored):
                return f"the launch data of kernel {kernel.entry!r} are not those of its configuration"
    except Superseded as error:
        bound = all(BOUND in k.launch for k in artifact.kernels)
        return "" if bound else f"it does not say what its kernels were compiled for ({error})"
    except (Unsupported, BuildError, ValueError, TypeError, KeyError, ZeroDivisionError) as error:
        return f"its configuration makes no such kernels ({error})"
    return ""


def _fit(kernel: Kernel, block: int, dynamic: int, target: str) -> int:
    """Blocks of a kernel that fit an SM at a time, by its cubin. Raises ValueError where it is no cubin, or takes other
    shared memory than is written beside it."""
    used = taken(kernel.code, kernel.entry, target)
    if kernel.resources.get("shared") != used["shared"]:
        raise ValueError(f"kernel {kernel.entry!r} takes other shared memory than is stored")
    return blocks_per_sm(used["registers"], used["shared"] + dynamic, block, target)
