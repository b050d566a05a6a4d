"""From a plan and its groups' configurations to an artifact: every group emitted, joined into launches, compiled."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotune.compiler.planner.kernel_names import launch_names, part_name
from autotune.compiler.planner.packing import MOST_POINTERS
from autotune.compiler.planner.plan import Group, Plan
from autotune.compiler.schedules.configurations import one_block, one_launch
from autotune.compiler.schedules.cuda import scheme_of
from autotune.compiler.targets.cuda.compile import build
from autotune.compiler.targets.cuda.cubin import limits
from autotune.compiler.targets.cuda.intrinsics.cluster import STATE_WORDS
from autotune.compiler.targets.cuda.kernels import Private, Ref
from autotune.compiler.targets.cuda.pack import Body, Run, pack_bodies
from autotune.compiler.targets.cuda.phases import Phase, coherent, in_phases
from autotune.compiler.targets.cuda.source import GENERATOR, CudaSource
from autotune.compiler.targets.cuda.strict import strictly
from autotune.errors import BuildError, Unsupported
from autotune.ir.families import family_of, single
from autotune.ir.graph import Graph
from autotune.ir.precision import STRICT
from autotune.task import Artifact, Config, Kernel
from autotune.workload import Json

_SQUEEZE = 0.75  # of the registers a kernel takes by itself: with fewer it would spill
SPILLS = 512
"""Bytes of stack a thread beyond which a candidate is not worth measuring."""


@dataclass(frozen=True)
class Draft:
    """A kernel of a region before it is compiled: its source, the region's tensors behind its pointers, and the group
    whose axis 0 is the extent it takes."""

    source: CudaSource
    refs: tuple[Ref, ...]
    group: int


Scratch = tuple[tuple[str, int, bool], ...]
"""(storage type, elements, whether it is state) of each scratch tensor; see ``autotune.task.Artifact``."""


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
            source, pointers, private = phased(plan, launch, parts, sms, len(scratch))
            scratch += [(p.storage, p.numel, p.state) for p in private]
            out.append(Draft(replace(source, name=name), pointers, launch[0][0]))
            continue
        if len(launch[0]) > 1:
            source, pointers = packed(plan, launch[0], parts, sms)
            out.append(Draft(replace(source, name=name), pointers, launch[0][0]))
            continue
        (k,) = launch[0]
        group = plan.groups[k]
        made = scheme_of(group.graph).emit(group.graph, parts[k], sms)
        first = len(scratch)
        scratch += [(p.storage, p.numel, p.state) for p in made.private]
        for n, (source, args) in enumerate(zip(made.sources, made.args, strict=True)):
            refs = tuple(_place(group.inputs, group.outputs, first, ref) for ref in args)
            out.append(Draft(replace(source, name=part_name(name, n)), refs, k))
    if graph.precision == STRICT:
        out = [replace(d, source=strictly(d.source)) for d in out]
    return out, tuple(scratch)


def phased(
    plan: Plan, launch: Sequence[Sequence[int]], parts: Sequence[Config], sms: int, first: int
) -> tuple[CudaSource, tuple[Ref, ...], list[Private]]:
    """The kernel of a launch of several phases, the region's tensors behind its pointers, and scratch of its own.

    A phase is the kernels of a group, one after the other, or groups side by side.

    Args:
        first: number of the launch's own scratch among the region's.

    Raises:
        Unsupported: a configuration does not fit its group, or the groups' kernels cannot share a launch.
    """
    agreed = one_launch(plan, launch, parts)
    phases: list[Phase] = []
    private: list[Private] = []
    written: set[Ref] = set()

    def add(source: CudaSource, refs: Sequence[Ref], extent: int, reads: Collection[Ref]) -> None:
        phases.append(Phase(coherent(source, [k for k, r in enumerate(refs) if r in written]), tuple(refs), extent))
        written.update(r for r in refs if r not in reads)

    for numbers in launch:
        if len(numbers) > 1:
            source, refs = packed(plan, numbers, agreed, sms, frozenset(written))
            phases.append(Phase(source, refs, 1))
            written.update(r for k in numbers for r in plan.groups[k].outputs)
            continue
        group = plan.groups[numbers[0]]
        made = scheme_of(group.graph).emit(group.graph, agreed[numbers[0]], sms)
        made = made.apart or made
        at = first + len(private)
        private += made.private
        extent = group.graph.extents[0] if group.graph.extents else 1
        for source, args in zip(made.sources, made.args, strict=True):
            add(source, [_place(group.inputs, group.outputs, at, ref) for ref in args], extent, group.inputs)
    state = ("scratch", first + len(private))
    private.append(Private("int32", STATE_WORDS, True))
    source, refs = in_phases(phases, state, sms)
    if len(refs) > MOST_POINTERS:
        raise Unsupported(f"{len(refs)} tensors in one launch")
    return source, refs, private


def packed(
    plan: Plan, numbers: Sequence[int], parts: Sequence[Config], sms: int, written: Collection[Ref] = ()
) -> tuple[CudaSource, tuple[Ref, ...]]:
    """The kernel of groups side by side, and the region's tensors behind its pointers.

    Groups of one family are runs of one body, emitted for the largest of them. ``written`` are tensors that an earlier
    phase of the same launch writes.

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
                raise Unsupported(f"the group {','.join(group.roots)} takes several kernels and shares no launch")
            bodies.append(Body(made.sources[0], ()))
            leads.append(n)
        lead = plan.groups[numbers[leads[body]]]
        run = Run(_refs(lead, group), group.graph.extents[0] if group.graph.extents else 1, group.graph.bytes_moved)
        bodies[body] = Body(bodies[body].source, (*bodies[body].runs, run))
    if written:
        bodies = [replace(b, source=coherent(b.source, _written(b, written))) for b in bodies]
    return pack_bodies(bodies, sms)


