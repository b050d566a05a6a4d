"""The row-wise scheme: the choices for a program, the default and the seeds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from autotune.compiler.program.passes import build_program, find_moments, once_a_row
from autotune.compiler.program.program import Program, power_of_two
from autotune.compiler.program.rewrites import widened
from autotune.compiler.program.vectors import narrowest, vector_length
from autotune.compiler.schedules.configurations import PLAIN_CUDA, has_online, having, most_kept, narrow
from autotune.compiler.schedules.cuda import CAPS, SMS, Scheme, block_of
from autotune.compiler.targets.cuda.rows.emitter import CudaEmitter
from autotune.compiler.targets.cuda.rows.kernel import RowKernel, is_too_long
from autotune.compiler.targets.cuda.source import CudaSchedule, CudaSource
from autotune.errors import Unsupported, UserError
from autotune.ir.graph import REDUCTIONS, STORAGE_BYTES, Graph
from autotune.space import Space
from autotune.task import Config

REGISTERS_KEPT = 160  # 32-bit words of kept values a thread may hold; beyond it spilling is certain


def _built(graph: Graph, schedule: CudaSchedule) -> Program:
    online = schedule.online
    return build_program(widened(graph), keep=schedule.keep != "reload", online=online, moments=online)


@lru_cache(maxsize=512)
def plain_program(graph: Graph) -> Program:
    """The program for which choices are made, cached because each candidate needs it several times."""
    return build_program(widened(graph))


def one_pass(program: Program) -> bool:
    """True if ``online`` merges reductions into one pass: softmax's, or a mean and a variance."""
    return has_online(program) or bool(find_moments(program.graph, program.cols))


def large(program: Program) -> bool:
    """True if cache policies of stores and a persistent grid matter, by the number of elements."""
    return program.n_rows * program.n_cols >= 1 << 20


def may_prefetch(program: Program, config: Config) -> bool:
    """True if a persistent grid has loads that it can issue a row ahead at this vector size."""
    vector_bytes = int(config["vector_bytes"])
    if not config["blocks_per_sm"] or not vector_length(program, vector_bytes):
        return False
    return _has_issuable(program, vector_bytes)


@lru_cache(maxsize=2048)
def _has_issuable(program: Program, vector_bytes: int) -> bool:
    schedule = CudaSchedule.from_config(PLAIN_CUDA | {"vector_bytes": vector_bytes})
    return bool(CudaEmitter(program, schedule).issuable())


def clustered(program: Program) -> bool:
    """True if a row is long enough for several blocks to share it."""
    return program.n_cols >= 4096


def vectors(program: Program) -> list[int]:
    """Vector sizes in bytes that divide a row, widest first."""
    return [b for b in (32, 16, 8, 4, 2, 1) if vector_length(program, b)]


def default_vector(program: Program) -> int:
    """16 bytes if they divide a row, else the widest vector that does."""
    usable = vectors(program)
    return 16 if 16 in usable else usable[0]


@lru_cache(maxsize=2048)
def kept_words(program: Program) -> float:
    """Most 32-bit words of kept values between two passes, per element of a row."""

    def words(i: int) -> float:
        v = program.graph.values[i]
        return 0.5 if v.op == "load" and STORAGE_BYTES[program.graph.inputs[v.slot]] == 2 else 1.0

    return most_kept(program, words)


def too_many_kept(words: float, block: int, cap: int) -> str | None:
    """The reason why a thread cannot hold ``words`` words for later passes under a register cap, or None."""
    if words > REGISTERS_KEPT:
        return f"{words:.0f} registers a thread for kept values"
    if (words + 24) * block > 65536:
        return f"{words:.0f} registers a thread for kept values do not fit {block} threads"
    if cap and words + 16 > cap:
        return f"{words:.0f} kept registers under a cap of {cap}"
    return None


def crowded(program: Program, config: Config) -> str | None:
    """The reason why ``config`` cannot keep a row in registers, or None."""
    if config["keep"] != "registers":
        return None
    threads, vec = int(config["threads_per_row"]), vector_length(program, int(config["vector_bytes"]))
    packs = -(-program.n_cols // (threads * int(config.get("cluster", 1)) * vec))
    block = threads * int(config["rows_per_block"])
    if is_too_long(program, packs * vec):
        return f"a row is too long for {threads} threads to keep in registers"
    return too_many_kept(kept_words(program) * vec * packs, block, int(config["max_registers"]))


def thread_counts(cols: int, vectors: Iterable[int], least: int, most: int) -> list[int]:
    """Numbers of threads that may share a row: powers of two, and some other multiples of a warp.

    The latter must divide the row's packs for one of these ``vectors``: 768 = 192 * 4, 14336 = 448 * 32.
    """
    powers = [t for t in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) if least <= t <= most] or [most]
    odd = [t for t in (96, 160, 192, 224, 320, 384, 448, 640, 768, 896) if least <= t <= most]
    return powers + [t for t in odd if any(cols % (t * v) == 0 for v in vectors)]


