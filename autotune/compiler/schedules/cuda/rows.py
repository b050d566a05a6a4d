"""The row-wise and the flat scheme: the choices for a program, the default and the seeds.

``flat`` is the same module with a program that has no reductions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from autotune.compiler.program.passes import build_program, find_moments, once_a_row
from autotune.compiler.program.program import Program, power_of_two
from autotune.compiler.program.rewrites import widened
from autotune.compiler.program.vectors import narrowest, vector_length
from autotune.compiler.schedules.configurations import PLAIN_CUDA, has_online, having, most_kept, narrow
from autotune.compiler.targets.cuda.cubin import too_large
from autotune.compiler.targets.cuda.kernels import GroupKernels
from autotune.compiler.targets.cuda.rows.early import has_early_work
from autotune.compiler.targets.cuda.rows.emitter import CudaEmitter
from autotune.compiler.targets.cuda.rows.flat import emit_flat
from autotune.compiler.targets.cuda.rows.kernel import emit_rows
from autotune.compiler.targets.cuda.rows.prefetch import loads_ahead
from autotune.compiler.targets.cuda.source import CudaSchedule, CudaSource
from autotune.errors import Unsupported, UserError
from autotune.ir.graph import REDUCTIONS, STORAGE_BYTES, Graph
from autotune.task import Config
from autotune.words import plural

if TYPE_CHECKING:
    from autotune.space import Space

REGISTERS_KEPT = 160  # 32-bit words of kept values a thread may hold; beyond it spilling is certain


def _built(graph: Graph, schedule: CudaSchedule) -> Program:
    early = schedule.prefetch and not schedule.blocks_per_sm
    return build_program(
        widened(graph), keep=schedule.keep != "reload", online=schedule.online, moments=schedule.online, early=early
    )


@lru_cache(maxsize=512)
def plain_program(graph: Graph) -> Program:
    """The program that choices are made for. Remembered: each candidate asks for it several times."""
    return build_program(widened(graph))


def one_pass(program: Program) -> bool:
    """Whether there are reductions that ``online`` brings together in one pass: softmax's, or a mean and a variance."""
    return has_online(program) or bool(find_moments(program.graph, program.cols))


CAPS = (32, 40, 48, 56, 64, 80, 96, 128)
"""Register caps, as the search space has them."""


def large(program: Program) -> bool:
    """Enough elements for cache policies of stores and for a persistent grid to matter."""
    return program.n_rows * program.n_cols >= 1 << 20


def may_load_ahead(program: Program, config: Config) -> bool:
    """Whether a kernel of this vector size has loads that it can issue a row ahead."""
    if not vector_length(program, int(config["vector_bytes"])):
        return False
    return bool(loads_ahead(CudaEmitter(program, CudaSchedule.from_config(config))))


def may_begin_early(program: Program, config: Config) -> bool:
    """Whether a kernel of one set of rows a block can do a part of later passes before the first reduction."""
    if program.pointwise or not vector_length(program, int(config["vector_bytes"])):
        return False
    whole = build_program(program.graph, early=True)
    return has_early_work(CudaEmitter(whole, CudaSchedule.from_config(config)))


def clustered(program: Program) -> bool:
    """Whether a row is long enough for several blocks to share it."""
    return not program.pointwise and program.n_cols >= 4096


def vectors(program: Program) -> list[int]:
    """Vector sizes in bytes that divide a row, widest first."""
    return [b for b in (32, 16, 8, 4, 2, 1) if vector_length(program, b)]


def kept_words(program: Program) -> float:
    """32-bit words a row element takes in kept values between two passes, where they are most."""

    def words(i: int) -> float:
        v = program.graph.values[i]
        return 0.5 if v.op == "load" and STORAGE_BYTES[program.graph.inputs[v.slot]] == 2 else 1.0

    return most_kept(program, words)


def too_many_kept(words: float, block: int, cap: int) -> str | None:
    """Why threads of a block cannot hold so many words each for later passes under a cap of registers, or None."""
    if words > REGISTERS_KEPT:
        return f"{words:.0f} registers a thread for kept values"
    if (words + 24) * block > 65536:
        return f"{words:.0f} registers a thread for kept values do not fit {block} threads"
    if cap and words + 16 > cap:
        return f"{words:.0f} kept registers under a cap of {cap}"
    return None


