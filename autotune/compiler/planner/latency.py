"""The latency-evaluator: predicted time of a group's schedule, in a fraction of a millisecond and without compiling.

FusionStitching (arXiv 2009.10924, section 4.3) ranks schedules by ``L = N_wave * L_warp`` with ``L_warp =
N_instruction * CPI``. The number of waves follows from the occupancy, which registers and shared memory limit. Current
kernels are mostly memory-bound, so three times are estimated, and the longest counts. Other blocks of an SM hide the
second: half of it counts if one block is resident, a quarter if two are.

* *memory*: Bytes over the bandwidth that the loads in flight can reach (Little's law: too few warps, or too narrow
  loads, leave it idle), and the time of shared memory for kept values.
* *issue*: Instructions over the issue rate, which is lower if few warps are resident or lanes of a row are idle.
* *latency*: Rows one after the other on an SM, each waiting for its loads and its reductions.

Registers are estimated from the program (values kept between passes, loads in flight). Measurements of a workload scale
the predictions before use (``autotune.tuner.seeds``), so only their order matters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from autotune.compiler.planner.cost import Costs, Figures
from autotune.compiler.program.columns import main_program, split_columns
from autotune.compiler.program.passes import build_program
from autotune.compiler.program.program import Program
from autotune.compiler.program.rewrites import cut_everything, widened
from autotune.compiler.program.scattered import scattered
from autotune.compiler.program.vectors import tiling, vector_length
from autotune.compiler.schedules.cuda import scheme_of
from autotune.compiler.schedules.cuda.columns import TWO_KERNELS, accumulators
from autotune.compiler.schedules.cuda.rows import kept_words
from autotune.compiler.schedules.cuda.scatter import blocks_of, place_bytes
from autotune.compiler.targets.cuda.compile import SmLimits, limits
from autotune.compiler.targets.cuda.scatter import FLIGHT, MANY, MOST_PACKS, MOST_SORTED
from autotune.errors import Unsupported
from autotune.ir.graph import STORAGE_BYTES, Graph
from autotune.task import Choice

Schedule = Mapping[str, Choice]

_BASE_REGISTERS = 22
_CLOCK_GHZ = 1.7
_ISSUE = 128.0  # Lanes that an SM issues in a cycle.
_LATENCY_US = 0.75  # Latency of a load from memory, on a busy device.
_REDUCE_US = 0.06, 0.35, 1.2  # Reductions over a warp, over a block, over a cluster.
_SHARED_BYTES = 128.0  # Bytes that an SM moves to or from shared memory in a cycle.
_BESIDE = 0.5  # Share of the second longest time that one block alone does not hide.
_OVERLAP = 0.2  # The same share for kernels whose blocks are not counted.


@dataclass(frozen=True)
class Work:
    """The work of a schedule's threads. ``row_us`` is the latency of one row."""

    threads: int
    rows: float  # Total number of sets of rows that blocks process.
    registers: float
    shared: float
    in_flight: float  # bytes a thread has in flight
    lanes: float  # share of the lanes with elements
    row_us: float
    rereads: float  # times that inputs are read again, from the cache if it holds them
    packs: float
    shared_words: float = 0.0  # 32-bit words that an element of a row moves to and from shared memory


def predict_cuda(graph: Graph, config: Schedule, figures: Figures, target: str) -> float | None:
    """Microseconds of a single group under a schedule, with its launch; None for schemes without a model.

    Args:
        graph: the group's canonical graph.
        config: parameters of ``search_spaces/fusion.toml``, [cuda].
    """
    name = scheme_of(graph).name
    if name == "scatter":
        return _scattered(graph, config, figures, limits(target))
    if name not in ("flat", "rows", *TWO_KERNELS, "transpose"):
        return None
    found = _program(graph, name, config["keep"] != "reload", bool(config["online"]))
    if found is None:
        return None
    program, extra = found
    work = _tiled(graph, config) if name == "transpose" else _work(program, config, extra)
    if work is None:
        return None
    us = _time(graph, program, config, work, figures, limits(target))
    return figures.first_us + us + (figures.next_us + 1.5 if name in TWO_KERNELS else 0.0)


@lru_cache(maxsize=512)
def _program(graph: Graph, scheme: str, keep: bool, online: bool) -> tuple[Program, float] | None:
    """The program, and 32-bit accumulators per element of a row."""
    try:
        if scheme not in TWO_KERNELS:
            return build_program(widened(graph), keep=keep, online=online), 0.0
        program = main_program(split_columns(widened(cut_everything(graph) or graph)), keep=keep, online=online)
        return program, float(accumulators(program, 1, 1))
    except Unsupported:
        return None


class _Shape(NamedTuple):
    """Properties of a program: inputs that vary over the columns, their mean bytes an element, walks, reductions."""

    inputs: int
    bytes: float
    walks: int
    reductions: int


