"""Artifacts: their assembly from a plan and its groups' configurations, and the audit of stored ones.

CUDA kernels are named after the operators they compute, for example ``autotune_addmm_sigmoid_tanh_rsub``. A kernel for
a whole region is named after the operators of the region's program. If a plan has several launches, each is named after
the graphs of its groups. Names depend on the workload and the plan alone, so candidates that differ in their schedules
have equal names. So equal kernels have equal cubins, which are stored once.

The audit checks, without a compiler, that the launch data of a stored artifact match the workload and configuration. A
cubin is code, and no check makes a cubin from somebody else safe. The rest of an artifact can be checked. The audit
prints the kernels again from the graph and the configuration, which takes milliseconds. It compares their launch data
(grids, blocks, shared memory, the meaning of the pointers) and scratch with the stored ones. It reads a kernel's use of
an SM from its cubin. An artifact with a changed number, or with another plan's kernels, is therefore never launched.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotune.compiler.lower.op_names import CASTS, PRODUCTS, telling
from autotune.compiler.planner.groups import Group, Plan, group_configs, names
from autotune.compiler.planner.plan import make_plan
from autotune.compiler.schedules.configurations import one_block
from autotune.compiler.schedules.cuda import scheme_of
from autotune.compiler.schedules.cuda.columns import reorders_columns
from autotune.compiler.targets.cuda import GENERATOR, OVERWRITES, PREFIX
from autotune.compiler.targets.cuda.compile import blocks_per_sm, build, taken
from autotune.compiler.targets.cuda.source import Body, CudaSource, Ref, Run, pack_bodies
from autotune.errors import BuildError, Superseded, Unsupported
from autotune.ir.canonical import family_of, row_extent, single
from autotune.ir.graph import REDUCTIONS, Graph, is_product
from autotune.ir.nodes import LIGHT, POINTWISE, STRICT
from autotune.task import Artifact, Choice, Config, Kernel
from autotune.workload import Json, canonical_json, digest

SPILLS = 512
"""Bytes of stack per thread above which a candidate is not worth measuring."""
LONGEST = 60
"""Most characters of a name."""
BOUND = "of"
"""Key of a kernel's launch data for the digest of the workload and configuration that it was compiled for."""
_SUFFIX = 12  # of these, kept free for "_finish" and a number


@dataclass(frozen=True)
class Draft:
    """A kernel of a region before compilation: its source, the region's tensors behind its pointers, and the group
    whose axis 0 has the kernel's dynamic extent."""

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
        graph: the region's graph.
        plan: the region's plan.
        parts: the configurations of its groups.
        target: the architecture, such as "sm_90".
        sms: the device's number of multiprocessors.
        program: the region's aten calls, after which kernels are named; empty if they are unknown.

    Raises:
        Unsupported: a configuration does not fit its group.
        BuildError: a kernel does not compile or does not fit an SM.
    """
    drafts, scratch = draft(graph, plan, parts, sms, program)
    return Artifact(target, tuple(compile_source(d, target, sms) for d in drafts), scratch, GENERATOR)


def draft(
    graph: Graph, plan: Plan, parts: Sequence[Config], sms: int, program: Json | None = None
) -> tuple[list[Draft], Scratch]:
    """A region's kernels in launch order and its scratch, printed but not compiled; see :func:`build_artifact`.

    Raises Unsupported if a configuration does not fit its group.
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
        scratch += made.private
        of_region = {("input", n): ref for n, ref in enumerate(group.inputs)}
        of_region |= {("output", n): ref for n, ref in enumerate(group.outputs)}
        of_region |= {("private", n): ("scratch", first + n) for n in range(len(made.private))}
        for n, (source, args) in enumerate(zip(made.sources, made.args, strict=True)):
            # The kernels after the first one finish its results.
            own = name if n == 0 else f"{name}_finish{n if n > 1 else ''}"
            out.append(Draft(replace(source, name=own), tuple(of_region[ref] for ref in args), k))
    out = [_overwriting(d, last=n == len(out) - 1) for n, d in enumerate(out)]
    if graph.precision == STRICT:
        out = [replace(d, source=replace(d.source, fast=False)) for d in out]
    return out, tuple(scratch)