def crowded(program: Program, config: Config) -> str | None:
    """Why ``config`` cannot keep a row in registers, or None."""
    if config["keep"] != "registers" or program.pointwise:
        return None
    threads, vec = int(config["threads_per_row"]), vector_length(program, int(config["vector_bytes"]))
    packs = -(-program.n_cols // (threads * int(config.get("cluster", 1)) * vec))
    block = threads * int(config["rows_per_block"])
    return too_many_kept(kept_words(program) * vec * packs, block, int(config["max_registers"]))


def thread_counts(cols: int, vectors: Iterable[int], least: int, most: int) -> list[int]:
    """Threads that may share a row: powers of two, and other multiples of a warp only where they divide the row's packs
    of one of these ``vectors``: 768 = 192 * 4, 14336 = 448 * 32."""
    powers = [t for t in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) if least <= t <= most] or [most]
    odd = [t for t in (96, 160, 192, 224, 320, 384, 448, 640, 768, 896) if least <= t <= most]
    return powers + [t for t in odd if any(cols % (t * v) == 0 for v in vectors)]


def space_of(program: Program, space: Space) -> Space:
    """``space`` narrowed to what can matter for ``program``."""
    wide = vectors(program)[:3]
    space = narrow(having(space, CudaSchedule), vector_bytes=wide)
    if not clustered(program):
        space = narrow(space, cluster=[1])
    if program.pointwise:
        space = narrow(space, threads_per_row=[64, 128, 256, 512, 1024], rows_per_block=[1], keep=["registers"])
        return narrow(space, online=[False], prefetch=[False])
    cols = program.n_cols
    vec = max(1, vector_length(program, wide[0]))
    most = min(1024, max(1, power_of_two(-(-cols // min(vec, 4)))))
    least = 1
    while least < most and cols / least > 1024:
        least *= 2
    threads = thread_counts(cols, {vector_length(program, b) for b in wide}, least, most)
    rows = [r for r in (1, 2, 4, 8, 16, 32, 64, 128, 256) if r * threads[0] <= 1024]
    if space["keep"].choices == ("shared",):
        raise UserError("keep = shared alone: rows are kept in registers or read again (keep = registers, reload)")
    space = narrow(space, threads_per_row=threads, rows_per_block=rows, keep=["registers", "reload"])
    if not one_pass(program):
        space = narrow(space, online=[False])
    if not large(program):
        space = narrow(space, blocks_per_sm=[0], store_hint=["default"])
    return space


def normalize(program: Program, config: Config) -> Config:
    """The configuration that would in effect run: parameters without effect at their first value, blocks of legal size.

    Many combinations mean the same kernel; measuring one of them is enough.
    """
    c: Config = {"cluster": 1, "prefetch": False} | dict(config)
    t = int(c["threads_per_row"])
    if program.pointwise:
        c.update(
            cluster=1,
            prefetch=False,
            rows_per_block=1,
            keep="registers",
            online=False,
            threads_per_row=min(1024, max(64, t)),
        )
        return c
    rows = int(c["rows_per_block"])
    while rows * t > 1024:
        rows //= 2
    while rows * t < 64:
        rows *= 2
    c["rows_per_block"] = max(1, rows)
    vec = vector_length(program, int(c["vector_bytes"])) or 1
    if int(c["rows_per_block"]) > 1 or t * vec >= program.n_cols or not clustered(program):
        c["cluster"] = 1
    if int(c["cluster"]) > 1:
        c["blocks_per_sm"] = 0
    if c["prefetch"]:
        able = may_load_ahead if int(c["blocks_per_sm"]) else may_begin_early
        c["prefetch"] = c["keep"] == "registers" and able(program, c)
    if c["keep"] == "registers":
        c["unroll"] = 1
    else:
        # A loop cannot have more packs in flight than a thread has.
        packs = max(1, -(-program.n_cols // (t * int(c["cluster"]) * vec)))
        while int(c["unroll"]) > packs:
            c["unroll"] = int(c["unroll"]) // 2
    return c


def _second(program: Program) -> int:
    """Bytes of the narrowest storage type of more than one byte among the full-size tensors; 1 if there is none."""
    g = program.graph
    loads = [v for i, v in enumerate(g.values) if v.op in ("load", "gather") and program.domain(i) == "full"]
    sizes = [STORAGE_BYTES[g.inputs[v.slot]] for v in loads] + [STORAGE_BYTES[o.dtype] for o in g.outputs if o.axes]
    return min((size for size in sizes if size > 1), default=1)


def _even(program: Program, vec: int) -> list[int]:
    """Threads a row, no power of two and 64 to 256, that have one to four packs each."""
    found = [divmod(program.n_cols, vec * packs) for packs in (1, 2, 3, 4)]
    return [n for n, rest in found if not rest and 64 <= n <= 256 and n % 32 == 0 and n & (n - 1)]


def default(program: Program) -> Config:
    """A schedule from rules of thumb: 16-byte accesses, 16 to 32 elements a thread, at least 128 threads a block."""
    usable = vectors(program)
    size = narrowest(program)
    bytes_ = 16 if 16 in usable else usable[0]
    if size == 4 and 16 not in usable:
        bytes_ = usable[0]
    if size == 1 and not program.pointwise:  # masks beside wider tensors: these are read in 16 bytes
        wide = usable[:3]  # as the space has them
        bytes_ = next((b for b in wide if b <= 16 // _second(program)), wide[-1])
    vec = vector_length(program, bytes_)
    base: Config = PLAIN_CUDA | {"threads_per_row": 256, "vector_bytes": bytes_}
    if program.pointwise:
        return base | {"unroll": 2}
    per_thread = max(vec, 16)
    t = min(1024, max(1, power_of_two(-(-program.n_cols // per_thread))))
    if program.n_rows * t < 132 * 1024:  # few rows: more threads on each
        t = min(1024, max(t, power_of_two(-(-program.n_cols // vec))))
    even = _even(program, vec)
    if program.n_cols % (t * vec) and even:  # no thread without elements, rather than a power of two
        t = min(even, key=lambda n: abs(n - t))
    base["threads_per_row"] = t
    base["rows_per_block"] = max(1, 128 // t)
    packs = -(-program.n_cols // (t * vec))
    if packs > 32 or crowded(program, base):
        base.update(keep="reload", unroll=4, online=one_pass(program))
    return normalize(program, base)


def _shared_rows(program: Program, d: Config) -> list[Config]:
    """Clusters whose threads have 8 to 64 elements each, evenly where the row allows it, under a register cap that lets
    several blocks overlap on an SM: while one waits for its cluster, another loads."""
    vec = vector_length(program, int(d["vector_bytes"]))
    out: list[Config] = []
    for cluster in (2, 4, 8):
        found: list[int] = []
        for packs in range(1, 1 + 64 // vec):
            n, rest = divmod(program.n_cols, vec * cluster * packs)
            if not rest and 128 <= n <= 512 and n % 32 == 0 and packs * vec >= 8:
                found.append(n)
        if not found:
            found = [min(512, max(128, power_of_two(-(-program.n_cols // (cluster * 16)))))]
        for n in {min(found), max(found)}:
            words = kept_words(program) * vec * -(-program.n_cols // (vec * cluster * n))
            cap = next((c for c in CAPS if c >= words + 28), 0)
            out.append({"cluster": cluster, "threads_per_row": n, "max_registers": cap})
    return out


def seeds(program: Program) -> list[Config]:
    """Variations of the default along what usually matters most: threads a row, then hints, then a persistent grid."""
    d = default(program)
    out: list[Config] = []
    if program.pointwise:
        return [d | {"unroll": u} for u in (1, 4)] + [d | {"threads_per_row": 512}, d | {"load_hint": "evict_first"}]
    t = int(d["threads_per_row"])
    vec = vector_length(program, int(d["vector_bytes"]))
    odd = t & (t - 1)
    early = [d | {"prefetch": True}]
    if odd:  # no power of two suits the row: what does, before all others
        cap = next((c for c in CAPS if c >= vec * kept_words(program) + 24), 0)
        warps = _warps(program, d)
        out += [*early, *warps[:1], early[0] | {"max_registers": cap}, *warps[1:]]
    for factor in (2, 0.5, 4, 0.25):
        n = int(power_of_two(t) * factor)
        if 1 <= n <= 1024:
            out.append(d | {"threads_per_row": n, "rows_per_block": max(1, 128 // n)})
    out += [d | {"threads_per_row": power_of_two(t)}] if odd else early
    for packs in (1, 2, 3, 4):  # threads that divide the row's packs evenly, where they are not a power of two
        n, rest = divmod(program.n_cols, vec * packs)
        if not rest and 64 <= n <= 1024 and n % 32 == 0 and n & (n - 1):
            even = d | {"threads_per_row": n, "rows_per_block": 1, "keep": "registers"}
            out.append(even)
            if n > 256:  # one such block an SM loads, computes and stores in turn: a cap lets two overlap
                out.append(even | {"max_registers": max(c for c in CAPS if c * 2 * n <= 65536)})
    if clustered(program):
        one: Config = {"rows_per_block": 1, "keep": "registers", "online": one_pass(program)}
        out += [d | c | one for c in _shared_rows(program, d)]
    if one_pass(program):
        out.append(d | {"online": True})
        out.append(d | {"online": True, "keep": "reload", "unroll": 4})
    if large(program):
        out.append(d | {"store_hint": "evict_last"})
        out.append(d | {"load_hint": "streaming", "store_hint": "streaming"})
        out.append(d | {"blocks_per_sm": 4})
        if d["keep"] == "registers":
            out += [d | {"blocks_per_sm": b, "prefetch": True} for b in (2, 4)]
    out.append(d | {"load_hint": "evict_first"})
    out.append(d | {"load_hint": "no_allocate"})
    return [normalize(program, c) for c in out]


def _warps(program: Program, d: Config) -> list[Config]:
    """A row a warp, whose reductions need no barrier, where each lane has a few whole packs of it."""
    vec = vector_length(program, int(d["vector_bytes"]))
    packs, rest = divmod(program.n_cols, 32 * vec)
    words = packs * vec * kept_words(program)
    if rest or packs > 4:
        return []
    one: Config = d | {"threads_per_row": 32, "rows_per_block": 4, "keep": "registers"}
    return [one | {"max_registers": next((c for c in CAPS if c >= words + more), 0)} for more in (56, 40)]


def emit(program: Program, schedule: CudaSchedule) -> CudaSource:
    """The kernel of ``program`` under ``schedule``.

    Raises:
        Unsupported: the schedule does not fit the program.
    """
    if not program.cols:
        raise Unsupported("a group with a single element a row")
    if 0 in program.graph.extents:
        raise Unsupported("an empty axis")
    return (emit_flat if program.pointwise else emit_rows)(program, schedule)


def reject(graph: Graph, config: Config, kind: type[CudaSchedule] = CudaSchedule) -> str | None:
    """Why ``config`` cannot work on a group, found by printing it, which takes a millisecond or two."""
    try:
        schedule = kind.from_config(config)
        program = _built(graph, schedule)
        source = emit(program, schedule)
    except Unsupported as error:
        return str(error)
    why = too_large(int(source.launch["shared"]), schedule.block, schedule.max_registers)
    return why or crowded(program, config)


def scope(threads: int) -> str:
    """Where the parts of so many threads meet."""
    return "thread" if threads <= 1 else "warp" if threads <= 32 else "block"


class RowsScheme:
    """Schemes whose kernels are one pass or several over rows; see ``autotune.compiler.schedules.cuda.Scheme``."""

    packs = True
    kind: type[CudaSchedule] = CudaSchedule

    def __init__(self, name: str, rank: int) -> None:
        self.name, self.rank = name, rank

    def check(self, graph: Graph) -> None:
        if (self.name == "flat") == any(graph.values[i].op in REDUCTIONS for i in graph.live):
            raise Unsupported(f"not a group for the scheme {self.name}")
        program = build_program(graph)
        once_a_row(program)
        if self.name == "flat" and program.passes[0].row_stores:
            raise Unsupported("an output without a column axis in a flat kernel")

    def space_of(self, graph: Graph, space: Space) -> Space:
        return space_of(plain_program(graph), space)

    def default(self, graph: Graph) -> Config:
        return default(plain_program(graph))

    def seeds(self, graph: Graph) -> list[Config]:
        return seeds(plain_program(graph))

    def normalize(self, graph: Graph, config: Config) -> Config:
        return normalize(plain_program(graph), config)

    def reject(self, graph: Graph, config: Config) -> str | None:
        return reject(graph, config, self.kind)

    def threads(self, config: Config) -> str:
        t, r = int(config["threads_per_row"]), int(config.get("rows_per_block", 1))
        if self.name == "flat":
            return f"{t} threads a block"
        return f"{plural(t, 'thread')} a row, {plural(r, 'row')} a block"

    def home(self, graph: Graph, i: int, config: Config) -> str:
        if int(config.get("cluster", 1) or 1) > 1:
            return "cluster"
        return scope(int(config.get("threads_per_row", 256)))

    def emit(self, graph: Graph, config: Config, sms: int, fixed: bool = False) -> GroupKernels:
        schedule = self.kind.from_config(config)
        program = _built(graph, schedule)
        if fixed:
            program = replace(program, dynamic=-1)
        return GroupKernels.single(emit(program, schedule), graph)


SCHEME = RowsScheme("rows", 70)
