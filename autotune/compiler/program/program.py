"""Kernel programs: a group of operators arranged into passes over rows and columns, by ``program.passes``.

A group's axes are *columns* (the axes of its reductions; for a pointwise group the innermost axis) and *rows* (the
rest). Each value has one of three domains: ``row`` (one number a row, held by every thread of the row), ``col`` (the
same in all rows, cheap to load again) and ``full`` (one number an element). The result of a reduction is available only
after its whole row. The program is therefore a sequence of passes over the row's columns, with the reductions finished
between them. Softmax has three passes, layer_norm three, cross-entropy one or two.

A full value computed in one pass and used in a later one is *kept*: in registers, in shared memory or not at all
(recomputed). This follows the sub-root composition of FusionStitching (arXiv 2009.10924, section 4) with the row as the
unit, and any number of dependent reductions in one kernel.

The program has no threads: ``compiler.targets`` prints it for CUDA and for CPUs.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from autotune.ir.graph import REDUCTIONS, Graph, Output, Value, Walk


@dataclass(frozen=True)
class Online:
    """A maximum and a sum of exponentials of one value, computed in one pass.

    ``total`` = sum(exp(score - shift)); only row operators compute ``shift`` from ``peak`` = max(score).
    """

    score: int
    peak: int
    total: int
    shift: int

    @property
    def reductions(self) -> tuple[int, int]:
        """A reduction, and the one that waits for it."""
        return self.peak, self.total


@dataclass(frozen=True)
class Moments:
    """A sum and the sum of squared deviations from its mean, computed in one pass.

    ``total`` = sum(score), ``square`` = sum((score - total / n)^2).
    """

    score: int
    total: int
    square: int

    @property
    def reductions(self) -> tuple[int, int]:
        """A reduction, and the one that waits for it."""
        return self.total, self.square


@dataclass(frozen=True)
class Column:
    """One accumulator for each column.

    Attributes:
        kind: "sum", "max", "min", "prod", or "moments" (running mean and sum of squared deviations).
        value: the value of the main graph that is accumulated.
        dtype: arithmetic type of the accumulator.
        planes: number of arrays of its partials.
    """

    kind: str
    value: int
    dtype: str

    @property
    def planes(self) -> int:
        return 2 if self.kind == "moments" else 1

    @property
    def storage(self) -> str:
        return "int32" if self.dtype == "bool" else self.dtype


@dataclass(frozen=True)
class Pass:
    """One walk over the columns of a row.

    Attributes:
        row_values: row-domain values to compute before the walk, in order (reductions of the previous pass are done).
        row_stores: outputs (indices into ``graph.outputs``) with one number a row, stored before the walk.
        kept_in: full values that earlier passes have kept.
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
        """True if the pass visits the columns at all (a last pass may only store row results)."""
        return bool(self.reduce or self.online or self.stores or self.columns or self.moments)


@dataclass(frozen=True)
class Program:
    """A group as passes.

    Attributes:
        rows, cols: axis numbers, outermost first.
        dynamic: the axis whose extent is an argument of the kernel, or -1. It is axis 0 if that is ``rows[0]``, or the
            only column axis of a pointwise group without rows.
    """

    graph: Graph
    rows: tuple[int, ...]
    cols: tuple[int, ...]
    passes: tuple[Pass, ...] = ()
    dynamic: int = -1
    columns: tuple[Column, ...] = ()
    """Accumulators over all rows; see ``autotune.compiler.program.columns``."""
    batches: int = 1
    """Number of equal parts of the rows, from the first on, that accumulators are separate for."""

    @cached_property
    def _hash(self) -> int:
        return hash((self.graph, self.rows, self.cols, self.passes, self.dynamic, self.columns, self.batches))

    def __hash__(self) -> int:  # functions that are cached by program hash it once for each candidate
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: hashes of strings differ between processes."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @cached_property
    def n_rows(self) -> int:
        return self.graph.size(self.rows)

    @cached_property
    def n_cols(self) -> int:
        return self.graph.size(self.cols)

    @cached_property
    def pointwise(self) -> bool:
        """True without reductions: every element is independent."""
        return self.graph.pointwise

    def domain(self, i: int) -> str:
        """ "const", "row", "col" or "full" for value ``i``."""
        return self._domains[i]

    @cached_property
    def _domains(self) -> tuple[str, ...]:
        rows, cols = set(self.rows), set(self.cols)

        def of(v: Value) -> str:
            if v.op == "const":
                return "const"
            if cols.isdisjoint(v.axes):
                return "row"
            return "full" if not rows or not rows.isdisjoint(v.axes) else "col"

        return tuple(map(of, self.graph.values))

    @cached_property
    def kept(self) -> tuple[int, ...]:
        """The values that some pass keeps, in order."""
        return tuple(sorted(self.kept_from))

    @cached_property
    def kept_from(self) -> dict[int, int]:
        """The pass that keeps each value that some pass keeps."""
        return {i: q for q, p in enumerate(self.passes) for i in p.kept_out}

    @cached_property
    def reductions(self) -> tuple[int, ...]:
        return tuple(i for i, v in enumerate(self.graph.values) if v.op in REDUCTIONS)

    def roots(self, pas: Pass) -> list[int]:
        """Values whose elements a pass needs: arguments of its reductions, its stores and its accumulators."""
        values, outputs = self.graph.values, self.graph.outputs
        return [
            *(m.score for m in pas.moments),
            *(o.score for o in pas.online),
            *(values[i].args[0] for i in pas.reduce),
            *(outputs[k].value for k in pas.stores),
            *(self.columns[n].value for n in pas.columns),
        ]

    def row_chain(self, i: int) -> list[int]:
        """Row values from which row value ``i`` is computed, and ``i``, in order, without reductions and constants."""
        values = self.graph.values
        return self.graph.making([i], lambda j: values[j].op in REDUCTIONS or values[j].op == "const")

    def elementwise(self, roots: Iterable[int], have: Container[int] = ()) -> list[int]:
        """Col and full values that compute ``roots`` from ``have``, row values and constants, in order."""
        return self.graph.making(roots, lambda i: i in have or self.domain(i) in ("const", "row"))

    def row_values(self, read: Iterable[int]) -> list[int]:
        """Row values among ``read`` and their ancestors, in order, without reductions and constants."""
        values = self.graph.values
        return self.graph.making(read, lambda i: self.domain(i) != "row" or values[i].op in REDUCTIONS)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << max(0, n - 1).bit_length()


