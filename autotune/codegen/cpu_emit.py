"""Prints a kernel program as Numba source for the CPU.

A kernel is one function of the address of its argument block: the addresses of inputs and outputs, then the extent of axis
0, the number of threads, and a counter. Every thread of a launch runs the same function and takes blocks of work off the
counter until none is left, so that a thread that was held up takes fewer. A block is ``row_block`` rows, or for a pointwise
group ``row_block`` tiles of columns.

Inside a row each pass is a loop over the columns, written so that LLVM vectorises it: no calls, no branches but the guards
of sliced loads, sums that may be reassociated. With ``column_tile`` the loop is cut into tiles, which bounds the error of
long sums and is what an online softmax rescales by.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.codegen.cpu_passes import thin
from autotune.codegen.program import Online, Pass, Program, stride_of
from autotune.errors import Unsupported
from autotune.fusion.graph import REDUCTIONS, Value, compute_type

if TYPE_CHECKING:
    from autotune.codegen.cpu import CpuSchedule

_BYTES = {"float32": 4, "int32": 4, "int64": 8, "bool": 1}
_LONG_ROW = 65536  # sums over more columns than this are made of partial sums even where the schedule has no tiles
_PARTIAL = 16384
_POINTWISE_TILE = 4096
_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_COMPARE = {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_NUMPY = {"float32": "np.float32", "int32": "np.int32", "int64": "np.int64", "bool": "bool"}


@cache
def generator() -> str:
    """Short digest of the code that prints and compiles kernels: a changed generator never meets an old cached kernel."""
    h = hashlib.sha256()
    for name in ("cpu_emit.py", "cpu_math.py", "cpu_memory.py", "cpu_ops.py", "cpu_passes.py"):
        h.update(Path(__file__).with_name(name).read_bytes())
    return h.hexdigest()[:16]


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


class _Emitter:
    def __init__(self, program: Program, schedule: CpuSchedule) -> None:
        program = thin(program)
        self.program = program
        self.graph = program.graph
        self.values = program.graph.values
        self.schedule = schedule
        self.lines: list[str] = []
        self.depth = 0
        self.names: dict[str, str] = {}  # module-level name -> definition
        self.rows_done: set[int] = set()
        self.inverses: set[int] = set()
        self.n_inputs = len(self.graph.inputs)
        self.n_outputs = len(self.graph.outputs)
        self.n_cols = program.n_cols
        self.flat = program.pointwise and len(program.cols) == 1
        self.tile = schedule.column_tile
        long = any(self.values[i].op == "sum" for i in program.reductions)
        if not self.flat and not self.tile and long and self.inner > _LONG_ROW:
            self.tile = _PARTIAL
        if self.tile >= self.inner and not self.flat:
            self.tile = 0
        self.scratch = self._layout_scratch()
        self.spaces = (
            "in",
            *(f"out{k}" for k in range(self.n_outputs)),
            *(name for name in self.scratch if name != "size"),
        )

    # --- layout -----------------------------------------------------------------------------------------------------------

    @property
    def inner(self) -> int:
        """Extent of the innermost column axis."""
        return self.graph.extents[self.program.cols[-1]] if self.program.cols else 1

    def _layout_scratch(self) -> dict[str, int]:
        """Byte offset of each kept value's row and each online tile; "size" is the whole."""
        at: dict[str, int] = {}
        size = 0

        def take(name: str, count: int, dtype: str) -> None:
            nonlocal size
            at[name] = size
            size += (count * _BYTES[dtype] + 63) // 64 * 64

        for i in self.program.kept:
            take(f"kept{i}", self.n_cols, self.values[i].dtype)
        for p in self.program.passes:
            for o in p.online:
                take(f"tile{o.score}", self.tile or self.inner, "float32")
        at["size"] = size
        return at

    # --- text -------------------------------------------------------------------------------------------------------------

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

    # --- indices ----------------------------------------------------------------------------------------------------------

    def _sum(self, terms: Iterable[tuple[str, int]], constant: int) -> str:
        parts = [t if s == 1 else f"{t} * {s}" for t, s in terms if s]
        if constant or not parts:
            parts.append(str(constant))
        return " + ".join(parts)

    def row_offset(self, v: Value) -> str:
        terms = [(f"i{a}", stride_of(v, a)) for a in self.program.rows if a in v.axes]
        return self._sum(terms, v.offset)

    def out_row_offset(self, k: int) -> str:
        o = self.graph.outputs[k]
        terms = [(f"i{a}", s) for a, s in zip(o.axes, o.strides, strict=True) if a in self.program.rows]
        return self._sum(terms, o.offset)

    def _col_terms(self, axes: tuple[int, ...], strides: tuple[int, ...]) -> list[tuple[str, int]]:
        return [(f"i{a}", s) for a, s in zip(axes, strides, strict=True) if a in self.program.cols]

    def index(self, i: int) -> str:
        """Index of a load or gather in its slot: what the row gives (o<i>) plus the columns' part."""
        v = self.values[i]
        terms = self._col_terms(v.axes, v.strides)
        if v.op == "gather":
            idx = v.args[0]
            picked = f"{self.name('clamp', 'cpu_ops.clamp')}({self.value(idx)}, {v.bound})"
            terms.append((picked, v.index_stride))
        return self._sum([(f"o{i}", 1), *terms], 0)

    # --- values -----------------------------------------------------------------------------------------------------------

    def compute(self, i: int) -> None:
        """Assign value ``i`` (not a constant, not a reduction)."""
        v = self.values[i]
        if v.op == "index":
            text = self.cast(self._sum([(f"i{v.axes[0]}", v.scale)], v.shift), "int64", v.dtype)
            self.put(f"v{i} = {text}")
        elif v.op in ("load", "gather"):
            self._fetch(i, v)
        else:
            self.put(f"v{i} = {self._pointwise(v)}")

    def _fetch(self, i: int, v: Value) -> None:
        text = f"{self.load(self.graph.inputs[v.slot], 'in')}(x{v.slot}, {self.index(i)})"
        guards = []
        for a, lo, hi in v.guards:
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
        self.put(f"if {' and '.join(guards)}:")
        self.put(f"    v{i} = {text}")

    def _pointwise(self, v: Value) -> str:
        args = [self.value(a) for a in v.args]
        first = self.values[v.args[0]].dtype
        if v.op == "cast":
            return self.cast(args[0], first, v.dtype)
        if v.op == "div" and self.program.domain(v.args[1]) == "row" and v.args[1] in self.inverses:
            return f"{args[0]} * d{v.args[1]}"
        if first == "float32" and v.op in _INFIX:
            return f"{args[0]} {_INFIX[v.op]} {args[1]}"
        if first == "float32" and v.op == "neg":
            return f"-{args[0]}"
        if first != "bool" and v.op in _COMPARE:
            return f"{args[0]} {_COMPARE[v.op]} {args[1]}"
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

    # --- rows -------------------------------------------------------------------------------------------------------------

    def row_indices(self) -> None:
        """i<axis> of each row axis from the row number r; the outermost may be of any extent."""
        rows = self.program.rows
        rest = "r"
        for pos in range(len(rows) - 1, 0, -1):
            extent = self.graph.extents[rows[pos]]
            self.put(f"i{rows[pos]} = {rest} % {max(1, extent)}")
            self.put(f"q{pos} = {rest} // {max(1, extent)}")
            rest = f"q{pos}"
        if rows:
            self.put(f"i{rows[0]} = {rest}")

    def offsets(self) -> None:
        live = {i for p in self.program.passes for i in (*p.row_values, *p.compute)} | self._shift_values()
        for i in sorted(live):
            v = self.values[i]
            if v.op in ("load", "gather"):
                self.put(f"o{i} = {self.row_offset(v)}")
        for k in range(self.n_outputs):
            self.put(f"w{k} = {self.out_row_offset(k)}")

    def _shift_values(self) -> set[int]:
        found: set[int] = set()
        for p in self.program.passes:
            for o in p.online:
                found.update(self._row_closure(o.shift))
        return found

    def _row_closure(self, i: int) -> list[int]:
        """Row values that make ``i`` from finished reductions, in order."""
        seen: set[int] = set()
        stack = [i]
        while stack:
            j = stack.pop()
            if j in seen or self.values[j].op in REDUCTIONS or self.values[j].op == "const":
                continue
            seen.add(j)
            stack.extend(self.values[j].args)
        return sorted(seen)

    def divisors(self, p: Pass) -> None:
        """One division a row where every element of it is divided by the same number."""
        values = self.values
        for i in p.compute:
            v = values[i]
            if v.op == "div" and v.dtype == "float32" and self.program.domain(v.args[1]) == "row":
                y = v.args[1]
                if y not in self.inverses:
                    self.inverses.add(y)
                    self.put(f"d{y} = {self.name('inverse', 'cpu_ops.inverse')}({self.value(y)})")

    def row_values(self, values: Iterable[int]) -> None:
        for i in values:
            if i not in self.rows_done and self.values[i].op != "const":
                self.rows_done.add(i)
                self.compute(i)

    def stored(self, k: int) -> str:
        o = self.graph.outputs[k]
        return self.cast(self.value(o.value), self.values[o.value].dtype, compute_type(o.dtype))

    def write(self, k: int, index: str) -> None:
        o = self.graph.outputs[k]
        self.put(f"{self.store(o.dtype, f'out{k}')}(y{k}, {index}, {self.stored(k)})")

    # --- passes -----------------------------------------------------------------------------------------------------------

    def walk(self, p: Pass) -> None:
        """The loops of one pass over a row."""
        tiled = bool(self.tile) or len(self.program.cols) > 1
        for i in p.reduce:
            v = self.values[i]
            self.put(f"v{i} = {self.start(v.op, v.dtype)}")
        for o in p.online:
            zero = self.start("sum")
            self.put(f"v{o.peak} = {self.start('max')}")
            self.put(f"m{o.peak} = {zero}")
            self.put(f"v{o.total} = {zero}")
        base = self.depth
        for a in self.program.cols[:-1]:
            self.put(f"for i{a} in range({self.graph.extents[a]}):")
            self.depth += 1
        flat = "0"
        if len(self.program.cols) > 1:
            span, terms = self.inner, []
            for a in reversed(self.program.cols[:-1]):
                terms.append((f"i{a}", span))
                span *= self.graph.extents[a]
            flat = "f"
            self.put(f"f = {self._sum(reversed(terms), 0)}")
        start, stop = "0", str(self.inner)
        if self.tile:
            self.put(f"for t in range(0, {self.inner}, {self.tile}):")
            self.depth += 1
            self.put(f"e = min(t + {self.tile}, {self.inner})")
            start, stop = "t", "e"
        partial = {i for i in p.reduce if self.values[i].op == "sum" and self.values[i].dtype == "float32"} if tiled else ()
        for i in partial:
            self.put(f"t{i} = {self.start('sum')}")
        for o in p.online:
            self.put(f"t{o.peak} = {self.start('max')}")
        column = f"i{self.program.cols[-1]}"
        self.put(f"for {column} in range({start}, {stop}):")
        self.depth += 1
        position = column if flat == "0" else f"f + {column}"
        self.columns(p, position, column if start == "0" else f"{column} - t", partial)
        self.depth -= 1
        for i in partial:
            self.put(f"v{i} += t{i}")
        for o in p.online:
            self.rescale(o, start, stop)
        self.depth = base
        for o in p.online:
            # What shift needs of the row; the peak is whole now.
            self.row_values(self._row_closure(o.shift))
            exp = self.op("exp")
            self.put(f"v{o.total} = v{o.total} * {exp}(m{o.peak} - {self.value(o.shift)})")

    def columns(self, p: Pass, position: str, in_tile: str, partial: Iterable[int]) -> None:
        """The body of the innermost loop."""
        for i in p.kept_in:
            v = self.values[i]
            self.put(f"v{i} = {self.load(v.dtype, f'kept{i}')}(s_kept{i}, {position})")
        for i in p.compute:
            self.compute(i)
        for i in p.kept_out:
            self.put(f"{self.store(self.values[i].dtype, f'kept{i}')}(s_kept{i}, {position}, v{i})")
        for i in p.reduce:
            v = self.values[i]
            arg = self.cast(self.value(v.args[0]), self.values[v.args[0]].dtype, v.dtype)
            acc = f"t{i}" if i in partial else f"v{i}"
            self.put(f"{acc} = {self.accumulate(v.op)}({acc}, {arg})")
        for o in p.online:
            self.put(f"{self.store('float32', f'tile{o.score}')}(s_tile{o.score}, {in_tile}, {self.value(o.score)})")
            self.put(f"t{o.peak} = {self.accumulate('max')}(t{o.peak}, {self.value(o.score)})")
        for k in p.stores:
            o = self.graph.outputs[k]
            self.write(k, self._sum([(f"w{k}", 1), *self._col_terms(o.axes, o.strides)], 0))

    def rescale(self, o: Online, start: str, stop: str) -> None:
        """Take a tile into the running maximum and sum.

        The sum is kept relative to ``m``: the maximum where that is finite, else 0, so that rows of infinities come out
        as the two-pass formula has them. A sum of 0 (only -inf so far) is not rescaled: the factor may be infinite.
        """
        add, total, exp = self.accumulate("max"), self.accumulate("sum"), self.op("exp")
        zero = self.start("sum")
        self.put(f"v{o.peak} = {add}(v{o.peak}, t{o.peak})")
        self.put(f"n{o.peak} = {zero} if {self.op('isinf')}(v{o.peak}) else v{o.peak}")
        self.put(f"t{o.total} = {zero}")
        count = stop if start == "0" else f"{stop} - {start}"
        self.put(f"for j in range({count}):")
        score = f"{self.load('float32', f'tile{o.score}')}(s_tile{o.score}, j)"
        self.put(f"    t{o.total} = {total}(t{o.total}, {exp}({score} - n{o.peak}))")
        self.put(f"if v{o.total} != {zero}:")
        self.put(f"    v{o.total} = v{o.total} * {exp}(m{o.peak} - n{o.peak})")
        self.put(f"v{o.total} = v{o.total} + t{o.total}")
        self.put(f"m{o.peak} = n{o.peak}")

    # --- kernel -----------------------------------------------------------------------------------------------------------

    def extent(self, axis: int) -> str:
        return "n0" if axis == self.program.dynamic else str(self.graph.extents[axis])

    def total_rows(self) -> str:
        rows = self.program.rows
        fixed = 1
        for a in rows[1:]:
            fixed *= self.graph.extents[a]
        if not rows:
            return "1"
        first = self.extent(rows[0])
        return str(int(first) * fixed) if first != "n0" else self._sum([("n0", fixed)], 0)

    def kernel(self) -> None:
        self.put("def kernel(block):")
        self.depth = 1
        for j in range(self.n_inputs):
            self.put(f"x{j} = word(block, {j})")
        for k in range(self.n_outputs):
            self.put(f"y{k} = word(block, {self.n_inputs + k})")
        at = self.n_inputs + self.n_outputs
        self.put(f"n0 = word(block, {at})")
        self.put(f"threads = word(block, {at + 1})")
        if self.scratch["size"]:
            self.put(f"memory = allocate({self.scratch['size']})")
            self.put("aligned = (memory + 63) & -64")
            for name, offset in self.scratch.items():
                if name != "size":
                    self.put(f"s_{name} = aligned + {offset}")
        self.put(f"rows = {self.total_rows()}")
        if self.flat:
            self._tiles()
        else:
            self.put("units = rows")
        # No more rows at a time than leave every thread some.
        self.put(f"step = min({self.schedule.row_block}, max(1, (units + threads - 1) // threads))")
        self.put("while True:")
        self.depth += 1
        self.put(f"first = ticket(block, {at + 2}) * step")
        self.put("if first >= units:")
        self.put("    break")
        self.put("for u in range(first, min(first + step, units)):")
        self.depth += 1
        self._unit()
        self.depth = 1
        if self.scratch["size"]:
            self.put("release(memory)")

    def _tiles(self) -> None:
        """A pointwise group: the unit of work is a tile of one row."""
        cols = self.extent(self.program.cols[0])
        self.put(f"cols = {cols}")
        if self.tile:
            self.put(f"tile = {self.tile}")
        elif self.program.rows:
            self.put(f"tile = max(1, cols) if rows >= threads else max({_POINTWISE_TILE}, (cols + threads - 1) // threads)")
        else:
            self.put(f"tile = max({_POINTWISE_TILE}, (cols + threads - 1) // threads)")
        self.put("tiles = (cols + tile - 1) // tile")
        self.put("units = rows * tiles")

    def _unit(self) -> None:
        self.put("r = u // tiles" if self.flat and self.program.rows else "r = u")
        self.row_indices()
        self.offsets()
        for p in self.program.passes:
            self.row_values(p.row_values)
            self.divisors(p)
            for k in p.row_stores:
                self.write(k, f"w{k}")
            if not p.walks:
                continue
            if self.flat:
                self.put("t = (u % tiles) * tile")
                column = f"i{self.program.cols[0]}"
                self.put(f"for {column} in range(t, min(t + tile, cols)):")
                self.depth += 1
                self.columns(p, column, "0", ())
                self.depth -= 1
            else:
                self.walk(p)

    def source(self) -> str:
        self.kernel()
        s = self.schedule
        head = [
            f'"""Generated by autotune (generator {generator()}): a stitched CPU kernel.',
            "",
            f"row_block={s.row_block} column_tile={s.column_tile} keep={s.keep} online={s.online}",
            '"""',
            "",
            "import numpy as np",
            "from numba import cfunc",
            "",
            "from autotune.codegen import cpu_ops",
            "from autotune.codegen.cpu_memory import allocate, loader, release, storer, ticket, word",
            "from autotune.codegen.cpu_ops import ACCUMULATE, CASTS, OPS",
            "",
            f"SPACES = {self.spaces!r}",
        ]
        names = [f"{n} = {d}" for n, d in sorted(self.names.items())]
        decorator = [
            "",
            "",
            '@cfunc("void(int64)", cache=True, error_model="numpy")',
        ]
        return "\n".join([*head, *names, *decorator, *self.lines, ""])


def emit_source(program: Program, schedule: CpuSchedule) -> str:
    """Numba source of ``program`` under ``schedule``; the same text for the same arguments in every process.

    Raises:
        Unsupported: the program has an operator that the CPU has no code for.
    """
    from autotune.fusion.ops import POINTWISE

    for i, v in enumerate(program.graph.values):
        if v.op not in POINTWISE and v.op not in REDUCTIONS and v.op not in ("load", "gather", "const", "index"):
            raise Unsupported(f"value {i}: no CPU code for {v.op}")
    return _Emitter(program, schedule).source()
