"""Description of a region under a plan: kernels, passes, storage of each value, and bytes moved.

This module reads the plan, the schedules of its groups and their programs; it does not run or compile kernels.
``autotune plan`` prints the result, and :mod:`autotune.domains.fusion.picture` draws it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from autotune.compiler.planner.groups import Group, Plan, group_configs
from autotune.compiler.planner.plan import make_plan
from autotune.compiler.program.columns import split_columns
from autotune.compiler.program.passes import build_program
from autotune.compiler.program.program import Program
from autotune.compiler.program.rewrites import cut_everything
from autotune.compiler.schedules.cuda import scheme_of, schemes
from autotune.compiler.targets.cpu.columns import column_split, parts_of
from autotune.compiler.targets.cpu.schedule import CpuSchedule
from autotune.errors import Unsupported
from autotune.ir.graph import REDUCTIONS, SHORT, STORAGE_BYTES, Graph
from autotune.ir.nodes import POINTWISE
from autotune.task import Config

HOMES = ("thread", "warp", "block", "cluster", "grid", "again", "output")
"""Storage of a value until its use: registers of a thread, warp shuffles, shared memory of a block, shared memory of a
cluster of blocks, global memory (scratch between groups, partial results of blocks), none (recomputed from the inputs),
or global memory as a result of the region."""


@dataclass(frozen=True)
class Tensor:
    """A tensor in global memory that a group reads or writes.

    ``name`` is x<n> for inputs of the region, y<n> for its outputs, s<n> for scratch; ``bytes`` is the group's traffic.
    """

    name: str
    dtype: str
    extents: tuple[int, ...]
    bytes: int

    @property
    def label(self) -> str:
        """Text such as ``x0 bf16 8192x4096``."""
        return f"{self.name} {SHORT[self.dtype]} {'x'.join(map(str, self.extents)) or '1'}"


@dataclass(frozen=True)
class Operator:
    """One operator of a group.

    Attributes:
        value: index of the value in the group's graph.
        name: the operator's name; for a load, the tensor it reads.
        kind: "load", "leaf" (constants are left out; an index), "pointwise" or "reduction".
        args: values of its arguments, without constants.
        step: index of its pass.
        home: storage of its result, one of :data:`HOMES`.
        extents: extents of its result.
    """

    value: int
    name: str
    kind: str
    args: tuple[int, ...]
    step: int
    home: str
    extents: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """JSON for ``--json``."""
        return {
            "value": self.value, "name": self.name, "kind": self.kind, "args": list(self.args), "pass": self.step,
            "lives": self.home, "extents": list(self.extents),
        }  # fmt: skip


@dataclass(frozen=True)
class GroupAnatomy:
    """One group: the operators in one kernel body.

    Attributes:
        number: index of the group in the plan.
        roots: root values, as named in the plan.
        scheme: scheme of its kernel.
        config: its schedule.
        shape: text about its rows and columns.
        reads, writes: tensors in global memory.
        stores: pairs of a value and the tensor it is written to, in order of ``writes``.
        operators: its operators in order.
        kernels: number of launches (0 if it shares the launch of another group).
        private_bytes: bytes of partial results in global memory.
        cost: operations in units of one fused multiply-add; a recomputed value counts once.
    """

    number: int
    roots: tuple[str, ...]
    scheme: str
    config: Config
    shape: str
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]
    stores: tuple[tuple[int, str], ...]
    operators: tuple[Operator, ...]
    kernels: int
    private_bytes: int
    cost: int

    @property
    def bytes(self) -> int:
        """Bytes moved: every tensor once; partial results are written and read."""
        return sum(t.bytes for t in (*self.reads, *self.writes)) + 2 * self.private_bytes

    @property
    def steps(self) -> int:
        return 1 + max((o.step for o in self.operators), default=0)

    @property
    def form(self) -> tuple[Any, ...]:
        """Key that is equal for groups with the same operators, whatever their sizes."""
        ops = tuple((o.name.split(" ")[0] if o.kind != "load" else "load", o.args, o.home) for o in self.operators)
        return (self.scheme, ops, tuple(t.dtype for t in (*self.reads, *self.writes)))

    def to_json(self) -> dict[str, Any]:
        """JSON for ``--json``."""
        return {
            "number": self.number,
            "roots": list(self.roots),
            "scheme": self.scheme,
            "config": dict(self.config),
            "kernels": self.kernels,
            "bytes": self.bytes,
            "private_bytes": self.private_bytes,
            "cost": self.cost,
            "reads": [asdict(t) for t in self.reads],
            "writes": [asdict(t) for t in self.writes],
            "operators": [o.to_json() for o in self.operators],
        }


@dataclass(frozen=True)
class Anatomy:
    """A region under a plan.

    Attributes:
        plan: the plan's text.
        launches: the groups of each launch.
        scratch_bytes: bytes of tensors between groups and of partial results.
    """

    plan: str
    launches: tuple[tuple[GroupAnatomy, ...], ...]
    scratch_bytes: int

    @property
    def groups(self) -> list[GroupAnatomy]:
        return [g for launch in self.launches for g in launch]

    @property
    def kernels(self) -> int:
        """Number of kernels launched."""
        return sum(g.kernels for g in self.groups)

    @property
    def bytes(self) -> int:
        """Bytes moved by all groups."""
        return sum(g.bytes for g in self.groups)

    @property
    def cost(self) -> int:
        return sum(g.cost for g in self.groups)

    def to_json(self) -> dict[str, Any]:
        """JSON for ``--json``."""
        return {
            "plan": self.plan,
            "kernels": self.kernels,
            "bytes": self.bytes,
            "scratch_bytes": self.scratch_bytes,
            "cost": self.cost,
            "launches": [[g.to_json() for g in launch] for launch in self.launches],
        }


def dissect(graph: Graph, config: Config, side: str, sms: int) -> Anatomy:
    """The anatomy of a region under a configuration.

    Args:
        graph: the region's canonical graph.
        config: a schedule's configuration; ``config["plan"]`` is the plan, by default the greedy one.
        side: "cuda" or "cpu".
        sms: number of multiprocessors of the device, for kernels whose grid depends on it.

    Raises:
        Unsupported: the region has no kernels under this plan.
    """
    plan = make_plan(graph, side, str(config.get("plan", "")))
    parts = group_configs(plan, config)
    launches = []
    private = 0
    for launch in plan.launches:
        groups = []
        for n, k in enumerate(launch):
            part = parts[k]
            kernels, own = _kernels(plan.groups[k].graph, part, side, sms)
            private += own
            shared = 1 if n == 0 else 0
            groups.append(_group(graph, plan, k, part, side, kernels if len(launch) == 1 else shared, own))
        launches.append(tuple(groups))
    between = sum(STORAGE_BYTES[dtype] * numel for dtype, numel in plan.scratch_numel(graph))
    return Anatomy(plan.text, tuple(launches), between + private)


def _kernels(graph: Graph, config: Config, side: str, sms: int) -> tuple[int, int]:
    """(number of kernels, bytes of private scratch) of a group launched alone."""
    if side == "cpu":
        split = column_split(graph) if config.get("parts") else None
        if split is None:
            return 1, 0
        planes = split.planes(parts_of(split, CpuSchedule.from_config(config)))
        return 2, sum(STORAGE_BYTES[storage] * numel for storage, numel in planes)
    try:
        made = scheme_of(graph).emit(graph, config, sms)
    except (Unsupported, KeyError):
        return 1, 0
    return len(made.sources), sum(STORAGE_BYTES[storage] * numel for storage, numel in made.private)


def _group(graph: Graph, plan: Plan, k: int, config: Config, side: str, kernels: int, own: int) -> GroupAnatomy:
    group = plan.groups[k]
    own_graph = group.graph
    scheme = "cpu" if side == "cpu" else scheme_of(own_graph).name
    names = [_tensor_name(kind, n) for kind, n in group.inputs]
    sinks = [_tensor_name(kind, n) for kind, n in group.outputs]
    reads = tuple(_read(own_graph, slot, names[slot]) for slot in range(len(names)))
    writes = tuple(
        Tensor(
            sinks[n], o.dtype, tuple(own_graph.extents[a] for a in o.axes),
            own_graph.size(o.axes) * STORAGE_BYTES[o.dtype],
        )
        for n, o in enumerate(own_graph.outputs)
    )  # fmt: skip
    stores = tuple((o.value, sinks[n]) for n, o in enumerate(own_graph.outputs))
    return GroupAnatomy(
        k, tuple(map(str, group.roots)), scheme, config, _shape(own_graph), reads, writes, stores,
        _operators(group, names, config, side, scheme), kernels, own, cost(own_graph),
    )  # fmt: skip


def _tensor_name(kind: str, n: int) -> str:
    return {"input": "x", "output": "y", "scratch": "s"}[kind] + str(n)


def _read(graph: Graph, slot: int, name: str) -> Tensor:
    """The part of an input that the group reads; each element counts once."""
    parts = (graph.read_extents(v) for v in graph.values if v.slot == slot)
    elements, extents = max(((min(prod(p), graph.input_numel(slot)), p) for p in parts), default=(0, ()))
    return Tensor(name, graph.inputs[slot], extents, elements * STORAGE_BYTES[graph.inputs[slot]])


def _shape(graph: Graph) -> str:
    over = sorted({v.over for i in graph.live if (v := graph.values[i]).op in REDUCTIONS})
    everything = {a for i in graph.live for a in graph.values[i].axes} | {a for o in graph.outputs for a in o.axes}
    if not over:
        return f"{graph.size(everything)} elements"
    parts = []
    for axes in over:
        rest = graph.size(everything - set(axes))
        parts.append(f"{rest} x {graph.size(axes)}")
    return "reductions: " + ", ".join(parts)


def cost(graph: Graph) -> int:
    """Operations of a graph in units of one fused multiply-add; every value is computed once."""
    total = 0
    for i in graph.live:
        v = graph.values[i]
        if v.op in POINTWISE:
            total += POINTWISE[v.op].cost * graph.size(v.axes)
        elif v.op in REDUCTIONS:
            total += graph.size((*v.axes, *v.over))
    return total


def steps_of(graph: Graph) -> list[int]:
    """The pass in which each value is first needed: the length of the chain of reductions before it."""
    level = [0] * len(graph.values)
    for i, v in enumerate(graph.values):
        if v.args:
            level[i] = max(level[a] + (graph.values[a].op in REDUCTIONS) for a in v.args)
    stored, live = {o.value for o in graph.outputs}, set(graph.live)
    for i in sorted(live, reverse=True):
        users = [u for u in graph.users[i] if u in live]
        if users and i not in stored and graph.values[i].op not in REDUCTIONS:
            level[i] = max(level[i], min(level[u] for u in users))
    return level


def _operators(group: Group, names: list[str], config: Config, side: str, scheme: str) -> tuple[Operator, ...]:
    graph = group.graph
    level = steps_of(graph)
    kept = _kept(graph, config)
    scratch = {o.value for o, (kind, _) in zip(graph.outputs, group.outputs, strict=True) if kind == "scratch"}
    results = {o.value for o in graph.outputs} - scratch
    out = []
    for i in graph.live:
        v = graph.values[i]
        if v.op == "const":
            continue
        args = tuple(a for a in dict.fromkeys(v.args) if graph.values[a].op != "const")
        extents = tuple(graph.extents[a] for a in v.axes)
        if v.op in ("load", "gather"):
            name, kind = f"{names[v.slot]} {SHORT[graph.inputs[v.slot]]}", "load"
            name = f"gather {name}" if v.op == "gather" else name
        elif v.op in REDUCTIONS:
            name, kind = v.op, "reduction"
        else:
            name, kind = v.op, "pointwise" if v.op in POINTWISE else "leaf"
        users = graph.users[i]
        if v.op in REDUCTIONS:
            home = reduction_home(graph, i, config, side, scheme)
        elif users and i in kept:
            home = {"shared": "block", "reload": "again"}.get(str(config.get("keep")), "thread")
        elif users:
            home = "thread"
        else:
            home = "grid" if i in scratch else "output" if i in results else "thread"
        out.append(Operator(i, name, kind, args, level[i], home, extents))
    return tuple(out)


def _kept(graph: Graph, config: Config) -> set[int]:
    """Full-size values that later passes use."""
    try:
        program: Program = build_program(graph)
    except Unsupported:
        return set()
    return set(program.kept)


def reduction_home(graph: Graph, i: int, config: Config, side: str, scheme: str) -> str:
    """Storage in which the partial results of a reduction are combined, one of :data:`HOMES`."""
    if side == "cuda":
        return schemes()[scheme].home(graph, i, config)
    if not config.get("parts"):
        return "thread"
    return "grid" if cut_everything(graph) is not None or i in split_columns(graph).reduced else "thread"
