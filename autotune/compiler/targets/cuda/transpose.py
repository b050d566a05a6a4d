"""The transpose skeleton: a pointwise group whose tensors disagree on the axis along which neighbours lie in memory.

A block takes a square *tile* of two axes: ``x``, along which most of the bytes have unit stride, and ``y``, along which
the others have. Threads compute side by side on ``x``. What has its neighbours on ``y`` goes through shared memory: a
load is read along ``y`` into it before the computing, an output is written along ``y`` from it afterwards. So every
access to global memory is of neighbours, in vectors where alignment and extents allow. An output takes the place of a
load in shared memory: the thread that reads an element of the one writes that of the other.

An element's word in shared memory is ``y * pitch + skew(y) + x + skew(x)``. With an odd pitch, and a shift for every 32
elements that makes room for the threads of a warp that lie on other lines, neither direction has a bank conflict.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autotune.compiler.kernel.nodes import Assign, Cast, Const, Expr, Item, Select, Stmt, Var
from autotune.compiler.program.program import Program
from autotune.compiler.program.tiling import Tiling, tiling
from autotune.compiler.targets.cuda.access import narrowest
from autotune.compiler.targets.cuda.counts import Counts, check_launch
from autotune.compiler.targets.cuda.names import HINTS, NAMES
from autotune.compiler.targets.cuda.rows import legacy
from autotune.compiler.targets.cuda.rows.emitter import CudaEmitter
from autotune.compiler.targets.cuda.rows.kernel import alignments
from autotune.compiler.targets.cuda.rows.prefetch import MOST_WORDS, load_function, loads_ahead
from autotune.compiler.targets.cuda.source import GENERATOR, CudaSchedule, CudaSource
from autotune.errors import Unsupported
from autotune.ir.graph import STORAGE_BYTES, Graph, compute_type

MOST_ELEMENTS = 64
"""Elements of a tile that one thread takes."""
BANKS = 32
AT = Var("at", "uint32")
_VIEW = {"float32": "sf", "int32": "si", "bool": "si", "int64": "sl"}


class _Emitter(CudaEmitter):
    """Prints the computing of one pack along ``x``; what is in shared memory is found at the word ``at``."""

    def __init__(self, t: Tiling, program: Program, schedule: CudaSchedule, tile: int) -> None:
        self.t, self.tile = t, tile
        self.along_x, self.along_y = t.vectors(schedule.vector_bytes)
        super().__init__(program, replace(schedule, vector_bytes=self.along_x * narrowest(program)), apart=t.loads)
        g = self.graph
        self.lines = {a: -(-g.extents[a] // tile) for a in (t.x, t.y)}
        self.batch = [a for a in program.rows if a != t.y]
        self.tiles = self.lines[t.x] * self.lines[t.y]  # in the plane of both axes
        self.side = self.lines[t.x] + self.lines[t.x] % 2  # of the square that pairs are counted in
        if t.mirrored:
            self.tiles = self.side * (self.side + 1)
        self.count = Counts.of(g.size(self.batch) * self.tiles, g.extents[t.x], g.extents[t.y])
        self.partial = {a: g.extents[a] % tile != 0 for a in (t.x, t.y)}
        self.ok_needed = any(self.partial.values())
        self.skews = {t.x: BANKS * self.along_x // tile, t.y: BANKS * self.along_y // tile}
        room = (tile // BANKS - 1) * self.skews[t.x]
        self.pitch = (tile + room) | 1
        self.words = tile * self.pitch + (tile // BANKS - 1) * self.skews[t.y]
        self.places: dict[tuple[str, int], tuple[str, int]] = {}  # of loads and outputs: view and first word
        wide, narrow = 0, 0
        for kind, items in (("load", t.loads), ("store", t.stores)):
            longs = [n for n in items if self.dtype(kind, n) == "int64"]
            self.places |= {(kind, n): ("sl", k * self.words) for k, n in enumerate(longs)}
            wide, narrow = max(wide, len(longs)), max(narrow, len(items) - len(longs))
        for kind, items in (("load", t.loads), ("store", t.stores)):
            others = [n for n in items if (kind, n) not in self.places]
            for k, n in enumerate(others):
                self.places[kind, n] = (_VIEW[self.dtype(kind, n)], (2 * wide + k) * self.words)
        self.shared = 4 * (2 * wide + narrow) * self.words

    def dtype(self, kind: str, n: int) -> str:
        """The arithmetic type of what a load or an output has in shared memory."""
        return self.graph.values[n].dtype if kind == "load" else compute_type(self.graph.outputs[n].dtype)

    def word(self, kind: str, n: int, at: Expr, e: int) -> Item:
        view, first = self.places[kind, n]
        return Var(view)[Cast("uint32", at + (first + e))]

    def put(self, kind: str, n: int, at: Expr, e: int, x: Expr) -> Assign:
        """Leaves ``x`` in shared memory."""
        one = Select(x, Const(1, "int32"), Const(0, "int32"))
        return Assign(self.word(kind, n, at, e), one if self._bool(kind, n) else x)

    def take(self, kind: str, n: int, at: Expr, e: int) -> Expr:
        """What is there in shared memory."""
        word = self.word(kind, n, at, e)
        return word.differs(0) if self._bool(kind, n) else word

    def _bool(self, kind: str, n: int) -> bool:
        return self.dtype(kind, n) == "bool"

    def emit_load(self, i: int, number: int) -> list[Stmt]:
        if i not in self.t.loads:
            return super().emit_load(i, number)
        return [Assign(x, self.take("load", i, AT, e)) for e, x in enumerate(self.lanes(i))]

    def emit_store(self, k: int) -> list[Stmt]:
        if k not in self.t.stores:
            return super().emit_store(k)
        return [self.put("store", k, AT, e, x) for e, x in enumerate(self.stored(k))]

    # ---- along y ----------------------------------------------------------------------------------------------------

    def across(self, kind: str, n: int) -> str:
        """Element offset of a pack along ``y`` at ``i<y>`` and ``i<x>``."""
        t = self.graph.values[n] if kind == "load" else self.graph.outputs[n]
        terms = [f"i{a}" if s == 1 else f"i{a} * {s}" for a, s in zip(t.axes, t.strides, strict=True) if s]
        return " + ".join([*terms, str(t.offset)] if t.offset else terms)

    def read(self, i: int) -> str:
        """A load of one pack along ``y``."""
        v, n = self.graph.values[i], self.along_y
        conds = []
        for a, lo, hi in v.guards:
            conds += [f"i{a} >= {lo}"] if lo > 0 else []
            conds += [f"i{a} < {hi}"] if hi < self.graph.extents[a] or a == 0 else []
        kind, where = ("lg", f", {' and '.join(conds)}") if conds else ("ld", "")
        name = f"{kind}_{NAMES[self.graph.inputs[v.slot]]}_{n}_{HINTS[self.load_hint(i)]}"
        return f"{name}(p{v.slot}, {self.across('load', i)}{where})"

    def filling(self) -> str:
        """Text of device function ``f1``: leaves the packs of all loads, ``w<value>``, in shared memory at ``at``."""
        views = sorted({self.places["load", i][0] for i in self.t.loads})
        out = [f"def f1(at, {', '.join([*views, *(f'w{i}' for i in self.t.loads)])}):"]
        for i in self.t.loads:
            for e in range(self.along_y):
                x = Var(f"w{i}")[e] if self.along_y > 1 else Var(f"w{i}")
                out += ["    " + line for line in legacy.lines([self.put("load", i, AT, e * self.pitch, x)])]
        return "\n".join(out)

    def emptying(self, k: int) -> list[str]:
        """Lines that write one pack of output ``k`` along ``y``."""
        name = f"st_{NAMES[self.graph.outputs[k].dtype]}_{self.along_y}_{HINTS[self.schedule.store_hint]}"
        xs = [legacy.text(self.take("store", k, AT, e * self.pitch)) for e in range(self.along_y)]
        what = xs[0] if len(xs) == 1 else f"({', '.join(xs)})"
        line = f"{name}({self.out_pointer(k).name}, {self.across('store', k)}, {what})"
        return ["if ok:", f"    {line}"] if self.ok_needed else [line]


class _Kernel:
    """The lines of one kernel."""

    def __init__(self, e: _Emitter) -> None:
        self.e, self.t, self.tile, self.count = e, e.t, e.tile, e.count.type
        self.block = e.schedule.block
        self.steps: dict[int, int] = {}  # lines that the block takes at a time, by the axis that its threads lie along
        if self.block > 1024 or self.block < 32 or self.block % 32:
            raise Unsupported("a block is a multiple of 32 up to 1024 threads")
        for a, vec in ((self.t.x, e.along_x), (self.t.y, e.along_y)):
            self.steps[a], rest = divmod(self.block * vec, self.tile)
            if rest or not self.steps[a] or self.tile % self.steps[a]:
                raise Unsupported(f"{self.block} threads do not divide a tile of {self.tile}")
        if self.tile * self.tile > MOST_ELEMENTS * self.block:
            raise Unsupported(f"a tile of {self.tile} is too much for {self.block} threads")
        (pas,) = e.program.passes
        self.pas = pas
        e.ahead = tuple(i for i in loads_ahead(e) if i not in self.t.loads)
        if not e.ahead or sum(map(e.raw_words, e.ahead)) * self.tile // self.steps[self.t.x] > MOST_WORDS:
            e.ahead = ()
        e.ahead_pass = 0 if e.ahead else -1
        self.text, self.params = legacy.function(e.pass_function(0, pas)[0], "f0")

    def pack(self, along: int, k: int) -> list[str]:
        """Lines for pack ``k`` of a thread: the index along both axes, kept inside, ``ok`` where it is, and ``at``."""
        e, x, y = self.e, self.t.x, self.t.y
        other = y if along == x else x
        vec = e.along_x if along == x else e.along_y
        place = {along: f"lane{along} * {vec}", other: f"line{along} + {k * self.steps[along]}"}
        out = []
        for a, n in ((along, vec), (other, 1)):
            out.append(f"k{a} = int32({place[a]})")
            out.append(f"c = {self.count}(g{a} + k{a})")
            if e.partial[a]:
                end = e.graph.extents[a]
                out += [f"ok{a} = c < {end}", f"c = sel(ok{a}, c, {self.count}({end - n}))"]
            out.append(f"i{a} = int64(c)")
        if e.ok_needed:
            both = [f"ok{a}" for a in (x, y) if e.partial[a]]
            out.append(f"ok = {both[0]}" if len(both) == 1 else f"ok = sel({both[0]}, {both[1]}, False)")
        skews = "".join(f" + (k{a} // {BANKS}) * {s}" for a, s in e.skews.items() if s and self.tile > BANKS)
        out.append(f"at = uint32(k{y} * {e.pitch} + k{x}{skews})")
        return [*out, f"c = {self.count}(i{x})"]

    def indices(self) -> list[str]:
        """Lines that take the number of a tile apart: its first element on both axes, the index along all others."""
        e, x, y = self.e, self.t.x, self.t.y
        udiv, urem, rest = e.count.udiv, e.count.urem, "plane"
        out = [f"plane = {udiv}(group, {e.tiles})", f"place = {self.count}(group - plane * {e.tiles})"]
        if self.t.mirrored:
            out += self.pair()
        else:
            out.append(f"down = {udiv}(place, {e.lines[x]})")
            out.append(f"g{x} = {self.count}((place - down * {e.lines[x]}) * {self.tile})")
            out.append(f"g{y} = {self.count}(down * {self.tile})")
        for a in reversed(e.batch[1:]):
            n = e.graph.extents[a]
            out += [f"i{a} = int64({urem}({rest}, {n}))", f"q{a} = {udiv}({rest}, {n})"]
            rest = f"q{a}"
        return out + [f"i{a} = int64({rest})" for a in e.batch[:1]]

    def pair(self) -> list[str]:
        """Lines that find tile number ``place`` where tiles come in pairs, one the other's mirror image.

        Both read the same two places of one tensor, so the second finds them in the cache. Of the triangle ``down <=
        right`` a line and its counterpart from the other end are as long together as any other such two. ``live`` is
        false for the second of a pair on the diagonal, and beyond an odd number of tiles.
        """
        x, y, n, count, udiv = self.t.x, self.t.y, self.e.side, self.count, self.e.count.udiv
        return [
            f"number = {udiv}(place, 2)",
            "first = place == number * 2",
            f"top = {udiv}(number, {n + 1})",
            f"along = {count}(number - top * {n + 1})",
            f"near = along < {n} - top",
            f"down = sel(near, {count}(top), {count}({n - 1} - top))",
            f"right = {count}(down + sel(near, along, {count}(along - {n} + top)))",
            f"live = sel(right < {self.e.lines[x]}, sel(down == right, first, True), False)",
            f"g{x} = {count}(sel(first, right, down) * {self.tile})",
            f"g{y} = {count}(sel(first, down, right) * {self.tile})",
        ]

    def tile_lines(self) -> list[str]:
        """What a block does with one tile."""
        e, x, y, loads = self.e, self.t.x, self.t.y, self.t.loads
        packs = {a: range(self.tile // self.steps[a]) for a in (x, y)}
        out: list[str] = []
        for k in packs[y] if loads else ():
            out += [*self.pack(y, k), f"at_{k} = at", *(f"w{i}_{k} = {e.read(i)}" for i in loads)]
        given = ", ".join(p.name for p in load_function(e).params)
        for k in packs[x] if e.ahead else ():
            out += [*self.pack(x, k), *legacy.lines(e.bases(e.ahead, ()))]
            out.append(f"x_{k} = l0({given})")
        views = sorted({e.places["load", i][0] for i in loads})
        for k in packs[y] if loads else ():
            out.append(f"f1({', '.join([f'at_{k}', *views, *(f'w{i}_{k}' for i in loads)])})")
        if loads:
            out.append("cuda.syncthreads()")
        for k in packs[x]:
            out += [
                *self.pack(x, k),
                *legacy.lines([s for i in self.pas.row_values for s in e.row_value(i)] + e.bases()),
            ]
            out.append(f"f0({', '.join(f'x_{k}' if n == 'x' else n for n in self.params)})")
        if self.t.stores:
            out.append("cuda.syncthreads()")
        for k in packs[y] if self.t.stores else ():
            out += [*self.pack(y, k), *(line for n in self.t.stores for line in e.emptying(n))]
        if self.t.mirrored:
            out = ["if live:", *(f"    {line}" for line in out)]
        return self.indices() + out

    def source(self) -> CudaSource:
        e, x, y, s = self.e, self.t.x, self.t.y, self.e.schedule
        dynamic = e.program.dynamic == 0
        inner = e.tiles * e.graph.size(a for a in e.batch if not (dynamic and a == 0))
        body = ["tid = int32(cuda.threadIdx.x)"]
        for a, vec in ((x, e.along_x), (y, e.along_y)):
            lanes = self.tile // vec
            body += [f"line{a} = udiv(tid, {lanes})", f"lane{a} = int32(tid - line{a} * {lanes})"]
        kinds = {"sf": "float32", "si": "int32", "sl": "int64"}
        views = sorted({view for view, _ in e.places.values()})
        body += [f"{view} = cuda.shared.array(0, {kinds[view]})" for view in views]
        if s.blocks_per_sm:
            total = f"n0 * {inner}" if dynamic else str(inner)
            body.append(f"for group in range({self.count}(blk), {self.count}({total}), nblk):")
            body += ["    " + line for line in (*self.tile_lines(), "cuda.syncthreads()")]
        else:
            body += [f"group = {self.count}(blk)", *self.tile_lines()]
        functions = [self.text]
        functions += [legacy.function(load_function(e), "l0")[0]] if e.ahead else []
        functions += [e.filling()] if self.t.loads else []
        launch: dict[str, Any] = {
            "dynamic": dynamic,
            "inner": inner,
            "per_block": 1,
            "blocks_per_sm": s.blocks_per_sm,
            "block": self.block,
            "shared": e.shared,
            "align": self.alignments(),
            "multiple": 1,
            "generator": GENERATOR,
        }
        launch |= e.count.launch()
        check_launch(launch, e.graph.extents[0])
        return CudaSource(tuple(functions), tuple(body), e.params(), launch, self.block, s.max_registers)

    def alignments(self) -> list[int]:
        """Bytes every pointer must be aligned to, inputs first."""
        e, need = self.e, alignments(self.e)
        for i in self.t.loads:
            slot = e.graph.values[i].slot
            need[slot] = max(need[slot], min(16, e.along_y * STORAGE_BYTES[e.graph.inputs[slot]]))
        for k in self.t.stores:
            need[len(e.graph.inputs) + k] = min(16, e.along_y * STORAGE_BYTES[e.graph.outputs[k].dtype])
        return need


def emit_transpose(graph: Graph, schedule: CudaSchedule, tile: int, fixed: bool = False) -> CudaSource:
    """The kernel of a pointwise group in tiles of ``tile`` by ``tile`` elements.

    Args:
        fixed: take no extent as an argument.

    Raises:
        Unsupported: the group has no two axes to tile, or the schedule does not fit.
    """
    if any(n == 0 for n in graph.extents):
        raise Unsupported("an empty axis")
    t = tiling(graph)
    program = replace(t.program, dynamic=-1) if fixed else t.program
    return _Kernel(_Emitter(t, program, schedule, tile)).source()
