"""Fusion on the CPU: the choices for a group, the default and the seeds."""

from __future__ import annotations

from collections.abc import Iterable

from autotune.compiler.program.program import power_of_two
from autotune.compiler.schedules.configurations import narrow
from autotune.compiler.targets.cpu.columns import column_split, group_program, row_wise
from autotune.compiler.targets.cpu.lanes import lanes_suit
from autotune.compiler.targets.cpu.schedule import EARLIER, fetched_bytes, flatten, streamed_bytes
from autotune.device import cpu_isa, usable_processors
from autotune.ir.graph import Graph
from autotune.space import Space
from autotune.task import Config

PARTS = 4
"""Default number of parts per thread."""
LANES = 256
"""Default number of adjacent rows that are processed together, if they are adjacent in memory."""
_BLOCK = 1 << 17
"""Elements that a thread takes at a time: with fewer, the processor's prefetchers restart too often."""
_MANY_ROWS, _LARGE = 1024, 1 << 18
"""Rows and elements from which partial results gain more than their finish costs."""


_LEAST_MOVED = 1 << 18
"""Bytes below which streaming stores and prefetched rows gain nothing: the caches hold them, also for the next
reader."""
_MUCH_MOVED = 1 << 20
"""Bytes from which a search begins with streaming stores and prefetched rows."""
_FETCHED_ROWS = 8
"""Least rows that a thread takes at a time if a search begins with prefetched rows; the last row has no next one."""


def completed(config: Config, names: Iterable[str]) -> Config:
    """A stored configuration in terms of this version's and this machine's choices.

    Args:
        names: the names of the parameters, such as ``groups.0.stream``.
    """

    def last(name: str) -> str:
        return name.rpartition(".")[2]

    out = {n: False for n in names if last(n) in _LATER} | dict(config)
    return out if wide_vectors() else {n: False if last(n) == "wide" else v for n, v in out.items()}


def forms(graph: Graph) -> tuple[bool, bool]:
    """True if the group has a kernel without parts, and one with."""
    return row_wise(graph), column_split(graph) is not None


_MOVES = {"stream": streamed_bytes, "prefetch": fetched_bytes}
_LATER: Config = dict.fromkeys((*_MOVES, "wide"), False)
"""Values of the parameters that configurations of earlier versions lack: those versions did not have them."""


def wide_vectors() -> bool:
    """True if this machine's vectors can be wider than LLVM's default."""
    return "avx512f" in cpu_isa().split()


def moved(graph: Graph, parts: bool) -> dict[str, int]:
    """Bytes that the group's kernel can write by streaming stores, and prefetch; 0 for small amounts."""
    program = group_program(graph, parts)
    lanes = not parts and lanes_suit(program)
    if not parts:
        program = flatten(program)[0]
    found = {name: size(program, lanes) for name, size in _MOVES.items()}
    return {name: size if size >= _LEAST_MOVED else 0 for name, size in found.items()}


