"""The flat scheme: a group without reductions, every element independent."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from autotune.compiler.program.passes import build_program, once_a_row
from autotune.compiler.program.program import Program
from autotune.compiler.program.vectors import vector_length
from autotune.compiler.schedules.configurations import PLAIN_CUDA, having, narrow
from autotune.compiler.schedules.cuda import Scheme
from autotune.compiler.schedules.cuda.rows import RowsScheme, plain_program, vectors
from autotune.compiler.targets.cuda.rows.flat import has_row_values, parts_of_a_row
from autotune.compiler.targets.cuda.source import FlatSchedule
from autotune.errors import Unsupported
from autotune.ir.graph import REDUCTIONS

if TYPE_CHECKING:
    from autotune.ir.graph import Graph
    from autotune.space import Space
    from autotune.task import Config


class PointwiseScheme(RowsScheme):
    """One pass over rows, whose threads share no row."""

    def check(self, graph: Graph) -> None:
        if any(graph.values[i].op in REDUCTIONS for i in graph.live):
            raise Unsupported("not a group for the scheme flat")
        program = build_program(graph)
        once_a_row(program)
        if program.passes[0].row_stores:
            raise Unsupported("an output without a column axis in a flat kernel")

    def space_of(self, graph: Graph, space: Space) -> Space:
        space = narrow(having(space, self.schedule), vector_bytes=vectors(plain_program(graph))[:3], cluster=[1])
        space = narrow(space, threads_per_row=[64, 128, 256, 512, 1024], rows_per_block=[1], keep=["registers"])
        return narrow(space, online=[False], prefetch=[False])

    def normalize(self, graph: Graph, config: Config) -> Config:
        alone: Config = {"cluster": 1, "prefetch": False, "rows_per_block": 1, "keep": "registers", "online": False}
        threads = min(1024, max(64, int(config["threads_per_row"])))
        return {"cluster": 1, "prefetch": False} | dict(config) | alone | {"threads_per_row": threads}

    def default(self, graph: Graph) -> Config:
        usable = vectors(plain_program(graph))
        bytes_ = 16 if 16 in usable else usable[0]
        return PLAIN_CUDA | {"threads_per_row": 256, "vector_bytes": bytes_, "unroll": 2}

    def seeds(self, graph: Graph) -> list[Config]:
        d = self.default(graph)
        return [d | {"unroll": u} for u in (1, 4)] + [d | {"threads_per_row": 512}, d | {"load_hint": "evict_first"}]

    def reject(self, graph: Graph, config: Config) -> str | None:
        return Scheme.reject(self, graph, config)

    def threads(self, config: Config) -> str:
        return f"{int(config['threads_per_row'])} threads a block"


class FlatScheme(PointwiseScheme):
    """Configurations of groups whose rows have values in common say ``by_row``, too."""

    name, rank, schedule = "flat", 30, FlatSchedule

    def space_of(self, graph: Graph, space: Space) -> Space:
        made = super().space_of(graph, space)
        if has_row_values(plain_program(graph)):
            return made
        return replace(made, parameters=tuple(p for p in made if p.name != "by_row"))

    def normalize(self, graph: Graph, config: Config) -> Config:
        made = super().normalize(graph, {name: choice for name, choice in config.items() if name != "by_row"})
        program = plain_program(graph)
        if has_row_values(program):
            made["by_row"] = bool(config.get("by_row")) and _shares(program, made)
        return made

    def default(self, graph: Graph) -> Config:
        return self.normalize(graph, super().default(graph) | {"by_row": True})

    def seeds(self, graph: Graph) -> list[Config]:
        out, d = super().seeds(graph), self.default(graph)
        if has_row_values(plain_program(graph)):
            out = [c | {"by_row": True} for c in out] + [d | {"by_row": False}]
            out += [d | {"threads_per_row": 64, "unroll": 8, "by_row": True}, d | {"unroll": 8, "by_row": True}]
        return [self.normalize(graph, c) for c in out]


def _shares(program: Program, config: Config) -> bool:
    vec = vector_length(program, int(config["vector_bytes"]))
    step = int(config["threads_per_row"]) * int(config["unroll"])
    return bool(vec) and parts_of_a_row(program, vec, step) > 0


SCHEME = FlatScheme()
