"""Kernel programs: a group of operators arranged into passes over rows and columns.

A group's axes fall into *columns* (what its reductions run over; for a pointwise group the innermost axis) and *rows*
(the rest). Each value then lives in one of three domains: ``row`` (one number a row, held by every thread of the row),
``col`` (the same in all rows, cheap to fetch again) and ``full`` (one number an element). A reduction needs its whole
row before its result can be used, so the program is a sequence of passes over the row's columns with the reductions
finished between them; softmax has three, layer_norm three, cross-entropy one or two.

A full value computed in one pass and used in a later one is *kept*: in registers, in shared memory or not at all
(recomputed). What is kept is the smallest set of values we can see: a value that light operators make again from other
kept values is dropped. This follows the sub-root composition of FusionStitching (arXiv 2009.10924, section 4) with the
row as the unit, and any number of dependent reductions in one kernel.

The program knows nothing of threads: ``compiler.targets`` prints it for CUDA and for CPUs.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from autotune.compiler.program.one_pass import Column, Moments, Online, find_moments, find_online
from autotune.errors import Unsupported
from autotune.ir.graph import REDUCTIONS, STORAGE_BYTES, Graph, Output, Value, Walk, has_sum_at
from autotune.ir.ops import LIGHT, POINTWISE


@dataclass(frozen=True)
class Pass:
    """One walk over the columns of a row.

    Attributes:
        row_values: row-domain values to compute before the walk, in order (reductions of the previous pass are done).
        row_stores: outputs (indices into ``graph.outputs``) with one number a row, stored before the walk.
        kept_in: full values taken from where earlier passes kept them.
        compute: col and full values to compute for every element, in order; constants are not listed.
        kept_out: full values computed here that later passes take.
        reduce: reductions that this walk contributes to (online pairs are listed in ``online`` only).
        stores: outputs stored element by element in this walk.
        columns: accumulators over the rows (indices into ``Program.columns``) that this walk adds to.
        row_columns: accumulators of one number a row, added to before the walk.
        moments: means with variances that this walk contributes to (listed here only, as ``online``).
    """

    row_values: tuple[int, ...] = ()
    row_stores: tuple[int, ...] = ()
    kept_in: tuple[int, ...] = ()
    compute: tuple[int, ...] = ()
    kept_out: tuple[int, ...] = ()
    reduce: tuple[int, ...] = ()
    online: tuple[Online, ...] = ()
    stores: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    row_columns: tuple[int, ...] = ()
    moments: tuple[Moments, ...] = ()

    @property
    def walks(self) -> bool:
        """Whether the pass visits the columns at all (a last pass may only store row results)."""
        return bool(self.reduce or self.online or self.stores or self.columns or self.moments)


@dataclass(frozen=True)
class Program:
    """A group as passes. ``rows`` and ``cols`` are axis numbers, outermost first.

    ``dynamic`` is the axis whose extent the kernel takes as an argument (always axis 0 when it is ``rows[0]``, or the
    only column axis of a pointwise group without rows), or -1.
    """

    graph: Graph
    rows: tuple[int, ...]
    cols: tuple[int, ...]
    passes: tuple[Pass, ...] = ()
    dynamic: int = -1
    columns: tuple[Column, ...] = ()
    """Accumulators over all the rows; see ``autotune.compiler.program.columns``."""
    early: Pass | None = None
    """Random masks of later passes, computed beside the first one; see
    ``autotune.compiler.targets.cuda.rows.early``.
    """

    @cached_property
    def n_rows(self) -> int:
        return self.graph.size(self.rows)

    @cached_property
    def n_cols(self) -> int:
        return self.graph.size(self.cols)

    @cached_property
    def pointwise(self) -> bool:
        """No reduction: every element is independent."""
        return not any(v.op in REDUCTIONS for v in self.graph.values)

    def domain(self, i: int) -> str:
        """ "const", "row", "col" or "full" for value ``i``."""
        v = self.graph.values[i]
        if v.op == "const":
            return "const"
        if not any(a in self.cols for a in v.axes):
            return "row"
        return "full" if not self.rows or any(a in self.rows for a in v.axes) else "col"

    @cached_property
    def kept(self) -> tuple[int, ...]:
        """Every value some pass keeps, in order."""
        return tuple(sorted({i for p in self.passes for i in p.kept_out}))

    @cached_property
    def reductions(self) -> tuple[int, ...]:
        return tuple(i for i, v in enumerate(self.graph.values) if v.op in REDUCTIONS)

    def row_chain(self, i: int) -> list[int]:
        """Row values that row value ``i`` is made from, in order, ``i`` included; reductions and constants not."""
        values = self.graph.values
        return self.graph.making([i], lambda j: values[j].op in REDUCTIONS or values[j].op == "const")

    def elementwise(self, roots: Iterable[int], have: Container[int] = ()) -> list[int]:
        """Col and full values that make ``roots`` from ``have``, row values and constants, in order."""
        return self.graph.making(roots, lambda i: i in have or self.domain(i) in ("const", "row"))

    def row_values(self, read: Iterable[int]) -> list[int]:
        """Row values among ``read``, and those that make these, in order; reductions and constants not."""
        values = self.graph.values
        return self.graph.making(read, lambda i: self.domain(i) != "row" or values[i].op in REDUCTIONS)

    def col_stride(self, v: Value) -> int:
        """Stride of a load along the innermost column axis."""
        return stride_of(v, self.cols[-1]) if self.cols else 0


MASK_OPERATORS = 6
"""Integer operators from which on a mask is worth a register from the first pass to its use."""


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << max(0, n - 1).bit_length()


def stride_of(tensor: Value | Output | Walk, axis: int) -> int:
    """Stride of what is read or written along ``axis``; 0 where it does not vary."""
    return tensor.strides[tensor.axes.index(axis)] if axis in tensor.axes else 0


def read_once(graph: Graph, i: int, axes: Iterable[int]) -> bool:
    """Whether each element of load ``i`` is read at one index along ``axes`` only."""
    v = graph.values[i]
    single = {a for a, lo, hi in v.guards if hi - lo == 1}
    return all(stride_of(v, a) or a in single for a in axes if graph.extents[a] > 1)


def _weight(graph: Graph, axis: int) -> int:
    """How far apart in memory neighbours along ``axis`` lie, in the largest tensors; without end where no tensor says.

    A position that no tensor has (what is summed over the parts of a stack) is then never the innermost one.
    """
    for tensors in (graph.outputs, [v for v in graph.values if v.op == "load"]):
        if best := max((stride_of(t, axis) * max(1, graph.size(t.axes)) for t in tensors), default=0):
            return best
    return sys.maxsize


def split_axes(graph: Graph) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(rows, cols) of a group, outermost first.

    Raises:
        Unsupported: the reductions run over different axes.
    """
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
        # The innermost axis of the largest output, so that neighbouring threads touch neighbouring elements.
        inner = order[-1] if order else None
        for o in sorted(graph.outputs, key=lambda o: -graph.size(o.axes)):
            unit = [a for a, s in zip(o.axes, o.strides, strict=True) if s == 1 and graph.extents[a] > 1]
            if unit:
                inner = unit[0]
                break
        rows = [a for a in order if a != inner]
        cols = [] if inner is None else [inner]
    if 0 in rows:  # the open extent must be the outermost, so that row numbers are decomposed without it
        rows.remove(0)
        rows.insert(0, 0)
    return tuple(rows), tuple(cols)


