"""Fusion on the CPU: the choices for a program, the default and the seeds."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from autotune.codegen.program import Program, build_program, power_of_two
from autotune.fusion.schedules import has_online, narrow
from autotune.task import Config

if TYPE_CHECKING:
    from autotune.codegen.kernels import GroupKernels
    from autotune.fusion.graph import Graph
    from autotune.tuner.space import Space


def processors() -> int:
    """Processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def space_of(program: Program, space: Space) -> Space:
    """``space`` narrowed to what can matter for ``program`` on this machine."""
    cores = processors()
    space = narrow(space, "threads", [t for t in (1, 2, 4, 8, 16, 32, 64, 128) if t <= cores])
    if not has_online(program):
        space = narrow(space, "online", [False])
    if not program.kept:
        space = narrow(space, "keep", ["scratch"])
    rows = power_of_two(max(1, program.n_rows))
    blocks = [b for b in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if b <= max(1, rows // 2)]
    space = narrow(space, "row_block", blocks or [1])
    tiles = [t for t in (256, 512, 1024, 2048, 4096, 8192, 16384) if t < program.n_cols]
    return narrow(space, "column_tile", [0, *tiles])


def normalize(program: Program, config: Config) -> Config:
    """The configuration that would in effect run: a tile at least as long as a row is no tile."""
    c = dict(config)
    if int(c["column_tile"]) >= program.n_cols:
        c["column_tile"] = 0
    if not program.kept:
        c["keep"] = "scratch"
    if not has_online(program):
        c["online"] = False
    return c


def default(program: Program) -> Config:
    """All processors, rows in blocks of some ten thousand elements, whole rows."""
    cores = processors()
    threads = 1 << (cores.bit_length() - 1)
    cols = max(1, program.n_cols)
    block = min(512, power_of_two(max(1, 16384 // cols)))
    while block > 1 and block * threads > program.n_rows:
        block //= 2
    tile = 4096 if program.pointwise and program.n_rows == 1 and cols > 4096 else 0
    return normalize(
        program,
        {
            "row_block": block,
            "column_tile": tile,
            "keep": "scratch",
            "online": False,
            "threads": min(128, threads),
        },
    )


def seeds(program: Program) -> list[Config]:
    """Variations of the default: other row blocks, tiles, recomputing, online forms, one thread."""
    d = default(program)
    out = [d | {"row_block": max(1, int(d["row_block"]) // 4)}, d | {"row_block": min(512, int(d["row_block"]) * 4)}]
    out += [d | {"column_tile": t} for t in (1024, 4096) if t < program.n_cols]
    if program.kept:
        out.append(d | {"keep": "reload"})
    if has_online(program):
        out.append(d | {"online": True})
    if int(d["threads"]) > 1:
        out.append(d | {"threads": 1})
    return [normalize(program, c) for c in out]


class CpuScheme:
    """The same questions as the CUDA schemes answer, on the graph of one group."""

    name = "cpu"

    def check(self, graph: Graph) -> None:
        build_program(graph)

    def space_of(self, graph: Graph, space: Space) -> Space:
        return space_of(build_program(graph), space)

    def default(self, graph: Graph) -> Config:
        return default(build_program(graph))

    def seeds(self, graph: Graph) -> list[Config]:
        return seeds(build_program(graph))

    def normalize(self, graph: Graph, config: Config) -> Config:
        return normalize(build_program(graph), config)

    def reject(self, graph: Graph, config: Config) -> str | None:
        return None

    def emit(self, graph: Graph, config: Config, sms: int, fixed: bool = False) -> GroupKernels:
        raise NotImplementedError("CPU kernels are emitted when they are loaded: autotune.codegen.cpu")


SCHEME = CpuScheme()
