"""Groups of the schemes ``flat`` and ``rows`` as Triton kernels.

A flat kernel takes ``block`` elements a program. A row-wise one takes ``rows`` rows a program: where a row fits
``block`` columns it is computed at one go, else each pass of the program walks along it, and reads its inputs again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import and_

from autotune.compiler.kernel import lower
from autotune.compiler.kernel.lower import Plain, reducers_of
from autotune.compiler.kernel.nodes import (
    Assign,
    Cast,
    Const,
    Expr,
    Load,
    Pointer,
    Select,
    Stmt,
    Store,
    Var,
    loop,
    sum_of,
)
from autotune.compiler.program.passes import build_program, once_a_row
from autotune.compiler.program.program import Pass
from autotune.errors import Unsupported
from autotune.ir.graph import EIGHT_BIT_FLOATS, Graph
from autotune.ir.nodes import STRICT
from examples.triton_target.printer import Full, ProgramId, Range, Reduce, TritonPrinter

ROW, COLUMN, FIRST = Var("row", "int64"), Var("column", "int64"), Var("first", "int32")
ROW_THERE, COLUMN_THERE = Var("row_there", "bool"), Var("column_there", "bool")
"""Whether the row, or the column, is there."""


class Emitter:
    """Builds the kernel of one group.

    Raises:
        Unsupported: the group is of another scheme, or has what Triton offers in libdevice or by inline code only.
    """

    def __init__(self, graph: Graph, rows: int, block: int) -> None:
        program = build_program(graph)
        self.flat = program.pointwise
        self.looped = not self.flat and program.n_cols > block
        self.program = program = build_program(graph, keep=False) if self.looped else program
        once_a_row(program)
        self.graph, self.values, self.rows, self.block = program.graph, program.graph.values, rows, block
        if graph.precision == STRICT:
            raise Unsupported("strict precision")
        if set(EIGHT_BIT_FLOATS) & {*graph.inputs, *(o.dtype for o in graph.outputs)}:
            raise Unsupported("floats of eight bits")
        self.done: set[int] = set()  # values that are computed once for all passes

    # ---- places -----------------------------------------------------------------------------------------------------

    def index(self, axis: int) -> Var:
        return Var(f"i{axis}", "int64")

    def there(self, axes: Iterable[int]) -> list[Expr]:
        """Bounds checks of values that vary over ``axes``."""
        axes = set(axes)
        on_rows, on_columns = axes & {*self.program.rows}, axes & {*self.program.cols}
        if self.flat:
            return [ROW_THERE] if axes else []
        return [*([ROW_THERE] if on_rows else []), *([COLUMN_THERE] if on_columns else [])]

    def taken_apart(self, number: Expr, axes: Sequence[int]) -> list[Stmt]:
        """Sets the index along each axis from one number."""
        out: list[Stmt] = []
        for a in reversed(axes):
            extent = max(1, self.graph.extents[a])
            out.append(Assign(self.index(a), number if a == axes[0] else number % extent))
            rest = Var(f"above{a}", "int64")
            out += [Assign(rest, number // extent)] if a != axes[0] else []
            number = rest
        return out

    def offset(self, axes: Sequence[int], strides: Sequence[int], constant: int, shape: Iterable[int] = ()) -> Expr:
        """Element offset, a block that varies over the axes ``shape`` too."""
        at = sum_of([(self.index(a), s) for a, s in zip(axes, strides, strict=True)], constant)
        for a in shape:
            at = at + self.index(a) * 0
        return at

    # ---- values -----------------------------------------------------------------------------------------------------

    def value(self, i: int) -> Expr:
        v = self.values[i]
        return Const(v.number, v.dtype) if v.op == "const" else Var(f"v{i}", v.dtype)

    def compute(self, i: int) -> Stmt:
        v = self.values[i]
        if v.op == "index":
            return Assign(Var(f"v{i}", v.dtype), Cast(v.dtype, self.index(v.axes[0]) * v.scale + v.shift))
        if v.op not in ("load", "gather"):
            return Assign(Var(f"v{i}", v.dtype), lower.pointwise(v, [self.value(a) for a in v.args]))
        moved = {a for a, s in zip(v.axes, v.strides, strict=True) if s} | {a for a, _, _ in v.guards}
        tests: list[Expr] = [t for a, low, high in v.guards for t in (self.index(a) >= low, self.index(a) < high)]
        at = self.offset(v.axes, v.strides, v.offset, [a for a, _, _ in v.guards])
        if v.op == "gather":
            index = self.value(v.args[0])
            moved |= {*self.values[v.args[0]].axes}
            tests += [index >= 0, index < v.bound]
            at = at + Cast("int64", index) * v.index_stride
        tests += self.there(moved)
        storage, guard = self.graph.inputs[v.slot], reduce(and_, tests) if tests else None
        return Assign(Var(f"v{i}", v.dtype), Load(storage, 1, "default", Pointer(v.slot), at, guard=guard))

    def computed(self, values: Iterable[int], once: bool) -> list[Stmt]:
        """The statements of values; ``once``: they hold for all that follows."""
        new = [i for i in values if i not in self.done and self.values[i].op != "const"]
        self.done |= {*new} if once else set()
        return [self.compute(i) for i in new]

    def store(self, k: int) -> Stmt:
        o = self.graph.outputs[k]
        along = not self.flat and set(o.axes) & {*self.program.cols}
        # Blocks, although an extent is 1: the mask is one.
        at = self.offset(o.axes, o.strides, o.offset) + ROW * 0 + (COLUMN * 0 if along else 0)
        value = lower.stored(self.value(o.value), o.dtype)
        guard = ROW_THERE & COLUMN_THERE if along else ROW_THERE
        return Store(o.dtype, "default", Pointer(len(self.graph.inputs) + k), at, (value,), guard)

    # ---- kernels ----------------------------------------------------------------------------------------------------

    def flat_body(self) -> list[Stmt]:
        axes = (*self.program.rows, *self.program.cols)
        first = Cast("int64", ProgramId()) * self.block
        body: list[Stmt] = [Assign(ROW, first + Range(self.block, "")), Assign(ROW_THERE, self.graph.size(axes) > ROW)]
        body += self.taken_apart(ROW, axes)
        body += self.computed(self.graph.live, once=True)
        return [*body, *(self.store(k) for k in range(len(self.graph.outputs)))]

    def rows_body(self) -> list[Stmt]:
        first = Cast("int64", ProgramId()) * self.rows
        body: list[Stmt] = [
            Assign(ROW, first + Range(self.rows, "[:, None]")),
            Assign(ROW_THERE, self.program.n_rows > ROW),
        ]
        body += self.taken_apart(ROW, self.program.rows)
        if not self.looped:
            body += self.columns(Const(0))
        for pas in self.program.passes:
            body += self.computed(pas.row_values, once=True)
            body += [self.store(k) for k in pas.row_stores]
            if pas.walks:
                body += self.walk(pas)
        return body

    def columns(self, first: Expr) -> list[Stmt]:
        """Sets the indices of a block of columns."""
        number = Cast("int64", Range(self.block, "[None, :]"))
        there = Assign(COLUMN_THERE, self.program.n_cols > COLUMN)
        return [Assign(COLUMN, number + first), there, *self.taken_apart(COLUMN, self.program.cols)]

    def walk(self, pas: Pass) -> list[Stmt]:
        """One pass over a row."""
        plain = reducers_of(self.graph, pas).plain
        inside = [*self.computed(pas.compute, once=not self.looped), *(self.store(k) for k in pas.stores)]
        terms = {i: self.term(i, r) for i, r in plain.items()}
        if not self.looped:
            ends = [Assign(r.carried, Reduce(r.op, terms[i])) for i, r in plain.items()]
            return [*inside, *ends, *(r.finish() for r in plain.values())]
        shape = (self.rows, self.block)
        begin: list[Stmt] = [Assign(r.carried, Full(shape, r.identity[0])) for r in plain.values()]
        inside += [s for i, r in plain.items() for s in r.merge([terms[i]])]
        walked = loop(FIRST, self.program.n_cols, [*self.columns(FIRST), *inside], 0, self.block)
        ends = [Assign(r.carried, Reduce(r.op, r.carried)) for r in plain.values()]
        return [*begin, walked, *ends, *(r.finish() for r in plain.values())]

    def term(self, i: int, r: Plain) -> Expr:
        """The term of reduction ``i`` for a block of columns: elements out of bounds are its identity."""
        taken = lower.term(self.value(self.values[i].args[0]), r.dtype)
        return Select(ROW_THERE & COLUMN_THERE, taken, r.identity[0])

    def source(self) -> tuple[str, int]:
        """A module that defines ``kernel``, which takes the group's inputs and outputs; how many programs run it."""
        body = self.flat_body() if self.flat else self.rows_body()
        pointers = [f"p{k}" for k in range(len(self.graph.inputs) + len(self.graph.outputs))]
        whole = self.graph.size((*self.program.rows, *self.program.cols)) if self.flat else self.program.n_rows
        each = self.block if self.flat else self.rows
        return TritonPrinter().kernel(pointers, body), -(-whole // each)
