"""Plans of a region, ranked: a beam search over candidate groups (FusionStitching, arXiv 2009.10924, section 5.3).

A plan consists of disjoint candidates of producers (:mod:`autotune.compiler.planner.patterns`) that leave no cycle. The
beam keeps the three best sets by the delta-evaluator. The search then measures:

- The best of those, and the greedy plan.
- Variants that keep an expensive value in memory instead of computing it twice.
- Variants whose launches are packed or unpacked.
- A variant that first stores an output computed from a tensor whose unit stride is across the rows, or outputs that
  are across the rows themselves.
- A variant that first stores small values, which larger ones would compute again for each of their elements.

``autotune search --plans`` and ``autotune.search(plans=...)`` take the names of :data:`PLANS`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

from autotune.compiler.planner.cost import Costs, Figures, plan_us
from autotune.compiler.planner.groups import Root, Roots, Shape, groups_of, pack
from autotune.compiler.planner.patterns import Mask, Vertices, bits, candidates, union
from autotune.compiler.planner.plan import build_plan, by_rows, can_be_read_back, cone, homes, make_plan
from autotune.compiler.program.vectors import unit_axis
from autotune.errors import Unsupported, UserError
from autotune.ir.graph import REDUCTIONS, STORAGE_BYTES, Graph
from autotune.ir.nodes import LIGHT, POINTWISE
from autotune.words import closest

MEASURED = "measured"
PLANS = (MEASURED, "model", "greedy")
"""The plans that a search tunes: the most promising ones, chosen by measured time, the plan that the cost model ranks
first, or the plan with the largest groups."""


def check_plans(plans: str) -> None:
    """Raise UserError for a name that is not in :data:`PLANS`."""
    if plans not in PLANS:
        raise UserError(
            f"unknown way to choose plans {plans!r}; {closest(plans, PLANS) or 'there are ' + ', '.join(PLANS)}"
        )


WIDTH = 3
"""States of the beam."""
MOST_VERTICES = 48
"""Number of roots above which the search considers only the greedy plan and its variants."""
_CUT_GAIN, _TIE = 0.03, 0.01


def shapes(graph: Graph, side: str, plans: str, figures: Figures, limit: int) -> list[Shape]:
    """The shapes of plans worth tuning, the most promising first; ``plans`` is one of :data:`PLANS`.

    With measured plans, the greedy one is always included. A kernel can run each group of each shape; ``build_plan``
    checks a plan as a whole.
    """
    default = make_plan(graph, side).shape
    if plans == "greedy":
        return [default]
    found = [default]
    vertices = Vertices(graph, side, figures)
    if len(vertices) <= MOST_VERTICES:
        bare = [tuple((v,) for v in groups) for groups in beam(vertices) if groups]
        found += bare
        found += [cut for shape in (default, *bare[:1]) for cut in _cuts(graph, vertices.costs, shape)]
    if side == "cuda":
        found = [variant for shape in found for variant in _launched(graph, shape)]
    ranked = _different(graph, vertices.costs, list(dict.fromkeys(found)))
    if side == "cuda" and len(vertices) <= MOST_VERTICES:
        apart = [*_across_first(graph, vertices.costs, ranked[0]), *_read_back_first(graph, vertices.costs, ranked[0])]
        ranked = [*(cut for _, cut in sorted(apart, key=lambda found: -found[0])[:1]), *ranked]
        ranked = [*_small_first(graph, vertices.costs, ranked[0]), *ranked]
    if plans == "model":
        return ranked[:1]
    chosen = ranked[:limit]
    if default not in chosen:
        chosen = [*chosen[: limit - 1], default]
    return chosen


def _different(graph: Graph, costs: Costs, found: Sequence[Shape]) -> list[Shape]:
    """The shapes by estimated time, with only the best of similar shapes, and the first of equally good ones.

    Similar shapes have the same division of reductions and launches. The group of a cheap output matters little, and
    each shape costs searches of its groups. A value kept in memory must promise a gain of some per cent.
    """
    us = {s: shape_us(graph, costs, s) for s in found}
    cuts = {s: sum(r.kind == "v" for group in groups_of(s) for r in group) for s in found}
    best: dict[object, Shape] = {}
    for shape in sorted(found, key=lambda s: us[s] * (1 + _CUT_GAIN * cuts[s])):
        reductions = frozenset(frozenset(r for r in g if r.kind == "r") for g in groups_of(shape))
        best.setdefault((reductions, len(shape)), shape)
    ranked = list(best.values())
    if found[0] not in ranked:  # a similar shape replaces the default only if it promises a gain
        like = next((n for n, s in enumerate(ranked) if us[s] > us[found[0]] * (1 - _TIE)), None)
        ranked.insert(len(ranked) if like is None else like, found[0])
        if like is not None and us[ranked[like + 1]] <= us[found[0]] * (1 + _TIE):
            del ranked[like + 1]
    return ranked


def beam(v: Vertices) -> list[list[Roots]]:
    """Partitions of the vertices into groups, the best first, each in an order in which it can run."""
    heads = candidates(v)
    states: list[tuple[float, tuple[Mask, ...]]] = [(0.0, ())]
    for _, options in reversed(heads):
        grown = dict.fromkeys(states)
        for score, masks in states:
            covered = union(masks)
            for m in options:
                if not m & covered and v.gain(m) > 0 and _acyclic(v, (*masks, m)):
                    grown[(score + v.gain(m), (*masks, m))] = None
        states = sorted(grown, key=lambda s: (-s[0], s[1]))[:WIDTH]
    whole = {tuple(sorted(_merged(v, _complete(v, masks)))) for _, masks in states}
    # Groups with one set of reduction axes each: the form that kernels run best, and the baseline for other plans.
    whole.add(tuple(sorted(_by_axes(v))))
    whole |= {tuple(sorted(_sums_first(v, masks))) for masks in whole}
    ranked = sorted(whole, key=lambda masks: (sum(map(v.price, masks)), masks))
    return [[v.names(m) for m in _ordered(v, masks)] for masks in ranked]


def _complete(v: Vertices, masks: Sequence[Mask]) -> list[Mask]:
    """The groups, and a group for each vertex that is in none."""
    covered = union(masks)
    return [*masks, *(1 << k for k in range(len(v)) if not covered >> k & 1)]


def _merged(v: Vertices, masks: Sequence[Mask]) -> list[Mask]:
    groups = list(masks)
    while True:
        best = (1e-9, 0, 0)
        for a in range(len(groups)):
            for b in range(a):
                joined = v.us(groups[a] | groups[b])
                gain = 0.0 if joined is None else v.price(groups[a]) + v.price(groups[b]) - joined
                if gain > best[0] and _acyclic(v, _together(groups, a, b)):
                    best = (gain, a, b)
        if not best[1] and not best[2]:
            return groups
        groups = _together(groups, *best[1:])


def _together(groups: Sequence[Mask], a: int, b: int) -> list[Mask]:
    return [*(m for n, m in enumerate(groups) if n not in (a, b)), groups[a] | groups[b]]


def _by_axes(v: Vertices) -> list[Mask]:
    """Groups whose reductions all run over the same axes.

    Each vertex joins such a group if that is legal: one whose results it reads, or the latest.
    """
    over = {n: v.graph.values[i].over for i, n in v.reduction.items()}
    groups: list[Mask] = []
    for k in range(len(v)):
        for n in sorted(range(len(groups)), key=lambda n: (bool(groups[n] & v.needs[k]), n), reverse=True):
            joined = groups[n] | 1 << k
            kinds = {over[j] for j in bits(joined) if j in over}
            rest = [m for j, m in enumerate(groups) if j != n]
            if len(kinds) <= 1 and v.us(joined) is not None and _acyclic(v, (*rest, joined)):
                groups[n] = joined
                break
        else:
            groups.append(1 << k)
    return groups


def _sums_first(v: Vertices, masks: Sequence[Mask]) -> list[Mask]:
    """The groups, but with outputs computed from reductions of interleaved rows in groups of their own."""
    reductions = union(1 << k for k in v.reduction.values())
    odd = union(1 << k for i, k in v.reduction.items() if v.costs.sectors[i] > 1.0)
    groups: list[Mask] = []
    for m in masks:
        later = union(1 << k for k in bits(m & ~reductions) if v.before[k] & m & odd)
        apart = [m & ~later, later]
        groups += apart if later and all(v.us(own) is not None for own in apart) else [m]
    return groups


def _acyclic(v: Vertices, masks: Sequence[Mask]) -> bool:
    try:
        _ordered(v, _complete(v, masks))
    except Unsupported:
        return False
    return True


def _ordered(v: Vertices, masks: Sequence[Mask]) -> list[Mask]:
    """The groups in an order in which they can run. Raises Unsupported if there is none."""
    owner = {k: n for n, m in enumerate(masks) for k in bits(m)}
    needs = [{owner[p] for k in bits(m) for p in bits(v.needs[k])} - {n} for n, m in enumerate(masks)]
    done: list[int] = []
    waiting = sorted(range(len(masks)), key=lambda n: masks[n] & -masks[n])
    while waiting:
        ready = next((n for n in waiting if needs[n] <= set(done)), None)
        if ready is None:
            raise Unsupported("groups that wait for each other")
        waiting.remove(ready)
        done.append(ready)
    return [masks[n] for n in done]


def shape_us(graph: Graph, costs: Costs, shape: Shape) -> float:
    """Microseconds of a plan by the delta-evaluator; the shape may have cut values, but no outputs read back."""
    groups = groups_of(shape)
    home = homes(graph, groups)
    cones = [cone(graph, roots, home, k) for k, roots in enumerate(groups)]
    crossing = {i for k, values in enumerate(cones) for i in values if home.get(i, k) != k}
    times = []
    for k, (roots, values) in enumerate(zip(groups, cones, strict=True)):
        taken = [i for i in values if home.get(i, k) != k]
        inside = [i for i in values if home.get(i, k) == k]
        left = [i for i in inside if i in crossing]
        cost = costs.group(inside, taken, left, [r.number for r in roots if r.kind == "o"])
        kinds = {graph.values[i].over for i in inside if graph.values[i].op in REDUCTIONS}
        times.append(cost.us(costs.figures) + (costs.figures.next_us if len(kinds) > 1 else 0.0))
    return plan_us(times, len(shape), costs.figures)


def _cuts(graph: Graph, costs: Costs, shape: Shape) -> list[Shape]:
    """The best two variants of a shape that keep an expensive value, which several groups compute, in memory."""
    groups = groups_of(shape)
    if len(groups) < 2:
        return []
    home = homes(graph, groups)
    made: dict[int, list[int]] = {}
    for k, roots in enumerate(groups):
        for i in cone(graph, roots, home, k):
            if home.get(i, k) == k and graph.values[i].op in POINTWISE:
                made.setdefault(i, []).append(k)
    found: list[tuple[float, Shape]] = []
    base = shape_us(graph, costs, shape)
    for i, makers in made.items():
        if len(makers) < 2 or i in home:
            continue
        ops = [graph.values[j].op for j in graph.making([i], home.__contains__)]
        if sum(POINTWISE[op].cost for op in ops if op in POINTWISE) <= LIGHT:
            continue
        first = makers[0]
        cut = tuple(tuple((*g, Root("v", i)) if g == groups[first] else g for g in launch) for launch in shape)
        us = shape_us(graph, costs, cut)
        if us < base * 1.1:
            found.append((us, cut))
    return _legal(graph, [cut for _, cut in sorted(found, key=lambda f: f[0])[:4]])[:2]


def _legal(graph: Graph, found: Iterable[Shape]) -> list[Shape]:
    """Those of the shapes that have a plan."""
    made = []
    for shape in found:
        with contextlib.suppress(Unsupported):
            build_plan(graph, shape)
            made.append(shape)
    return made


_ACROSS = 3.0
"""Extra times that a kernel moves a tensor whose unit stride is across its lanes.

