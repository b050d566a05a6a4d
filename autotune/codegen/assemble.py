"""From a plan and its groups' configurations to an artifact: every group emitted, joined into launches, compiled."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.codegen.compile import build
from autotune.codegen.cuda import GENERATOR, CudaSource
from autotune.codegen.kernels import GroupKernels, Private, Ref
from autotune.errors import BuildError, Unsupported
from autotune.fusion.graph import Graph
from autotune.fusion.plan import Plan
from autotune.fusion.schemes import scheme_of
from autotune.task import Artifact, Config, Kernel

SPILLS = 512
"""Bytes of stack a thread beyond which a candidate is not worth measuring."""


def build_artifact(graph: Graph, plan: Plan, parts: Sequence[Config], target: str, sms: int) -> Artifact:
    """Compile a region.

    Args:
        graph: the region's.
        plan: its plan; ``parts`` are the configurations of its groups.
        target: "sm_90" and the like; ``sms`` its multiprocessors.

    Raises:
        Unsupported: a configuration does not fit its group.
        BuildError: a kernel does not compile or does not fit an SM.
    """
    scratch = list(plan.scratch_numel(graph))
    kernels: list[Kernel] = []
    for launch in plan.launches:
        if len(launch) != 1 or len(launch[0]) != 1:
            raise Unsupported("several groups in one launch")
        (k,) = launch[0]
        group = plan.groups[k]
        made = scheme_of(group.graph).emit(group.graph, parts[k], sms)
        first = len(scratch)
        scratch += [(p.storage, p.numel, p.state) for p in made.private]
        for source, args in zip(made.sources, made.args, strict=True):
            refs = [_place(group.inputs, group.outputs, first, ref) for ref in args]
            kernels.append(compile_source(source, refs, target, sms, k))
    return Artifact(target, tuple(kernels), tuple(scratch), GENERATOR)


def _place(inputs: Sequence[Ref], outputs: Sequence[Ref], first: int, ref: Ref) -> Ref:
    """A group's tensor as one of the region: ("input" | "output" | "scratch", number)."""
    kind, n = ref
    if kind == "input":
        return inputs[n]
    if kind == "output":
        return outputs[n]
    return ("scratch", first + n)


def compile_source(source: CudaSource, refs: Sequence[Ref], target: str, sms: int, group: int) -> Kernel:
    """One kernel with its launch data: what its pointers are, the most blocks of a persistent grid, and the group whose
    axis 0 is the extent it takes."""
    kernel = build(source, target)
    if kernel.resources["stack"] > SPILLS:
        raise BuildError(f"spills {kernel.resources['stack']} bytes a thread")
    launch = dict(kernel.launch)
    fit = kernel.resources["blocks_per_sm"]
    if launch.get("cooperative") and int(launch["grid"]) > fit * sms:
        raise BuildError(f"{launch['grid']} blocks behind one barrier, {fit * sms} fit the device")
    launch["group"] = group
    launch["args"] = [list(r) for r in refs]
    launch["cap"] = min(int(launch["blocks_per_sm"]), fit) * sms
    return Kernel(kernel.entry, kernel.code, launch, kernel.resources)


__all__ = ["GroupKernels", "Private", "build_artifact", "compile_source"]