def _written(body: Body, written: Collection[Ref]) -> list[int]:
    """The pointers of a body that stand for a written tensor in any of its runs."""
    return [k for k in range(len(body.source.params)) if any(run.refs[k] in written for run in body.runs)]


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


def _place(inputs: Sequence[Ref], outputs: Sequence[Ref], first: int, ref: Ref) -> Ref:
    """A group's tensor as one of the region: ("input" | "output" | "scratch", number)."""
    kind, n = ref
    if kind == "input":
        return inputs[n]
    if kind == "output":
        return outputs[n]
    return ("scratch", first + n)


def _more_at_a_time(source: CudaSource, kernel: Kernel, target: str) -> Kernel:
    """The kernel with another block on each SM, where a few registers fewer and no spill make room for it.

    Phases take the registers of the largest, and no blocks wait in line to hide the latency of those that run.
    """
    room, used = limits(target), kernel.resources
    more = used["blocks_per_sm"] + 1
    cap = room.registers // (source.block * more) // 8 * 8
    if source.max_registers or more * source.block > room.threads or cap < _SQUEEZE * used["registers"]:
        return kernel
    other = build(replace(source, max_registers=cap), target)
    better = other.resources["blocks_per_sm"] >= more and other.resources["stack"] <= used["stack"]
    return other if better else kernel


def compile_source(source: CudaSource, refs: Sequence[Ref], target: str, sms: int, group: int) -> Kernel:
    """One kernel with its launch data: what its pointers are, the most blocks of a persistent grid, and the group whose
    axis 0 is the extent it takes."""
    kernel = build(source, target)
    if source.launch.get("cooperative") and "grid" not in source.launch:
        kernel = _more_at_a_time(source, kernel, target)
    if kernel.resources["stack"] > SPILLS:
        raise BuildError(f"spills {kernel.resources['stack']} bytes a thread")
    launch = launch_of(Draft(source, tuple(refs), group), kernel.resources["blocks_per_sm"], sms)
    return Kernel(kernel.entry, kernel.code, launch, kernel.resources)


def launch_of(kernel: Draft, fit: int, sms: int) -> dict[str, Any]:
    """The launch data of a kernel.

    Args:
        fit: blocks of it that fit an SM at a time, of which the device has ``sms``.

    Raises:
        BuildError: all its blocks must run at a time, and do not fit.
    """
    launch = dict(kernel.source.launch)
    if launch.get("cooperative"):
        launch.setdefault("grid", min(int(launch["inner"]), fit * sms))
    if launch.get("cooperative") and int(launch["grid"]) > fit * sms:
        raise BuildError(f"{launch['grid']} blocks behind one barrier, {fit * sms} fit the device")
    launch["group"] = kernel.group
    launch["args"] = [list(r) for r in kernel.refs]
    launch["cap"] = min(int(launch["blocks_per_sm"]), fit) * sms
    return launch
