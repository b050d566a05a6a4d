"""The columns scheme: reductions over all rows with row-wise or pointwise work, finished from per-block partials.

The main kernel walks the rows with a persistent grid; a finish reduces ``[blocks, columns]``. See
``autotune.compiler.program.columns``.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import ClassVar

from autotune.compiler.program.columns import (
    SECTOR_BYTES,
    Split,
    finish_graph,
    main_program,
    piece_bytes,
    split_columns,
)
from autotune.compiler.program.program import Program, power_of_two
from autotune.compiler.program.rewrites import cut_everything, widened
from autotune.compiler.program.vectors import vector_length
from autotune.compiler.schedules.configurations import PLAIN_CUDA, having, narrow
from autotune.compiler.schedules.cuda import CAPS, Scheme, block_of, first_fit, scheme_of
from autotune.compiler.schedules.cuda import rows as row_wise
from autotune.compiler.targets.cuda.rows.kernel import RowKernel
from autotune.compiler.targets.cuda.source import CudaSchedule, CudaSource, GroupKernels, Ref
from autotune.errors import Unsupported
from autotune.ir.graph import STORAGE_BYTES, Graph
from autotune.space import Space
from autotune.task import Config

FEWEST_ROWS = 64
"""Rows below which partials of many blocks gain nothing over one block that reads them all."""
MOST_ROWS_AT_ONCE = 1024
"""Rows up to which a group with only sums over rows is left to blocks that each walk all rows of a strip."""
SHORTEST_PIECE = 64
"""Bytes of a piece of an interleaved row from which other schemes are as fast: two sectors. On an H200 the scheme rows
took 2.3 to 5 times the time of a group norm's bytes with pieces of 20, 1.1 to 2.3 times with 40, 1.0 to 1.3 above."""
ACCUMULATORS_KEPT = 128
"""Most 32-bit accumulators of a thread; with more, spilling is certain."""
_MOST_OF_ROWS = 82
"""Most accumulators of each of 512 threads that share a row; with 84 the compiler spills 568 bytes a thread."""
_FINISHES = ("outer", "rows")
"""Schemes of a finish: over the outer axis if that has a kernel, else row by row."""


@lru_cache(maxsize=512)
def _split(graph_key: Graph) -> Split:
    # A reduction of everything becomes one over rows and one of their results: many blocks instead of one.
    return split_columns(widened(cut_everything(graph_key) or graph_key))


def reorders_columns(graph: Graph) -> bool:
    """True if stored kernels of a group may have another order of columns; see :attr:`Split.reordered`."""
    return isinstance(scheme_of(graph), ColumnsScheme) and _split(graph).reordered


def accumulators(program: Program, vec: int, packs: int) -> int:
    """32-bit registers a thread holds for its columns."""
    words = 0
    for c in program.columns:
        if any(a in program.cols for a in program.graph.values[c.value].axes):
            words += c.planes * (2 if c.dtype == "int64" else 1)
    return words * vec * packs


def _full(words: int, threads: int, kept: float = 0) -> str | None:
    """The reason why threads of a block cannot hold so many words of accumulators and kept values each, or None."""
    if words > ACCUMULATORS_KEPT:
        return f"{words} accumulators a thread"
    if (words + kept + 24) * threads > 65536:
        return f"{words + kept:.0f} registers a thread for accumulators and kept values do not fit {threads}"
    return None


