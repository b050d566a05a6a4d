"""The schemes outer and tile: reductions over outer axes, with adjacent threads along the kept axis of unit stride.

The scheme tile also reduces over the unit-stride axis, inside small tiles.

Parameters have the names of the row-wise scheme. ``threads_per_row`` threads are along the kept axes, each with a
vector of adjacent elements. ``rows_per_block`` threads (on each of ``cluster`` blocks) share the reduced axes. A thread
has ``unroll`` indices of the reduced axes in flight. With ``keep = shared`` and ``prefetch``, strips are copied to
shared memory before their walks. Each thread loads the first ``held`` indices into registers instead: see
:mod:`autotune.compiler.targets.cuda.outer.copied`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from autotune.compiler.program.passes import build_program
from autotune.compiler.program.program import Program, power_of_two
from autotune.compiler.program.vectors import NARROWEST_KEPT, narrowest_along, tile_program, unit_axis, vector_along
from autotune.compiler.schedules.configurations import PLAIN_CUDA, has_online, having, most_kept, narrow
from autotune.compiler.schedules.cuda import CAPS, SMS, Scheme
from autotune.compiler.schedules.cuda.rows import too_many_kept
from autotune.compiler.targets.cuda.compile import SmLimits
from autotune.compiler.targets.cuda.device import shared_bytes
from autotune.compiler.targets.cuda.outer.copied import CopiedOuter
from autotune.compiler.targets.cuda.outer.kernel import Outer
from autotune.compiler.targets.cuda.outer.lanes import Lanes
from autotune.compiler.targets.cuda.source import CudaSource, OuterSchedule
from autotune.errors import Unsupported
from autotune.ir.graph import REDUCTIONS, Graph
from autotune.space import Space
from autotune.task import Config
from autotune.words import plural

HELD = (0, 1, 2, 3, 4, 6, 8)
"""Indices of a strip that a thread may hold in registers, in addition to those in shared memory."""
SYSTEM = 1024
"""Bytes of shared memory that the system reserves for each block."""
WORK = 20, 4
"""Registers of a thread in addition to its held values: in total, and per lane (running maxima, sums, temporaries)."""
MOST = SmLimits()


def kept_words(program: Program, vec: int) -> float:
    """Most 32-bit registers, per index of the reduced axes, of values that are kept for a later pass."""
    x = unit_axis(program.graph)

    def words(i: int) -> float:
        v = program.graph.values[i]
        half = v.op == "load" and vec > 1 and program.graph.inputs[v.slot] in ("float16", "bfloat16")
        return (vec if x in v.axes else 1) * (0.5 if half else 1.0)

    return most_kept(program, words)


def lanes(program: Program, vector_bytes: int) -> int:
    """Adjacent elements that a thread takes at a time; 0 if their number does not divide the axis."""
    return vector_along(program.graph, unit_axis(program.graph), vector_bytes)


def kept_elements(program: Program) -> int:
    """Elements along the axes that packs cover: the kept ones, and in a tile the unit-stride one."""
    x = unit_axis(program.graph)
    return program.n_rows * (1 if x in program.rows else program.graph.extents[x])


def across(program: Program, vector_bytes: int) -> int:
    """Number of threads that must be adjacent: those of one tile."""
    x, vec = unit_axis(program.graph), lanes(program, vector_bytes)
    return 1 if x in program.rows or not vec else program.graph.extents[x] // vec


def clusters(program: Program) -> list[int]:
    """Numbers of blocks that may share a strip; each block has at least 32 indices of the reduced axes."""
    return [c for c in (2, 4, 8) if c * 32 <= program.n_cols]


def vectors(program: Program) -> list[int]:
    """Vector sizes in bytes that divide the axis of packs, widest first, at most four.

    A tile is at most a warp wide.
    """
    return [b for b in (32, 16, 8, 4, 2, 1) if lanes(program, b) and across(program, b) <= 32][:4]


def crowded(program: Program) -> bool:
    """True if values kept for later passes take most of a large device's shared memory, or more."""
    return 4 * kept_words(program, 1) * kept_elements(program) * program.n_cols > MOST.shared * SMS / 2


def may_copy(program: Program, config: Config) -> bool:
    """True if there are loads that can be copied to shared memory ahead, with vectors of this size."""
    return _has_copyable(program, int(config["vector_bytes"]))


@lru_cache(maxsize=2048)
def _has_copyable(program: Program, vector_bytes: int) -> bool:
    schedule = OuterSchedule.from_config(PLAIN_CUDA | {"vector_bytes": vector_bytes})
    try:
        return bool(Lanes(program, schedule).copyable())
    except Unsupported:
        return False


