"""The base of all CPU kernels: computation of values, and the loop over units of work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from autotune.compiler.kernel.lower import identity, pointwise
from autotune.compiler.kernel.nodes import (
    Assign,
    Binary,
    Cast,
    Const,
    Do,
    Expr,
    Intrinsic,
    Op,
    Operand,
    Stmt,
    Unary,
    Var,
    conjunction,
    expr,
    loop,
    sum_of,
    when,
)
from autotune.compiler.program.program import Pass, Program, stride_of
from autotune.compiler.targets.cpu.printer import Accumulate, Break, Loop, Memory, Named, buffer, output, plane, source
from autotune.compiler.targets.cpu.schedule import CpuSchedule, fetched, shared_exponentials, streamed
from autotune.ir.graph import Value, compute_type
from autotune.ir.nodes import STRICT

_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_COMPARE = {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_POWERS = {0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal"}
BYTES = {"float32": 4, "int32": 4, "int64": 8, "bool": 1}
Term = tuple[Expr, int]
"""An index and its factor."""


def index(name: str) -> Var:
    """A variable that counts or finds elements."""
    return Var(name, "int64")


def axis(a: int) -> Var:
    """The index along an axis of the program."""
    return index(f"i{a}")


def cast(x: Expr, want: str) -> Expr:
    """``x`` in another arithmetic type; a number without a type is an index."""
    return x if (x.dtype or "int64") == want else Cast(want, x)


def call(name: str, *args: Operand) -> Intrinsic:
    """A call of a Python, NumPy or ``intrinsics`` function on indices."""
    return Intrinsic(name, tuple(expr(a) for a in args), "int64")


def start(op: str, dtype: str = "float32") -> Named:
    """A reduction's neutral element; boolean reductions have boolean accumulators."""
    neutral = Const(op in ("prod", "min"), "bool") if dtype == "bool" else identity(op, dtype)
    return Named(f"START_{op}_{dtype}", neutral)


def number(name: str, value: float, dtype: str) -> Named:
    """A constant of type ``dtype``."""
    kind = {"float32": float, "bool": bool}.get(dtype, int)
    return Named(name, Const(kind(value), dtype))


BLOCK, EXTENT, THREADS, UNITS, UNIT, FIRST, STEP = map(index, ("block", "n0", "threads", "units", "u", "first", "step"))
"""The argument block, the extent of axis 0, and units of work: their number, the current one, and the first and the
number of those taken from the counter."""


class Scratch:
    """Named buffers in one allocation, each with its own cache lines."""

    def __init__(self) -> None:
        self.at: dict[str, int] = {}
        self.size = 0

    def take(self, name: str, count: int, dtype: str) -> None:
        """Reserve ``count`` elements of a compute type; a second reservation of a name is the first one."""
        self.take_bytes(name, count * BYTES[dtype])

    def take_bytes(self, name: str, size: int) -> None:
        if name not in self.at:
            self.at[name] = self.size
            self.size += (size + 63) // 64 * 64