def tile_threads(program: Program, vec: int) -> int:
    """Threads for a tile of columns of a pointwise kernel: 128 unless other numbers leave far fewer of them idle."""
    packs = -(-program.n_cols // vec)
    most = min(128, power_of_two(packs))

    def idle(t: int) -> float:
        return 1 - packs / (-(-packs // t) * t)

    return most if most < 128 or idle(most) < 0.15 else min((128, 96, 160, 192, 64), key=idle)


def _overlapped(program: Program, vec: int) -> list[Config]:
    """Several blocks per SM that each load a row ahead, under the register cap that permits them.

    If no thread waits for the other threads of a row, the bytes in flight matter: first four blocks, then six. A block
    that does not fit in an SM runs after the others: on an H200, four blocks without a cap took 1.03 to 1.2 times the
    best of 30 candidates in 11 groups, and three under a cap 1.0 to 1.06 times, once 1.11.
    """
    out: list[Config] = []
    full = [v for i, v in enumerate(program.graph.values) if v.op == "load" and program.domain(i) == "full"]
    ahead = sum(STORAGE_BYTES[program.graph.inputs[v.slot]] * vec // 4 for v in full)
    for packs in (1, 2, 4):
        t, rest = divmod(program.n_cols, vec * packs)
        if program.pointwise:
            t, rest = tile_threads(program, vec), 0
        if rest or t > 1024 or (t < 8 and not program.pointwise) or (t % 32 if t > 32 else t & (t - 1)):
            continue
        r = max(1, 256 // t)
        words = accumulators(program, vec, packs) + row_wise.kept_words(program) * vec * packs
        for b in (4, 6, 3, 2) if program.pointwise else (2, 3, 4):
            least = words + 28 + (ahead * packs if b > 4 else 0)
            fit = [c for c in CAPS if c * t * r * b <= 65536 and c >= least]
            if fit and b * t * r <= 2048:
                out.append(
                    {"threads_per_row": t, "rows_per_block": r, "blocks_per_sm": b, "prefetch": True,
                     "max_registers": max(fit), "unroll": packs}
                )  # fmt: skip
    return out


@lru_cache(maxsize=512)
def _main(graph: Graph) -> Program:
    return main_program(_split(graph))


def _packs(program: Program, config: Config, vec: int) -> int:
    packs = -(-program.n_cols // (int(config["threads_per_row"]) * vec))
    return min(packs, int(config["unroll"])) if program.pointwise else packs


class ColumnsScheme(Scheme):
    """Per-block partials of sums over the rows, and a second kernel."""

    name, rank, packs = "columns", 40, False
    kind: ClassVar[str] = "contiguous"

    def check(self, graph: Graph) -> None:
        split = _split(graph)
        if split.kind != self.kind:
            raise Unsupported(f"{split.kind} rows")
        if split.main.size(split.rows) // split.batches < FEWEST_ROWS:
            raise Unsupported("few rows" if split.batches == 1 else "few rows in a batch")
        if split.width < 8:
            raise Unsupported("few columns")
        program = main_program(split)
        if not program.pointwise and accumulators(program, 1, -(-program.n_cols // 512)) > _MOST_OF_ROWS:
            raise Unsupported("rows too long for the accumulators of a block")
        sums_alone = program.pointwise and not split.main.outputs
        if sums_alone and split.main.size(split.rows) <= MOST_ROWS_AT_ONCE:
            raise Unsupported("few rows, which a block can walk alone in one kernel")
        first_fit(finish_graph(split, 2)[0], _FINISHES)

    def space_of(self, graph: Graph, space: Space) -> Space:
        program = _main(graph)
        usable = row_wise.vectors(program)[:3]
        keep = ["registers", "reload"] if program.kept else ["registers"]
        space = narrow(having(space, self.schedule), vector_bytes=usable, keep=keep, cluster=[1])
        space = narrow(space, blocks_per_sm=[1, 2, 3, 4, 6, 8, 12, 16])
        if not row_wise.one_pass(program):
            space = narrow(space, online=[False])
        if not row_wise.large(program):
            space = narrow(space, store_hint=["default"])
        vec = max(1, vector_length(program, usable[0]))
        cols = program.n_cols
        sizes = {vector_length(program, b) for b in usable}
        most = min(1024, max(1, power_of_two(-(-cols // min(vec, 4)))))
        if program.pointwise:
            suit = {tile_threads(program, v) for v in sizes}
            least = min(8, *suit)
            threads = [t for t in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) if least <= t <= most] or [most]
            threads += [t for t in (96, 160, 192) if t in suit or any(cols % (t * v) == 0 for v in sizes)]
        else:
            least = 1
            while least < most and cols / least > 64 * vec:
                least *= 2
            threads = row_wise.thread_counts(cols, sizes, max(8, least), most)
        most_rows = min(max(32, 256 // min(threads)), 1024 // min(threads))
        rows = [r for r in (1, 2, 4, 8, 16, 32, 64, 128, 256) if r <= most_rows]
        unroll = [1, 2, 4] if program.pointwise else [1]
        return narrow(space, threads_per_row=threads, rows_per_block=rows, unroll=unroll)

    def normalize(self, graph: Graph, config: Config) -> Config:
        program = _main(graph)
        c: Config = {"prefetch": False} | config | {"cluster": 1}
        t = int(c["threads_per_row"])
        c["rows_per_block"] = block_of(t, int(c["rows_per_block"]))
        if self.kind != "contiguous":  # A batch has whole sets of rows, and a block whole warps.
            c["rows_per_block"] = math.gcd(program.n_rows // program.batches, power_of_two(int(c["rows_per_block"])))
            t = c["threads_per_row"] = max(t, 32 // int(c["rows_per_block"]))
        if c["keep"] == "shared":
            c["keep"] = "registers"
        c["blocks_per_sm"] = int(c["blocks_per_sm"]) or 1
        c["prefetch"] = bool(c["prefetch"]) and row_wise.may_prefetch(program, c)
        if not program.pointwise:
            c["unroll"] = 1
        else:
            vec = vector_length(program, int(c["vector_bytes"])) or 1
            packs = -(-program.n_cols // (t * vec))
            while int(c["unroll"]) // 2 >= packs:  # ``unroll = 4`` handles three packs
                c["unroll"] = int(c["unroll"]) // 2
        return c

    def default(self, graph: Graph) -> Config:
        program = _main(graph)
        vb = row_wise.default_vector(program)
        vec = vector_length(program, vb)
        packs = 1 if program.n_cols <= 1024 * vec else 2
        t = min(1024, max(8, power_of_two(-(-program.n_cols // (vec * packs)))))
        if program.pointwise:
            t = tile_threads(program, vec)
        config: Config = PLAIN_CUDA | {
            "threads_per_row": t,
            "rows_per_block": max(1, 256 // t),
            "vector_bytes": vb,
            "blocks_per_sm": 2 if t >= 512 else 4,
            "prefetch": program.pointwise,
        }
        words = accumulators(program, vec, _packs(program, config, vec)) + row_wise.kept_words(program) * vec * packs
        if program.pointwise:
            single = [c for c in _overlapped(program, vec) if c["unroll"] == 1]
            config |= next((c for blocks in (3, 2) for c in single if c["blocks_per_sm"] == blocks), {})
        elif t == 512 and words + 28 <= 64:  # or only one of two blocks an SM would run
            config["max_registers"] = 64
        reload: Config = {"prefetch": False, "keep": "reload"}
        leaner: list[Config] = [{}, {"prefetch": False}, reload]
        widths = row_wise.vectors(program)
        leaner += [reload | {"vector_bytes": b} for b in widths if b < vb]
        leaner.append(reload | {"vector_bytes": widths[-1], "threads_per_row": 512})
        return self.first_accepted(graph, [config | less for less in leaner])

    def seeds(self, graph: Graph) -> list[Config]:
        program = _main(graph)
        d = self.default(graph)
        t = int(d["threads_per_row"])
        over = _overlapped(program, vector_length(program, int(d["vector_bytes"])))
        out: list[Config] = [d | c for c in over]
        if not program.pointwise and t <= 512:  # as few partials as can be: a large block an SM, which merges its rows
            large = {"rows_per_block": 1024 // t, "blocks_per_sm": 1, "prefetch": True, "max_registers": 64}
            out.append(d | large)
        for factor in (2, 0.5, 4, 0.25):
            n = int(power_of_two(t) * factor)
            if 8 <= n <= 1024:
                out.append(d | {"threads_per_row": n, "rows_per_block": max(1, 256 // n), "max_registers": 0})
        out += [d | {"blocks_per_sm": b} for b in (1, 2, 4, 8) if b != d["blocks_per_sm"]]
        out.append(d | {"rows_per_block": power_of_two(512 // t + 1) // 2 or 1})
        out.append(d | {"rows_per_block": 1})
        out.append(d | {"load_hint": "no_allocate"})
        out += [d | {"prefetch": True, "blocks_per_sm": b} for b in (1, 2, 4)]
        usable = row_wise.vectors(program)
        out += [d | {"vector_bytes": b, "max_registers": 0} for b in usable[:3] if b != d["vector_bytes"]]
        if program.pointwise:
            out += [d | {"unroll": u} for u in (2, 4)]
        return [self.normalize(graph, c) for c in out]

    def reject(self, graph: Graph, config: Config) -> str | None:
        made = self.block(graph, config)
        return made if isinstance(made, str) else self.overfull(graph, config)

    def overfull(self, graph: Graph, config: Config) -> str | None:
        """The reason why a thread cannot hold its accumulators and kept values, or None."""
        schedule = CudaSchedule.from_config(config)
        program, threads = _arranged(_split(graph), schedule), schedule.block
        vec = vector_length(program, int(config["vector_bytes"]))
        words = accumulators(program, vec, _packs(program, config, vec))
        kept = row_wise.kept_words(program) * vec * _packs(program, config, vec) if config["keep"] == "registers" else 0
        if why := _full(words, threads, kept):
            return why
        cap = int(config["max_registers"])
        if cap and (words + kept + 16 > cap or cap * threads > 65536):
            return f"{words + kept:.0f} accumulators and kept values under a cap of {cap} registers"
        return None

    def main(self, graph: Graph, config: Config) -> CudaSource:
        return emit_main(_split(graph), config)[0]

    def home(self, graph: Graph, i: int, config: Config) -> str:
        if cut_everything(graph) is not None or i in split_columns(graph).reduced:
            return "grid"
        return super().home(graph, i, config)

    def emit(self, graph: Graph, config: Config, sms: int, fixed: bool = False) -> GroupKernels:
        split = _split(graph)
        source, program = emit_main(split, config)
        sets = -(-program.n_rows // program.batches // int(config["rows_per_block"]))
        # Blocks that share the rows of one tile and batch, at most one for each set of rows.
        blocks = min(int(config["blocks_per_sm"]) * sms // int(source.launch["tiles"]) // program.batches, sets)
        return _kernels(split, source, max(1, blocks) * program.batches)

    def with_blocks(self, graph: Graph, config: Config, blocks: int) -> GroupKernels:
        """:meth:`emit` with a fixed number of blocks for each tile of columns.

        A block without rows writes neutral elements.
        """
        split = _split(graph)
        return _kernels(split, emit_main(split, config)[0], blocks)


def _kernels(split: Split, source: CudaSource, blocks: int) -> GroupKernels:
    if blocks % split.batches:
        raise Unsupported("blocks for another number of batches")
    main = replace(source, launch={**source.launch, "grid": blocks * int(source.launch["tiles"])})
    private = split.planes(blocks)
    args: list[Ref] = [("input", k) for k in range(len(split.whole.inputs))]
    args += [("output", k) for k in split.outputs]
    args += [("private", k) for k in range(len(private))]
    finish, slots, outputs = finish_graph(split, blocks)
    scheme = first_fit(finish, _FINISHES)
    made = scheme.emit(finish, scheme.default(finish), 1, fixed=True)  # the same on every device
    place: dict[Ref, Ref] = {("input", k): ("private" if at == "partial" else at, n) for k, (at, n) in enumerate(slots)}
    place |= {("output", k): ("output", n) for k, n in enumerate(outputs)}
    place |= {("private", k): ("private", len(private) + k) for k in range(len(made.private))}
    after = [tuple(place[r] for r in a) for a in made.args]
    return GroupKernels((main, *made.sources), (tuple(args), *after), (*private, *made.private))


def emit_main(split: Split, config: Config) -> tuple[CudaSource, Program]:
    """The main kernel, without its grid."""
    schedule = CudaSchedule.from_config(config)
    program = _arranged(split, schedule)
    return RowKernel(program, schedule).source(), program


def _arranged(split: Split, schedule: CudaSchedule) -> Program:
    return main_program(split, keep=schedule.keep != "reload", online=schedule.online)


class InterleavedScheme(ColumnsScheme):
    """The same for rows of short pieces, whose sectors row-wise kernels would read once for each of several rows."""

    name, rank, kind = "interleaved", 55, "interleaved"

    def check(self, graph: Graph) -> None:
        split = _split(graph)
        piece = max(piece_bytes(split.whole, i) for i in split.reduced)
        if piece >= SHORTEST_PIECE or piece % SECTOR_BYTES == 0:
            raise Unsupported("rows of whole sectors")
        super().check(graph)


class BatchedScheme(ColumnsScheme):
    """The same for several sets of rows with separate sums, which other schemes would read twice."""

    name, rank, kind, in_default = "batched", 80, "batched", False

    def check(self, graph: Graph) -> None:
        super().check(graph)
        if why := self.overfull(graph, self.default(graph)):
            raise Unsupported(why)


SCHEME, INTERLEAVED, BATCHED = ColumnsScheme(), InterleavedScheme(), BatchedScheme()
TWO_KERNELS = (SCHEME.name, INTERLEAVED.name, BATCHED.name)
