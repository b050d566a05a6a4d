"""The outer scheme: reductions over axes other than the unit-stride one, threads side by side on the axis that is kept.

Parameters have their names from the row-wise scheme with these meanings: ``threads_per_row`` threads lie along the kept
axes, each taking a vector of neighbours, and ``rows_per_block`` threads (on each of ``cluster`` blocks) share the
reduced ones; ``unroll`` is how many places of the reduced axes a thread has in flight. With ``keep = shared``,
``prefetch`` means that strips are copied to shared memory ahead of their walks, but for the first ``held`` places of
each thread, which are loaded into registers: see :mod:`autotune.compiler.targets.cuda.outer.copied`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from autotune.compiler.program.passes import build_program
from autotune.compiler.program.program import Program, power_of_two
from autotune.compiler.program.vectors import narrowest_along, unit_axis
from autotune.compiler.schedules.configurations import PLAIN_CUDA, has_online, having, narrow
from autotune.compiler.schedules.cuda.outer_seeds import copied_seeds
from autotune.compiler.schedules.cuda.outer_shape import (
    HELD,
    SMS,
    across,
    clusters,
    crowded,
    kept,
    kept_words,
    lanes,
    lines,
    may_copy,
    vectors,
)
from autotune.compiler.schedules.cuda.rows import too_many_kept
from autotune.compiler.targets.cuda.cubin import too_large
from autotune.compiler.targets.cuda.device import shared_bytes
from autotune.compiler.targets.cuda.kernels import GroupKernels
from autotune.compiler.targets.cuda.outer.copied import CopiedOuter
from autotune.compiler.targets.cuda.outer.kernel import Outer
from autotune.compiler.targets.cuda.source import CudaSource, OuterSchedule
from autotune.errors import Unsupported
from autotune.ir.graph import REDUCTIONS, Graph
from autotune.task import Config
from autotune.words import plural

if TYPE_CHECKING:
    from autotune.space import Space

NARROWEST = 8
"""Elements of the kept axis below which a warp's accesses fall apart into sectors of other rows."""


@lru_cache(maxsize=256)
def _program(graph: Graph, keep: bool = True, online: bool = False) -> Program:
    program = build_program(graph, keep=keep, online=online)
    x = unit_axis(graph)
    if program.pointwise:
        raise Unsupported("a group without reductions")
    if x < 0 or x not in program.rows:
        raise Unsupported("reductions over the axis whose elements are neighbours in memory")
    if graph.extents[x] < NARROWEST:
        raise Unsupported(f"fewer than {NARROWEST} elements on the axis that is kept")
    wide = {a for a in program.rows if graph.extents[a] > 1}
    for i in graph.live:
        v = graph.values[i]
        if v.op in REDUCTIONS and not wide - {x} <= set(v.axes):
            raise Unsupported("a reduction that is the same for several rows")
    return program


def _deepest(program: Program) -> int:
    """The most threads along the reduced axes; a block of one thread along the kept ones has 64."""
    return min(256, max(64, power_of_two(program.n_cols)))