def _overwriting(made: Draft, *, last: bool) -> Draft:
    """The kernel with those of its group's pairs of tensors that may share memory in the region: inputs and results.

    Only the last launch overwrites inputs. All other launches have read them by then, and a failure of one leaves them
    unchanged for the region's operators.
    """
    launch = {k: v for k, v in made.source.launch.items() if k != OVERWRITES}
    pairs = made.source.launch.get(OVERWRITES, ()) if last else ()
    kept = [pair for pair in pairs if [made.refs[p][0] for p in pair] == ["input", "output"]]
    return replace(made, source=replace(made.source, launch=launch | ({OVERWRITES: kept} if kept else {})))


def packed(plan: Plan, numbers: Sequence[int], parts: Sequence[Config], sms: int) -> tuple[CudaSource, tuple[Ref, ...]]:
    """The kernel of groups side by side, and the region's tensors behind its pointers.

    Groups of one family are runs of one body, emitted for the largest of them. Raises Unsupported if a configuration
    does not fit its group, or if a group's kernels cannot share a launch.
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


def compile_source(made: Draft, target: str, sms: int) -> Kernel:
    """A kernel with its launch data. Raises BuildError."""
    kernel = build(made.source, target)
    if kernel.resources["stack"] > SPILLS:
        raise BuildError(f"spills {kernel.resources['stack']} bytes a thread")
    return replace(kernel, launch=launch_of(made, kernel.resources["blocks_per_sm"], sms))


def launch_of(kernel: Draft, fit: int, sms: int) -> dict[str, Any]:
    """The launch data of a kernel: the group with its dynamic extent, its pointers, and the size of a persistent grid.

    Args:
        fit: the number of its blocks that fit an SM at a time.
        sms: the device's number of multiprocessors.
    """
    launch = {**kernel.source.launch, "group": kernel.group, "args": [list(r) for r in kernel.refs]}
    launch["cap"] = min(int(launch["blocks_per_sm"]), fit) * sms
    if OVERWRITES in launch:
        launch[OVERWRITES] = [[kernel.refs[p][1], kernel.refs[q][1]] for p, q in launch[OVERWRITES]]
    return launch


def kernel_name(ops: Iterable[str]) -> str:
    """A kernel's name from the operators it computes: as many as fit, in order, each once.

    Matrix products have priority. The name is an identifier for any characters in the operators' names.
    """
    room = LONGEST - len(PREFIX) - _SUFFIX
    cleaned = ("_".join(re.findall("[A-Za-z0-9]+", op))[:room].rstrip("_") for op in ops)
    words = list(dict.fromkeys(w for w in cleaned if w)) or ["kernel"]
    kept: set[str] = set()
    for word in sorted(words, key=lambda w: w not in PRODUCTS):
        if sum(len(w) + 1 for w in kept) + len(word) > room:
            break
        kept.add(word)
    return PREFIX + "_".join(w for w in words if w in kept)


def program_ops(source: Json) -> list[str]:
    """The distinctive operators of the aten calls of a region's program; empty if they are unknown."""
    calls: Sequence[Any] = source.get("calls") or ()
    parts = [str(call.get("of", call["op"])).split(".") for call in calls]
    ops = [p[1] for p in parts if len(p) > 1]  # of "aten.addmm.default"
    return telling(op for op in ops if op not in CASTS) or telling(ops)


