"""Partition a region into groups, one kernel each.

The rule of this version is greedy and deterministic, so that deployment finds the same plan from the graph alone: roots
(reductions and outputs) are taken in order, and each joins the latest group that it can join. A group's reductions run
over one set of axes; its other axes are its rows. Between roots everything is recomputed rather than stored, except
results of reductions that another group needs: they go through a scratch tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from autotune.codegen.program import build_program
from autotune.errors import Unsupported
from autotune.fusion.graph import REDUCTIONS, Graph, Output, Value


@dataclass(frozen=True)
class Group:
    """The operators of one kernel.

    ``inputs`` says for each slot of ``graph`` where it comes from: ("input", slot of the region) or ("scratch",
    number); ``outputs`` likewise with "output" or "scratch".
    """

    graph: Graph
    inputs: tuple[tuple[str, int], ...]
    outputs: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Plan:
    """Groups in launch order; ``scratch`` is (storage type, axes) of each global intermediate, dense in that axis
    order."""

    groups: tuple[Group, ...]
    scratch: tuple[tuple[str, tuple[int, ...]], ...]

    def scratch_numel(self, graph: Graph) -> tuple[tuple[str, int], ...]:
        """(storage type, elements) of each scratch tensor for the region ``graph``."""
        return tuple((dtype, graph.size(axes)) for dtype, axes in self.scratch)


@dataclass
class _Draft:
    over: tuple[int, ...]  # empty while the group has no reduction
    axes: frozenset[int]
    roots: list[int] = field(default_factory=list)  # reductions
    stores: list[int] = field(default_factory=list)  # region outputs
    needs: set[int] = field(default_factory=set)  # groups whose scratch it reads


def make_plan(graph: Graph) -> Plan:
    """The plan of a region.

    Raises:
        Unsupported: some group has no kernel in this version.
    """
    vals = graph.values
    live = graph.live
    drafts: list[_Draft] = []
    home: dict[int, int] = {}  # reduction -> group

    def groups_of(i: int) -> set[int]:
        """Groups whose reductions value ``i`` is made from, directly (through pointwise values only)."""
        found: set[int] = set()
        stack, seen = [i], set()
        while stack:
            j = stack.pop()
            if j in seen:
                continue
            seen.add(j)
            if j in home:
                found.add(home[j])
            else:
                stack.extend(vals[j].args)
        return found

    def reach(d: int) -> set[int]:
        """Groups that group ``d`` waits for, itself included."""
        seen: set[int] = set()
        stack = [d]
        while stack:
            k = stack.pop()
            if k not in seen:
                seen.add(k)
                stack.extend(drafts[k].needs)
        return seen

    def join(axes: frozenset[int], over: tuple[int, ...] | None, deps: set[int]) -> int:
        """The latest group that fits and that no group between depends on; a new one if there is none."""
        for k in reversed(range(len(drafts))):
            d = drafts[k]
            if over is not None and d.over and d.over != over:
                continue
            if any(k in reach(x) for x in deps - {k}):
                continue  # what we need waits for this group: joining it would make a cycle
            if _fits(d, axes, over):
                d.needs |= deps - {k}
                return k
        drafts.append(_Draft(over or (), axes, needs=set(deps)))
        return len(drafts) - 1

    roots: list[tuple[int, int, int]] = [(i, 0, i) for i in live if vals[i].op in REDUCTIONS]
    roots += [(o.value, 1, k) for k, o in enumerate(graph.outputs)]
    for i, kind, what in sorted(roots):
        if kind == 0:
            arg = vals[vals[i].args[0]]
            k = join(frozenset(arg.axes), vals[i].over, groups_of(vals[i].args[0]))
            drafts[k].over = vals[i].over
            drafts[k].axes |= frozenset(arg.axes)
            drafts[k].roots.append(i)
            home[i] = k
        else:
            axes = frozenset(graph.outputs[what].axes) | frozenset(vals[i].axes)
            k = join(axes, None, groups_of(i))
            drafts[k].axes |= axes
            drafts[k].stores.append(what)
    return _finish(graph, drafts, home)


def _fits(d: _Draft, axes: frozenset[int], over: tuple[int, ...] | None) -> bool:
    """Whether a root over ``axes`` belongs in draft ``d``: same rows, and columns that are the reduced axes."""
    if over is not None:
        rows = axes - set(over)
        have = d.axes - set(d.over or over)
        if not d.over:
            # A pointwise draft becomes a row-wise one only if it covers the same elements.
            return d.axes == axes
        return rows == have
    if d.over:
        have = d.axes - set(d.over)
        return have <= axes <= d.axes
    return axes == d.axes


def _finish(graph: Graph, drafts: list[_Draft], home: dict[int, int]) -> Plan:
    vals = graph.values
    order: list[int] = []

    def visit(k: int) -> None:
        if k not in order:
            for n in sorted(drafts[k].needs):
                visit(n)
            order.append(k)

    for k in range(len(drafts)):
        visit(k)
    # Reductions that another group reads travel through scratch.
    crossing: dict[int, int] = {}
    for k in order:
        for i in _cone(graph, drafts[k], home, k):
            if i in home and home[i] != k and i not in crossing:
                crossing[i] = len(crossing)
    scratch = tuple((vals[i].dtype, vals[i].axes) for i in crossing)
    groups = []
    for k in order:
        groups.append(_build_group(graph, drafts[k], home, k, crossing))
    for g in groups:
        build_program(g.graph)  # raises Unsupported where a group has no kernel
    return Plan(tuple(groups), scratch)


def _cone(graph: Graph, d: _Draft, home: dict[int, int], k: int) -> list[int]:
    """Values that draft ``d`` computes or reads from scratch, in order."""
    seen: set[int] = set()
    stack = [*d.roots, *(graph.outputs[o].value for o in d.stores)]
    while stack:
        i = stack.pop()
        if i in seen:
            continue
        seen.add(i)
        if i in home and home[i] != k:
            continue
        stack.extend(graph.values[i].args)
    return sorted(seen)


def _dense(graph: Graph, axes: Iterable[int]) -> tuple[int, ...]:
    strides: list[int] = []
    n = 1
    for a in reversed(tuple(axes)):
        strides.insert(0, n)
        n *= graph.extents[a]
    return tuple(strides)


def _build_group(graph: Graph, d: _Draft, home: dict[int, int], k: int, crossing: dict[int, int]) -> Group:
    cone = _cone(graph, d, home, k)
    new: dict[int, int] = {}
    values: list[Value] = []
    slots: dict[tuple[str, int], int] = {}
    types: list[str] = []

    def slot(kind: str, n: int, dtype: str) -> int:
        if (kind, n) not in slots:
            slots[(kind, n)] = len(types)
            types.append(dtype)
        return slots[(kind, n)]

    for i in cone:
        v = graph.values[i]
        if i in home and home[i] != k:
            s = slot("scratch", crossing[i], v.dtype)
            v = Value("load", axes=v.axes, dtype=v.dtype, slot=s, strides=_dense(graph, v.axes))
        elif v.op in ("load", "gather"):
            s = slot("input", v.slot, graph.inputs[v.slot])
            v = _with(v, args=tuple(new[a] for a in v.args), slot=s)
        else:
            v = _with(v, args=tuple(new[a] for a in v.args))
        new[i] = len(values)
        values.append(v)
    outputs: list[Output] = []
    sinks: list[tuple[str, int]] = []
    for r in d.roots:
        if r in crossing:
            axes = graph.values[r].axes
            outputs.append(Output(new[r], axes, _dense(graph, axes), graph.values[r].dtype))
            sinks.append(("scratch", crossing[r]))
    for o in d.stores:
        out = graph.outputs[o]
        outputs.append(Output(new[out.value], out.axes, out.strides, out.dtype, out.offset))
        sinks.append(("output", o))
    if not outputs:
        raise Unsupported("a group without a result")
    g = Graph(graph.extents, tuple(values), tuple(types), tuple(outputs))
    return Group(g, tuple(slots), tuple(sinks))


def _with(v: Value, args: tuple[int, ...], slot: int | None = None) -> Value:
    return replace(v, args=args, slot=v.slot if slot is None else slot)