def stride_of(tensor: Value | Output | Walk, axis: int) -> int:
    """Stride of a tensor along ``axis``; 0 if it does not vary."""
    return tensor.strides[tensor.axes.index(axis)] if axis in tensor.axes else 0


def read_once(graph: Graph, i: int, axes: Iterable[int]) -> bool:
    """True if each element of load ``i`` is read at one index along ``axes`` only."""
    v = graph.values[i]
    single = {a for a, lo, hi in v.guards if hi - lo == 1}
    return all(stride_of(v, a) or a in single for a in axes if graph.extents[a] > 1)


def overwritable(graph: Graph) -> tuple[tuple[int, int], ...]:
    """Pairs of an input slot and an output that may share memory.

    Every load of the slot reads the address that the output writes at the same index, and the output needs all of these
    loads. So a thread that computes an element of the output has read that of the slot, in any instruction order. The
    output varies over every axis: without one of them, each thread along it reads the slot and writes the output. The
    kernel's scheme must guarantee that no other thread needs the element.
    """
    reads: dict[int, list[int]] = {}
    for i in graph.live:
        if graph.values[i].op in ("load", "gather"):
            reads.setdefault(graph.values[i].slot, []).append(i)
    places = [_address(graph, o) for o in graph.outputs]
    needed = [set(graph.making([o.value])) for o in graph.outputs]
    # The extent of axis 0 may vary.
    walked = {a for a, extent in enumerate(graph.extents) if a == 0 or extent > 1}

    def reads_at(i: int, place: _Address) -> bool:
        v = graph.values[i]
        return v.op == "load" and not v.guards and _address(graph, v) == place

    return tuple(
        (slot, k)
        for slot, loads in sorted(reads.items())
        for k, output in enumerate(graph.outputs)
        if output.dtype == graph.inputs[slot] and needed[k].issuperset(loads) and walked.issubset(output.axes)
        if all(reads_at(i, places[k]) for i in loads)
    )


def overwritable_rows(program: Program) -> tuple[tuple[int, int], ...]:
    """The pairs of :func:`overwritable` for a row-wise kernel, in which one thread has the same elements in all passes.

    The compiler may reorder loads like arithmetic, so the stored value must depend on each of them. It does directly if
    the load's pass stores, else through one of the pass's reductions. It does not for a load of a later pass.
    """
    graph = program.graph
    passes = program.passes
    written = {} if program.columns else {k: q for q, p in enumerate(program.passes) for k in p.stores}

    def straight(q: int, roots: Iterable[int]) -> list[int]:
        return graph.making(roots, ends=lambda i: graph.values[i].op in REDUCTIONS or i in passes[q].kept_in)

    def safe(slot: int, k: int) -> bool:
        value = graph.outputs[k].value
        needed = set(graph.making([value]))
        reads = [(q, {i for i in p.compute if graph.values[i].slot == slot}) for q, p in enumerate(passes)]

        def goes_in(q: int, loads: set[int]) -> bool:
            p = passes[q]
            pairs = [*(o.reductions for o in p.online), *(m.reductions for m in p.moments)]
            reduced = {*p.reduce, *(i for pair in pairs for i in pair)}
            joined = [a for i in reduced if i in needed for a in graph.values[i].args]
            return loads.issubset(straight(q, [value] if q == written[k] else joined))

        return all(goes_in(q, loads) for q, loads in reads if loads)

    return tuple(pair for pair in overwritable(graph) if pair[1] in written and safe(*pair))


_Address = tuple[int, frozenset[tuple[int, int]]]
"""The offset of a tensor, and its axes with their strides. Axes of one element are left out, except axis 0, whose
extent may vary."""


def _address(graph: Graph, tensor: Value | Output) -> _Address:
    strides = zip(tensor.axes, tensor.strides, strict=True)
    return tensor.offset, frozenset((a, s) for a, s in strides if a == 0 or graph.extents[a] > 1)
