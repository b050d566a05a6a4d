"""Merging of loads, of which a select or a sum uses one, into a single load with a selected pointer.

The parts of a stack, or of a sum of ``select_backward``, are loads at the same address of different tensors, each
guarded on a separate part of one axis (:mod:`autotune.ir.simplify`). Separately, each is a predicated load, and
the zeros of the others are unpacked and added. If the index on the axis is the same for a whole pack, one load is
enough.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from autotune.compiler.kernel.nodes import Expr, Pointer, Select
from autotune.compiler.program.program import Program, stride_of
from autotune.ir.graph import Value


@dataclass(frozen=True)
class SelectedLoad:
    """Guarded loads that become one.

    Attributes:
        axis: the axis of their guards.
        parts: disjoint (begin, end, slot), ordered by begin.
        load: the first of them, guarded on all parts together.
        added: True if they were added to zeros, which turns a negative zero into a positive one.
    """

    axis: int
    parts: tuple[tuple[int, int, int], ...]
    load: Value
    added: bool

    @property
    def whole(self) -> bool:
        """True if the parts leave no gap."""
        return all(a[1] == b[0] for a, b in pairwise(self.parts))

    def pointer(self, index: Expr) -> Expr:
        """The pointer to load from where the index along the axis is ``index``."""
        chosen: Expr = Pointer(self.parts[-1][2])
        for _, end, slot in reversed(self.parts[:-1]):
            chosen = Select(index < end, Pointer(slot), chosen)
        return chosen


@dataclass(frozen=True)
class SelectedLoads:
    """The loads of a program that are printed as one.

    Attributes:
        loads: by the load that is printed for the others.
        results: for each select or sum that is one load: that load.
        skipped: values that are not printed at all.
    """

    loads: Mapping[int, SelectedLoad]
    results: Mapping[int, int]
    skipped: frozenset[int]


def find_selected_loads(program: Program, apart: Collection[int] = ()) -> SelectedLoads:
    """The largest selects and sums of guarded loads of which exactly one is not a zero.

    Args:
        apart: loads that are each printed as they are.
    """
    graph, inner = program.graph, program.cols[-1] if program.cols else -1
    wanted = {i for p in program.passes for i in p.compute}
    taken = {o.value for o in graph.outputs} | {c.value for c in program.columns} | set(program.kept)
    found: dict[int, tuple[SelectedLoad, int, frozenset[int]]] = {}  # with its load, and its values

    def once(i: int) -> bool:
        return i not in taken and len(graph.users[i]) == 1

    for i in sorted(wanted):
        v = graph.values[i]
        if v.op == "load":
            if i in apart:
                continue
            for axis, begin, end in v.guards:
                if axis != inner and not stride_of(v, axis) and program.domain(i) == "full":
                    found[i] = SelectedLoad(axis, ((begin, end, v.slot),), v, False), i, frozenset([i])
                    break
            continue
        args = v.args[1:] if v.op == "where" else v.args
        if v.op not in ("where", "add") or len(set(args)) != 2 or any(a not in found or not once(a) for a in args):
            continue
        (left, first, some), (right, second, others) = (found[a] for a in args)
        both = _both(left, right, v.op == "add", [graph.inputs[p[2]] for p in (*left.parts, *right.parts)])
        if both is None or (v.op == "where" and not _selects(graph.values, v, left, right)):
            continue
        found[i] = both, (first if both.parts[0] == left.parts[0] else second), some | others | {i}
    whole = [i for i in found if found[i][0].whole and not any(u in found for u in graph.users[i])]
    roots = [i for i in whole if graph.values[i].op != "load"]
    loads = {found[i][1]: found[i][0] for i in roots}
    made = {j for i in roots for j in found[i][2]}
    return SelectedLoads(loads, {i: found[i][1] for i in roots}, frozenset(made - set(loads) - set(roots)))


def _both(left: SelectedLoad, right: SelectedLoad, added: bool, types: list[str]) -> SelectedLoad | None:
    """Two as one, if their parts are disjoint and their loads differ in slot and part only."""
    parts = tuple(sorted((*left.parts, *right.parts)))
    if left.axis != right.axis or len(set(types)) != 1 or any(a[1] > b[0] for a, b in pairwise(parts)):
        return None
    whole = (left.axis, parts[0][0], parts[-1][1])
    guards = [tuple(sorted([whole, *(g for g in x.load.guards if g[0] != left.axis)])) for x in (left, right)]
    load, other = (replace(x.load, guards=own) for x, own in zip((left, right), guards, strict=True))
    if load != replace(other, slot=load.slot):
        return None
    return SelectedLoad(left.axis, parts, load, added or left.added or right.added)


def _selects(values: tuple[Value, ...], v: Value, left: SelectedLoad, right: SelectedLoad) -> bool:
    """True if a select takes its first argument on its parts and the second one on later ones, and zeros are added to
    both or to neither."""
    test = values[v.args[0]]
    if test.op != "lt" or left.added != right.added:
        return False
    position, limit = (values[a] for a in test.args)
    if position.op != "index" or position.axes != (left.axis,) or limit.op != "const":
        return False
    if (position.scale, position.shift) != (1, 0) or position.dtype == "float32":
        return False
    return left.whole and right.whole and left.parts[-1][1] == int(limit.number) == right.parts[0][0]