def _even(program: Program, vec: int, most: int) -> list[int]:
    """Numbers of threads per row, at least 64 and no power of two, with one to four packs each."""
    found = [divmod(program.n_cols, vec * packs) for packs in (1, 2, 3, 4)]
    return [n for n, rest in found if not rest and 64 <= n <= most and n % 32 == 0 and n & (n - 1)]


def _cap(words: float) -> int:
    """The smallest register cap that leaves room for ``words``, or none."""
    return next((c for c in CAPS if c >= words), 0)


class RowsScheme(Scheme):
    """Several passes over rows, with reductions along them."""

    name, rank = "rows", 70

    def check(self, graph: Graph) -> None:
        if not any(graph.values[i].op in REDUCTIONS for i in graph.live):
            raise Unsupported("not a group for the scheme rows")
        once_a_row(build_program(graph))

    def space_of(self, graph: Graph, space: Space) -> Space:
        program = plain_program(graph)
        wide = vectors(program)[:3]
        space = narrow(having(space, self.schedule), vector_bytes=wide)
        if not clustered(program):
            space = narrow(space, cluster=[1])
        cols = program.n_cols
        vec = max(1, vector_length(program, wide[0]))
        most = min(1024, max(1, power_of_two(-(-cols // min(vec, 4)))))
        least = 1
        while least < min(most, 256) and cols / least > 1024:
            least *= 2
        threads = thread_counts(cols, {vector_length(program, b) for b in wide}, least, most)
        rows = [r for r in (1, 2, 4, 8, 16, 32, 64, 128, 256) if r * threads[0] <= 1024]
        if space["keep"].choices == ("shared",):
            raise UserError("keep = [shared] is not possible: rows need keep = registers or reload")
        space = narrow(space, threads_per_row=threads, rows_per_block=rows, keep=["registers", "reload"])
        if not one_pass(program):
            space = narrow(space, online=[False])
        if not large(program):
            space = narrow(space, blocks_per_sm=[0], store_hint=["default"], prefetch=[False])
        return space

    def normalize(self, graph: Graph, config: Config) -> Config:
        """Parameters without effect at their first value, blocks of legal size.

        Many combinations give the same kernel; measuring one of them is enough.
        """
        program = plain_program(graph)
        c: Config = {"cluster": 1, "prefetch": False} | dict(config)
        t = int(c["threads_per_row"])
        c["rows_per_block"] = block_of(t, int(c["rows_per_block"]))
        vec = vector_length(program, int(c["vector_bytes"])) or 1
        if int(c["rows_per_block"]) > 1 or t * vec >= program.n_cols or not clustered(program):
            c["cluster"] = 1
        if int(c["cluster"]) > 1:
            c["blocks_per_sm"] = 0
        if c["prefetch"]:
            c["prefetch"] = c["keep"] == "registers" and may_prefetch(program, c)
        if c["keep"] == "registers":
            c["unroll"] = 1
        else:
            # A loop has at most as many packs in flight as a thread has.
            packs = max(1, -(-program.n_cols // (t * int(c["cluster"]) * vec)))
            while int(c["unroll"]) > packs:
                c["unroll"] = int(c["unroll"]) // 2
        return c

    def default(self, graph: Graph) -> Config:
        """16-byte accesses, 16 to 32 elements per thread, at least 128 threads per block."""
        program = plain_program(graph)
        bytes_ = default_vector(program)
        if narrowest(program) == 1:  # masks next to wider tensors: these are read in 16 bytes
            g, wide = program.graph, vectors(program)[:3]  # as the space has them
            loads = [v for i, v in enumerate(g.values) if v.op in ("load", "gather") and program.domain(i) == "full"]
            sizes = [STORAGE_BYTES[g.inputs[v.slot]] for v in loads]
            sizes += [STORAGE_BYTES[o.dtype] for o in g.outputs if o.axes]
            second = min((size for size in sizes if size > 1), default=1)
            bytes_ = next((b for b in wide if b <= 16 // second), wide[-1])
        vec = vector_length(program, bytes_)
        t = min(1024, max(1, power_of_two(-(-program.n_cols // max(vec, 16)))))
        if program.n_rows * t < SMS * 1024:  # few rows: more threads on each
            t = min(1024, max(t, power_of_two(-(-program.n_cols // vec))))
        even = _even(program, vec, 256)
        if program.n_cols % (t * vec) and even:  # no thread without elements, rather than a power of two
            t = min(even, key=lambda n: abs(n - t))
        base: Config = PLAIN_CUDA | {"threads_per_row": t, "rows_per_block": max(1, 128 // t), "vector_bytes": bytes_}
        packs = -(-program.n_cols // (t * vec))
        if packs > 32 or crowded(program, base):
            base.update(keep="reload", unroll=4, online=one_pass(program))
        return self.normalize(graph, base)

    def seeds(self, graph: Graph) -> list[Config]:
        """First threads a row, then hints, then a persistent grid."""
        program, d = plain_program(graph), self.default(graph)
        out: list[Config] = []
        t = int(d["threads_per_row"])
        vec = vector_length(program, int(d["vector_bytes"]))
        if clustered(program) and d["keep"] == "reload" and 2 * program.n_rows < SMS:  # few blocks would be busy
            out += [d | {"cluster": c, "threads_per_row": 512, "rows_per_block": 1} for c in (8, 4)]
        odd = t & (t - 1)
        if odd:  # no power of two suits the row: first the numbers that do
            warps = _warps(program, d)
            cap = {"max_registers": _cap(vec * kept_words(program) + 24)}
            out += [*warps[:1], d | cap, *warps[1:]]
        for factor in (2, 0.5, 4, 0.25):
            n = int(power_of_two(t) * factor)
            if 1 <= n <= 1024:
                out.append(d | {"threads_per_row": n, "rows_per_block": max(1, 128 // n)})
        out += [d | {"threads_per_row": power_of_two(t)}] if odd else []
        for n in _even(program, vec, 1024):
            even = d | {"threads_per_row": n, "rows_per_block": 1, "keep": "registers"}
            out.append(even)
            if n > 256:  # one such block an SM loads, computes and stores in turn: a cap lets two overlap
                out.append(even | {"max_registers": max(c for c in CAPS if c * 2 * n <= 65536)})
        if clustered(program):
            one: Config = {"rows_per_block": 1, "keep": "registers", "online": one_pass(program)}
            out += [d | c | one for c in _shared_rows(program, vec)]
        if one_pass(program):
            out.append(d | {"online": True})
            out.append(d | {"online": True, "keep": "reload", "unroll": 4})
        if large(program):
            out.append(d | {"store_hint": "evict_last"})
            out.append(d | {"load_hint": "streaming", "store_hint": "streaming"})
            out.append(d | {"blocks_per_sm": 4})
            if d["keep"] == "registers":
                out += [d | {"blocks_per_sm": b, "prefetch": True} for b in (2, 4)]
        out += [d | {"load_hint": hint} for hint in ("evict_first", "no_allocate")]
        return [self.normalize(graph, c) for c in out]

    def reject(self, graph: Graph, config: Config) -> str | None:
        why = super().reject(graph, config)
        return why or crowded(_built(graph, self.schedule.from_config(config)), config)

    def source(self, graph: Graph, config: Config, fixed: bool = False) -> CudaSource:
        schedule = self.schedule.from_config(config)
        program = _built(graph, schedule)
        if not program.cols:
            raise Unsupported("a group with a single element a row")
        return RowKernel(replace(program, dynamic=-1) if fixed else program, schedule).source()


def _shared_rows(program: Program, vec: int) -> list[Config]:
    """Clusters whose threads have 8 to 64 elements each, distributed evenly if possible.

    A register cap permits several blocks per SM: while one waits for its cluster, another loads.
    """
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
            out.append({"cluster": cluster, "threads_per_row": n, "max_registers": _cap(words + 28)})
    return out


def _warps(program: Program, d: Config) -> list[Config]:
    """One row per warp, without barriers for reductions, if each lane has a few whole packs of the row."""
    vec = vector_length(program, int(d["vector_bytes"]))
    packs, rest = divmod(program.n_cols, 32 * vec)
    words = packs * vec * kept_words(program)
    if rest or packs > 4:
        return []
    one: Config = d | {"threads_per_row": 32, "rows_per_block": 4, "keep": "registers"}
    return [one | {"max_registers": _cap(words + more)} for more in (56, 40)]


SCHEME = RowsScheme()