def build_program(
    graph: Graph,
    *,
    keep: bool = True,
    online: bool = False,
    split: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
    columns: tuple[Column, ...] = (),
    moments: bool = False,
    early: bool = False,
) -> Program:
    """Arrange a group into passes.

    Args:
        graph: the group. Every reduction must run over the same axes.
        keep: whether full values wait for later passes (False recomputes them from the inputs in each pass).
        online: whether softmax-like pairs are computed in one pass.
        split: (rows, cols), where they do not follow from the reductions.
        columns: accumulators over all the rows.
        moments: whether a mean and the variance about it are computed in one pass.
        early: whether random masks of later passes, which wait for nothing, are computed beside the first one.

    Raises:
        Unsupported: the group is not row-wise.
    """
    if has_sum_at(graph):
        raise Unsupported("sums at places that other data tell")
    if not any(o.axes for o in graph.outputs) and not any(v.axes for v in graph.values):
        graph = _as_row(graph)
    program = Program(graph, *(split or split_axes(graph)), columns=columns)
    rows, cols, vals = program.rows, program.cols, graph.values
    if any(a not in o.axes and graph.extents[a] > 1 for o in graph.outputs for a in rows):
        raise Unsupported("an output that does not vary over the group's rows")
    pairs = find_online(graph) if online else ()
    spreads = find_moments(graph, cols) if moments else ()
    by_total: dict[int, Online | Moments] = {o.total: o for o in pairs}
    by_total |= {m.square: m for m in spreads}
    live = graph.making([*(o.value for o in graph.outputs), *(c.value for c in columns)])

    level = [0] * len(vals)
    for i, v in enumerate(vals):
        if i in by_total:
            level[i] = level[by_total[i].score] + 1
        elif v.op in REDUCTIONS:
            level[i] = level[v.args[0]] + 1
        elif v.args:
            level[i] = max(level[a] for a in v.args)
    n_passes = 1 + max((level[i] for i in live), default=0)

    # What each pass does, by the fields of Pass, and what it must produce for every element.
    parts: list[dict[str, list[Any]]] = [defaultdict(list) for _ in range(n_passes)]
    roots: list[list[int]] = [[] for _ in range(n_passes)]

    def put(part: str, item: object, value: int, wide: bool = True) -> None:
        parts[level[value]][part].append(item)
        if wide:
            roots[level[value]].append(value)

    for m in spreads:
        put("moments", m, m.score)
    for o in pairs:
        put("online", o, o.score)
    fused = {o.peak for o in pairs} | {m.total for m in spreads} | by_total.keys()
    for i in live:
        if vals[i].op in REDUCTIONS and i not in fused:
            put("reduce", i, vals[i].args[0])
    for k, out in enumerate(graph.outputs):
        wide = any(a in cols for a in out.axes)
        put("stores" if wide else "row_stores", k, out.value, wide)
    for n, c in enumerate(columns):
        wide = any(a in cols for a in vals[c.value].axes)
        put("columns" if wide else "row_columns", n, c.value, wide)

    masks = _masks(program, roots) if early and keep else []
    made_at: dict[int, int] = dict.fromkeys(masks, -1)
    wanted: list[set[int]] = []  # values from earlier passes that each pass takes
    for p in range(n_passes):

        def kept_before(i: int, p: int = p) -> bool:
            return keep and program.domain(i) == "full" and made_at.get(i, p) < p

        made = graph.making(roots[p], lambda i: program.domain(i) in ("const", "row"), kept_before)
        wanted.append(set(filter(kept_before, made)))
        for i in made:
            made_at.setdefault(i, p)
    wanted = _drop_light(program, _prefer_packed(program, wanted))
    last = {i: p for p, taken in enumerate(wanted) for i in taken}  # the last pass that takes a value

    passes = []
    beside = program.elementwise(masks)
    computed_rows: set[int] = set()
    for p, part in enumerate(parts):
        compute = program.elementwise(roots[p], wanted[p])
        read = [a for i in (*compute, *(beside if p == 0 else ())) for a in vals[i].args] + roots[p]
        read += [graph.outputs[k].value for k in part["row_stores"]] + [columns[n].value for n in part["row_columns"]]
        row_now = [i for i in program.row_values(read) if i not in computed_rows]
        computed_rows.update(row_now)
        passes.append(
            Pass(
                row_values=tuple(row_now),
                kept_in=tuple(sorted(wanted[p])),
                compute=tuple(compute),
                kept_out=tuple(i for i in compute if made_at.get(i) == p and last.get(i, p) > p),
                **{name: tuple(items) for name, items in part.items()},
            )
        )
    reduces = bool(fused) or any(part["reduce"] for part in parts)
    dynamic = 0 if (rows and rows[0] == 0) or (not rows and cols == (0,) and not reduces) else -1
    side = Pass(compute=tuple(beside), kept_out=tuple(masks)) if masks else None
    return replace(program, passes=tuple(passes), dynamic=dynamic, early=side)