class Builder:
    """Builder of a kernel's body; with ``lanes``, its innermost loops run over rows."""

    def __init__(self, program: Program, schedule: CpuSchedule, lanes: bool = False) -> None:
        self.program, self.graph, self.values = program, program.graph, program.graph.values
        self.schedule, self.scratch = schedule, Scratch()
        self.helpers = shared_exponentials(self.graph)
        self.ready: set[int] = set()  # values that the current body has computed so far
        self.piece: tuple[int, int, int] | None = None  # the current columns: axis, first, end
        self.inverses: set[int] = set()  # row values with a computed inverse
        self.n_inputs, self.n_outputs = len(self.graph.inputs), len(self.graph.outputs)
        self.streams = streamed(program, lanes) if schedule.stream else ()  # outputs that bypass the caches
        self.ahead = fetched(program, lanes) if schedule.prefetch else ()  # prefetched loads
        self.n_planes = 0  # arrays of partial results, after the outputs

    @property
    def inner(self) -> int:
        """Extent of the innermost column axis."""
        return self.graph.extents[self.program.cols[-1]] if self.program.cols else 1

    # ---- values -----------------------------------------------------------------------------------------------------

    def value(self, i: int) -> Var | Named:
        v = self.values[i]
        return number(f"K{i}", v.number, v.dtype) if v.op == "const" else self.variable(i)

    def variable(self, i: int, prefix: str = "v") -> Var:
        """A variable for value ``i``, or for something of its type."""
        return Var(f"{prefix}{i}", self.values[i].dtype)

    def compute(self, i: int) -> list[Stmt]:
        """Assign value ``i`` (not a constant, not a reduction)."""
        v = self.values[i]
        self.ready.add(i)
        if v.op in ("load", "gather"):
            return self._fetch(i, v)
        if v.op == "index":
            return [Assign(self.variable(i), cast(sum_of([(axis(v.axes[0]), v.scale)], v.shift), v.dtype))]
        return [Assign(self.variable(i), self._pointwise(i, v))]

    def _fetch(self, i: int, v: Value) -> list[Stmt]:
        fetched = Assign(self.variable(i), source(v.slot).load(self.graph.inputs[v.slot], self._index(i)))
        guards: list[Expr] = []
        outside = v.op == "gather" and v.bound <= 0
        for a, low, high in v.guards:
            if self.piece and a == self.piece[0]:  # all of the piece is inside, or all of it outside
                outside |= self.piece[1] >= high or self.piece[2] <= low
                continue
            guards += [Const(low) <= axis(a)] if low > 0 else []
            guards += [axis(a) < high] if high < self.graph.extents[a] or self.program.dynamic == a else []
        if not guards and not outside:
            return [fetched]
        cleared = Assign(self.variable(i), number(f"ZERO_{v.dtype}", 0, v.dtype))
        return [cleared] if outside else [cleared, when(conjunction(*guards), [fetched])]

    def _index(self, i: int) -> Expr:
        v = self.values[i]
        terms = self.column_terms(v.axes, v.strides)
        if v.op == "gather":
            terms.append((call("clamp", self.value(v.args[0]), v.bound), v.index_stride))
        return sum_of([(index(f"o{i}"), 1), *terms])

    def _pointwise(self, i: int, v: Value) -> Expr:
        args = [self.value(a) for a in v.args]
        if v.op == "cast":
            return cast(args[0], v.dtype)
        if v.op == "div" and v.args[1] in self.inverses and self.program.domain(i) != "row":
            return args[0] * self.variable(v.args[1], "d")
        if v.op == "erf" and self.helpers.get(i) in self.ready:
            return Intrinsic("erf_by", (args[0], self.variable(self.helpers[i])), "float32")
        return _plain(pointwise(v, args))

    def divisors(self, compute: Iterable[int]) -> list[int]:
        """Row values that divide elements: by default with one division per row instead of one per element."""
        if self.graph.precision == STRICT:
            return []
        quotients = [v for v in (self.values[i] for i in compute) if v.op == "div" and v.dtype == "float32"]
        return list(dict.fromkeys(v.args[1] for v in quotients if self.program.domain(v.args[1]) == "row"))

    def inverse(self, y: int) -> Stmt:
        self.inverses.add(y)
        return Assign(self.variable(y, "d"), Intrinsic("inverse", (self.value(y),), "float32"))

    def reduced(self, i: int) -> Expr:
        """The term of reduction ``i``."""
        v = self.values[i]
        return cast(self.value(v.args[0]), v.dtype)

    def float_sums(self, pas: Pass) -> list[int]:
        """The sums of a pass that are added up in parts, so that rounding errors stay small."""
        return [i for i in pas.reduce if self.values[i].op == "sum" and self.values[i].dtype == "float32"]

    def element(self, pas: Pass, at: Expr, carried: Mapping[int, Var]) -> list[Stmt]:
        """One element of a pass, without its stores.

        Args:
            at: its index in the buffers of kept values.
            carried: the accumulator of each reduction.
        """
        self.ready.clear()

        def kept(i: int) -> Memory:
            return buffer(f"kept{i}")

        return [
            *(Assign(self.variable(i), kept(i).load(self.values[i].dtype, at)) for i in pas.kept_in),
            *(s for i in pas.compute for s in self.compute(i)),
            *(kept(i).store(self.values[i].dtype, at, self.variable(i)) for i in pas.kept_out),
            *(Assign(x, Accumulate(self.values[i].op, x, self.reduced(i))) for i, x in carried.items()),
        ]

    # ---- places -----------------------------------------------------------------------------------------------------

    def row_offset(self, v: Value) -> Expr:
        return sum_of([(axis(a), stride_of(v, a)) for a in self.program.rows if a in v.axes], v.offset)

    def output_row_offset(self, k: int) -> Expr:
        o = self.graph.outputs[k]
        terms = [(axis(a), s) for a, s in zip(o.axes, o.strides, strict=True) if a in self.program.rows]
        return sum_of(terms, o.offset)

    def column_terms(self, axes: Sequence[int], strides: Sequence[int]) -> list[Term]:
        return [(axis(a), s) for a, s in zip(axes, strides, strict=True) if a in self.program.cols]

    def spans(self, axes: Sequence[int], innermost: int = 1) -> list[Term]:
        """Terms that number the positions of ``axes``, a step along the last of which is ``innermost``."""
        return [(axis(a), innermost * self.graph.size(axes[k + 1 :])) for k, a in enumerate(axes)]

    def stored(self, k: int) -> Expr:
        o = self.graph.outputs[k]
        return cast(self.value(o.value), compute_type(o.dtype))

    def write(self, k: int, at: Expr) -> Stmt:
        return output(k).store(self.graph.outputs[k].dtype, at, self.stored(k))

    def extent(self, a: int) -> Expr:
        return EXTENT if a == self.program.dynamic else Const(self.graph.extents[a])

    def extent_of(self, axes: Sequence[int]) -> Expr:
        """Positions of all of ``axes``, the outermost of which may be of any extent."""
        rest = prod(self.graph.extents[a] for a in axes[1:])
        if axes and axes[0] == self.program.dynamic:
            return sum_of([(EXTENT, rest)])
        return Const(self.graph.extents[axes[0]] * rest if axes else 1)

    def split_index(self, position: Expr, axes: Sequence[int]) -> list[Stmt]:
        """The index of each of ``axes`` from a position over all of them; the outermost may be of any extent."""
        out: list[Stmt] = []
        for n in range(len(axes) - 1, 0, -1):
            extent, rest = max(1, self.graph.extents[axes[n]]), index(f"q{n}")
            out += [Assign(axis(axes[n]), position % extent), Assign(rest, position // extent)]
            position = rest
        return [*out, Assign(axis(axes[0]), position)] if axes else out

    # ---- the kernel -------------------------------------------------------------------------------------------------

    def kernel(self) -> list[Stmt]:
        """The kernel: arguments, scratch, and a loop that takes blocks of units of work until none is left."""
        arguments = [
            *(source(j) for j in range(self.n_inputs)),
            *(output(k) for k in range(self.n_outputs)),
            *(plane(n) for n in range(self.n_planes)),
            EXTENT,
            THREADS,
        ]
        work = self.units()
        taken = Assign(FIRST, call("ticket", BLOCK, len(arguments)) * STEP)
        block = loop(UNIT, call("min", FIRST + STEP, UNITS), self.unit(), FIRST)
        work.append(Loop((taken, when(FIRST >= UNITS, [Break()]), block)))
        given: list[Stmt] = [Assign(a, call("word", BLOCK, n)) for n, a in enumerate(arguments)]
        if self.schedule.wide:
            given.insert(0, Do(call("wide")))
        if self.scratch.size:  # known only now that the work is built
            memory, aligned = index("memory"), index("aligned")
            given += [Assign(memory, call("allocate", self.scratch.size)), Assign(aligned, (memory + 63) & -64)]
            given += [Assign(buffer(name), aligned + offset) for name, offset in self.scratch.at.items()]
            work.append(Do(call("release", memory)))
        return [*given, *work, *([Do(call("drain"))] if self.streams else [])]

    def units(self) -> list[Stmt]:
        """Assign units (how many there are) and step (how many a thread takes at a time)."""
        raise NotImplementedError

    def unit(self) -> list[Stmt]:
        """The work of unit u."""
        raise NotImplementedError


def _plain(x: Expr) -> Expr:
    """An operator without a call, if the result is the same: LLVM optimises it equally, and the source is shorter."""
    if not isinstance(x, Op):
        return x
    if x.of == "float32" and x.name in _INFIX:
        return Binary(_INFIX[x.name], *x.args)
    if x.of == "float32" and x.name == "neg":
        return Unary("-", *x.args)
    if x.of != "bool" and x.name in _COMPARE:
        return Binary(_COMPARE[x.name], *x.args)
    if x.of == "float32" and x.name == "pow" and isinstance(x.args[1], Named):
        return _power(x, float(x.args[1].value.value))
    return x


def _power(x: Op, exponent: float) -> Expr:
    """Constant powers without a libm call, as in torch."""
    base = x.args[0]
    if exponent in _POWERS:
        return Op(_POWERS[exponent], (base,), "float32", "float32")
    square = base * base
    return {1.0: base, 2.0: square, 3.0: square * base, 4.0: square * square}.get(exponent, x)
