"""From a plan and its groups' configurations to an artifact: every group emitted, joined into launches, compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotune.compiler.planner.groups import Group, Plan, names
from autotune.compiler.planner.kernel_names import launch_names, part_name
from autotune.compiler.schedules.configurations import one_block
from autotune.compiler.schedules.cuda import scheme_of
from autotune.compiler.targets.cuda.compile import build
from autotune.compiler.targets.cuda.kernels import Ref
from autotune.compiler.targets.cuda.pack import Body, Run, pack_bodies
from autotune.compiler.targets.cuda.source import GENERATOR, OVERWRITES, CudaSource
from autotune.errors import BuildError, Unsupported
from autotune.ir.forms.families import family_of, single
from autotune.ir.graph import Graph
from autotune.ir.precision import STRICT
from autotune.task import Artifact, Config, Kernel
from autotune.workload import Json

SPILLS = 512
"""Bytes of stack a thread beyond which a candidate is not worth measuring."""


@dataclass(frozen=True)
class Draft:
    """A kernel of a region before it is compiled: its source, the region's tensors behind its pointers, and the group
    whose axis 0 is the extent it takes."""

    source: CudaSource
    refs: tuple[Ref, ...]
    group: int


Scratch = tuple[tuple[str, int], ...]
"""(storage type, elements) of each scratch tensor; see ``autotune.task.Artifact``."""


def build_artifact(
    graph: Graph, plan: Plan, parts: Sequence[Config], target: str, sms: int, program: Json | None = None
) -> Artifact:
    """Compile a region.

    Args:
        graph: the region's.
        plan: its plan; ``parts`` are the configurations of its groups.
        target: "sm_90" and the like; ``sms`` its multiprocessors.
        program: the aten calls it was cut from, where they are known: kernels are named after them.

    Raises:
        Unsupported: a configuration does not fit its group.
        BuildError: a kernel does not compile or does not fit an SM.
    """
    drafts, scratch = draft(graph, plan, parts, sms, program)
    return Artifact(
        target, tuple(compile_source(d.source, d.refs, target, sms, d.group) for d in drafts), scratch, GENERATOR
    )


def draft(
    graph: Graph, plan: Plan, parts: Sequence[Config], sms: int, program: Json | None = None
) -> tuple[list[Draft], Scratch]:
    """A region's kernels in launch order and its scratch, printed and not compiled; as :func:`build_artifact`.

    Raises:
        Unsupported: a configuration does not fit its group.
    """
    scratch = list(plan.scratch_numel(graph))
    out: list[Draft] = []
    for name, launch in zip(launch_names(plan, program or {}), plan.launches, strict=True):
        if len(launch) > 1:
            source, pointers = packed(plan, launch, parts, sms)
            out.append(Draft(replace(source, name=name), pointers, launch[0]))
            continue
        (k,) = launch
        group = plan.groups[k]
        made = scheme_of(group.graph).emit(group.graph, parts[k], sms)
        first = len(scratch)
        scratch += [(p.storage, p.numel) for p in made.private]
        for n, (source, args) in enumerate(zip(made.sources, made.args, strict=True)):
            refs = tuple(_place(group.inputs, group.outputs, first, ref) for ref in args)
            out.append(Draft(replace(source, name=part_name(name, n)), refs, k))
    if len(plan.groups) > 1:  # another group may read what this one overwrites
        out = [replace(d, source=replace(d.source, launch=_without(d.source.launch, OVERWRITES))) for d in out]
    if graph.precision == STRICT:
        out = [replace(d, source=replace(d.source, fast=False)) for d in out]
    return out, tuple(scratch)


def packed(plan: Plan, numbers: Sequence[int], parts: Sequence[Config], sms: int) -> tuple[CudaSource, tuple[Ref, ...]]:
    """The kernel of groups side by side, and the region's tensors behind its pointers.

    Groups of one family are runs of one body, emitted for the largest of them.

    Raises:
        Unsupported: a configuration does not fit its group, or a group's kernels cannot share a launch.
    """
    families = [family_of(plan.groups[k].graph) for k in numbers]
    agreed = one_block([plan.groups[k].graph for k in numbers], [parts[k] for k in numbers])
    order = sorted(range(len(numbers)), key=lambda n: (-plan.groups[numbers[n]].graph.bytes_moved, n))
    bodies: list[Body] = []
    leads: list[int] = []

    def runs(body: int, n: int) -> bool:
        lead = leads[body]
        whole = bool(bodies[body].source.launch["dynamic"])
        same = plan.groups[numbers[lead]].graph.extents == plan.groups[numbers[n]].graph.extents
        return families[lead].has(families[n]) and (whole or same)

    for n in order:
        group = plan.groups[numbers[n]]
        body = next((b for b in range(len(bodies)) if runs(b, n)), len(bodies))
        if body == len(bodies):
            made = scheme_of(group.graph).emit(group.graph, agreed[n], sms)
            if len(made.sources) != 1 or made.private:
                raise Unsupported(f"the group {names(group.roots)} takes several kernels and shares no launch")
            bodies.append(Body(made.sources[0], ()))
            leads.append(n)
        lead = plan.groups[numbers[leads[body]]]
        run = Run(_refs(lead, group), group.graph.extents[0] if group.graph.extents else 1, group.graph.bytes_moved)
        bodies[body] = Body(bodies[body].source, (*bodies[body].runs, run))
    return pack_bodies(bodies, sms)


def _refs(lead: Group, group: Group) -> tuple[Ref, ...]:
    """The region's tensors of a group in the order of the pointers of its family's lead: inputs, then outputs."""
    if group.graph.extents or not lead.graph.extents:
        return (*group.inputs, *group.outputs)
    at_one = single(lead.graph)  # a single element among rows of them: its canonical order is another
    assert at_one is not None
    _, slots, outputs = at_one
    return (
        *(group.inputs[slots.index(s)] for s in range(len(slots))),
        *(group.outputs[outputs.index(k)] for k in range(len(outputs))),
    )


def _without(launch: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {k: v for k, v in launch.items() if k != name}


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
    launch = launch_of(Draft(source, tuple(refs), group), kernel.resources["blocks_per_sm"], sms)
    return Kernel(kernel.entry, kernel.code, launch, kernel.resources)


def launch_of(kernel: Draft, fit: int, sms: int) -> dict[str, Any]:
    """The launch data of a kernel.

    Args:
        fit: blocks of it that fit an SM at a time, of which the device has ``sms``.
    """
    launch = dict(kernel.source.launch)
    launch["group"] = kernel.group
    launch["args"] = [list(r) for r in kernel.refs]
    launch["cap"] = min(int(launch["blocks_per_sm"]), fit) * sms
    if OVERWRITES in launch:
        launch[OVERWRITES] = [[kernel.refs[p][1], kernel.refs[q][1]] for p, q in launch[OVERWRITES]]
    return launch
