"""The tuned parameters of a CPU kernel, and what they decide in its program: kept values, streams, prefetched loads.

A program keeps the smallest set of values; on a CPU even that is too much. A row that was just read is in the first or
second-level cache. Reading it again costs as much as reading a kept copy, and the copy also costs a store. So a value
is kept only if its recomputation from the inputs takes more than light arithmetic: the exponentials of a softmax are
kept, the scaled and masked scores are not.

``intrinsics.memory`` implements streaming stores and prefetches. This module decides on them without importing Numba,
which deployment does not load.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from autotune.compiler.program.passes import with_kept, without
from autotune.compiler.program.program import Program, stride_of
from autotune.ir.graph import STORAGE_BYTES, Graph
from autotune.ir.nodes import LIGHT, POINTWISE, STRICT

EARLIER: Mapping[str, tuple[str, ...] | None] = {"keep": ("scratch", "reload"), "online": None}
"""Parameters that only configurations of earlier versions have, and what they may be (None: a truth value).

Results are the same without them, and no slower: where values waited for the next pass (computing them again was slower
in three cases of three), and whether a softmax took one pass less (1.8% in the space of a cross entropy).
"""


@dataclass(frozen=True)
class CpuSchedule:
    """A group's tuned parameters on the CPU; see ``[cpu.*]`` of ``search_spaces/fusion.toml``."""

    row_block: int = 8
    column_tile: int = 0
    threads: int = 1
    parts: int = 0
    stream: bool = False
    prefetch: bool = False
    wide: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> CpuSchedule:
        """The schedule of a configuration, in which a parameter with its default value may be missing.

        Who reads a stored configuration checks its types and ranges first, by
        :func:`autotune.compiler.schedules.configurations.improper`.
        """
        return cls(**{f.name: config[f.name] for f in fields(cls) if f.name in config})


LINE = 64
"""Bytes of a cache line, and of a streaming store."""
STRETCH = 4096
"""Bytes of an output between two copies of a longer walk: they stay in the first-level cache."""
AHEAD = 8
"""Columns from the current one to the one that a kernel of lanes prefetches."""
_SHORTEST = 4 * LINE  # adjacent bytes below which a run has hardly a whole line
_LOAD_COST = 1
_GATHER_COST = 2 * LIGHT + 1  # never again


def shared_exponentials(graph: Graph) -> dict[int, int]:
    """Values erf(c x) that are only added to 1, and for each a value exp(-c^2 x^2), which saves most of its work.

    The derivative of gelu has both. There are none under strict precision, since the shared form loses digits near 0.
    """
    values = graph.values
    if graph.precision == STRICT:
        return {}

    def factor(i: int) -> tuple[int, float] | None:
        """(x, c) of a value x * c."""
        v = values[i]
        if v.op != "mul" or v.dtype != "float32":
            return None
        for x, c in (v.args, v.args[::-1]):
            if values[c].op == "const" and values[x].op != "const":
                return x, float(values[c].number)
        return None

    squares: list[tuple[int, float, int]] = []  # x, k, exp(k x^2)
    for j, v in enumerate(values):
        scaled = factor(v.args[0]) if v.op == "exp" else None
        if scaled and values[scaled[0]].op == "mul" and len(set(values[scaled[0]].args)) == 1:
            squares.append((values[scaled[0]].args[0], scaled[1], j))
    found = {}
    for i, v in enumerate(values):
        scaled = factor(v.args[0]) if v.op == "erf" else None
        users = [values[u] for u in graph.users[i]]
        one = all(
            u.op == "add" and any(values[a].op == "const" and values[a].number == 1 for a in u.args) for u in users
        )
        if scaled is None or not users or not one or any(o.value == i for o in graph.outputs):
            continue
        for x, k, j in squares:
            if x == scaled[0] and abs(k + scaled[1] ** 2) <= 1e-6 * abs(k):
                found[i] = j
    return found


def _order(program: Program, compute: list[int]) -> tuple[int, ...]:
    """Values in order of number, but exponentials before the error functions that they help."""
    helped = {i: j for i, j in shared_exponentials(program.graph).items() if i in compute and j in compute}
    if not helped:
        return tuple(compute)
    inside = set(compute)
    out: dict[int, None] = {}

    def visit(i: int) -> None:
        if i in out or i not in inside:
            return
        for a in (*program.graph.values[i].args, *([helped[i]] if i in helped else [])):
            visit(a)
        out[i] = None

    for i in compute:
        visit(i)
    return tuple(out)


def _cost(program: Program, i: int, have: set[int]) -> int:
    total = 0
    for j in program.elementwise((i,), have):
        v = program.graph.values[j]
        if v.op in POINTWISE:
            total += POINTWISE[v.op].cost
        else:
            total += _GATHER_COST if v.op == "gather" or v.guards else _LOAD_COST
    return total