def space_of(graph: Graph, space: Space) -> Space:
    """``space`` restricted to choices with an effect for a group on this machine."""
    plain, split = forms(graph)
    space = narrow(space, parts=[p for p in (0, 1, 2, 4, 8) if (split if p else plain)])
    program = group_program(graph, not plain)
    cores = usable_processors()
    space = narrow(space, threads=[t for t in (1, 2, 4, 8, 16, 32, 64, 128) if t <= cores])
    sizes = [moved(graph, parts) for parts, there in ((False, plain), (True, split)) if there]
    for name in _MOVES:
        if not any(size[name] for size in sizes):
            space = narrow(space, **{name: [False]})
    if not wide_vectors():
        space = narrow(space, wide=[False])
    if not plain:
        space = narrow(space, row_block=[1])
    else:
        rows = power_of_two(max(1, program.n_rows))
        least = 16 if lanes_suit(program) else 1
        blocks = [b for b in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if least <= b <= max(1, rows // 2)]
        space = narrow(space, row_block=[*([1] if split and least > 1 else []), *(blocks or [least])])
    cols = max(program.n_cols, group_program(graph, True).n_cols if split else 0)
    tiles = [t for t in (256, 512, 1024, 2048, 4096, 8192, 16384) if t < cols]
    return narrow(space, column_tile=[0, *tiles])


def normalize(graph: Graph, config: Config) -> Config:
    """The equivalent configuration in normal form: a tile at least as long as a row is no tile."""
    c = {"parts": 0} | _LATER | {name: value for name, value in config.items() if name not in EARLIER}
    plain, split = forms(graph)
    if not split:
        c["parts"] = 0
    elif not plain:
        c["parts"] = max(1, int(c["parts"]))
    program = group_program(graph, bool(c["parts"]))
    if c["parts"]:
        c["row_block"] = 1
    elif lanes_suit(program):
        c["row_block"] = max(16, int(c["row_block"]))
    if int(c["column_tile"]) >= program.n_cols:
        c["column_tile"] = 0
    if c["stream"] or c["prefetch"]:
        c |= {name: bool(c[name]) and size > 0 for name, size in moved(graph, bool(c["parts"])).items()}
    if int(c["row_block"]) == 1 and not c["parts"]:
        c["prefetch"] = False  # the next row is another thread's
    c["wide"] = bool(c["wide"]) and wide_vectors()
    return c


def default(graph: Graph) -> Config:
    """All processors, their widest vectors, and blocks of whole rows with some hundred thousand elements; parts for
    many rows."""
    threads = 1 << (usable_processors().bit_length() - 1)
    config: Config = {"row_block": 1, "column_tile": 0, "threads": min(128, threads), "parts": 0}
    config |= {**_LATER, "wide": wide_vectors()}
    plain, split = forms(graph)
    if split:
        program = group_program(graph, True)
        many = program.n_rows >= _MANY_ROWS and program.n_rows * program.n_cols >= _LARGE
        if not plain or many or group_program(graph, False).n_rows < threads:
            return normalize(graph, config | {"parts": PARTS})
    program = group_program(graph, False)
    cols = max(1, program.n_cols)
    block = min(512, power_of_two(max(1, _BLOCK // cols)))
    while block > 1 and 4 * block * threads > program.n_rows:
        block //= 2
    if lanes_suit(program):
        block = min(LANES, power_of_two(-(-program.n_rows // threads)))
    tile = 4096 if program.pointwise and program.n_rows == 1 and cols > 4096 else 0
    return normalize(graph, config | {"row_block": block, "column_tile": tile})


def seeds(graph: Graph) -> list[Config]:
    """Variations of the default: other moves, vectors, row blocks, parts and tiles, one thread."""
    d = default(graph)
    program = group_program(graph, bool(d["parts"]))
    plain, split = forms(graph)
    out: list[Config] = []
    much = [name for name, size in moved(graph, bool(d["parts"])).items() if size >= _MUCH_MOVED]
    long: Config = {}
    if not d["parts"]:
        most = max(1, power_of_two(program.n_rows) // 2)
        long = {"row_block": max(int(d["row_block"]), min(_FETCHED_ROWS, most))}
    if len(much) > 1:
        out.append(d | long | dict.fromkeys(much, True))
    out += [d | (long if name == "prefetch" else {}) | {name: True} for name in much]
    if d["wide"]:
        out.append((out[0] if out else d) | {"wide": False})
    if d["parts"]:
        out += [d | {"parts": p} for p in (1, 8)]
        if plain:
            rows = group_program(graph, False).n_rows
            out.append(d | {"parts": 0, "row_block": min(LANES, max(16, power_of_two(rows) // 2))})
    else:
        block = int(d["row_block"])
        out += [d | {"row_block": max(1, block // 4)}, d | {"row_block": min(512, block * 4)}]
        if split:
            out.append(d | {"parts": PARTS})
    out += [d | {"column_tile": t} for t in (1024, 4096) if t < program.n_cols]
    if int(d["threads"]) > 1:
        out.append(d | {"threads": 1})
    return [normalize(graph, c) for c in out]


def reject(graph: Graph, config: Config) -> str | None:
    """The reason why ``config`` cannot work on a group, or None."""
    plain, split = forms(graph)
    if int(config.get("parts", 0)) and not split:
        return "no reductions over all rows to be cut into parts"
    if not int(config.get("parts", 0)) and not plain:
        return "reductions over rows and over columns have a kernel in parts only"
    return None
