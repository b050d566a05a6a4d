"""The scatter_rows scheme: index-add along rows that have separate indices, with pointwise operators before and after.

Parameters have the names of the row-wise scheme with these meanings:

- ``threads_per_row``: 32, a warp.
- ``rows_per_block``: The warps of a block, each with a key (rows with equal indices).
- ``owned``: The number of rows of each key that a block computes, with the indices that it has listed once.
- ``unroll``: The number of vectors of terms that a thread has in flight.

See :mod:`autotune.compiler.targets.cuda.scatter_rows`.
"""

from __future__ import annotations

from functools import lru_cache

from autotune.compiler.program.program import power_of_two
from autotune.compiler.program.scattered import ScatteredRows, scattered_rows
from autotune.compiler.schedules.configurations import PLAIN_CUDA, having, narrow
from autotune.compiler.schedules.cuda import SMS, Scheme
from autotune.compiler.targets.cuda.compile import too_large
from autotune.compiler.targets.cuda.scatter_rows import ScatterRowsKernel
from autotune.compiler.targets.cuda.source import CudaSource, ScatterSchedule
from autotune.compiler.targets.cuda.threads import WARP
from autotune.errors import Unsupported
from autotune.ir.graph import Graph
from autotune.space import Space
from autotune.task import Config
from autotune.words import plural

WARPS = (1, 2, 4, 8, 16, 32)
OWNED = (1, 2, 4, 8, 16, 32, 64)
UNROLLS = (1, 2, 4)
_SAME = ("rows_per_block", "vector_bytes", "unroll", "max_registers", "load_hint", "store_hint")
_ONE: Config = {"threads_per_row": WARP, "keep": "registers", "online": False, "blocks_per_sm": 0, "cluster": 1}
WARPS_OF_DEFAULT = 8
_BLOCKS = 4
"""Blocks for each SM that a default has at least, before it gives them more rows of a key."""


def vectors(s: ScatteredRows) -> list[int]:
    """Vector sizes in bytes that divide terms and results, widest first, at most three.

    A vector of terms across rows is for as many warps. So those of which one block does not fit an SM are left out,
    unless that is each of them.
    """
    return list(_vectors(s.graph))


@lru_cache(maxsize=256)
def _vectors(graph: Graph) -> tuple[int, ...]:
    s = scattered_rows(graph)
    dividing = [b for b in (32, 16, 8, 4, 2, 1) if s.vector(b)]
    return tuple([b for b in dividing if _fits(s, b)][:3] or dividing[-1:])


def _fits(s: ScatteredRows, vector_bytes: int) -> bool:
    """True if the fewest warps that share a vector of terms have room for their sums."""
    shape: Config = {"vector_bytes": vector_bytes, "rows_per_block": _least_warps(s, vector_bytes), "owned": 1}
    try:
        made = ScatterRowsKernel(s, ScatterSchedule.from_config(PLAIN_CUDA | _ONE | shape))
    except Unsupported:
        return False
    return too_large(4 * made.words, made.schedule.block, 0) is None


def _least_warps(s: ScatteredRows, vector_bytes: int) -> int:
    """Warps that share a vector of terms."""
    return s.vector(vector_bytes) if s.is_across else 1


class ScatterRowsScheme(Scheme):
    """Index-add along rows."""

    name, rank, schedule = "scatter_rows", 15, ScatterSchedule

    def check(self, graph: Graph) -> None:
        narrowest = {"vector_bytes": vectors(scattered_rows(graph))[-1]}  # for the fewest warps
        if why := self.reject(graph, self.normalize(graph, PLAIN_CUDA | {"owned": 1} | narrowest)):
            raise Unsupported(why)

    def space_of(self, graph: Graph, space: Space) -> Space:
        s = scattered_rows(graph)
        usable = vectors(s)
        space = narrow(having(space, self.schedule), **{name: [only] for name, only in _ONE.items()}, prefetch=[False])
        warps = [w for w in WARPS if w >= min(_least_warps(s, b) for b in usable) and w < 2 * max(2, s.n_keys)]
        owned = [r for r in OWNED if r < 2 * s.n_repeats]
        return narrow(space, vector_bytes=usable, rows_per_block=warps, owned=owned, unroll=UNROLLS)

    def normalize(self, graph: Graph, config: Config) -> Config:
        s = scattered_rows(graph)
        c = PLAIN_CUDA | {n: config[n] for n in (*_SAME, "owned") if n in config} | _ONE | {"prefetch": False}
        if not s.vector(int(c["vector_bytes"])) or int(c["vector_bytes"]) > vectors(s)[0]:
            c |= {"vector_bytes": next((b for b in vectors(s) if b <= 16), vectors(s)[-1])}
        warps = 1 << (int(c["rows_per_block"]).bit_length() - 1)
        warps = max(_least_warps(s, int(c["vector_bytes"])), min(warps, power_of_two(s.n_keys), WARPS[-1]))
        owned = min(power_of_two(s.n_repeats), 1 << (int(c["owned"]).bit_length() - 1))
        return c | {"rows_per_block": warps, "owned": owned, "unroll": max(1, min(int(c["unroll"]), UNROLLS[-1]))}

    def default(self, graph: Graph) -> Config:
        """Blocks of eight warps, five on each SM, and a wave of blocks: indices are listed as rarely as possible."""
        s = scattered_rows(graph)
        vector_bytes = next((b for b in vectors(s) if b <= 16), vectors(s)[-1])
        owned, groups = 1, -(-s.n_keys // WARPS_OF_DEFAULT)
        while groups * -(-s.n_repeats // (2 * owned)) >= _BLOCKS * SMS and owned < OWNED[-1]:
            owned *= 2
        shape: Config = {"vector_bytes": vector_bytes, "rows_per_block": WARPS_OF_DEFAULT, "owned": owned}
        made = self.normalize(graph, PLAIN_CUDA | shape | {"unroll": 2, "max_registers": 48})
        while self.reject(graph, made) and int(made["rows_per_block"]) > _least_warps(s, int(made["vector_bytes"])):
            made = self.normalize(graph, made | {"rows_per_block": int(made["rows_per_block"]) // 2})
        return made

    def seeds(self, graph: Graph) -> list[Config]:
        s, d = scattered_rows(graph), self.default(graph)
        warps, owned = int(d["rows_per_block"]), int(d["owned"])
        out: list[Config] = [d | {"rows_per_block": w} for w in (warps // 2, warps * 2) if w in WARPS]
        out += [d | {"owned": r} for r in (owned // 2, owned * 2, owned * 4) if r in OWNED]
        out += [d | {"vector_bytes": b} for b in vectors(s) if b != d["vector_bytes"]]
        out += [d | {"unroll": u} for u in UNROLLS] + [d | {"max_registers": cap} for cap in (32, 40, 0)]
        out += [d | {"store_hint": "evict_last"}, d | {"store_hint": "streaming"}, d | {"load_hint": "evict_first"}]
        made = [self.normalize(graph, c) for c in out]
        return [c for n, c in enumerate(made) if c != d and c not in made[:n] and self.reject(graph, c) is None]

    def threads(self, config: Config) -> str:
        warps, owned = plural(int(config["rows_per_block"]), "warp"), plural(int(config["owned"]), "row")
        return f"{warps} a block, each with {owned} of equal indices"

    def source(self, graph: Graph, config: Config, fixed: bool = False) -> CudaSource:
        return ScatterRowsKernel(scattered_rows(graph), ScatterSchedule.from_config(config)).source()


SCHEME = ScatterRowsScheme()