def _masks(program: Program, roots: list[list[int]]) -> list[int]:
    """Full booleans of later passes that many operators make from indices and row values, as a dropout's hash does,
    but not from reductions."""
    values = program.graph.values
    first = set(program.elementwise(roots[0]))
    later = {i for made in roots[1:] for i in program.elementwise(made)}
    found = []
    for i in sorted(later - first):
        if values[i].dtype != "bool" or program.domain(i) != "full":
            continue
        made = program.elementwise([i])
        reads = {a for j in made for a in values[j].args}
        reads |= {a for j in (*reads, *program.row_values(reads)) for a in values[j].args}
        if any(values[a].op in REDUCTIONS for a in reads):
            continue
        if len(made) >= MASK_OPERATORS and all(values[j].op == "index" or values[j].op in POINTWISE for j in made):
            found.append(i)
    return found


def _as_row(graph: Graph) -> Graph:
    """A group of single numbers as a row of one element."""
    values: list[Value] = []
    for v in graph.values:
        if v.op in ("load", "gather"):
            v = replace(v, axes=(0,), strides=(1,))
        elif any(values[a].axes for a in v.args):
            v = replace(v, axes=(0,))
        values.append(v)
    stored = tuple(replace(o, axes=(0,), strides=(1,)) for o in graph.outputs)
    return replace(graph, extents=(1,), values=tuple(values), outputs=stored)


def once_a_row(program: Program) -> None:
    """Raise Unsupported where a reduction would be computed again for rows that it does not vary over."""
    g = program.graph
    rows = {a for a in program.rows if g.extents[a] > 1}
    for i in g.live:
        if g.values[i].op in REDUCTIONS and not rows <= set(g.values[i].axes):
            raise Unsupported("a reduction that is the same for several rows")


def _prefer_packed(program: Program, wanted: list[set[int]]) -> list[set[int]]:
    """Keep a 16-bit input as it was loaded rather than what light operators make of it: half the space."""
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


def _drop_light(program: Program, wanted: list[set[int]]) -> list[set[int]]:
    """Drop kept values that light operators make again from values that the same pass takes anyway."""
    wanted = [set(c) for c in wanted]
    for i in sorted({i for c in wanted for i in c}, reverse=True):
        takers = [c for c in wanted if i in c]
        if all(_cheap_from(program, i, c - {i}) for c in takers):
            for c in takers:
                c.discard(i)
    return wanted


def _cheap_from(program: Program, i: int, have: set[int]) -> bool:
    ops = [program.graph.values[j].op for j in program.elementwise([i], have)]
    # Of what is no operator, it would load again.
    return all(op in POINTWISE for op in ops) and sum(POINTWISE[op].cost for op in ops) <= 2 * LIGHT