@lru_cache(maxsize=512)
def _shape(program: Program) -> _Shape:
    graph, cols = program.graph, set(program.cols)
    across = {v.slot for v in graph.values if v.op == "load" and not cols.isdisjoint(v.axes)}
    widths = [STORAGE_BYTES[graph.inputs[slot]] for slot in sorted(across)] or [4]
    reductions = sum(bool(p.reduce or p.online) for p in program.passes)
    return _Shape(len(widths), sum(widths) / len(widths), sum(p.walks for p in program.passes), reductions)


def _work(program: Program, config: Schedule, accumulators: float) -> Work | None:
    t, per_block = int(config["threads_per_row"]), int(config["rows_per_block"])
    cluster = int(config.get("cluster", 1))  # blocks that share a row
    vec = vector_length(program, int(config["vector_bytes"]))
    if not vec:
        return None
    threads = t * per_block
    inputs, each, passes, reductions = _shape(program)
    flat = program.pointwise and not accumulators
    cols = float(program.n_cols)
    packs = 1.0 if flat else math.ceil(cols / (t * cluster * vec))
    lanes = 1.0 if flat else cols / (packs * t * cluster * vec)
    unroll = int(config["unroll"])
    kept = kept_words(program) if config["keep"] != "reload" else 0.0
    held = kept if config["keep"] == "registers" else 0.0
    whole = bool(held or accumulators)  # a thread has its part of a row in registers
    resident = packs if whole else unroll if flat else min(packs, unroll)
    ahead = resident
    if config["keep"] == "registers" and not flat:  # packs whose elements have registers before they are used
        ahead = min(packs, 2) if whole else packs
    registers = _BASE_REGISTERS + held * vec * packs + accumulators * vec * (packs if not flat else unroll)
    registers += min(inputs, 6) * vec * each / 4 * ahead
    reductions = 0 if flat else reductions
    hop = _REDUCE_US[0] if t <= 32 else _REDUCE_US[1]
    hop = _REDUCE_US[2] if cluster > 1 else hop
    again = 0.0 if config["keep"] != "reload" else max(0.0, passes - 1.0)
    first_us = _LATENCY_US * (0.4 if config.get("prefetch") and config["blocks_per_sm"] else 1.0)
    row_us = max(1.0, packs / resident) * (first_us + again * _LATENCY_US) + reductions * hop
    rows = program.n_rows * cols / (threads * vec * unroll) if flat else program.n_rows / per_block * cluster
    words = kept if config["keep"] == "shared" else 0.0
    shared = words * 4 * cols * per_block / cluster
    in_flight = resident * vec * each * min(inputs, 4)
    return Work(threads, max(1.0, rows), registers, shared, in_flight, lanes, row_us, again, packs, 2.0 * words)


def _tiled(graph: Graph, config: Schedule) -> Work:
    """The work of a tiled kernel: a thread has its share of a tile of all inputs in flight at a time."""
    t, side, threads = tiling(graph), int(config["tile"]), int(config["threads_per_row"])
    share = side * side / threads
    widths = [STORAGE_BYTES[d] for d in graph.inputs] or [4]
    lines = {a: math.ceil(graph.extents[a] / side) for a in (t.x, t.y)}
    filled = math.prod(graph.extents[a] / (n * side) for a, n in lines.items())
    tiles = math.prod(lines.values()) * t.program.n_rows / graph.extents[t.y]
    in_flight = share * sum(widths[:4])
    shared = 4.0 * side * (side + 1) * max(len(t.loads), len(t.stores))
    registers = _BASE_REGISTERS + share + in_flight / 4
    return Work(threads, tiles, registers, shared, in_flight, filled, _LATENCY_US + _REDUCE_US[1], 0.0, 1.0)


