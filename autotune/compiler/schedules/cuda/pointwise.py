"""The schemes of groups without reductions: flat, and transpose for tensors with different unit-stride axes.

In the scheme transpose, ``tile`` is the side of the square tiles that go through shared memory, each by a block of
``threads_per_row`` threads. A walk along one of the axes is never faster
(docs/decisions/025-transposed-tensors-in-tiles.md).
"""

from __future__ import annotations

from dataclasses import replace

from autotune.compiler.program.passes import build_program, once_a_row
from autotune.compiler.program.vectors import Tiling, tiling, vector_length
from autotune.compiler.schedules.configurations import PLAIN_CUDA, REMOVED, having, narrow
from autotune.compiler.schedules.cuda import Scheme
from autotune.compiler.schedules.cuda.rows import default_vector, plain_program, vectors
from autotune.compiler.targets.cuda.rows.flat import FlatKernel
from autotune.compiler.targets.cuda.source import CudaSchedule, CudaSource, TransposeSchedule
from autotune.compiler.targets.cuda.transpose import MOST_ELEMENTS, TransposeKernel
from autotune.errors import Superseded, Unsupported
from autotune.ir.graph import REDUCTIONS, Graph
from autotune.ir.nodes import POINTWISE
from autotune.space import Space
from autotune.task import Config

_MOST_WORK = 1024
"""Cost of the operators on a thread's elements above which a search begins with fewer elements.

Twenty sines and cosines of eight elements take 254 registers and spill 344 bytes; of two elements they take 87.
"""


class FlatScheme(Scheme):
    """One pass over rows, without cooperation of threads on a row."""

    name, rank, schedule = "flat", 30, CudaSchedule

    def check(self, graph: Graph) -> None:
        if any(graph.values[i].op in REDUCTIONS for i in graph.live):
            raise Unsupported("not a group for the scheme flat")
        program = build_program(graph)
        once_a_row(program)
        if program.passes[0].row_stores:
            raise Unsupported("an output without a column axis in a flat kernel")

    def space_of(self, graph: Graph, space: Space) -> Space:
        program = plain_program(graph)
        space = narrow(having(space, self.schedule), vector_bytes=vectors(program)[:3], cluster=[1])
        space = narrow(space, threads_per_row=[64, 128, 256, 512, 1024], rows_per_block=[1], keep=["registers"])
        return narrow(space, online=[False], prefetch=[False])

    def normalize(self, graph: Graph, config: Config) -> Config:
        c: Config = {name: choice for name, choice in config.items() if name not in REMOVED}
        c |= {"cluster": 1, "prefetch": False, "rows_per_block": 1, "keep": "registers", "online": False}
        c["threads_per_row"] = min(1024, max(64, int(config["threads_per_row"])))
        return c

    def default(self, graph: Graph) -> Config:
        """16-byte accesses and two packs a thread, or fewer elements of many operators."""
        program = plain_program(graph)
        widest = default_vector(program)
        work = sum(POINTWISE[v.op].cost for i in graph.live if (v := graph.values[i]).op in POINTWISE and v.axes)
        shapes = [(widest, 2), *((b, 1) for b in vectors(program)[:3] if b <= widest)]
        fit = ((b, n) for b, n in shapes if work * n * vector_length(program, b) <= _MOST_WORK)
        vector_bytes, unroll = next(fit, shapes[-1])
        shape: Config = {"threads_per_row": 256, "vector_bytes": vector_bytes, "unroll": unroll}
        return self.normalize(graph, PLAIN_CUDA | shape)

    def seeds(self, graph: Graph) -> list[Config]:
        d = self.default(graph)
        out = [d | {"unroll": 1}, d | {"unroll": 4}, d | {"threads_per_row": 512}, d | {"load_hint": "evict_first"}]
        if plain_program(graph).passes[0].row_values:
            out += [d | {"threads_per_row": 64, "unroll": 8}, d | {"unroll": 8}]
        return [self.normalize(graph, c) for c in out]

    def threads(self, config: Config) -> str:
        return f"{int(config['threads_per_row'])} threads a block"

    def source(self, graph: Graph, config: Config, fixed: bool = False) -> CudaSource:
        if config.get("by_row"):
            raise Superseded("blocks with a part of one row each, which this autotune lacks")
        program = plain_program(graph)
        return FlatKernel(replace(program, dynamic=-1) if fixed else program, CudaSchedule.from_config(config)).source()


