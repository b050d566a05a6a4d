"""The flat scheme: a group without reductions, every element independent."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from autotune.compiler.program.passes import build_program, once_a_row
from autotune.compiler.program.program import Program
from autotune.compiler.program.vectors import vector_length
from autotune.compiler.schedules.configurations import PLAIN_CUDA, having, narrow
from autotune.compiler.schedules.cuda import Scheme
from autotune.compiler.schedules.cuda.rows import default_vector, plain_program, vectors
from autotune.compiler.targets.cuda.rows.flat import FlatKernel, has_row_values, parts_of_a_row
from autotune.compiler.targets.cuda.source import CudaSource, FlatSchedule
from autotune.errors import Unsupported
from autotune.ir.graph import REDUCTIONS

if TYPE_CHECKING:
    from autotune.ir.graph import Graph
    from autotune.space import Space
    from autotune.task import Config


class FlatScheme(Scheme):
    """One pass over rows, without cooperation of threads on a row.

    If a group has values per row, its configurations also have ``by_row``.
    """

    name, rank, schedule = "flat", 30, FlatSchedule

    def check(self, graph: Graph) -> None:
        if any(graph.values[i].op in REDUCTIONS for i in graph.live):
            raise Unsupported("not a group for the scheme flat")
        program = build_program(graph)
        once_a_row(program)
        if program.passes[0].row_stores:
            raise Unsupported("an output without a column axis in a flat kernel")

    def space_of(self, graph: Graph, space: Space) -> Space:
        program = plain_program(graph)
        space = narrow(having(space, self.schedule), vector_bytes=vectors(program)[:3], cluster=[1])
        space = narrow(space, threads_per_row=[64, 128, 256, 512, 1024], rows_per_block=[1], keep=["registers"])
        space = narrow(space, online=[False], prefetch=[False])
        if has_row_values(program):
            return space
        return replace(space, parameters=tuple(p for p in space if p.name != "by_row"))

    def normalize(self, graph: Graph, config: Config) -> Config:
        program = plain_program(graph)
        c: Config = {name: choice for name, choice in config.items() if name != "by_row"}
        c |= {"cluster": 1, "prefetch": False, "rows_per_block": 1, "keep": "registers", "online": False}
        c["threads_per_row"] = min(1024, max(64, int(config["threads_per_row"])))
        if has_row_values(program):
            c["by_row"] = bool(config.get("by_row")) and _shares(program, c)
        return c

    def default(self, graph: Graph) -> Config:
        shape: Config = {"threads_per_row": 256, "vector_bytes": default_vector(plain_program(graph)), "unroll": 2}
        return self.normalize(graph, PLAIN_CUDA | shape | {"by_row": True})

    def seeds(self, graph: Graph) -> list[Config]:
        d = self.default(graph)
        out = [d | {"unroll": 1}, d | {"unroll": 4}, d | {"threads_per_row": 512}, d | {"load_hint": "evict_first"}]
        if has_row_values(plain_program(graph)):
            out = [c | {"by_row": True} for c in out] + [d | {"by_row": False}]
            out += [d | {"threads_per_row": 64, "unroll": 8, "by_row": True}, d | {"unroll": 8, "by_row": True}]
        return [self.normalize(graph, c) for c in out]

    def threads(self, config: Config) -> str:
        return f"{int(config['threads_per_row'])} threads a block"

    def source(self, graph: Graph, config: Config, fixed: bool = False) -> CudaSource:
        program = plain_program(graph)
        return FlatKernel(replace(program, dynamic=-1) if fixed else program, FlatSchedule.from_config(config)).source()


def _shares(program: Program, config: Config) -> bool:
    vec = vector_length(program, int(config["vector_bytes"]))
    step = int(config["threads_per_row"]) * int(config["unroll"])
    return bool(vec) and parts_of_a_row(program, vec, step) > 0


SCHEME = FlatScheme()
