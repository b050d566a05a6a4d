"""The schemes of index-add: scatter, and scatter_rows along rows that have separate indices. Both compute pointwise
operators before and after it.

In the scheme scatter, parameters have the names of the row-wise scheme with these meanings:

- ``owned``: The number of destinations (rows of the result) of a block.
- ``threads_per_row``: The threads for a block's chunk of the columns, each with a vector of adjacent elements.
- ``rows_per_block``: The threads (match lanes) per column, which share the block's destinations or the terms of one
  destination.
- ``unroll``: The number of destinations that a match lane stores at a time.

In the scheme scatter_rows:

- ``threads_per_row``: 32, a warp.
- ``rows_per_block``: The warps of a block, each with a key (rows with equal indices).
- ``owned``: The number of rows of each key that a block computes, with the indices that it has listed once.
- ``unroll``: The number of vectors of terms that a thread has in flight.

See :mod:`autotune.compiler.targets.cuda.scatter` and :mod:`autotune.compiler.targets.cuda.scatter_rows`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from autotune.compiler.program.program import power_of_two
from autotune.compiler.program.scattered import Scattered, ScatteredRows, scattered, scattered_rows
from autotune.compiler.schedules.configurations import PLAIN_CUDA, having, narrow
from autotune.compiler.schedules.cuda import CAPS, SMS, Scheme
from autotune.compiler.targets.cuda.compile import too_large
from autotune.compiler.targets.cuda.device import LIMIT
from autotune.compiler.targets.cuda.scatter import ScatterKernel, fetchable
from autotune.compiler.targets.cuda.scatter_rows import ScatterRowsKernel
from autotune.compiler.targets.cuda.source import CudaSource, ScatterSchedule
from autotune.compiler.targets.cuda.threads import WARP
from autotune.errors import Unsupported
from autotune.ir.graph import STORAGE_BYTES, Graph
from autotune.space import Space
from autotune.task import Choice, Config
from autotune.words import plural

_SAME = ("rows_per_block", "vector_bytes", "unroll", "max_registers", "load_hint", "store_hint", "owned")
_ONE: Config = {"keep": "registers", "online": False, "blocks_per_sm": 0, "cluster": 1}

# scatter

THREADS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
"""Numbers of threads along the columns in the search space."""
MATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256)
OWNED = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LEAST_BYTES = 1 << 14
"""Bytes of results that a block should have if there are many destinations: with fewer, its latencies are not hidden.
"""
SECTOR = 32
"""Least bytes of a memory access."""


def place_bytes(s: Scattered) -> int:
    """Bytes of the indices that a block scans."""
    total = 0
    for one in s.sums:
        values = [s.graph.values[i] for i in one.destinations.passes[0].compute]
        slots = {v.slot for v in values if v.op == "load"}
        total += one.n_tokens * max(1, sum(STORAGE_BYTES[s.graph.inputs[slot]] for slot in slots))
    return total


def vectors(s: Scattered) -> list[int]:
    """Vector sizes in bytes that divide the columns, widest first, at most three."""
    return [b for b in (32, 16, 8, 4, 2, 1) if s.vector(b)][:3]


def most_owned(s: Scattered) -> int:
    """Most destinations of a block: an entry of its list has the numbers of a term and of a destination in one 32-bit
    word.
    """
    return next((r for r in reversed(OWNED) if r * max(one.n_tokens for one in s.sums) < LIMIT), OWNED[0])


def blocks_of(s: Scattered, config: Mapping[str, Choice]) -> tuple[int, int]:
    """(groups of destinations, chunks of columns): their product is the number of blocks."""
    chunk = int(config["threads_per_row"]) * max(1, s.vector(int(config["vector_bytes"])))
    return -(-s.n_destinations // int(config["owned"])), -(-s.n_cols // chunk)


class ScatterScheme(Scheme):
    """Index-add."""

    name, rank, schedule = "scatter", 10, ScatterSchedule

    def check(self, graph: Graph) -> None:
        s = scattered(graph)
        if max(s.n_destinations, s.n_cols, *(one.n_tokens for one in s.sums)) >= LIMIT:
            raise Unsupported("more indices or terms than 32-bit counters hold")

    def space_of(self, graph: Graph, space: Space) -> Space:
        s = scattered(graph)
        usable = vectors(s)
        widest = min(s.vector(b) for b in usable)
        most = next((t for t in THREADS if t * widest >= s.n_cols), THREADS[-1])
        threads = [t for t in THREADS if t <= most]
        owned = [r for r in OWNED if r < 2 * s.n_destinations and r <= most_owned(s)]
        space = narrow(having(space, self.schedule), **{name: [only] for name, only in _ONE.items()})
        space = narrow(space, vector_bytes=usable, threads_per_row=threads, rows_per_block=MATCH, owned=owned)
        return space if fetchable(s) else narrow(space, prefetch=[False])

    def normalize(self, graph: Graph, config: Config) -> Config:
        s = scattered(graph)
        c = (
            PLAIN_CUDA
            | {"owned": 1}
            | {n: config[n] for n in ("threads_per_row", *_SAME, "prefetch") if n in config}
            | _ONE
        )
        vec = s.vector(int(c["vector_bytes"])) or 1
        most = next((t for t in THREADS if t * vec >= s.n_cols), THREADS[-1])
        t, m = min(int(c["threads_per_row"]), most), 1 << (int(c["rows_per_block"]).bit_length() - 1)
        if t not in THREADS:
            t = max(n for n in THREADS if n <= t)
        while t * m > 1024:
            m //= 2
        while t * m < 64 or t * m % 32:
            m *= 2
        owned = min(power_of_two(s.n_destinations), most_owned(s), 1 << (int(c["owned"]).bit_length() - 1))
        unroll = max(1, min(int(c["unroll"]), owned // m))
        c |= {"prefetch": bool(c["prefetch"]) and bool(fetchable(s))}
        return c | {"threads_per_row": t, "rows_per_block": m, "owned": owned, "unroll": unroll}

    def default(self, graph: Graph) -> Config:
        """Whole rows in 16-byte accesses, in several waves of blocks.

        A block owns enough rows to write more bytes than it scans. If destinations are few, the default is narrow
        chunks of columns and many match lanes.
        """
        s = scattered(graph)
        usable = vectors(s)
        vector_bytes = next((b for b in usable if b <= 16), usable[-1])
        vec = s.vector(vector_bytes)
        packs = -(-s.n_cols // vec)
        threads = next((t for t in THREADS if t >= packs), 0) if packs <= 256 else 0
        threads = threads or next((t for t in (128, 256, 96, 192, 160, 224) if packs % t == 0), 128)
        chunk, owned = threads * vec, 1
        scanned = max(LEAST_BYTES, place_bytes(s))
        written = chunk * sum(STORAGE_BYTES[o.dtype] for o in s.graph.outputs)  # of one destination

        def worth(owned: int) -> bool:
            """True if ``owned`` destinations per block are better than half as many."""
            blocks = -(-s.n_destinations // owned) * -(-s.n_cols // chunk)
            enough = scanned * (4 if blocks >= 8 * SMS else 1)
            return blocks >= 2 * SMS and owned // 2 * written < enough

        while owned < most_owned(s) and worth(2 * owned):
            owned *= 2
        least = max(1, SECTOR // (vec * s.unit))
        while owned == 1 and threads % 2 == 0 and threads > least:
            if s.n_destinations * -(-s.n_cols // (threads * vec)) >= SMS:
                break
            threads //= 2
        match = max(1, power_of_two(512 // threads + 1) // 2)
        if owned > 1:
            match = min(match, max(4, owned))
        while match > 4 and match * 4 > s.n_tokens:
            match //= 2
        shape: Config = {"threads_per_row": threads, "rows_per_block": match, "vector_bytes": vector_bytes}
        made = self.normalize(graph, PLAIN_CUDA | shape | {"owned": owned, "prefetch": True, "unroll": 2})
        block = int(made["threads_per_row"]) * int(made["rows_per_block"])
        return made | {"max_registers": max(c for c in CAPS if c * block * -(-1024 // block) <= 65536)}

    def seeds(self, graph: Graph) -> list[Config]:
        s, d = scattered(graph), self.default(graph)
        owned, match, threads = (int(d[n]) for n in ("owned", "rows_per_block", "threads_per_row"))
        out: list[Config] = [d | {"owned": r} for r in (owned // 2, owned * 2, owned * 4) if r in OWNED]
        out += [d | {"rows_per_block": m} for m in (match // 2, match * 2) if m in MATCH]
        if threads % 2 == 0:
            out.append(d | {"threads_per_row": threads // 2, "rows_per_block": match * 2, "owned": min(owned * 2, 256)})
            out.append(d | {"threads_per_row": threads // 2})
        if threads % 4 == 0:  # narrow, so that more match lanes share a destination of many terms
            out.append(d | {"threads_per_row": threads // 4, "rows_per_block": match * 4, "owned": min(owned * 4, 256)})
        less = [b for b in vectors(s) if b < int(d["vector_bytes"])]
        out += [d | {"vector_bytes": b, "threads_per_row": threads * 2} for b in less]
        out += [d | {"unroll": u} for u in (1, 4)] + [d | {"prefetch": False}]
        out += [d | {"store_hint": "evict_first"}, d | {"store_hint": "streaming"}, d | {"load_hint": "evict_first"}]
        out += [d | {"max_registers": 0}, d | {"max_registers": 0, "unroll": 4}]
        return self.distinct(graph, d, out)

    def threads(self, config: Config) -> str:
        owned, lanes = plural(int(config["owned"]), "destination"), plural(int(config["rows_per_block"]), "match lane")
        return f"{owned} a block, {config['threads_per_row']} threads along the columns, {lanes}"

    def source(self, graph: Graph, config: Config, fixed: bool = False) -> CudaSource:
        return ScatterKernel(scattered(graph), ScatterSchedule.from_config(config)).source()


# scatter_rows

WARPS = (1, 2, 4, 8, 16, 32)
OWNED_OF_KEY = (1, 2, 4, 8, 16, 32, 64)
UNROLLS = (1, 2, 4)
WARPS_OF_DEFAULT = 8
_BLOCKS = 4
"""Blocks for each SM that a default has at least, before it gives them more rows of a key."""
_ONE_WARP: Config = {"threads_per_row": WARP, **_ONE}


def vectors_of_rows(s: ScatteredRows) -> list[int]:
    """Vector sizes in bytes that divide terms and results, widest first, at most three.

    A vector of terms across rows is for as many warps. So those of which one block does not fit an SM are left out,
    unless that is each of them.
    """
    return list(_vectors_of_rows(s.graph))


@lru_cache(maxsize=256)
def _vectors_of_rows(graph: Graph) -> tuple[int, ...]:
    s = scattered_rows(graph)
    dividing = [b for b in (32, 16, 8, 4, 2, 1) if s.vector(b)]
    return tuple([b for b in dividing if _fits(s, b)][:3] or dividing[-1:])


def _fits(s: ScatteredRows, vector_bytes: int) -> bool:
    """True if the fewest warps that share a vector of terms have room for their sums."""
    shape: Config = {"vector_bytes": vector_bytes, "rows_per_block": _least_warps(s, vector_bytes), "owned": 1}
    try:
        made = ScatterRowsKernel(s, ScatterSchedule.from_config(PLAIN_CUDA | _ONE_WARP | shape))
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
        narrowest = {"vector_bytes": vectors_of_rows(scattered_rows(graph))[-1]}  # for the fewest warps
        if why := self.reject(graph, self.normalize(graph, PLAIN_CUDA | {"owned": 1} | narrowest)):
            raise Unsupported(why)

    def space_of(self, graph: Graph, space: Space) -> Space:
        s = scattered_rows(graph)
        usable = vectors_of_rows(s)
        space = narrow(
            having(space, self.schedule), **{name: [only] for name, only in _ONE_WARP.items()}, prefetch=[False]
        )
        warps = [w for w in WARPS if w >= min(_least_warps(s, b) for b in usable) and w < 2 * max(2, s.n_keys)]
        owned = [r for r in OWNED_OF_KEY if r < 2 * s.n_repeats]
        return narrow(space, vector_bytes=usable, rows_per_block=warps, owned=owned, unroll=UNROLLS)

    def normalize(self, graph: Graph, config: Config) -> Config:
        s = scattered_rows(graph)
        c = PLAIN_CUDA | {n: config[n] for n in _SAME if n in config} | _ONE_WARP | {"prefetch": False}
        if not s.vector(int(c["vector_bytes"])) or int(c["vector_bytes"]) > vectors_of_rows(s)[0]:
            c |= {"vector_bytes": next((b for b in vectors_of_rows(s) if b <= 16), vectors_of_rows(s)[-1])}
        warps = 1 << (int(c["rows_per_block"]).bit_length() - 1)
        warps = max(_least_warps(s, int(c["vector_bytes"])), min(warps, power_of_two(s.n_keys), WARPS[-1]))
        owned = min(power_of_two(s.n_repeats), 1 << (int(c["owned"]).bit_length() - 1))
        return c | {"rows_per_block": warps, "owned": owned, "unroll": max(1, min(int(c["unroll"]), UNROLLS[-1]))}

    def default(self, graph: Graph) -> Config:
        """Blocks of eight warps, five on each SM, and a wave of blocks: indices are listed as rarely as possible."""
        s = scattered_rows(graph)
        vector_bytes = next((b for b in vectors_of_rows(s) if b <= 16), vectors_of_rows(s)[-1])
        owned, groups = 1, -(-s.n_keys // WARPS_OF_DEFAULT)
        while groups * -(-s.n_repeats // (2 * owned)) >= _BLOCKS * SMS and owned < OWNED_OF_KEY[-1]:
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
        out += [d | {"owned": r} for r in (owned // 2, owned * 2, owned * 4) if r in OWNED_OF_KEY]
        out += [d | {"vector_bytes": b} for b in vectors_of_rows(s) if b != d["vector_bytes"]]
        out += [d | {"unroll": u} for u in UNROLLS] + [d | {"max_registers": cap} for cap in (32, 40, 0)]
        out += [d | {"store_hint": "evict_last"}, d | {"store_hint": "streaming"}, d | {"load_hint": "evict_first"}]
        return self.distinct(graph, d, out)

    def threads(self, config: Config) -> str:
        warps, owned = plural(int(config["rows_per_block"]), "warp"), plural(int(config["owned"]), "row")
        return f"{warps} a block, each with {owned} of equal indices"

    def source(self, graph: Graph, config: Config, fixed: bool = False) -> CudaSource:
        return ScatterRowsKernel(scattered_rows(graph), ScatterSchedule.from_config(config)).source()


SCHEME, ALONG_ROWS = ScatterScheme(), ScatterRowsScheme()
