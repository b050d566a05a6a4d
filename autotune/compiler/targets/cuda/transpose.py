"""The transpose skeleton: a pointwise group whose tensors have different unit-stride axes.

A block takes a square *tile* of two axes: ``x``, along which most of the bytes have unit stride, and ``y``, along which
the others have. Adjacent threads compute adjacent elements along ``x``. Tensors with unit stride along ``y`` go through
shared memory: a load is read along ``y`` into it before the computation, an output is written along ``y`` from it
afterwards. So every access to global memory is coalesced, in vectors if alignment and extents permit. An output reuses
the space of a load in shared memory: the thread that reads an element of the load writes that of the output.

An element's word in shared memory is ``y * pitch + skew(y) + x + skew(x)``. With an odd pitch, and a shift for every 32
elements for the threads of a warp on other lines, neither direction has a bank conflict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autotune.compiler.kernel.nodes import (
    Assign,
    Cast,
    Const,
    Do,
    Expr,
    Function,
    Item,
    Load,
    Pointer,
    Select,
    Stmt,
    Store,
    Var,
    closed,
    sum_of,
    when,
)
from autotune.compiler.program.program import Program
from autotune.compiler.program.vectors import Tiling, narrowest
from autotune.compiler.targets.cuda.device import BARRIER, BLOCK, THREAD, Counts, Shared, ThreadIndex, Units
from autotune.compiler.targets.cuda.rows.emitter import CudaEmitter
from autotune.compiler.targets.cuda.rows.packs import FALSE, RowOptions
from autotune.compiler.targets.cuda.source import CudaSource, TransposeSchedule
from autotune.compiler.targets.cuda.tensors import fixed_index, unravel_index, within
from autotune.compiler.targets.cuda.threads import ThreadGrid, each_unit
from autotune.errors import Unsupported
from autotune.ir.graph import STORAGE_BYTES, compute_type

MOST_ELEMENTS = 64
"""Elements of a tile that one thread takes."""
BANKS = 32
_VIEW = {"float32": "sf", "int32": "si", "bool": "si", "int64": "sl"}
_TYPE = {"sf": "float32", "si": "int32", "sl": "int64"}


class _Emitter(CudaEmitter):
    """Builder of the computation of one pack along ``x``; elements in shared memory are at word ``at``."""

    at = Var("at", "uint32")
    """The current word of shared memory."""

    def __init__(self, t: Tiling, program: Program, schedule: TransposeSchedule) -> None:
        g, tile = program.graph, schedule.tile
        self.t, self.tile = t, tile
        self.along_x, self.along_y = t.vectors(schedule.vector_bytes)
        self.lines = {a: -(-g.extents[a] // tile) for a in (t.x, t.y)}
        self.batch = [a for a in program.rows if a != t.y]
        self.side = self.lines[t.x] + self.lines[t.x] % 2  # of the square that pairs are counted in
        # In the plane of both axes.
        self.tiles = self.side * (self.side + 1) if t.mirrored else self.lines[t.x] * self.lines[t.y]
        count = Counts.of(g.size(self.batch) * self.tiles, g.extents[t.x], g.extents[t.y])
        self.partial = {a: g.extents[a] % tile != 0 for a in (t.x, t.y)}
        options = RowOptions(apart=t.loads, tested=any(self.partial.values()), count=count)
        super().__init__(program, replace(schedule, vector_bytes=self.along_x * narrowest(program)), options)
        self.skews = {t.x: BANKS * self.along_x // tile, t.y: BANKS * self.along_y // tile}
        room = (tile // BANKS - 1) * self.skews[t.x]
        self.pitch = (tile + room) | 1
        words = tile * self.pitch + (tile // BANKS - 1) * self.skews[t.y]
        self.places: dict[tuple[str, int], tuple[str, int]] = {}  # of loads and outputs: view and first word
        wide, narrow = 0, 0
        for kind, items in (("load", t.loads), ("store", t.stores)):
            longs = [n for n in items if self.dtype(kind, n) == "int64"]
            self.places |= {(kind, n): ("sl", k * words) for k, n in enumerate(longs)}
            wide, narrow = max(wide, len(longs)), max(narrow, len(items) - len(longs))
        for kind, items in (("load", t.loads), ("store", t.stores)):
            others = [n for n in items if (kind, n) not in self.places]
            for k, n in enumerate(others):
                self.places[kind, n] = (_VIEW[self.dtype(kind, n)], (2 * wide + k) * words)
        self.shared = 4 * (2 * wide + narrow) * words

    def dtype(self, kind: str, n: int) -> str:
        """The arithmetic type of a load or an output in shared memory."""
        return self.graph.values[n].dtype if kind == "load" else compute_type(self.graph.outputs[n].dtype)

    def word(self, kind: str, n: int, step: int) -> Item:
        """Its word in shared memory, ``step`` from ``at``."""
        view, first = self.places[kind, n]
        return Var(view)[Cast("uint32", self.at + (first + step))]

    def put(self, kind: str, n: int, step: int, x: Expr) -> Assign:
        if self.dtype(kind, n) == "bool":
            x = Select(x, Const(1, "int32"), Const(0, "int32"))
        return Assign(self.word(kind, n, step), x)

    def take(self, kind: str, n: int, step: int) -> Expr:
        word = self.word(kind, n, step)
        return word.differs(0) if self.dtype(kind, n) == "bool" else word

    def emit_load(self, i: int, issued: Sequence[int]) -> list[Stmt]:
        if i not in self.t.loads:
            return super().emit_load(i, issued)
        return [Assign(x, self.take("load", i, e)) for e, x in enumerate(self.variables(i))]

    def emit_store(self, k: int) -> list[Stmt]:
        if k not in self.t.stores:
            return super().emit_store(k)
        return [self.put("store", k, e, x) for e, x in enumerate(self.stored(k, self.vec))]

    # ---- along y ----------------------------------------------------------------------------------------------------

    def across(self, kind: str, n: int) -> Expr:
        """Element offset of a pack along ``y``."""
        t = self.graph.values[n] if kind == "load" else self.graph.outputs[n]
        return sum_of(((fixed_index(a), s) for a, s in zip(t.axes, t.strides, strict=True)), t.offset)

    def pack(self, i: int) -> Var:
        """A pack of load ``i`` along ``y``."""
        return Var(f"w{i}")

    def read(self, i: int) -> Load:
        """A load of one pack along ``y``."""
        v = self.graph.values[i]
        hint, at = self.load_hint(i), self.across("load", i)
        guard = within(v.guards, self.graph.extents, 0, fixed_index)
        return Load(self.storage(i), self.along_y, hint, Pointer(v.slot), at, guard=guard)

    def filling(self) -> Function:
        """Leaves the packs of all loads in shared memory."""
        body = []
        for i in self.t.loads:
            for e in range(self.along_y):
                x = self.pack(i)[e] if self.along_y > 1 else self.pack(i)
                body.append(self.put("load", i, e * self.pitch, x))
        return closed(body)

    def emptying(self, k: int) -> list[Stmt]:
        """Writes one pack of output ``k`` along ``y``."""
        xs = tuple(self.take("store", k, e * self.pitch) for e in range(self.along_y))
        pointer, at = self.out_pointer(k), self.across("store", k)
        store = Store(self.graph.outputs[k].dtype, self.schedule.store_hint, pointer, at, xs)
        return [when(self.ok, [store])] if self.ok_needed else [store]


class TransposeKernel:
    """The kernel of a pointwise group in square tiles. Raises Unsupported if the schedule does not fit."""

    number, in_plane = Var("group"), Var("place")
    """Number of the tile: of all, and of those in its plane of both axes."""
    live = Var("live", "bool")
    """True if the tile exists; see :meth:`pair`."""

    def __init__(self, t: Tiling, program: Program, schedule: TransposeSchedule) -> None:
        self.e = e = _Emitter(t, program, schedule)
        self.t, self.tile, self.count = t, e.tile, e.count
        self.block = e.schedule.block
        self.steps: dict[int, int] = {}  # lines that the block takes at a time, by the axis of its threads
        e.schedule.check_block()
        self.grids: dict[int, ThreadGrid] = {}  # its threads by lines of the tile
        for a, vec in ((self.t.x, e.along_x), (self.t.y, e.along_y)):
            self.grids[a] = ThreadGrid(self.tile // vec, Var(f"line{a}", "int32"), Var(f"lane{a}", "int32"))
            self.steps[a], rest = divmod(self.block * vec, self.tile)
            if rest or not self.steps[a] or self.tile % self.steps[a]:
                raise Unsupported(f"{self.block} threads do not divide a tile of {self.tile}")
        if self.tile * self.tile > MOST_ELEMENTS * self.block:
            raise Unsupported(f"a tile of {self.tile} is too much for {self.block} threads")
        (pas,) = e.program.passes
        self.pas = pas
        loads = tuple(i for i in e.issuable() if i not in self.t.loads)
        self.prefetched = e.held(loads, self.tile // self.steps[self.t.x])
        self.function, _ = e.pass_function(0, pas, self.prefetched)

    def first(self, axis: int) -> Var:
        """The tile's first index along an axis."""
        return Var(f"g{axis}")

    def pack(self, along: int, k: int) -> list[Stmt]:
        """Sets for pack ``k`` of a thread: the index along both axes, kept inside, ``ok`` where it is, and ``at``."""
        e, x, y = self.e, self.t.x, self.t.y
        vec = e.along_x if along == x else e.along_y
        grid = self.grids[along]
        local = {a: Var(f"k{a}", "int32") for a in (x, y)}  # in the tile
        inside = {a: Var(f"ok{a}", "bool") for a in (x, y) if e.partial[a]}
        out: list[Stmt] = []
        for a, place, n in ((along, grid.lane * vec, vec), (x + y - along, grid.line + k * self.steps[along], 1)):
            out.append(Assign(local[a], Cast("int32", place)))
            out.append(Assign(e.column, self.count.number(self.first(a) + local[a])))
            if a in inside:
                end = e.graph.extents[a]
                out.append(Assign(inside[a], end > e.column))
                out.append(Assign(e.column, Select(inside[a], e.column, self.count.number(Const(end - n)))))
            out.append(Assign(fixed_index(a), Cast("int64", e.column)))
        if inside:
            tests = list(inside.values())
            out.append(Assign(e.ok, tests[0] if len(tests) == 1 else Select(tests[0], tests[1], FALSE)))
        at: Expr = local[y] * e.pitch + local[x]
        for a, s in e.skews.items():
            at = at + local[a] // BANKS * s if s and self.tile > BANKS else at
        return [*out, Assign(e.at, Cast("uint32", at)), Assign(e.column, self.count.number(fixed_index(x)))]

    def indices(self) -> list[Stmt]:
        """Takes the number of a tile apart: its first element on both axes, the index along all others."""
        e, x, y, count = self.e, self.t.x, self.t.y, self.count
        rest, down = Var("plane"), Var("down")
        out: list[Stmt] = [
            Assign(rest, count.quotient(self.number, e.tiles)),
            Assign(self.in_plane, count.number(self.number - rest * e.tiles)),
        ]
        if self.t.mirrored:
            out += self.pair()
        else:
            out.append(Assign(down, count.quotient(self.in_plane, e.lines[x])))
            out.append(Assign(self.first(x), count.number((self.in_plane - down * e.lines[x]) * self.tile)))
            out.append(Assign(self.first(y), count.number(down * self.tile)))
        return [*out, *unravel_index(rest, e.batch, e.graph.extents, count, fixed_index)]

    def pair(self) -> list[Stmt]:
        """Compute the position of tile number ``place`` if tiles are paired with their mirror images.

        Both tiles of a pair read the same two parts of one tensor, so the second reads them from the cache. In the
        triangle ``down <= right``, a line and its counterpart from the other end have a constant total length. ``live``
        is false for the second tile of a pair on the diagonal, and beyond an odd number of tiles.
        """
        n, count = self.e.side, self.count
        number, top, along, down, right = map(Var, ("number", "top", "along", "down", "right"))
        first, near = Var("first", "bool"), Var("near", "bool")
        apart = Select(down.equals(right), first, Const(True, "bool"))
        return [
            Assign(number, count.quotient(self.in_plane, 2)),
            Assign(first, self.in_plane.equals(number * 2)),
            Assign(top, count.quotient(number, n + 1)),
            Assign(along, count.number(number - top * (n + 1))),
            Assign(near, along < n - top),
            Assign(down, Select(near, count.number(top), count.number(n - 1 - top))),
            Assign(right, count.number(down + Select(near, along, count.number(along - n + top)))),
            Assign(self.live, Select(right < self.e.lines[self.t.x], apart, FALSE)),
            Assign(self.first(self.t.x), count.number(Select(first, right, down) * self.tile)),
            Assign(self.first(self.t.y), count.number(Select(first, down, right) * self.tile)),
        ]

    def one_tile(self) -> list[Stmt]:
        e, x, y, loads = self.e, self.t.x, self.t.y, self.t.loads
        packs = {a: range(self.tile // self.steps[a]) for a in (x, y)}

        def of(v: Var, k: int) -> Var:
            """The variable of pack ``k``."""
            return Var(f"{v.name}_{k}", v.dtype)

        out: list[Stmt] = []
        for k in packs[y] if loads else ():
            out += [*self.pack(y, k), Assign(of(e.at, k), e.at), *(Assign(of(e.pack(i), k), e.read(i)) for i in loads)]
        if self.prefetched:
            ahead = e.load_function(self.prefetched)
            for k in packs[x]:
                out += [*self.pack(x, k), *e.bases(self.prefetched, ()), Assign(of(e.prefetched, k), ahead())]
        if loads:
            filling = e.filling()
            given = [e.at, *(e.pack(i) for i in loads)]
            out += [Do(filling({v.name: of(v, k) for v in given})) for k in packs[y]]
            out.append(BARRIER)
        for k in packs[x]:
            values = [line for i in self.pas.row_values for line in e.row_value(i)]
            out += [*self.pack(x, k), *values, *e.bases(), Do(self.function({e.prefetched.name: of(e.prefetched, k)}))]
        if self.t.stores:
            out.append(BARRIER)
        for k in packs[y] if self.t.stores else ():
            out += [*self.pack(y, k), *(line for n in self.t.stores for line in e.emptying(n))]
        return [*self.indices(), *([when(self.live, out)] if self.t.mirrored else out)]

    def source(self) -> CudaSource:
        e, schedule = self.e, self.e.schedule
        dynamic = e.program.dynamic == 0
        units = Units(e.tiles * e.graph.size(a for a in e.batch if not (dynamic and a == 0)), dynamic=dynamic)
        body: list[Stmt] = [Assign(THREAD, ThreadIndex())]
        body += [s for grid in self.grids.values() for s in grid.indices()]
        body += [Shared(Var(view), 0, _TYPE[view]) for view in sorted({view for view, _ in e.places.values()})]
        persistent = bool(schedule.blocks_per_sm)
        work = [*self.one_tile(), *([BARRIER] if persistent else [])]
        first = self.count.number(BLOCK)
        body += each_unit(self.number, units.total(self.count), work, persistent, first)
        return CudaSource.scheduled(
            body, e.params(), schedule, self.count, units, e.graph.extents[0], self.alignments(), shared=e.shared
        )

    def alignments(self) -> list[int]:
        """Bytes every pointer must be aligned to, inputs first."""
        e, need = self.e, self.e.alignments()
        for i in self.t.loads:
            slot = e.graph.values[i].slot
            need[slot] = max(need[slot], min(16, e.along_y * STORAGE_BYTES[e.graph.inputs[slot]]))
        for k in self.t.stores:
            need[len(e.graph.inputs) + k] = min(16, e.along_y * STORAGE_BYTES[e.graph.outputs[k].dtype])
        return need
