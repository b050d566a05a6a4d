"""Arrangement of a group of operators into passes.

The result of a reduction is available only after its whole row. So every value has a *level*, the length of its longest
chain of reductions, and there is a pass for each level. Liveness gives the values that a pass takes from earlier ones.
This set is then reduced: a value that light operators can recompute from other kept values is dropped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from autotune.compiler.program.program import Column, Moments, Online, Pass, Program, stride_of
from autotune.errors import Unsupported
from autotune.ir.graph import REDUCTIONS, STORAGE_BYTES, Graph, Value, has_sum_at
from autotune.ir.nodes import LIGHT, POINTWISE

Kept = list[set[int]]
"""For each pass, the values that it takes from earlier ones."""


@lru_cache(maxsize=2048)
def build_program(
    graph: Graph,
    *,
    keep: bool = True,
    online: bool = False,
    split: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
    columns: tuple[Column, ...] = (),
    moments: bool = False,
) -> Program:
    """Arrange a group into passes; cached, since each candidate needs the program several times.

    Args:
        graph: the group. Every reduction must run over the same axes.
        keep: True to keep full values for later passes, False to recompute them from the inputs in each pass.
        online: True to compute softmax-like pairs in one pass.
        split: (rows, cols), if they do not follow from the reductions.
        columns: accumulators over all rows.
        moments: True to compute a mean and its variance in one pass.

    Raises:
        Unsupported: the group is not row-wise.
    """
    if has_sum_at(graph):
        raise Unsupported("sums at indices from data")
    if not any(o.axes for o in graph.outputs) and not any(v.axes for v in graph.values):
        graph = _as_row(graph)
    rows, cols = split or split_axes(graph)
    if any(a not in o.axes and graph.extents[a] > 1 for o in graph.outputs for a in rows):
        raise Unsupported("an output that does not vary over the group's rows")
    pairs: list[Online | Moments] = [*(find_moments(graph, cols) if moments else ())]
    pairs += find_online(graph) if online else ()
    program = Program(graph, rows, cols, columns=columns)
    program = replace(program, passes=_levelled(program, pairs))
    reduces = bool(pairs) or any(p.reduce for p in program.passes)
    if (rows and rows[0] == 0) or (not rows and cols == (0,) and not reduces):
        program = replace(program, dynamic=0)
    if not keep:
        return with_kept(program, [set() for _ in program.passes])
    return with_kept(program, _without_light(program, _prefer_packed(program, _taken(program))))


def with_kept(
    program: Program, kept: Kept, order: Callable[[list[int]], Iterable[int]] = lambda compute: compute
) -> Program:
    """``program`` with passes that take these values from earlier ones, and compute the others that they need.

    Args:
        order: sorts the values that a pass computes.
    """
    last = {i: p for p, taken in enumerate(kept) for i in taken}  # the last pass that takes a value
    made: set[int] = set()
    rows_done: set[int] = set()
    passes = []
    for p, pas in enumerate(program.passes):
        roots = program.roots(pas)
        compute = tuple(order(program.elementwise(roots, kept[p])))
        read = [a for i in compute for a in program.graph.values[i].args] + roots
        read += [program.graph.outputs[k].value for k in pas.row_stores]
        read += [program.columns[n].value for n in pas.row_columns]
        row_values = [i for i in program.row_values(read) if i not in rows_done]
        rows_done.update(row_values)
        out = tuple(i for i in compute if last.get(i, p) > p and i not in made)
        made.update(out)
        kept_in = tuple(sorted(kept[p]))
        passes.append(replace(pas, row_values=tuple(row_values), kept_in=kept_in, compute=compute, kept_out=out))
    return replace(program, passes=tuple(passes))


def once_a_row(program: Program) -> None:
    """Raise Unsupported if a reduction would be recomputed for rows that it does not vary over."""
    g = program.graph
    rows = {a for a in program.rows if g.extents[a] > 1}
    for i in g.live:
        if g.values[i].op in REDUCTIONS and not rows <= set(g.values[i].axes):
            raise Unsupported("a reduction that is the same for several rows")


def split_axes(graph: Graph) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(rows, cols) of a group, outermost first. Raises Unsupported if the reductions run over different axes."""
    used = sorted({a for v in graph.values for a in v.axes} | {a for o in graph.outputs for a in o.axes})
    over = {v.over for v in graph.values if v.op in REDUCTIONS}
    if len(over) > 1:
        raise Unsupported("reductions over different axes in one row-wise kernel")
    order = sorted(used, key=lambda a: (-_weight(graph, a), a))
    if over:
        cols_set = set(next(iter(over)))
        rows = [a for a in order if a not in cols_set]
        cols = [a for a in order if a in cols_set]
    else:
        # The innermost axis of the largest output, so that adjacent threads access adjacent elements.
        inner = order[-1] if order else None
        for o in sorted(graph.outputs, key=lambda o: -graph.size(o.axes)):
            unit = [a for a, s in zip(o.axes, o.strides, strict=True) if s == 1 and graph.extents[a] > 1]
            if unit:
                inner = unit[0]
                break
        rows = [a for a in order if a != inner]
        cols = [] if inner is None else [inner]
    # The open extent must be the outermost, so that row numbers are decomposed without it.
    return tuple(sorted(rows, key=lambda a: a != 0)), tuple(cols)