def thin(program: Program) -> Program:
    """``program`` without the kept values that light operators can recompute from inputs or other kept values."""
    kept = [set(p.kept_in) for p in program.passes]
    left = without(kept, lambda i, have: _cost(program, i, have) <= 2 * LIGHT)
    return with_kept(program, left, lambda compute: _order(program, compute))


def flatten(program: Program) -> tuple[Program, int]:
    """Flatten a pointwise program over dense tensors of one layout to one axis.

    Short rows would leave vectors half empty and compute indices for every row.

    Returns:
        The program, and its number of elements per step along axis 0 of the original. The extent of a dynamic axis 0 is
        multiplied by this number, which is 1 for an unchanged program.
    """
    graph = program.graph
    if not program.pointwise or not program.rows or len(program.cols) != 1:
        return program, 1
    axes = [a for a in (*program.rows, *program.cols) if graph.extents[a] != 1 or a == program.dynamic]
    live = {i for p in program.passes for i in p.compute} | {o.value for o in graph.outputs}
    if any(p.row_values or p.row_stores or p.kept_out for p in program.passes):
        return program, 1
    layouts = set()
    for i in live:
        v = graph.values[i]
        if v.op == "const":
            continue
        if v.op in ("gather", "index") or v.guards or not set(axes) <= set(v.axes):
            return program, 1
        if v.op == "load":
            layouts.add(tuple(v.strides[v.axes.index(a)] for a in axes))
    for o in graph.outputs:
        if not set(axes) <= set(o.axes):
            return program, 1
        layouts.add(tuple(o.strides[o.axes.index(a)] for a in axes))
    if len(layouts) != 1:
        return program, 1
    step = 1
    order = sorted(zip(next(iter(layouts)), axes, strict=True))
    for stride, a in order:
        if stride != step:
            return program, 1
        step *= graph.extents[a]
    dynamic = program.dynamic >= 0
    if dynamic and order[-1][1] != program.dynamic:
        return program, 1
    values = tuple(
        replace(v, axes=(0,), strides=(1,) if v.op == "load" else ()) if i in live and v.op != "const" else v
        for i, v in enumerate(graph.values)
    )
    outputs = tuple(replace(o, axes=(0,), strides=(1,)) for o in graph.outputs)
    flat = replace(graph, extents=(step,), values=values, outputs=outputs)
    factor = step // max(1, graph.extents[program.dynamic]) if dynamic else 1
    return replace(program, graph=flat, rows=(), cols=(0,), dynamic=0 if dynamic else -1), factor


def streamed(program: Program, lanes: bool = False) -> tuple[int, ...]:
    """Outputs (indices into ``graph.outputs``) that a kernel can stream.

    They have unit stride along the innermost column axis (row axis for a kernel of ``lanes``), in runs of at least a
    few cache lines.
    """
    graph = program.graph
    if not program.cols:
        return ()
    inner = program.rows[-1] if lanes else program.cols[-1]
    stored = {k for p in program.passes for k in p.stores}
    return tuple(
        k
        for k, o in enumerate(graph.outputs)
        if k in stored
        and dict(zip(o.axes, o.strides, strict=True)).get(inner) == 1
        and graph.extents[inner] * STORAGE_BYTES[o.dtype] >= _SHORTEST
    )


def fetched(program: Program, lanes: bool = False) -> tuple[int, ...]:
    """Loads whose next row a kernel can prefetch while it finishes a row: long rows with unit stride.

    There are none if rows are walked only once, because the processor's prefetchers are then not interrupted. A kernel
    of ``lanes`` prefetches columns, each of which is a jump in memory.
    """
    graph = program.graph
    walks = [p for p in program.passes if p.walks]
    loads = [(i, graph.values[i]) for i in sorted({i for p in program.passes for i in p.compute})]
    loads = [(i, v) for i, v in loads if v.op == "load"]
    if not program.rows or not program.cols:
        return ()
    row, inner = program.rows[-1], program.cols[-1]
    if lanes:
        if graph.extents[inner] < 2 * AHEAD:
            return ()  # the walk ends before the prefetched columns
        return tuple(i for i, v in loads if stride_of(v, row) == 1 and any(stride_of(v, a) for a in program.cols))
    if len(walks) < 2 or walks[-1].online:
        return ()
    return tuple(
        i
        for i, v in loads
        if stride_of(v, inner) == 1
        and stride_of(v, row) > 0
        and graph.extents[inner] * STORAGE_BYTES[graph.inputs[v.slot]] >= _SHORTEST
    )


def streamed_bytes(program: Program, lanes: bool = False) -> int:
    """Bytes of the streamed outputs."""
    outputs = [program.graph.outputs[k] for k in streamed(program, lanes)]
    return sum(program.graph.size(o.axes) * STORAGE_BYTES[o.dtype] for o in outputs)


def fetched_bytes(program: Program, lanes: bool = False) -> int:
    """Bytes of the prefetched loads."""
    loads = [program.graph.values[i] for i in fetched(program, lanes)]
    return sum(program.graph.size(v.axes) * STORAGE_BYTES[program.graph.inputs[v.slot]] for v in loads)
