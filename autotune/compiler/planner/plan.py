"""Partition a region into groups, and groups into launches.

Each group's graph is canonical, so that equal groups of different regions are equal workloads: they are tuned once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from autotune.compiler.planner.groups import Group, Plan, Root, Roots, Shape, Source, groups_of, names, pack, read_text
from autotune.compiler.schedules.cuda import legal, scheme_of
from autotune.compiler.schedules.cuda.columns import TWO_KERNELS
from autotune.errors import Unsupported
from autotune.ir.canonical import canonicalize
from autotune.ir.graph import FLOATS, REDUCTIONS, Graph, Output, Value
from autotune.ir.nodes import STRICT
from autotune.ir.simplify import components, simplify

_MOST_OF_A_BLOCK = 1 << 17
"""Most elements from which one block makes a number, and what depends on it, no slower than two launches."""


def all_roots(graph: Graph) -> Roots:
    """The roots that every plan of ``graph`` has: its live reductions and its outputs, in order."""
    live = set(graph.live)
    found = [Root("r", i) for i in sorted(live) if graph.values[i].op in REDUCTIONS]
    found += [Root("o", k) for k in range(len(graph.outputs))]
    return tuple(sorted(found, key=lambda root: (root.value(graph), root.is_output, str(root))))


def build_plan(graph: Graph, shape: Shape, target: str = "cuda") -> Plan:
    """The plan of a region with the given launches.

    Args:
        target: "cuda" or "cpu"; packing is for "cuda" only.

    Raises:
        Unsupported: a root is missing, duplicated or unknown; a group reads a result of a later group; or a group has
            no kernel.
    """
    drafts = groups_of(shape)
    _check_roots(graph, drafts)
    home = homes(graph, drafts)
    back = {r.value(graph): r.number for roots in drafts for r in roots if r.kind == "b"}  # value -> output
    crossing: dict[int, Source] = {}
    cones = [cone(graph, roots, home, k) for k, roots in enumerate(drafts)]
    for k, values in enumerate(cones):
        for i in values:
            if home.get(i, k) != k and i not in crossing:
                number = sum(kind == "scratch" for kind, _ in crossing.values())
                crossing[i] = ("output", back[i]) if i in back and by_rows(graph, back[i]) else ("scratch", number)
    groups = []
    for k, roots in enumerate(drafts):
        raw, slots, sinks = _raw_group(graph, roots, cones[k], home, k, crossing, back)
        if not raw.outputs:
            raise Unsupported("a group without a result")
        made, order, outputs = canonicalize(simplify(raw))
        groups.append(Group(made, tuple(slots[s] for s in order), tuple(sinks[o] for o in outputs), tuple(roots)))
    numbers = iter(range(len(drafts)))
    launches = tuple(tuple(next(numbers) for _ in launch) for launch in shape)
    kept = [i for i, (kind, _) in crossing.items() if kind == "scratch"]
    types = [graph.outputs[back[i]].dtype if i in back else graph.values[i].dtype for i in kept]
    scratch = tuple((dtype, graph.values[i].axes) for dtype, i in zip(types, kept, strict=True))
    written: set[Source] = set()
    for launch in launches:
        for g in (groups[k] for k in launch):
            if any(ref[0] != "input" and ref not in written for ref in g.inputs):
                raise Unsupported(f"the group {names(g.roots)} reads what is made after it")
        written.update(ref for k in launch for ref in groups[k].outputs)
    for g in groups:
        if not legal(g.graph, target):
            raise Unsupported(f"no kernel for the group {names(g.roots)}")
    return Plan(tuple(groups), scratch, launches)


def homes(graph: Graph, groups: Sequence[Roots]) -> dict[int, int]:
    """The group that computes each value which other groups read from memory: reductions and kept values."""
    return {r.value(graph): k for k, roots in enumerate(groups) for r in roots if r.in_memory}


@lru_cache(maxsize=1024)
def _planned(graph: Graph, given: Shape, target: str) -> Plan:
    if given:
        return build_plan(graph, given, target)
    shape = greedy(graph, target)
    try:
        plan = build_plan(graph, shape, target)
        if not all(legal(group.graph, target, default=True) for group in plan.groups):
            raise Unsupported("a scheme that greedy plans leave out")
    except Unsupported:
        shape = greedy(graph, target, exact=True)
        plan = build_plan(graph, shape, target)
    packed = shape if target == "cpu" else pack(plan)
    return plan if packed == shape else build_plan(graph, packed, target)


def make_plan(graph: Graph, target: str = "cuda", plan: str | Shape = "") -> Plan:
    """The plan of a region, cached.

    Args:
        plan: its launches or their text; "" for those of :func:`greedy`, packed for "cuda".

    Raises:
        Unsupported: some group has no kernel in this version, or the plan does not fit the graph.
    """
    if not plan:
        return _planned(graph, (), target)
    try:
        return _planned(graph, read_text(plan) if isinstance(plan, str) else plan, target)
    except ValueError as error:
        raise Unsupported(f"the plan {plan!r}: {error}") from error


def default_plan(graph: Graph, target: str = "cuda") -> Plan:
    """The plan that a search begins with: a single group if a scheme fits that greedy plans lack, else the greedy plan.

    On a GPU :func:`numbers_first` divides a greedy plan's groups. Raises Unsupported as :func:`make_plan`.
    """
    plan = make_plan(graph, target)
    if target == "cpu":
        return plan
    with contextlib.suppress(Unsupported):
        if len(plan.groups) > 1:
            whole = make_plan(graph, target, ((all_roots(graph),),))
            if not scheme_of(whole.groups[0].graph).in_default:
                return whole
    with contextlib.suppress(Unsupported):
        return numbers_first(graph, plan)
    return plan


def greedy(graph: Graph, target: str = "cuda", *, exact: bool = False) -> Shape:
    """The largest groups, one launch each: every root, in order, joins the latest group that it can join.

    Unconnected parts of the graph get separate groups; ``autotune.compiler.planner.groups.pack`` may join their
    launches.

    Args:
        exact: check groups in their canonical form, which takes longer. If tensors of one size have unit strides along
            different axes, the first tensor determines the scheme, and the canonical order may have another one first.

    Raises:
        Unsupported: a root has no kernel even alone.
    """
    groups: list[list[Root]] = []
    home: dict[int, int] = {}

    def needs(k: int, roots: Sequence[Root], homes: Mapping[int, int]) -> set[int]:
        return {homes[i] for i in cone(graph, roots, homes, k) if homes.get(i, k) != k}

    def reach(start: Iterable[int]) -> set[int]:
        seen: set[int] = set()
        stack = list(start)
        while stack:
            k = stack.pop()
            if k not in seen:
                seen.add(k)
                stack.extend(needs(k, groups[k], home))
        return seen

    def fits(roots: Sequence[Root], homes: Mapping[int, int], k: int) -> bool:
        made = sketch(graph, roots, homes, k)
        return legal(canonicalize(made)[0] if exact else made, target, default=True)

    part_of = _parts(graph)
    for root in all_roots(graph):
        made = {root.number} if root.kind == "r" else set()
        for k in reversed(range(len(groups))):
            if part_of[groups[k][0]] != part_of[root]:
                continue
            trial, homes = [*groups[k], root], home | dict.fromkeys(made, k)
            # If a value that this root needs depends on the group, joining it would make a cycle.
            if k not in reach(needs(k, trial, homes)) and fits(trial, homes, k):
                groups[k], home = trial, homes
                break
        else:
            k = len(groups)
            homes = home | dict.fromkeys(made, k)
            if not fits([root], homes, k):
                raise Unsupported(f"no kernel for {root}")
            groups.append([root])
            home = homes
    order: list[int] = []

    def visit(k: int) -> None:
        if k not in order:
            for n in sorted(needs(k, groups[k], home)):
                visit(n)
            order.append(k)

    for k in range(len(groups)):
        visit(k)
    return tuple((tuple(groups[k]),) for k in order)


def small_apart(graph: Graph, shape: Shape) -> Shape:
    """The shape with a first launch for the outputs that are small, and that no reduction goes into.

    A broadcast weight is one, such as instance norm's. With it in a group of large sums over outer axes, no kernel can
    divide these sums among all multiprocessors. Returns ``shape`` itself if there is no such output.
    """
    home = homes(graph, groups_of(shape))
    largest = max(graph.size(graph.values[i].axes) for i in graph.live)

    def is_small(root: Root) -> bool:
        if root.kind != "o" or graph.size(graph.values[root.value(graph)].axes) == largest:
            return False
        made = cone(graph, [root], {}, 0)
        return not any(graph.values[i].op in REDUCTIONS or i in home for i in made)

    small = tuple(root for group in groups_of(shape) for root in group if is_small(root))
    rest = tuple(tuple(tuple(r for r in group if r not in small) for group in launch) for launch in shape)
    rest = tuple(tuple(group for group in launch if group) for launch in rest)
    return ((small,), *(launch for launch in rest if launch)) if small else shape


def numbers_first(graph: Graph, plan: Plan) -> Plan:
    """The plan with launches of their own for large values that depend on a number, such as a norm of all elements.

    Where one group makes both, one block computes them, in a single row. A number by itself is computed by all blocks,
    and so are the sums of :data:`TWO_KERNELS`. Returns ``plan`` itself if there is no such value.

    Raises:
        Unsupported: a part of a group has no kernel.
    """
    parts: list[Roots] = []
    for group in plan.groups:
        by_all = scheme_of(group.graph).name in TWO_KERNELS
        parts += [group.roots] if by_all else _after_numbers(graph, group.roots)
    if len(parts) == len(plan.groups):
        return plan
    divided = make_plan(graph, plan=tuple((part,) for part in parts))
    return make_plan(graph, plan=pack(divided))


def _after_numbers(graph: Graph, roots: Roots) -> list[Roots]:
    """A group's roots in parts, by the length of the longest chain of the group's numbers before them."""
    sums = {r.number: graph.values[r.number] for r in roots if r.kind == "r"}
    elements = {i: graph.size(graph.values[v.args[0]].axes) for i, v in sums.items() if graph.size(v.axes) == 1}
    numbers = {i for i, count in elements.items() if count > _MOST_OF_A_BLOCK}
    if not numbers:
        return [roots]
    level: dict[int, int] = {}
    for i in graph.live:
        v = graph.values[i]
        large = graph.size(v.axes) > 1
        level[i] = max((level[a] + (large and a in numbers) for a in v.args), default=0)
        if not large and not numbers.isdisjoint(v.args):
            numbers.add(i)
    found = sorted({level[r.value(graph)] for r in roots})
    return [tuple(r for r in roots if level[r.value(graph)] == n) for n in found]


def _parts(graph: Graph) -> dict[Root, int]:
    found: dict[Root, int] = {}
    for n, outputs in enumerate(components(graph)):
        stored = [Root("o", k) for k in outputs]
        reduced = [Root("r", i) for i in cone(graph, stored, {}, 0) if graph.values[i].op in REDUCTIONS]
        found |= dict.fromkeys([*stored, *reduced], n)
    return found


def cone(graph: Graph, roots: Iterable[Root], home: Mapping[int, int], k: int) -> list[int]:
    """Values that group ``k`` with these roots computes, or reads from the scratch of other groups, in order.

    ``home`` has the group of each root's value; the walk ends at the values of other groups.
    """
    return graph.making((r.value(graph) for r in roots), ends=lambda i: home.get(i, k) != k)


def sketch(graph: Graph, roots: Sequence[Root], home: Mapping[int, int], k: int) -> Graph:
    """The graph of a group, simplified but not canonical, for checking that it has a kernel.

    Reductions of other groups are loads. The group's reductions are stored if a root outside the group needs them.
    """
    values = cone(graph, roots, home, k)
    readers = _readers(graph)
    own = [i for i in values if home.get(i, k) == k and Root("r", i) in roots and not readers[i] <= set(roots)]
    others = [i for i in values if home.get(i, k) != k]
    crossing: dict[int, Source] = {i: ("scratch", n) for n, i in enumerate([*own, *others])}
    return simplify(_raw_group(graph, roots, values, home, k, crossing, {})[0])


_READERS: dict[int, tuple[Graph, dict[int, set[Root]]]] = {}


def _readers(graph: Graph) -> dict[int, set[Root]]:
    """For each reduction, the roots that are computed from it through values that are no roots.

    The result for the last graph is cached, since planning reads it repeatedly.
    """
    found = _READERS.get(id(graph))
    if found is None or found[0] is not graph:
        out: dict[int, set[Root]] = {i: set() for i in graph.live if graph.values[i].op in REDUCTIONS}
        for root in all_roots(graph):
            start = root.value(graph)
            made = graph.making(graph.values[start].args if root.kind == "r" else [start], ends=out.__contains__)
            for i in out.keys() & made:
                out[i].add(root)
        _READERS.clear()
        found = _READERS[id(graph)] = (graph, out)
    return found[1]


def _check_roots(graph: Graph, drafts: Sequence[Roots]) -> None:
    named = [r for roots in drafts for r in roots]
    written = {Root("o", r.number) if r.is_output else r for r in named}
    if len(named) != len(written):
        raise Unsupported("a root is in two groups")
    for r in named:
        if r.number >= len(graph.outputs if r.is_output else graph.values):
            raise Unsupported(f"the region has no {r}")
        if r.kind == "r" and graph.values[r.number].op not in REDUCTIONS:
            raise Unsupported(f"{r} is not a reduction")
        if r.kind == "v" and graph.values[r.number].op in ("const", "index", *REDUCTIONS):
            raise Unsupported(f"{r} is not a value to be kept in memory")
        if r.kind == "b" and not can_be_read_back(graph, r.number):
            raise Unsupported(f"{r} is not an output to be read back")
    kept = [r.value(graph) for r in named if r.kind in ("v", "b")]
    if len(kept) != len(set(kept)):
        raise Unsupported("a value is kept in two places")
    missing = set(all_roots(graph)) - written
    if missing:
        raise Unsupported(f"no group has {', '.join(sorted(map(str, missing)))}")


def can_be_read_back(graph: Graph, k: int) -> bool:
    """True if a group may read output ``k`` instead of computing its value: a float that varies over all its axes.

    Under the precision "strict", storing must not round the value.
    """
    out = graph.outputs[k]
    v = graph.values[out.value]
    if v.op in ("const", "index", "load", *REDUCTIONS) or v.dtype not in FLOATS or out.dtype not in FLOATS:
        return False
    if not v.axes or out.offset or sorted(out.axes) != sorted(v.axes) or 0 in out.strides:
        return False
    return graph.precision != STRICT or v.dtype == out.dtype


def _dense(graph: Graph, axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(graph.size(axes[k + 1 :]) for k in range(len(axes)))


def _strides(out: Output, axes: Iterable[int]) -> tuple[int, ...]:
    at = dict(zip(out.axes, out.strides, strict=True))
    return tuple(at[a] for a in axes)


def by_rows(graph: Graph, k: int) -> bool:
    """True if output ``k`` has unit stride along the last axis of its value."""
    return _strides(graph.outputs[k], graph.values[graph.outputs[k].value].axes)[-1:] == (1,)


def _raw_group(
    graph: Graph, roots: Iterable[Root], values: Sequence[int], home: Mapping[int, int], k: int,
    crossing: Mapping[int, Source], back: Mapping[int, int],
) -> tuple[Graph, list[Source], list[Source]]:  # fmt: skip
    """A group's graph in the region's axes, and the sources of its slots and outputs."""
    new: dict[int, int] = {}
    made: list[Value] = []
    slots: dict[Source, int] = {}
    types: list[str] = []

    def slot(kind: str, n: int, dtype: str) -> int:
        if (kind, n) not in slots:
            slots[(kind, n)] = len(types)
            types.append(dtype)
        return slots[(kind, n)]

    for i in values:
        v = graph.values[i]
        if home.get(i, k) != k:
            kind, n = crossing[i]
            storage = graph.outputs[back[i]].dtype if i in back else v.dtype
            strides = _strides(graph.outputs[n], v.axes) if kind == "output" else _dense(graph, v.axes)
            v = Value("load", axes=v.axes, dtype=v.dtype, slot=slot(kind, n, storage), strides=strides)
        else:
            own = slot("input", v.slot, graph.inputs[v.slot]) if v.slot >= 0 else -1
            v = v.but(args=tuple(new[a] for a in v.args), slot=own)
        new[i] = len(made)
        made.append(v)
    outputs: list[Output] = []
    sinks: list[Source] = []
    for r in sorted(roots, key=lambda r: (r.is_output, r.number)):
        number = r.number
        if r.is_output:
            out = graph.outputs[number]
            outputs.append(replace(out, value=new[out.value]))
            sinks.append(("output", number))
            if r.kind == "b" and crossing.get(out.value, sinks[-1]) != sinks[-1]:
                axes = graph.values[out.value].axes
                outputs.append(Output(new[out.value], axes, _dense(graph, axes), out.dtype))
                sinks.append(crossing[out.value])
        elif number in crossing:
            v = graph.values[number]
            outputs.append(Output(new[number], v.axes, _dense(graph, v.axes), v.dtype))
            sinks.append(crossing[number])
    return Graph(graph.extents, tuple(made), tuple(types), tuple(outputs), graph.precision), list(slots), sinks