def find_online(graph: Graph) -> tuple[Online, ...]:
    """Pairs (max, sum of exp) that one pass can compute together.

    The sum's argument must be ``exp(score - shift)`` with ``shift`` computed from ``peak = max(score)`` and constants
    alone. Softmax, log_softmax and logsumexp (with its guard against infinities) have this form.
    """
    vals = graph.values
    peaks = {(v.args[0], v.over): i for i, v in enumerate(vals) if v.op == "max" and v.dtype == "float32"}
    found: dict[int, Online] = {}
    for i, v in enumerate(vals):
        if v.op != "sum" or v.dtype != "float32":
            continue
        exponential = vals[v.args[0]]
        if exponential.op != "exp" or vals[exponential.args[0]].op != "sub":
            continue
        score, shift = vals[exponential.args[0]].args
        peak = peaks.get((score, v.over), i)
        if peak < i and _made_from(graph, shift, peak):
            # Only one sum for each maximum: a second one would need a separate running shift.
            found.setdefault(peak, Online(score, peak, i, shift))
    return tuple(found.values())


def find_moments(graph: Graph, cols: Iterable[int]) -> tuple[Moments, ...]:
    """Pairs of a sum over the columns and the sum of squared deviations from its mean, which a variance contains."""
    vals, over = graph.values, tuple(sorted(cols))
    live = graph.live
    sums = {vals[i].args[0]: i for i in live if vals[i].op == "sum" and vals[i].over == over}
    n = graph.size(over)
    found = []
    for i in live:
        v = vals[i]
        if v.op != "sum" or v.over != over or v.dtype != "float32" or n < 2:
            continue
        square = vals[v.args[0]]
        if square.op != "mul" or square.args[0] != square.args[1] or vals[square.args[0]].op != "sub":
            continue
        score, middle = vals[square.args[0]].args
        if score not in sums or vals[middle].op != "mul":
            continue
        total, mean = sums[score], vals[middle]
        scale = next((vals[a] for a in mean.args if vals[a].op == "const"), None)
        if total in mean.args and scale is not None and abs(float(scale.number) * n - 1) < 1e-6:
            found.append(Moments(score, total, i))
    return tuple(found)


# ---- levels ---------------------------------------------------------------------------------------------------------


def _levelled(program: Program, pairs: Sequence[Online | Moments]) -> tuple[Pass, ...]:
    """The passes with their reductions, stores and accumulators, but without the values needed for these."""
    values, outputs, columns = program.graph.values, program.graph.outputs, program.columns
    level = _levels(program.graph, {pair.reductions[1]: pair.score for pair in pairs})
    live = program.graph.making([*(o.value for o in outputs), *(c.value for c in columns)])
    paired = {i for pair in pairs for i in pair.reductions}
    reductions = [i for i in live if values[i].op in REDUCTIONS and i not in paired]

    def wide(axes: Iterable[int]) -> bool:
        return any(a in program.cols for a in axes)

    def at(p: int) -> Pass:
        stores = [k for k, o in enumerate(outputs) if level[o.value] == p]
        added = [n for n, c in enumerate(columns) if level[c.value] == p]
        own = [pair for pair in pairs if level[pair.score] == p]
        return Pass(
            row_stores=tuple(k for k in stores if not wide(outputs[k].axes)),
            reduce=tuple(i for i in reductions if level[values[i].args[0]] == p),
            online=tuple(pair for pair in own if isinstance(pair, Online)),
            stores=tuple(k for k in stores if wide(outputs[k].axes)),
            columns=tuple(n for n in added if wide(values[columns[n].value].axes)),
            row_columns=tuple(n for n in added if not wide(values[columns[n].value].axes)),
            moments=tuple(pair for pair in own if isinstance(pair, Moments)),
        )

    return tuple(map(at, range(1 + max((level[i] for i in live), default=0))))