An H200 took 1029 us for Mixer-B's layer norm of a sum that is half of such tensors; moving everything once takes 150.
"""


def _across_first(graph: Graph, costs: Costs, shape: Shape) -> list[tuple[float, Shape]]:
    """The shape with transposed outputs of no reduction in a first launch, and the bytes it saves.

    A projection of an image's tokens leaves such a region in a backward pass: the gradient, stored with the channels
    last, and its sums over images and pixels. Kernels over rows would store single elements, and tiled ones read the
    gradient once more. The list is empty if there is no gain.
    """
    g, f = graph, costs.figures
    reduced = {n for n in g.live if g.values[n].op in REDUCTIONS}
    sides: dict[tuple[frozenset[int], bool], list[int]] = {}  # by axes and direction of the unit stride
    for k, out in enumerate(g.outputs):
        if reduced and 1 in out.strides and reduced.isdisjoint(g.making([out.value])):
            sides.setdefault((frozenset(g.values[out.value].axes), by_rows(g, k)), []).append(k)
    found: list[tuple[float, Shape]] = []
    for first in sides.values():
        axes, every = g.values[g.outputs[first[0]].value].axes, range(len(g.outputs))
        rest = [k for k in every if k not in first]
        whole, less = (_crosswise(g, axes, g.making([g.outputs[k].value for k in of]), of) for of in (every, rest))
        loads = (i for i in g.making([g.outputs[k].value for k in first]) if g.values[i].op in ("load", "gather"))
        again = sum({g.values[i].slot: costs.loaded[i] for i in loads}.values())
        gain = _ACROSS * (whole - less) - again - f.next_us * f.copy_gbs * 1e3
        cut = ((tuple(Root("o", k) for k in first),), *_without(shape, first))
        found += [(gain, cut) for cut in (_legal(g, [cut]) if gain > 0 else [])]
    return found


def _read_back_first(graph: Graph, costs: Costs, shape: Shape) -> list[tuple[float, Shape]]:
    """The shape with one output, which is reduced along its rows, in a first launch; the other launches read it back.

    It is for regions with unit strides both along and across rows, such as MLP-Mixer's norms of a residual stream with
    unit stride across its rows. A tiled kernel moves both kinds of tensor, and kernels over rows read its result. The
    list is empty if there is no gain, which is in bytes.
    """
    g, f = graph, costs.figures
    found: list[tuple[float, int]] = []
    reduced = {n: set(g.making(g.values[n].args)) for n in g.live if g.values[n].op in REDUCTIONS}
    made = [set(g.making([o.value])) for o in g.outputs]
    for k, out in enumerate(g.outputs):
        v = g.values[out.value]
        if not can_be_read_back(g, k) or not made[k].isdisjoint(reduced):
            continue
        if not any(out.value in inside and v.axes[-1] in g.values[n].over for n, inside in reduced.items()):
            continue
        users = [o for o, inside in zip(g.outputs, made, strict=True) if out.value in inside]
        if any(STORAGE_BYTES[o.dtype] > STORAGE_BYTES[out.dtype] for o in users):
            continue  # a wider output would show the rounding of the stored one and fail the accuracy check
        others = g.making([o.value for n, o in enumerate(g.outputs) if n != k], ends={out.value}.__contains__)
        whole = _crosswise(g, v.axes, g.live, range(len(g.outputs)))
        rest = _crosswise(g, v.axes, others, [n for n in range(len(g.outputs)) if n != k])
        passes = 1 if by_rows(g, k) else 2
        gain = _ACROSS * (whole - rest) - passes * costs.written(k) - f.next_us * f.copy_gbs * 1e3
        if gain > 0:
            found.append((gain, -k))
    if not found:
        return []
    most, k = max(found)
    cut = (((Root("b", -k),),), *_without(shape, [-k]))
    return [(most, cut) for cut in _legal(graph, [cut])]


def _without(shape: Shape, outputs: Sequence[int]) -> Shape:
    """The shape without some outputs, and without launches and groups that have nothing else."""
    stored = {Root("o", k) for k in outputs}
    kept = ([tuple(r for r in group if r not in stored) for group in launch] for launch in shape)
    return tuple(tuple(filter(None, launch)) for launch in kept if any(launch))


_SCATTERED = 48
"""Cost of a gather whose index varies along the lanes: a warp's lanes read up to 32 lines of the first cache."""
_REUSE = 8
"""Least multiple of a value's size at which computing it again for each element counts."""