def graph_ops(graph: Graph, vectors: bool = False) -> list[str]:
    """The distinctive operators of a group's graph, with sums of products as "mm" and "mv".

    Args:
        vectors: True to name a sum over a matrix's rows times a vector "mv", for a program with such a product. A
            weighted mean has the same form.
    """
    live = [graph.values[i] for i in graph.live]
    names = [
        _product(graph, i, vectors) or graph.values[i].op
        for i in graph.live
        if (op := graph.values[i].op) in REDUCTIONS or (op in POINTWISE and POINTWISE[op].cost > LIGHT)
    ]
    return list(dict.fromkeys(names or [v.op for v in live if v.op in POINTWISE] or ["copy"]))


def launch_names(plan: Plan, source: Json) -> list[str]:
    """The name of each launch of a plan, numbered if groups that differ in more than their rows have the same name.

    Args:
        source: the region's program as aten calls; empty if it is unknown.
    """
    ops = program_ops(source)
    vectors = not PRODUCTS.keys().isdisjoint(ops)
    names: list[str] = []
    met: dict[str, list[object]] = {}
    for launch in plan.launches:
        graphs = [plan.groups[k].graph for k in launch]
        whole = len(plan.launches) == 1 and ops
        own = ops if whole else [op for g in graphs for op in graph_ops(g, vectors)]
        name = kernel_name(own)
        # Ignore the extents of rows, which are arguments of kernels.
        form = [replace(g, extents=(0, *g.extents[1:])) if row_extent(g) else g for g in graphs]
        equal = met.setdefault(name, [])
        if form not in equal:
            equal.append(form)
        nth = equal.index(form) + 1
        names.append(name if nth == 1 else f"{name}_{nth}")
    return names


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
        why = _difference(artifact, graph, plan, group_configs(plan, config), sms)
        if why and any(reorders_columns(group.graph) for group in plan.groups):
            raise Superseded("columns in the order of the graph's axes, which this autotune lacks")
        return why
    except Superseded as error:
        bound = all(BOUND in k.launch for k in artifact.kernels)
        return "" if bound else f"it does not say what its kernels were compiled for ({error})"
    except (Unsupported, BuildError, ValueError, TypeError, KeyError, ZeroDivisionError) as error:
        return f"its configuration makes no such kernels ({error})"


def _difference(artifact: Artifact, graph: Graph, plan: Plan, parts: Sequence[Config], sms: int) -> str:
    """The difference of an artifact's kernels from those printed now; "" for none."""
    drafts, scratch = draft(graph, plan, parts, sms)
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
    return ""


def _fit(kernel: Kernel, block: int, dynamic: int, target: str) -> int:
    """The number of a kernel's blocks that fit an SM at a time, by its cubin.

    Raises ValueError if the code is no cubin, or if its shared memory differs from the stored size.
    """
    used = taken(kernel.code, kernel.entry, target)
    if kernel.resources.get("shared") != used["shared"]:
        raise ValueError(f"kernel {kernel.entry!r} takes other shared memory than is stored")
    return blocks_per_sm(used["registers"], used["shared"] + dynamic, block, target)


def _refs(lead: Group, group: Group) -> tuple[Ref, ...]:
    """The region's tensors of a group, in the order of the pointers of the family's lead: inputs, then outputs."""
    if group.graph.extents or not lead.graph.extents:
        return (*group.inputs, *group.outputs)
    at_one = single(lead.graph)  # a single element among rows of elements has a different canonical order
    assert at_one is not None
    _, slots, outputs = at_one
    inputs = tuple(group.inputs[slots.index(s)] for s in range(len(slots)))
    return (*inputs, *(group.outputs[outputs.index(k)] for k in range(len(outputs))))


def _product(graph: Graph, i: int, vectors: bool) -> str | None:
    """ "mm" or "mv" if value ``i`` multiplies two matrices, or a matrix and a vector."""
    if not is_product(graph, i):
        return None
    terms = graph.values[graph.values[i].args[0]]
    one, other = (set(graph.values[a].axes) for a in terms.args)
    if one - other and other - one:
        return "mm"
    return "mv" if vectors else None