def _levels(graph: Graph, one_pass: Mapping[int, int]) -> list[int]:
    """For each value, the first pass that has it.

    Args:
        one_pass: reductions in the same pass as another one that they depend on, and the value that the pass reduces.
    """
    level: list[int] = []
    for i, v in enumerate(graph.values):
        if i in one_pass or v.op in REDUCTIONS:
            level.append(level[one_pass.get(i, v.args[0])] + 1)
        else:
            level.append(max((level[a] for a in v.args), default=0))
    return level


# ---- liveness and keeping -------------------------------------------------------------------------------------------


def _taken(program: Program) -> Kept:
    """For each pass, the full values that it needs and that an earlier pass has computed."""
    made_at: dict[int, int] = {}
    taken: Kept = []
    for p, pas in enumerate(program.passes):

        def made_before(i: int, p: int = p) -> bool:
            return program.domain(i) == "full" and made_at.get(i, p) < p

        needs = program.graph.making(program.roots(pas), lambda i: program.domain(i) in ("const", "row"), made_before)
        taken.append(set(filter(made_before, needs)))
        for i in needs:
            made_at.setdefault(i, p)
    return taken


def _prefer_packed(program: Program, wanted: Kept) -> Kept:
    """Keep a 16-bit input as loaded instead of the result of light operators on it, which takes twice the space."""
    values, inputs = program.graph.values, program.graph.inputs
    out = []
    for taken in wanted:
        new = set(taken)
        for i in taken:
            need = program.elementwise([i])
            leaves = [j for j in need if values[j].op not in POINTWISE]
            full = [j for j in leaves if program.domain(j) == "full"]
            cost = sum(POINTWISE[values[j].op].cost for j in need if values[j].op in POINTWISE)
            halves = all(
                values[j].op == "load" and not values[j].guards and STORAGE_BYTES[inputs[values[j].slot]] == 2
                for j in leaves
            )
            if values[i].op in POINTWISE and halves and len(full) == len(leaves) == 1 and cost <= 2 * LIGHT:
                new.discard(i)
                new.update(full)
        out.append(new)
    return out


def _without_light(program: Program, wanted: Kept) -> Kept:
    """``wanted`` without the values that light operators can recompute from other kept values of the same pass."""
    values = program.graph.values

    def cheap(i: int, have: set[int]) -> bool:
        ops = [values[j].op for j in program.elementwise([i], have)]
        # A value that is no operator would be loaded again.
        return all(op in POINTWISE for op in ops) and sum(POINTWISE[op].cost for op in ops) <= 2 * LIGHT

    return without(wanted, cheap)


def without(kept: Kept, cheap: Callable[[int, set[int]], bool]) -> Kept:
    """``kept`` without the values that are ``cheap`` to compute from the others of each pass that uses them.

    Later values are removed first: a value may be cheap only because an earlier one is kept.
    """
    left = [set(taken) for taken in kept]
    for i in sorted({i for taken in left for i in taken}, reverse=True):
        takers = [taken for taken in left if i in taken]
        if all(cheap(i, taken - {i}) for taken in takers):
            for taken in takers:
                taken.discard(i)
    return left


# ---- graphs ---------------------------------------------------------------------------------------------------------


def _made_from(graph: Graph, i: int, root: int) -> bool:
    if i == root:
        return True
    v = graph.values[i]
    if v.op == "const":
        return True
    if v.op not in POINTWISE:
        return False
    return all(_made_from(graph, a, root) for a in v.args) and v.axes == graph.values[root].axes


def _weight(graph: Graph, axis: int) -> int:
    """The stride along ``axis`` in the largest tensors; infinite if no tensor has the axis.

    An axis without tensors (a sum over the parts of a stack) is then never the innermost one.
    """
    for tensors in (graph.outputs, [v for v in graph.values if v.op == "load"]):
        if best := max((stride_of(t, axis) * max(1, graph.size(t.axes)) for t in tensors), default=0):
            return best
    return sys.maxsize


def _as_row(graph: Graph) -> Graph:
    """A group of scalars as a row of one element."""
    values: list[Value] = []
    for v in graph.values:
        if v.op in ("load", "gather"):
            v = replace(v, axes=(0,), strides=(1,))
        elif any(values[a].axes for a in v.args):
            v = replace(v, axes=(0,))
        values.append(v)
    stored = tuple(replace(o, axes=(0,), strides=(1,)) for o in graph.outputs)
    return replace(graph, extents=(1,), values=tuple(values), outputs=stored)