def _small_first(graph: Graph, costs: Costs, shape: Shape) -> list[Shape]:
    """The shape with small values in a first launch, if kernels would compute them again for each element of others.

    Window attention adds a bias to its scores, gathered from a table by the positions in a window, which all windows
    share. An H200 took 41 us for such a softmax of 256 x 16 x 49 x 49 numbers, whose bytes take 10. The list is empty
    if there is no gain.
    """
    g, f = graph, costs.figures
    home, live, unit = homes(g, groups_of(shape)), set(g.live), unit_axis(g)
    small: dict[int, set[int]] = {}
    for i in g.live:
        v, users = g.values[i], [j for j in g.users[i] if j in live]
        if i in home or not v.axes or v.op not in ("gather", *POINTWISE):
            continue
        if not users or any(costs.size[j] < _REUSE * costs.size[i] for j in users):
            continue
        making, again = set(g.making([i])), 0.0
        for j in users:
            lane = unit if unit in g.values[j].axes else g.values[j].axes[-1]
            each = sum(_lane_cost(g, k, lane) for k in making)
            again += costs.size[j] * each if lane in v.axes and each > LIGHT else 0.0
        if making.isdisjoint(home) and again / f.ops_gs / 1e3 > f.next_us:
            small[i] = making
    groups: dict[tuple[int, ...], list[Root]] = {}
    for i in small:
        if not any(i in making for j, making in small.items() if j != i):  # what makes another one is in its group
            groups.setdefault(g.values[i].axes, []).append(Root("v", i))
    return _legal(graph, [(tuple(map(tuple, groups.values())), *shape)] if groups else [])


