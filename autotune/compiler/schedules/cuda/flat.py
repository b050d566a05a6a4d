"""The flat scheme: a group without reductions, every element independent."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from autotune.compiler.program.program import Program
from autotune.compiler.program.vectors import vector_length
from autotune.compiler.schedules.cuda.rows import RowsScheme, plain_program
from autotune.compiler.targets.cuda.rows.flat import has_row_values, parts_of_a_row
from autotune.compiler.targets.cuda.source import FlatSchedule

if TYPE_CHECKING:
    from autotune.ir.graph import Graph
    from autotune.space import Space
    from autotune.task import Config


def _shares(program: Program, config: Config) -> bool:
    vec = vector_length(program, int(config["vector_bytes"]))
    step = int(config["threads_per_row"]) * int(config["unroll"])
    return bool(vec) and parts_of_a_row(program, vec, step) > 0


class FlatScheme(RowsScheme):
    """As :class:`RowsScheme`; configurations of groups whose rows have values in common say ``by_row``, too."""

    kind = FlatSchedule

    def space_of(self, graph: Graph, space: Space) -> Space:
        made = super().space_of(graph, space)
        own = [p for p in space if p.name == "by_row" and has_row_values(plain_program(graph))]
        return replace(made, parameters=(*made, *own))

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


SCHEME = FlatScheme("flat", 30)
