"""CPU kernels with reductions over all rows beside what is done row by row.

The rows are cut into *parts*. A unit of work is one part (or a tile of its columns, where no row has to be known as a
whole): it walks its rows as ``cpu_rows`` does and adds each to accumulators, one for each column, which lie in the
part's own stretch of memory and stay in the cache meanwhile. A second, small kernel reduces the parts. So the backward
of a layer norm reads its inputs once, where separate kernels for rows and for columns read them twice. The number of
parts depends on the schedule alone: results are the same however many threads take them. See
``autotune.compiler.program.columns`` for how a group is taken apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from autotune.compiler.program.columns import Split, finish_graph, main_program, split_columns
from autotune.compiler.program.full_reduction import cut_everything
from autotune.compiler.program.one_pass import Column
from autotune.compiler.program.program import Pass, Program, build_program, once_a_row
from autotune.compiler.targets.cpu.rows import RowPrinter
from autotune.errors import Unsupported
from autotune.ir.graph import STORAGE_BYTES, Graph, compute_type

if TYPE_CHECKING:
    from autotune.compiler.targets.cpu.schedule import CpuSchedule

FEWEST_ROWS = 16
"""Rows below which a part would hold next to nothing."""
_LONGEST = 2048  # rows that one accumulator takes: bounds the error of long sums
_PER_PART = 16  # rows for each part, at least, so that partial results are little beside the rows
_TILE = 4096


@lru_cache(maxsize=512)
def column_split(graph: Graph) -> Split | None:
    """A group taken apart into rows and reductions over all rows; None where it is not of that form."""
    try:
        split = split_columns(cut_everything(graph) or graph)
        program = main_program(split, unit_rows=True)
        build_program(finish_graph(split, 2)[0])
    except Unsupported:
        return None
    if split.main.size(split.rows) < FEWEST_ROWS or program.n_cols < 2:
        return None
    return split


def group_program(graph: Graph, config: Mapping[str, object]) -> Program:
    """The program of a group's only or main kernel under a configuration; ``dynamic`` is -1 where its kernels are for
    one number of rows alone.

    Raises:
        Unsupported: the group has no kernel of the form that the configuration asks for.
    """
    keep, online = config.get("keep") != "reload", bool(config.get("online", False))
    split = column_split(graph) if config.get("parts", 0) else None
    if split is None:
        return build_program(graph, keep=keep, online=online)
    program = main_program(split, keep=keep, online=online, unit_rows=True)
    return replace(program, dynamic=-1) if split.counts else program


def row_wise(graph: Graph) -> bool:
    """Whether the group has a kernel without parts."""
    try:
        once_a_row(build_program(graph))
    except Unsupported:
        return False
    return True


def parts_of(split: Split, schedule: CpuSchedule) -> int:
    """Parts that the rows are cut into: ``schedule.parts`` for each thread, so that one that is held up takes fewer;
    none with too many rows or next to none."""
    rows = split.main.size(split.rows)
    wanted = max(schedule.threads * max(1, schedule.parts), -(-rows // _LONGEST))
    return max(1, min(wanted, max(schedule.threads, rows // _PER_PART), rows))


def planes_of(split: Split, parts: int) -> list[tuple[str, int]]:
    """(storage type, elements) of each array of partial results."""
    planes = [("float32", parts)] if split.counts else []
    for c in split.columns:
        planes += [(c.storage, parts * (split.width if split.spans(c) else 1))] * c.planes
    return planes


def plane_bytes(planes: list[tuple[str, int]]) -> list[int]:
    """Where each array begins in one buffer, in whole cache lines; the last number is the size of all."""
    at = [0]
    for storage, numel in planes:
        at.append(at[-1] + (numel * STORAGE_BYTES[storage] + 63) // 64 * 64)
    return at


class ColumnPrinter(RowPrinter):
    """Prints the kernel that walks the rows, a part at a time."""

    def __init__(self, split: Split, program: Program, schedule: CpuSchedule) -> None:
        super().__init__(program, schedule)
        self.split = split
        self.parts = parts_of(split, schedule)
        self.planes = [storage for storage, _ in planes_of(split, self.parts)]
        self.n_planes = len(self.planes)
        self.first: list[int] = []  # of each accumulator's planes
        n = 1 if split.counts else 0
        for c in program.columns:
            self.first.append(n)
            n += c.planes
        if self.flat and not self.tile:
            self.tile = _TILE

    @property
    def pieces(self) -> int:
        """Units of work."""
        return self.parts * (-(-self.inner // self.tile) if self.flat else 1)

    def units(self) -> None:
        self.put(f"rows = {self.total_rows()}")
        if self.flat:
            self.put(f"tiles = {-(-self.inner // self.tile)}")
        else:
            self.hide_columns()
        self.put(f"units = {self.pieces}")
        self.put("step = 1")

    def unit(self) -> None:
        self.put("part = u // tiles" if self.flat else "part = u")
        if self.flat:
            self.put(f"t = (u % tiles) * {self.tile}")
            self.put(f"e = min(t + {self.tile}, {self.inner})")
        self.put(f"low = part * rows // {self.parts}")
        self.put(f"high = (part + 1) * rows // {self.parts}")
        self._begin()
        self.put("for r in range(low, high):")
        self.depth += 1
        self.put_more("r + 1 < high")
        self.split_index("r", self.program.rows)
        self._offsets()
        if self.split.counts:
            self.put(f"share = {self.name('ONE', 'np.float32(1)')} / np.float32(r - low + 1)")
        for p in self.program.passes:
            self.row_part(p)
            if p.row_columns and self.flat:
                self.put("if t == 0:")
                self.depth += 1
            for n in p.row_columns:
                self._accumulate(n, f"b{n}")
            if p.row_columns and self.flat:
                self.depth -= 1
            if not p.walks:
                continue
            if self.flat:
                column = f"i{self.program.cols[0]}"
                for first, last in self.stretches(p, "t", "e", self.tile):
                    self.put(f"for {column} in range({first}, {last}):")
                    self.depth += 1
                    self.columns(p, column, "0", ())
                    self.depth -= 1
            else:
                self.walk(p)
        self.depth -= 1

    def _begin(self) -> None:
        """Neutral elements into the part's accumulators."""
        if self.split.counts:
            self.put(f"{self._store(0)}(z0, part, np.float32(high - low))")
        for n, c in enumerate(self.program.columns):
            if not self.split.spans(c):
                self.put(f"b{n} = part")
                self.put("if t == 0:" if self.flat else "if True:")
                self._neutral(n, c, f"b{n}")
                continue
            self.put(f"b{n} = part * {self.split.width}")
            self.put(f"for j in range({'t, e' if self.flat else self.split.width}):")
            self._neutral(n, c, f"b{n} + j")

    def _neutral(self, n: int, c: Column, at: str) -> None:
        for plane in range(self.first[n], self.first[n] + c.planes):
            storage = self.planes[plane]
            start = self.start("sum" if c.kind == "moments" else c.kind, compute_type(storage))
            self.put(f"    {self._store(plane)}(z{plane}, {at}, {start})")

    def columns(self, p: Pass, position: str, in_tile: str, partial: object) -> None:
        super().columns(p, position, in_tile, partial)  # type: ignore[arg-type]
        for n in p.columns:
            self._accumulate(n, f"b{n} + {position}")

    def _accumulate(self, n: int, at: str) -> None:
        """One more element into the accumulator at ``at``."""
        c = self.program.columns[n]
        first = self.first[n]
        kind = compute_type(self.planes[first])
        x = self.cast(self.value(c.value), self.values[c.value].dtype, kind)
        if c.kind != "moments":
            self.put(f"a{n} = {self._load(first)}(z{first}, {at})")
            self.put(f"{self._store(first)}(z{first}, {at}, {self.accumulate(c.kind)}(a{n}, {x}))")
            return
        # Welford: the deviation from the mean so far, and from the mean with this row.
        self.put(f"a{n} = {self._load(first)}(z{first}, {at})")
        self.put(f"d_{n} = {x} - a{n}")
        self.put(f"a{n} = a{n} + d_{n} * share")
        self.put(f"{self._store(first)}(z{first}, {at}, a{n})")
        self.put(f"q{n}_ = {self._load(first + 1)}(z{first + 1}, {at})")
        self.put(f"{self._store(first + 1)}(z{first + 1}, {at}, q{n}_ + d_{n} * ({x} - a{n}))")

    def _load(self, plane: int) -> str:
        return self.load(self.planes[plane], f"part{plane}")

    def _store(self, plane: int) -> str:
        return self.store(self.planes[plane], f"part{plane}")