@lru_cache(maxsize=256)
def _program(graph: Graph, keep: bool, online: bool) -> Program:
    program = build_program(graph, keep=keep, online=online)
    x = unit_axis(graph)
    if program.pointwise:
        raise Unsupported("a group without reductions")
    if x < 0 or x not in program.rows:
        raise Unsupported("reductions over the axis whose elements are neighbours in memory")
    if graph.extents[x] < NARROWEST_KEPT:
        raise Unsupported(f"fewer than {NARROWEST_KEPT} elements on the axis that is kept")
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
    """Registers a thread needs for values that are kept for a later pass."""
    vec = lanes(program, int(config["vector_bytes"]))
    if config["keep"] != "registers":
        return kept_words(program, vec) * int(config.get("held", 0))
    places = int(config["rows_per_block"]) * int(config.get("cluster", 1))
    return kept_words(program, vec) * -(-program.n_cols // places)


def _held(program: Program, config: Config) -> bool:
    """True if a block's registers hold its kept values, with room for computing from them."""
    words, block = _registers(program, config), int(config["threads_per_row"]) * int(config["rows_per_block"])
    # From one pass to the next, the compiler keeps some elements of packed pairs in unpacked form too.
    room = 1.8 if narrowest_along(program.graph, unit_axis(program.graph)) == 2 else 1.25
    return words <= 64 and (room * words + 28) * block <= 65536


class OuterScheme(Scheme):
    """Reductions over axes other than the unit-stride one."""

    name, rank, schedule = "outer", 50, OuterSchedule

    def program(self, graph: Graph, keep: bool = True, online: bool = False) -> Program:
        """A group arranged into passes. Raises Unsupported."""
        return _program(graph, keep, online)

    def check(self, graph: Graph) -> None:
        self.program(graph)

    def space_of(self, graph: Graph, space: Space) -> Space:
        program = self.program(graph)
        usable = vectors(program)
        vec = lanes(program, usable[-1])
        least, most = min(across(program, b) for b in usable), min(256, power_of_two(kept_elements(program) // vec))
        counts, deepest = (1, 2, 4, 8, 16, 32, 64, 128, 256), _deepest(program)
        threads, rows = [t for t in counts if least <= t <= most], [r for r in counts if r <= deepest]
        space = narrow(having(space, OuterSchedule), vector_bytes=usable, threads_per_row=threads, rows_per_block=rows)
        space = narrow(space, cluster=[1, *clusters(program)])
        if not has_online(program):
            space = narrow(space, online=[False])
        if not any(may_copy(program, PLAIN_CUDA | {"vector_bytes": b}) for b in usable):
            space = narrow(space, prefetch=[False], keep=["registers", "reload"])
        if len(space["prefetch"].choices) < 2 or not crowded(program):
            space = narrow(space, held=[0])
        if kept_elements(program) * program.n_cols < 1 << 20:
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
        copies = config["keep"] == "shared" and config["prefetch"] and not config["blocks_per_sm"]
        if not copies or not may_copy(self.program(graph, True, bool(config["online"])), config):
            keep = "reload" if config["keep"] == "shared" else config["keep"]
            config.update(keep=keep, prefetch=False)  # strips are in shared memory only where they are copied there
        packs = -(-program.n_cols // (deep * cluster))
        if not program.kept and packs <= int(config["unroll"]):
            config["keep"] = "registers"  # straight-line either way
        if not config["prefetch"]:
            config["held"] = 0
        config["held"] = max(n for n in HELD if n <= min(int(config["held"]), packs - 1))
        if config["keep"] == "registers":
            config["unroll"] = 1
        if config["prefetch"]:  # at most ``unroll`` packs are one group
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
        bytes_ = next((b for b in fits if kept_elements(program) * b >= lanes(program, b) * 32 * SMS), fits[-1])
        packs = kept_elements(program) // lanes(program, bytes_)
        config: Config = PLAIN_CUDA | {"vector_bytes": bytes_}
        least = max(1, 32 // bytes_, across(program, bytes_))  # a sector, or a tile
        threads = least
        while threads < 32 and packs >= 2 * threads * SMS * 2:
            threads *= 2
        best = self._shape(program, config, threads)
        while not _held(program, best) and threads > least:
            threads //= 2
            best = self._shape(program, config, threads)
        for cluster in clusters(program):  # several blocks of a cluster may hold more than one block can
            if _held(program, best) or not program.kept:
                break
            wide = max(threads, 128 // bytes_)
            best = config | {"cluster": cluster, "threads_per_row": wide, "rows_per_block": max(1, 512 // wide)}
        if program.kept and not _held(program, best):
            best |= {"keep": "reload", "unroll": 4, "online": has_online(program), "cluster": 1}
        deep = int(best["rows_per_block"])
        return self.first_accepted(graph, [best | {"rows_per_block": max(1, deep // n)} for n in (1, 2, 4)])

    def _shape(self, program: Program, config: Config, threads: int) -> Config:
        """``threads`` along the kept axes, and enough along the reduced ones for four to eight indices each."""
        room, need = max(1, 1024 // threads), power_of_two(-(-program.n_cols // 8))
        deep = min(room, _deepest(program), max(need, 256 // threads))
        packs = -(-program.n_cols // deep)
        loop = not program.kept and packs > 16
        walk: Config = {"keep": "reload", "unroll": 8} if loop else {"keep": "registers", "unroll": 1}
        return config | walk | {"threads_per_row": threads, "rows_per_block": deep}

    def seeds(self, graph: Graph) -> list[Config]:
        program, default = self.program(graph), self.default(graph)
        threads, deep = int(default["threads_per_row"]), int(default["rows_per_block"])
        out: list[Config] = []
        if kept_elements(program) * program.n_cols >= 1 << 20:
            out += self._copied(graph, default)
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
            for c in clusters(program):
                wide = max(threads, 128 // int(default["vector_bytes"]))  # whole lines of memory
                held = default | {"keep": "registers", "unroll": 1, "online": False, "cluster": c}
                held |= {"threads_per_row": wide, "rows_per_block": max(1, 512 // wide)}
                # A cap that lets two blocks of an SM overlap, one loading while the other one stores.
                out += [held, held | {"max_registers": 64}]
                half = max(1, 64 // int(default["vector_bytes"]))  # bytes per memory access
                if half < wide:
                    strip = {"threads_per_row": half, "rows_per_block": max(1, 512 // half), "max_registers": 64}
                    out.append(held | strip)
        if kept_elements(program) * program.n_cols >= 1 << 20:
            out += [default | {"load_hint": "no_allocate"}, default | {"store_hint": "evict_last"}]
            out.append(default | {"blocks_per_sm": 2})
        made = [self.normalize(graph, c) for c in out]
        return [c for c in made if self.reject(graph, c) is None]

    # ---- seeds whose strips are copied to shared memory ahead of their walks ----------------------------------------
    #
    # Either blocks take turns on an SM, some loading while others store, or everything is on the device at the same
    # time: all is read at once and then written at once. What counts is how many blocks fit an SM, by shared memory and
    # by registers.

    def _copied(self, graph: Graph, default: Config) -> list[Config]:
        """Variations of ``default`` whose strips are copied ahead; none if nothing can be copied."""
        program = self.program(graph)
        wide = next((b for b in vectors(program) if b <= 16), 0)
        default = default | {"vector_bytes": wide, "keep": "shared", "prefetch": True, "online": False, "unroll": 2}
        default |= {"cluster": 1, "blocks_per_sm": 0}
        if not wide or not may_copy(program, default):
            return []
        return (self._whole(graph, default) if crowded(program) else []) + self._in_turn(graph, default)

    def _in_turn(self, graph: Graph, default: Config) -> list[Config]:
        """At least three blocks per SM, under a register cap that permits them, in the smallest clusters with strips
        that small."""
        program, wide = self.program(graph), int(default["vector_bytes"])
        out: list[Config] = []
        for strip in (64, 32, 128):  # bytes
            t = max(1, strip // wide, across(program, wide))
            shape = default | {"threads_per_row": t, "rows_per_block": max(1, 256 // t)}
            for cluster in (1, *clusters(program)):
                config = shape | {"cluster": cluster}
                fit = MOST.shared // (sum(self.shared(graph, config)) + SYSTEM)
                if fit >= 3:
                    cap = max((c for c in CAPS if c * 256 * fit <= MOST.registers), default=0)
                    out.append(config | {"max_registers": cap if cap >= 40 else 0})
                    break
        return out + ([out[0] | {"online": True}] if out and has_online(program) else [])

    def _whole(self, graph: Graph, default: Config) -> list[Config]:
        """Strips that are all on the device at the same time, or in two waves.

        A part of each strip is in registers if shared memory alone is too small. So no SM waits for a last, short wave.
        But no strip hides the computation of another one, so the maximum and the sum of exponentials are computed
        online, while copies arrive.
        """
        program, wide, online = self.program(graph), int(default["vector_bytes"]), has_online(self.program(graph))
        vec = lanes(program, wide)
        default = default | {"online": online, "unroll": 2 if vec > 4 else 4}
        shapes = [(64, 256), (64, 512), (32, 256), (128, 256)]  # bytes, threads
        if vec <= 4:  # a block of all threads that 64 registers allow: with more lanes it spills
            shapes.insert(1, (64, 1024))
        for waves in (1, 2):
            out: list[Config] = []
            for strip, threads in shapes:
                t = max(1, strip // wide, across(program, wide))
                shape = default | {"threads_per_row": t, "rows_per_block": max(1, threads // t)}
                fitting = (self._fitting(graph, shape | {"cluster": c}, waves) for c in (1, *clusters(program)))
                out += [c for c in fitting if c is not None][:1]
            if out:
                first = out[0]
                others = [first | {"load_hint": "prefetch"}]  # adjacent strips are read at the same time
                twice = self._fitting(graph, first | {"online": False, "held": 0}, waves) if online else None
                return [first, *others, *([twice] if twice else []), *out[1:]]
        return []

    def _fitting(self, graph: Graph, config: Config, waves: int) -> Config | None:
        """``config`` with enough values in registers, under a cap, to run all blocks in ``waves``.

        None if that is impossible, or would leave many slots for blocks empty.
        """
        program = self.program(graph, True, bool(config["online"]))
        vec = lanes(program, int(config["vector_bytes"]))
        threads = int(config["threads_per_row"]) * int(config["rows_per_block"])
        blocks = -(-(kept_elements(program) // vec) // int(config["threads_per_row"])) * int(config["cluster"])
        each = -(-blocks // (SMS * waves))  # blocks an SM
        if not 1024 <= each * threads <= MOST.threads or each > MOST.blocks or 10 * blocks < 7 * each * SMS * waves:
            return None
        packs = -(-program.n_cols // (int(config["rows_per_block"]) * int(config["cluster"])))
        strip, static = self.shared(graph, config)
        room = min(MOST.shared // each // 128 * 128 - SYSTEM, MOST.shared_block) - static
        over = packs - room // max(1, strip // packs)
        held = min((n for n in HELD if n >= over), default=packs)
        cap = max((c for c in CAPS if c * threads * each <= MOST.registers), default=0)
        if held >= packs or held * kept_words(program, vec) + WORK[0] + WORK[1] * vec > cap:
            return None
        return config | {"held": held, "max_registers": cap}

    def shared(self, graph: Graph, config: Config) -> tuple[int, int]:
        """Bytes of a block's shared memory, for its strip and for the rest; without such a kernel, more than any SM
        has."""
        try:
            source = self.source(graph, config)
        except Unsupported:
            return 1 << 30, 0
        return int(source.launch["shared"]), -(-shared_bytes(source.body) // 128) * 128

    def reject(self, graph: Graph, config: Config) -> str | None:
        block, cap = int(config["threads_per_row"]) * int(config["rows_per_block"]), int(config["max_registers"])
        why = super().reject(graph, config)
        return why or too_many_kept(_registers(self._arranged(graph, config), config), block, cap)

    def _arranged(self, graph: Graph, config: Config) -> Program:
        return self.program(graph, config["keep"] != "reload", bool(config["online"]))

    def source(self, graph: Graph, config: Config, fixed: bool = False) -> CudaSource:
        schedule, program = OuterSchedule.from_config(config), self._arranged(graph, config)
        kind = CopiedOuter if schedule.prefetch else Outer
        return kind(replace(program, dynamic=-1) if fixed else program, schedule).source()

    def threads(self, config: Config) -> str:
        t, r = int(config["threads_per_row"]), int(config.get("rows_per_block", 1))
        return f"{plural(t, 'thread')} side by side on the kept axes, {r} along the reduced ones"

    def home(self, graph: Graph, i: int, config: Config) -> str:
        if unit_axis(graph) in graph.values[i].over:
            return "warp"
        if int(config.get("cluster", 1) or 1) > 1:
            return "cluster"
        return "block" if int(config.get("rows_per_block", 1)) > 1 else "thread"  # these share the reduced axes


class TileScheme(OuterScheme):
    """Reductions over the unit-stride axis and others over outer axes, both inside small tiles."""

    name, rank, packs = "tile", 60, False

    def program(self, graph: Graph, keep: bool = True, online: bool = False) -> Program:
        program = tile_program(graph, keep, online)
        if not vectors(program):
            raise Unsupported("tiles that no vectors divide")
        return program


OUTER, TILE = OuterScheme(), TileScheme()