def _time(
    graph: Graph, program: Program, config: Schedule, work: Work, figures: Figures, sm: SmLimits
) -> float:  # fmt: skip
    cap = int(config["max_registers"]) or min(255, sm.registers // max(work.threads, 32) // 8 * 8)
    registers = min(max(work.registers, 24.0), cap)
    spilled = max(0.0, work.registers - cap)
    blocks = min(
        sm.threads // work.threads,
        int(sm.registers // (registers * work.threads)),
        int(sm.shared // (work.shared + 1024)),
        sm.blocks,
    )
    if blocks < 1:
        return math.inf
    persistent = int(config["blocks_per_sm"])
    if persistent:
        blocks = min(blocks, persistent)
    sets = work.rows / figures.units
    resident = min(float(blocks), max(sets, 1.0))
    waves = max(sets / blocks, 1e-9)
    tail = math.ceil(waves) / waves if waves > 1 else 1.0
    tail = 1.0 + (tail - 1.0) * (0.8 if persistent else 0.5)
    busy = min(1.0, work.rows / figures.units)  # fewer blocks than SMs leave SMs idle
    total, read, light, heavy = _costs(graph, figures)
    flying = resident * work.threads * work.in_flight * figures.units * busy
    row_bytes = total / max(program.n_rows, 1) * min(resident * figures.units, program.n_rows)
    again = figures.l2_gbs if row_bytes < figures.l2_mib * 2**20 * 0.6 else figures.copy_gbs
    # Bandwidth, or the part of it that the bytes in flight can use by Little's law.
    memory = math.hypot(total / figures.copy_gbs / 1e3, total * _LATENCY_US / max(flying, 1.0)) * tail
    memory += work.rereads * read / again / 1e3
    memory *= 1.0 + spilled / 32.0
    shared_bytes = 4.0 * work.shared_words * program.n_rows * program.n_cols
    memory += shared_bytes / (_SHARED_BYTES * _CLOCK_GHZ * 1e3 * figures.units * busy)
    warps = resident * work.threads / 32
    rate = _ISSUE * _CLOCK_GHZ * 1e3 * figures.units * min(1.0, warps / 12.0) * busy
    issued = (light * (1.0 + 0.5 * work.rereads) + heavy * (1.0 + work.rereads)) / max(work.lanes, 0.05)
    issue = issued / rate * tail
    latency = sets / max(resident, 1e-9) * work.row_us if not program.pointwise else work.row_us
    longest, second = sorted((memory, issue, latency), reverse=True)[:2]
    return longest + _BESIDE / resident * second


def _scattered(graph: Graph, config: Schedule, figures: Figures, sm: SmLimits) -> float:
    """Microseconds of an index-add, under the assumption of evenly distributed indices.

    It counts the bytes moved, the indices that every block reads from the cache, and successive blocks of an SM.
    """
    s = scattered(graph)
    threads, match = int(config["threads_per_row"]) * int(config["rows_per_block"]), int(config["rows_per_block"])
    owned, vec = int(config["owned"]), max(1, s.vector(int(config["vector_bytes"])))
    groups, chunks = blocks_of(s, config)
    blocks = float(groups * chunks)
    cap = int(config["max_registers"]) or min(40 + 4 * vec * min(4, int(config["unroll"])), sm.registers // threads)
    steps = sum(math.ceil(one.n_tokens / (threads * one.place_vector * MOST_PACKS)) for one in s.sums)
    shared = 4.0 * (threads * (4 * MOST_PACKS + 2) + len(s.sums) * min(MOST_SORTED, s.n_tokens))
    fit = min(sm.threads // threads, int(sm.registers // (cap * threads)), int(sm.shared // (shared + 1024)), sm.blocks)
    if fit < 1:
        return math.inf
    busy = min(1.0, blocks / figures.units)
    resident = min(float(fit), max(1.0, blocks / figures.units))
    terms = s.n_tokens / s.n_destinations  # of a destination
    alone = owned > 1 and terms <= MANY * match
    turns = math.ceil(owned / match) * math.ceil(terms / 2) if alone else terms / (match * FLIGHT) * owned
    turns += math.ceil(owned / match / int(config["unroll"])) * (0.4 if config.get("prefetch") else 1.0)
    scans = steps * (1 if alone else owned)
    block_us = scans * (_LATENCY_US + 2 * _REDUCE_US[1]) + turns * _LATENCY_US + 2 * _REDUCE_US[1]
    latency = blocks / (figures.units * busy * resident) * block_us
    total, _, light, heavy = _costs(graph, figures)
    each = max(1, owned // match) if alone else FLIGHT
    each = each if config.get("prefetch") or not alone else min(int(config["unroll"]), each)
    in_flight = resident * threads * vec * s.unit * each
    memory = math.hypot(total / figures.copy_gbs / 1e3, total * _LATENCY_US / (in_flight * figures.units * busy))
    memory += blocks * place_bytes(s) * (1 if alone else owned) / figures.l2_gbs / busy / 1e3
    lanes = s.n_cols / (
        math.ceil(s.n_cols / (int(config["threads_per_row"]) * vec)) * int(config["threads_per_row"]) * vec
    )
    rate = _ISSUE * _CLOCK_GHZ * 1e3 * figures.units * busy
    issue = ((light + heavy) / lanes + 8.0 * blocks * s.n_tokens * (1 if alone else owned)) / rate
    longest, second = sorted((memory, issue, latency), reverse=True)[:2]
    return figures.first_us + longest + _OVERLAP * second


@lru_cache(maxsize=512)
def _costs(graph: Graph, figures: Figures) -> tuple[float, float, float, float]:
    """(bytes, bytes read, light and heavy instructions) of a group."""
    costs = Costs(graph, figures)
    cost = costs.group(graph.live, (), (), range(len(graph.outputs)))
    read = sum(costs.loaded[i] for i in graph.live if graph.values[i].op in ("load", "gather"))
    moved = sum(costs.size[i] for i in graph.live if graph.values[i].op in ("load", "gather"))
    moved += sum(float(graph.size(o.axes)) for o in graph.outputs)
    return cost.bytes, read, cost.light + 1.5 * moved, cost.heavy