def _registers(program: Program, config: Config) -> float:
    """Registers a thread needs for values that wait for a later pass."""
    vec = lanes(program, int(config["vector_bytes"]))
    if config["keep"] != "registers":
        return kept_words(program, vec) * int(config.get("held", 0))
    places = int(config["rows_per_block"]) * int(config.get("cluster", 1))
    return kept_words(program, vec) * -(-program.n_cols // places)


def _held(program: Program, config: Config) -> bool:
    """Whether a block's registers hold what it keeps, with room for what is computed from it."""
    words, block = _registers(program, config), int(config["threads_per_row"]) * int(config["rows_per_block"])
    # The compiler keeps some elements of packed pairs unpacked as well, from one pass to the next.
    room = 1.8 if narrowest_along(program.graph, unit_axis(program.graph)) == 2 else 1.25
    return words <= 64 and (room * words + 28) * block <= 65536


class OuterScheme:
    """See ``autotune.compiler.schedules.cuda.Scheme``."""

    def __init__(self, name: str, rank: int, program: Callable[..., Program], packs: bool = False) -> None:
        """``program(graph, keep, online)`` arranges a group into passes, or raises Unsupported."""
        self.name, self.rank, self.program, self.packs = name, rank, program, packs

    def check(self, graph: Graph) -> None:
        self.program(graph)

    def space_of(self, graph: Graph, space: Space) -> Space:
        program = self.program(graph)
        usable = vectors(program)
        vec = lanes(program, usable[-1])
        least, most = min(across(program, b) for b in usable), min(256, power_of_two(lines(program, vec)))
        counts, deepest = (1, 2, 4, 8, 16, 32, 64, 128, 256), _deepest(program)
        threads, rows = [t for t in counts if least <= t <= most], [r for r in counts if r <= deepest]
        space = narrow(having(space, OuterSchedule), vector_bytes=usable, threads_per_row=threads, rows_per_block=rows)
        space = narrow(space, cluster=[1, *clusters(program)])
        if not program.kept:
            space = narrow(space, keep=["registers", "reload"])
        if not has_online(program):
            space = narrow(space, online=[False])
        if not any(may_copy(program, PLAIN_CUDA | {"vector_bytes": b}) for b in usable):
            space = narrow(space, prefetch=[False])
        if len(space["prefetch"].choices) < 2 or not crowded(program):
            space = narrow(space, held=[0])
        if kept(program) * program.n_cols < 1 << 20:
            space = narrow(space, blocks_per_sm=[0], store_hint=["default"])
        return space

    def normalize(self, graph: Graph, config: Config) -> Config:
        program = self.program(graph)
        config = {"cluster": 1, "prefetch": False, "held": 0} | config
        threads = 1 << (int(config["threads_per_row"]).bit_length() - 1)
        threads = max(min(threads, 256), across(program, int(config["vector_bytes"])))
        deep, cluster = int(config["rows_per_block"]), int(config["cluster"])
        while deep * threads > 1024:
            deep -= deep // 2
        while deep * threads < 64:
            deep *= 2
        while cluster > 1 and (deep < cluster or deep * cluster >= program.n_cols):
            cluster //= 2
        config.update(threads_per_row=threads, rows_per_block=max(1, deep), cluster=cluster)
        if cluster > 1:
            config["blocks_per_sm"] = 0
        if not any(pas.kept_out for pas in program.passes) and config["keep"] == "shared":
            config["keep"] = "registers"
        packs = -(-program.n_cols // (deep * cluster))
        if not program.kept and packs <= int(config["unroll"]):
            config["keep"] = "registers"  # straight-line either way
        shared = config["keep"] == "shared" and not config["blocks_per_sm"]
        if not shared or not may_copy(self.program(graph, True, bool(config["online"])), config):
            config["prefetch"] = False
        if not config["prefetch"]:
            config["held"] = 0
        config["held"] = max(n for n in HELD if n <= min(int(config["held"]), packs - 1))
        if config["keep"] == "registers":
            config["unroll"] = 1
        if config["prefetch"]:  # up to so many are one group
            while int(config["unroll"]) // 2 >= max(int(config["held"]), packs - int(config["held"])):
                config["unroll"] = int(config["unroll"]) // 2
        while not config["prefetch"] and int(config["unroll"]) > packs:
            config["unroll"] = int(config["unroll"]) // 2
        return config

    def default(self, graph: Graph) -> Config:
        program = self.program(graph)
        usable = vectors(program)
        # The widest vectors of up to 16 bytes that leave enough strips of a 32-byte sector for all multiprocessors.
        fits = [b for b in usable if b <= 16] or usable[-1:]
        bytes_ = next((b for b in fits if kept(program) * b >= lanes(program, b) * 32 * SMS), fits[-1])
        vec = lanes(program, bytes_)
        packs = lines(program, vec)
        config: Config = PLAIN_CUDA | {"vector_bytes": bytes_}
        least = max(1, 32 // bytes_, across(program, bytes_))  # a sector, or a tile
        threads = least
        while threads < 32 and packs >= 2 * threads * SMS * 2:
            threads *= 2
        best = self._shape(program, config, threads)
        while not _held(program, best) and threads > least:
            threads //= 2
            best = self._shape(program, config, threads)
        for cluster in clusters(program):  # what one block cannot hold, several may
            if _held(program, best) or not program.kept:
                break
            wide = max(threads, 128 // bytes_)
            best = config | {"cluster": cluster, "threads_per_row": wide, "rows_per_block": max(1, 512 // wide)}
        if program.kept and not _held(program, best):
            best |= {"keep": "reload", "unroll": 4, "online": has_online(program), "cluster": 1}
        return self.normalize(graph, best)

    def _shape(self, program: Program, config: Config, threads: int) -> Config:
        """``threads`` along the kept axes, and along the reduced ones enough for four to eight places each."""
        room, need = max(1, 1024 // threads), power_of_two(-(-program.n_cols // 8))
        deep = min(room, _deepest(program), max(need, 256 // threads))
        packs = -(-program.n_cols // deep)
        loop = not program.kept and packs > 16
        return config | {
            "threads_per_row": threads,
            "rows_per_block": deep,
            "keep": "reload" if loop else "registers",
            "unroll": 8 if loop else 1,
        }

    def seeds(self, graph: Graph) -> list[Config]:
        program, default = self.program(graph), self.default(graph)
        threads, deep = int(default["threads_per_row"]), int(default["rows_per_block"])
        out: list[Config] = []
        if kept(program) * program.n_cols >= 1 << 20:
            out += copied_seeds(self, graph, default)
        for a, b in ((1, 2.0), (1, 0.5), (2, 0.5), (0.5, 2), (2, 1), (0.5, 1), (4, 0.25)):
            n, m = int(threads * a), int(deep * b)
            if 1 <= n <= 256 and 1 <= m <= _deepest(program) and 64 <= n * m <= 1024:
                out.append(default | {"threads_per_row": n, "rows_per_block": m})
        for b in vectors(program):
            if b <= 16 and b != default["vector_bytes"]:
                scale = int(default["vector_bytes"]) / b
                out.append(default | {"vector_bytes": b, "threads_per_row": max(1, min(256, int(threads * scale)))})
        out += [default | {"cluster": c, "rows_per_block": max(c, deep // c)} for c in clusters(program)]
        if program.kept:
            out.append(default | {"keep": "reload", "unroll": 4, "online": has_online(program)})
            out.append(default | {"keep": "shared", "unroll": 4})
            for c in clusters(program):
                wide = max(threads, 128 // int(default["vector_bytes"]))  # whole lines of memory
                held = default | {"keep": "registers", "unroll": 1, "online": False, "cluster": c}
                held |= {"threads_per_row": wide, "rows_per_block": max(1, 512 // wide)}
                # A cap that lets two blocks of an SM overlap, one loading while the other one stores.
                out += [held, held | {"max_registers": 64}]
                half = max(1, 64 // int(default["vector_bytes"]))  # what memory gives at a time
                if half < wide:
                    strip = {"threads_per_row": half, "rows_per_block": max(1, 512 // half), "max_registers": 64}
                    out.append(held | strip)
        if kept(program) * program.n_cols >= 1 << 20:
            out += [default | {"load_hint": "no_allocate"}, default | {"store_hint": "evict_last"}]
            out.append(default | {"blocks_per_sm": 2})
        made = [self.normalize(graph, c) for c in out]
        return [c for c in made if self.reject(graph, c) is None]

    def shared(self, graph: Graph, config: Config) -> tuple[int, int]:
        """Shared memory of a block in bytes, of its strip and beside it; more than any has where there is no such
        kernel."""
        try:
            source = self._emit(graph, config)[1]
        except Unsupported:
            return 1 << 30, 0
        return int(source.launch["shared"]), -(-shared_bytes(source.body) // 128) * 128

    def reject(self, graph: Graph, config: Config) -> str | None:
        try:
            program, source = self._emit(graph, config)
        except Unsupported as error:
            return str(error)
        cap = int(config["max_registers"])
        why = too_large(int(source.launch["shared"]) + shared_bytes(source.body), source.block, cap)
        return why or too_many_kept(_registers(program, config), source.block, cap)

    def _emit(self, graph: Graph, config: Config, fixed: bool = False) -> tuple[Program, CudaSource]:
        schedule = OuterSchedule.from_config(config)
        program = self.program(graph, schedule.keep != "reload", schedule.online)
        if fixed:
            program = replace(program, dynamic=-1)
        if 0 in program.graph.extents:
            raise Unsupported("an empty axis")
        return program, (CopiedOuter if schedule.prefetch else Outer)(program, schedule).kernel()

    def threads(self, config: Config) -> str:
        t, r = int(config["threads_per_row"]), int(config.get("rows_per_block", 1))
        return f"{plural(t, 'thread')} side by side on the kept axes, {r} along the reduced ones"

    def home(self, graph: Graph, i: int, config: Config) -> str:
        if unit_axis(graph) in graph.values[i].over:
            return "warp"
        if int(config.get("cluster", 1) or 1) > 1:
            return "cluster"
        return "block" if int(config.get("rows_per_block", 1)) > 1 else "thread"  # these share the reduced axes

    def emit(self, graph: Graph, config: Config, sms: int, fixed: bool = False) -> GroupKernels:
        _, source = self._emit(graph, config, fixed)
        return GroupKernels.single(source, graph)


SCHEME = OuterScheme("outer", 50, _program, packs=True)
