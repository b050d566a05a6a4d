"""Audit of stored artifacts: checks, without a compiler, that the launch data match the workload and configuration.

A cubin is code, and no check makes a cubin from somebody else safe. The rest of an artifact can be checked. The audit
prints the kernels again from the graph and the configuration, which takes milliseconds. It compares their launch data
(grids, blocks, shared memory, the meaning of the pointers) and scratch with the stored ones. It reads a kernel's use of
an SM from its cubin. An artifact with a changed number, or with another plan's kernels, is therefore never launched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autotune.compiler.assemble import draft, launch_of
from autotune.compiler.planner.groups import group_configs
from autotune.compiler.planner.plan import make_plan
from autotune.compiler.targets.cuda.compile import blocks_per_sm, taken
from autotune.compiler.targets.cuda.names import GENERATOR, OVERWRITES
from autotune.errors import BuildError, Superseded, Unsupported
from autotune.ir.graph import Graph
from autotune.task import Artifact, Choice, Kernel
from autotune.workload import canonical_json, digest

BOUND = "of"
"""Key of a kernel's launch data for the digest of the workload and configuration that it was compiled for."""


def bind(artifact: Artifact, graph: Graph, config: Mapping[str, Choice]) -> Artifact:
    """The artifact with the :func:`binding` of its workload and configuration in each kernel's launch data."""
    name = binding(graph, config)
    return replace(artifact, kernels=tuple(replace(k, launch={**k.launch, BOUND: name}) for k in artifact.kernels))


def binding(graph: Graph, config: Mapping[str, Choice]) -> str:
    """SHA-256 of a workload's graph and a configuration, 64 hex digits."""
    return digest({"graph": graph.to_json(), "config": dict(config)})


def foreign(artifact: Artifact, graph: Graph, config: Mapping[str, Choice], sms: int) -> str:
    """The reason why an artifact does not belong to this configuration and workload; "" if it does.

    For an artifact of another generator version, only the binding is compared, if it has one. The same applies to a
    form of kernel that this version no longer makes, which must have a binding.

    Args:
        graph: the graph of the workload that the artifact was tuned for.
        sms: the device's number of multiprocessors.
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
    """The number of a kernel's blocks that fit an SM at a time, by its cubin.

    Raises ValueError if the code is no cubin, or if its shared memory differs from the stored size.
    """
    used = taken(kernel.code, kernel.entry, target)
    if kernel.resources.get("shared") != used["shared"]:
        raise ValueError(f"kernel {kernel.entry!r} takes other shared memory than is stored")
    return blocks_per_sm(used["registers"], used["shared"] + dynamic, block, target)
