"""Prints values of a kernel program as Numba expressions: what all shapes of CPU kernel have in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from autotune.compiler.program.program import Program, stride_of
from autotune.compiler.targets.cpu.passes import shared_exponentials
from autotune.ir.graph import Value, compute_type
from autotune.ir.precision import STRICT

if TYPE_CHECKING:
    from autotune.compiler.targets.cpu.schedule import CpuSchedule

BYTES = {"float32": 4, "int32": 4, "int64": 8, "bool": 1}
_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_COMPARE = {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_NUMPY = {"float32": "np.float32", "int32": "np.int32", "int64": "np.int64", "bool": "bool"}


def _literal(v: Value) -> str:
    n = v.number
    if v.dtype == "float32":
        x = float(n)
        text = repr(x) if x == x and abs(x) != float("inf") else f'"{x}"'
        return f"np.float32({text})"
    return f"{_NUMPY[v.dtype]}({int(n) if v.dtype != 'bool' else bool(n)})"


def _start(op: str, dtype: str) -> str:
    """A reduction's neutral element."""
    if op in ("sum", "prod"):
        neutral = 0 if op == "sum" else 1
    elif dtype == "float32":
        return f'np.float32("{"-inf" if op == "max" else "inf"}")'
    elif dtype == "bool":
        neutral = 0 if op == "max" else 1
    else:
        bits = 31 if dtype == "int32" else 63
        neutral = -(1 << bits) if op == "max" else (1 << bits) - 1
    return f"{_NUMPY[dtype]}({bool(neutral) if dtype == 'bool' else neutral})"


class Scratch:
    """Named buffers in one allocation, each on a cache line of its own."""

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