def _lane_cost(graph: Graph, i: int, lane: int) -> int:
    """The cost of value ``i`` for each element along axis ``lane``; kernels compute the rest once for each row."""
    v = graph.values[i]
    if lane not in v.axes:
        return 0
    if v.op == "gather":
        scattered = lane in graph.values[v.args[0]].axes and v.strides[v.axes.index(lane)] == 0
        return _SCATTERED if scattered else 0
    return POINTWISE[v.op].cost if v.op in POINTWISE else 0


def _crosswise(graph: Graph, axes: Sequence[int], values: Iterable[int], outputs: Iterable[int]) -> float:
    """Bytes of the tensors over ``axes`` whose unit stride is across a kernel's lanes, for the better choice of lanes.

    This is the minimum of the bytes with unit stride along the last axis and those with unit stride along another.
    """
    loads = [graph.values[i] for i in values if graph.values[i].op == "load"]
    tensors = [(v.axes, v.strides, graph.inputs[v.slot]) for v in loads]
    tensors += [(o.axes, o.strides, o.dtype) for o in (graph.outputs[k] for k in outputs)]
    along = across = 0.0
    for own, strides, storage in tensors:
        if set(own) == set(axes) and 1 in strides:
            moved = float(graph.size(own)) * STORAGE_BYTES[storage]
            if strides[own.index(axes[-1])] == 1:
                along += moved
            else:
                across += moved
    return min(along, across)


def _launched(graph: Graph, shape: Shape) -> list[Shape]:
    if len(shape) > 1:
        with contextlib.suppress(Unsupported):
            return [shape, pack(build_plan(graph, shape))]
    return [shape]