FLAT = FlatScheme()


LEAST_BYTES = 1 << 15
"""Bytes moved below which a group is left to the flat scheme: a launch costs more than all its accesses."""
FEW = 264
"""Number of tiles for two per multiprocessor of a large device."""
_SAME = ("threads_per_row", "vector_bytes", "max_registers", "load_hint", "store_hint", "blocks_per_sm")
"""Parameters of a tiled kernel, in addition to the tile's side."""


def _vectors(t: Tiling) -> list[int]:
    """Vector sizes in bytes that differ along at least one of the axes, widest first, at most three."""
    found: dict[tuple[int, int], int] = {}
    for n in (1, 2, 4, 8, 16):
        if n * t.size <= 16:
            found.setdefault(t.vectors(n * t.size), n * t.size)
    return sorted(found.values(), reverse=True)[:3]


def _tiles(t: Tiling, side: int) -> int:
    g = t.program.graph
    everything = g.size((*t.program.rows, t.x)) // (g.extents[t.x] * g.extents[t.y])
    return everything * -(-g.extents[t.x] // side) * -(-g.extents[t.y] // side)


class TransposeScheme(Scheme):
    """Tiles through shared memory."""

    name, rank, schedule = "transpose", 20, TransposeSchedule

    def check(self, graph: Graph) -> None:
        tiling(graph)
        if graph.bytes_moved < LEAST_BYTES:
            raise Unsupported("too small for tiles to matter")

    def space_of(self, graph: Graph, space: Space) -> Space:
        space = narrow(having(space, self.schedule), vector_bytes=_vectors(tiling(graph)), tile=[32, 64], unroll=[1])
        space = narrow(space, threads_per_row=[64, 128, 256, 512, 1024], rows_per_block=[1], keep=["registers"])
        return narrow(space, online=[False], prefetch=[False], cluster=[1])

    def normalize(self, graph: Graph, config: Config) -> Config:
        side, t = int(config.get("tile", 0)) or 32, tiling(graph)
        widest = max(t.vectors(int(config["vector_bytes"])))
        threads = 1 << (int(config["threads_per_row"]).bit_length() - 1)
        threads = min(max(threads, 64, side * side // MOST_ELEMENTS), side * side // widest, 1024)
        c = PLAIN_CUDA | {name: config[name] for name in _SAME}
        return c | {"threads_per_row": threads, "vector_bytes": t.size * widest, "tile": side}

    def default(self, graph: Graph) -> Config:
        """Tiles with a cache line per row, or smaller ones if there are few or an axis is shorter."""
        t = tiling(graph)
        fits = min(t.program.graph.extents[t.x], t.program.graph.extents[t.y]) >= 64
        side = 64 if t.size <= 2 and fits and _tiles(t, 64) >= FEW else 32
        widest = _vectors(t)[0]
        return self.normalize(graph, PLAIN_CUDA | {"threads_per_row": 256, "vector_bytes": widest, "tile": side})

    def seeds(self, graph: Graph) -> list[Config]:
        d, t = self.default(graph), tiling(graph)
        threads = int(d["threads_per_row"])
        out = [d | {"tile": 32 if d["tile"] == 64 else 64}]
        out += [d | {"tile": 64, "threads_per_row": 512}, d | {"threads_per_row": threads // 2}]
        out += [d | {"vector_bytes": b} for b in _vectors(t)[1:]]
        out += [d | {"store_hint": "evict_first"}, d | {"load_hint": "evict_first"}, d | {"blocks_per_sm": 4}]
        return self.distinct(graph, d, out)

    def threads(self, config: Config) -> str:
        side = config.get("tile", 0)
        return f"tiles of {side} x {side} through shared memory, {config['threads_per_row']} threads each"

    def source(self, graph: Graph, config: Config, fixed: bool = False) -> CudaSource:
        if not config.get("tile"):
            raise Superseded("a walk along one axis of transposed tensors, which this autotune lacks")
        t = tiling(graph)
        return TransposeKernel(t, t.program, TransposeSchedule.from_config(config)).source()


TRANSPOSE = TransposeScheme()