class Printer:
    """Lines of a kernel and the module-level names that they use."""

    def __init__(self, program: Program, schedule: CpuSchedule) -> None:
        self.program = program
        self.graph = program.graph
        self.values = program.graph.values
        self.schedule = schedule
        self.lines: list[str] = []
        self.depth = 0
        self.names: dict[str, str] = {}  # module-level name -> definition
        self.scratch = Scratch()
        self.helpers = shared_exponentials(self.graph)
        self.ready: set[int] = set()  # what the body being printed has computed so far
        self.piece: tuple[int, int, int] | None = None  # the columns in hand: axis, first, end
        self.inverses: set[int] = set()  # row values y that d<y> holds the inverse of
        self.n_inputs = len(self.graph.inputs)
        self.n_outputs = len(self.graph.outputs)
        self.last: list[str] = []  # what a thread does when no work is left
        self.n_planes = 0  # arrays of partial results, z0, z1, ..., after the outputs

    @property
    def inner(self) -> int:
        """Extent of the innermost column axis."""
        return self.graph.extents[self.program.cols[-1]] if self.program.cols else 1

    def put(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)

    def name(self, name: str, definition: str) -> str:
        """A module-level name; kernels see these as constants."""
        self.names[name] = definition
        return name

    def op(self, name: str) -> str:
        return self.name(f"{name}_", f'OPS["{name}"]')

    def accumulate(self, op: str) -> str:
        return self.name(f"add_{op}", f'ACCUMULATE["{op}"]')

    def start(self, op: str, dtype: str = "float32") -> str:
        return self.name(f"START_{op}_{dtype}", _start(op, dtype))

    def load(self, storage: str, space: str) -> str:
        return self.name(f"load_{storage}_{space}", f'loader("{storage}", "{space}", SPACES)')

    def store(self, storage: str, space: str) -> str:
        return self.name(f"store_{storage}_{space}", f'storer("{storage}", "{space}", SPACES)')

    def value(self, i: int) -> str:
        """How value ``i`` is named in the kernel."""
        v = self.values[i]
        if v.op == "const":
            return self.name(f"K{i}", _literal(v))
        return f"v{i}"

    def cast(self, text: str, have: str, want: str) -> str:
        if have == want:
            return text
        convert = self.name(f"to_{want}", f'CASTS["{want}"]')
        return f"{convert}({text})"

    def sum_of(self, terms: Iterable[tuple[str, int]], constant: int) -> str:
        parts = [t if s == 1 else f"{t} * {s}" for t, s in terms if s]
        if constant or not parts:
            parts.append(str(constant))
        return " + ".join(parts)

    def row_offset(self, v: Value) -> str:
        terms = [(f"i{a}", stride_of(v, a)) for a in self.program.rows if a in v.axes]
        return self.sum_of(terms, v.offset)

    def out_row_offset(self, k: int) -> str:
        o = self.graph.outputs[k]
        terms = [(f"i{a}", s) for a, s in zip(o.axes, o.strides, strict=True) if a in self.program.rows]
        return self.sum_of(terms, o.offset)

    def col_terms(self, axes: tuple[int, ...], strides: tuple[int, ...]) -> list[tuple[str, int]]:
        return [(f"i{a}", s) for a, s in zip(axes, strides, strict=True) if a in self.program.cols]

    def index(self, i: int) -> str:
        """Index of a load or gather in its slot: what the row gives (o<i>) plus the columns' part."""
        v = self.values[i]
        terms = self.col_terms(v.axes, v.strides)
        if v.op == "gather":
            idx = v.args[0]
            picked = f"{self.name('clamp', 'cpu_ops.clamp')}({self.value(idx)}, {v.bound})"
            terms.append((picked, v.index_stride))
        return self.sum_of([(f"o{i}", 1), *terms], 0)

    def compute(self, i: int) -> None:
        """Assign value ``i`` (not a constant, not a reduction)."""
        v = self.values[i]
        if v.op == "index":
            text = self.cast(self.sum_of([(f"i{v.axes[0]}", v.scale)], v.shift), "int64", v.dtype)
            self.put(f"v{i} = {text}")
        elif v.op in ("load", "gather"):
            self._fetch(i, v)
        else:
            self.put(f"v{i} = {self._pointwise(i, v)}")
        self.ready.add(i)

    def _fetch(self, i: int, v: Value) -> None:
        text = f"{self.load(self.graph.inputs[v.slot], 'in')}(x{v.slot}, {self.index(i)})"
        guards = []
        for a, lo, hi in v.guards:
            if self.piece and a == self.piece[0]:
                if self.piece[1] >= hi or self.piece[2] <= lo:
                    guards = ["False"]
                    break
                continue  # all of the piece is inside
            low = [f"{lo} <= i{a}"] if lo > 0 else []
            high = [f"i{a} < {hi}"] if hi < self.graph.extents[a] or self.program.dynamic == a else []
            guards += low + high
        if v.op == "gather" and v.bound <= 0:
            guards = ["False"]
        if not guards:
            self.put(f"v{i} = {text}")
            return
        zero = Value("const", dtype=v.dtype, number=0)
        self.put(f"v{i} = {self.name(f'ZERO_{v.dtype}', _literal(zero))}")
        if "False" in guards:
            return
        self.put(f"if {' and '.join(guards)}:")
        self.put(f"    v{i} = {text}")

    def _pointwise(self, i: int, v: Value) -> str:
        args = [self.value(a) for a in v.args]
        first = self.values[v.args[0]].dtype
        if v.op == "cast":
            return self.cast(args[0], first, v.dtype)
        if v.op == "div" and v.args[1] in self.inverses and self.program.domain(i) != "row":
            return f"{args[0]} * d{v.args[1]}"
        if first == "float32" and v.op in _INFIX:
            return f"{args[0]} {_INFIX[v.op]} {args[1]}"
        if first == "float32" and v.op == "neg":
            return f"-{args[0]}"
        if first != "bool" and v.op in _COMPARE:
            return f"{args[0]} {_COMPARE[v.op]} {args[1]}"
        if v.op == "erf" and self.helpers.get(i) in self.ready:
            return f"{self.name('erf_by', 'cpu_ops.erf_by')}({args[0]}, v{self.helpers[i]})"
        if v.op == "pow" and first == "float32" and self.values[v.args[1]].op == "const":
            power = self._power(args[0], float(self.values[v.args[1]].number))
            if power:
                return power
        return f"{self.op(v.op)}({', '.join(args)})"

    def _power(self, x: str, exponent: float) -> str | None:
        """Constant powers that need no libm call, as torch takes them too."""
        plain = {1.0: x, 2.0: f"{x} * {x}", 3.0: f"{x} * {x} * {x}", 4.0: f"({x} * {x}) * ({x} * {x})"}
        if exponent in plain:
            return plain[exponent]
        named = {0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal"}
        return f"{self.op(named[exponent])}({x})" if exponent in named else None

    def divisors(self, compute: Iterable[int]) -> list[int]:
        """Row values that elements are divided by: one division a row instead of one an element, by default."""
        found: list[int] = []
        if self.graph.precision == STRICT:
            return found
        for i in compute:
            v = self.values[i]
            if v.op == "div" and v.dtype == "float32" and self.program.domain(v.args[1]) == "row":
                found.append(v.args[1])
        return list(dict.fromkeys(found))

    def inverse(self, y: int) -> None:
        self.inverses.add(y)
        self.put(f"d{y} = {self.name('inverse', 'cpu_ops.inverse')}({self.value(y)})")

    def stored(self, k: int) -> str:
        o = self.graph.outputs[k]
        return self.cast(self.value(o.value), self.values[o.value].dtype, compute_type(o.dtype))

    def write(self, k: int, index: str) -> None:
        o = self.graph.outputs[k]
        self.put(f"{self.store(o.dtype, f'out{k}')}(y{k}, {index}, {self.stored(k)})")

    def extent(self, axis: int) -> str:
        return "n0" if axis == self.program.dynamic else str(self.graph.extents[axis])

    def split_index(self, number: str, axes: tuple[int, ...]) -> None:
        """i<axis> of each of ``axes`` from a number over all of them; the outermost may be of any extent."""
        for pos in range(len(axes) - 1, 0, -1):
            extent = max(1, self.graph.extents[axes[pos]])
            self.put(f"i{axes[pos]} = {number} % {extent}")
            self.put(f"q{pos} = {number} // {extent}")
            number = f"q{pos}"
        if axes:
            self.put(f"i{axes[0]} = {number}")

    def kernel(self) -> list[str]:
        """The kernel's lines: arguments, scratch, and a loop that takes blocks of units of work until none is left."""
        n = self.n_inputs + self.n_outputs + self.n_planes
        self.depth = 1
        self.units()
        self.put("while True:")
        self.depth += 1
        self.put(f"first = ticket(block, {n + 2}) * step")
        self.put("if first >= units:")
        self.put("    break")
        self.put("for u in range(first, min(first + step, units)):")
        self.depth += 1
        self.unit()
        self.depth = 1
        # The scratch is known only now.
        body, self.lines = self.lines, ["def kernel(block):", *(["    wide()"] if self.schedule.wide else [])]
        for j in range(self.n_inputs):
            self.put(f"x{j} = word(block, {j})")
        for k in range(self.n_outputs):
            self.put(f"y{k} = word(block, {self.n_inputs + k})")
        for k in range(self.n_planes):
            self.put(f"z{k} = word(block, {self.n_inputs + self.n_outputs + k})")
        self.put(f"n0 = word(block, {n})")
        self.put(f"threads = word(block, {n + 1})")
        if self.scratch.size:
            self.put(f"memory = allocate({self.scratch.size})")
            self.put("aligned = (memory + 63) & -64")
            for name, offset in self.scratch.at.items():
                self.put(f"s_{name} = aligned + {offset}")
            body.append("    release(memory)")
        body += [f"    {line}" for line in self.last]
        return [*self.lines, *body]

    def units(self) -> None:
        """Assign units (how many there are) and step (how many a thread takes at a time)."""
        raise NotImplementedError

    def unit(self) -> None:
        """The work of unit u."""
        raise NotImplementedError

    def total_rows(self) -> str:
        rows = self.program.rows
        fixed = 1
        for a in rows[1:]:
            fixed *= self.graph.extents[a]
        if not rows:
            return "1"
        first = self.extent(rows[0])
        return str(int(first) * fixed) if first != "n0" else self.sum_of([("n0", fixed)], 0)
