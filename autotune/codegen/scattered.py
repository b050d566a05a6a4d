"""A group with sums at places that other data tell, taken apart: the places, the terms, and what is made of the sums.

Each part is a program of its own over the same values: places are walked along the *tokens* (the axes that are summed
over), terms along the *columns* (the axes that a term and its sum share) of one token, results along the columns of one
*place*. See :mod:`autotune.codegen.cuda_scatter`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from autotune.codegen.cuda_access import narrowest
from autotune.codegen.program import Pass, Program, stride_of
from autotune.errors import Unsupported
from autotune.fusion.graph import LEAVES, REDUCTIONS, Graph, Value, at_axis
from autotune.fusion.ops import POINTWISE


@dataclass(frozen=True)
class Scattered:
    """A group with one ``sum_at`` and pointwise operators before and after it.

    Attributes:
        graph: the group; with a column of extent 1 where it had none.
        total: the sum; ``at`` is the axis of its places.
        tokens, cols: axes, outermost first.
        places, terms, results: the three parts; the first two keep one value, the last takes the sum and stores all.
    """

    graph: Graph
    total: int
    at: int
    tokens: tuple[int, ...]
    cols: tuple[int, ...]
    places: Program
    terms: Program
    results: Program

    @property
    def n_tokens(self) -> int:
        return self.graph.size(self.tokens)

    @property
    def n_places(self) -> int:
        return self.graph.extents[self.at]

    @property
    def n_cols(self) -> int:
        return self.graph.size(self.cols)

    @property
    def unit(self) -> int:
        """Bytes of the narrowest storage type among what has columns: the unit of ``vector_bytes``."""
        return min(narrowest(self.terms), narrowest(self.results))

    def vector(self, vector_bytes: int) -> int:
        """Elements that a thread takes at a time along the columns; 0 where these do not divide them."""
        n, rest = divmod(vector_bytes, self.unit)
        return n if n and not rest and n <= 16 and self.graph.extents[self.cols[-1]] % n == 0 else 0

    @property
    def place_vector(self) -> int:
        """Places that a thread reads at a time: 16 or 32 bytes where their number allows it."""
        inner = self.graph.extents[self.tokens[-1]]
        return next(n for n in (4, 2, 1) if inner % n == 0)


def _needed(graph: Graph, roots: Iterable[int], stop: Iterable[int] = ()) -> list[int]:
    """The values that make ``roots``, those of ``stop`` taken as given, in order; constants are left out."""
    seen: set[int] = set()
    given, stack = set(stop), list(roots)
    while stack:
        i = stack.pop()
        if i not in seen and i not in given and graph.values[i].op != "const":
            seen.add(i)
            stack.extend(graph.values[i].args)
    return sorted(seen)


def _by_stride(graph: Graph, axes: Iterable[int], values: Iterable[int]) -> tuple[int, ...]:
    """Axes by falling stride in the largest of the loads among ``values`` that move along them."""
    chosen = set(axes)
    loads = [v for v in (graph.values[i] for i in values) if v.op == "load" and chosen & set(v.axes)]
    largest = max(loads, key=lambda v: graph.size(chosen & set(v.axes)), default=None)
    return tuple(sorted(chosen, key=lambda a: (-stride_of(largest, a) if largest else 0, a)))


def _part(
    graph: Graph, rows: tuple[int, ...], cols: tuple[int, ...], values: list[int], total: int = -1, kept: int = -1
) -> Program:
    """The program of one pass over ``values``: it keeps one, or takes the sum ``total`` and stores all outputs."""
    first = Pass((), (), (), (), (), (), (), ())
    program = Program(graph, rows, cols, (first,), -1)
    row = tuple(i for i in values if program.domain(i) == "row")
    wide = tuple(i for i in values if program.domain(i) != "row")
    if kept >= 0:
        if kept not in wide:
            raise Unsupported("terms or places that are the same everywhere")
        return replace(program, passes=(Pass(row, (), (), wide, (kept,), (), (), ()),))
    source = replace(first, kept_out=(total,))
    return replace(
        program, passes=(source, Pass(row, (), (total,), wide, (), (), (), tuple(range(len(graph.outputs)))))
    )


def _with_column(graph: Graph, total: int) -> Graph:
    """The graph with an axis of extent 1 along which terms and results lie; the places are computed without it."""
    x = len(graph.extents)
    places = _needed(graph, [graph.values[total].args[1]])
    values: list[Value] = []
    plain: dict[int, int] = {}
    for i, v in enumerate(graph.values):  # for the places
        if i in places or v.op == "const":
            plain[i] = len(values)
            values.append(replace(v, args=tuple(plain[a] for a in v.args)))
    where: dict[int, int] = {}
    for i, v in enumerate(graph.values):
        if v.op == "const":
            where[i] = plain[i]
            continue
        args = tuple(where[a] for a in v.args)
        if i == total:
            args = (args[0], plain[v.args[1]])
        if v.op in ("load", "gather"):
            v = replace(v, axes=(*v.axes, x), strides=(*v.strides, 1))
        elif any(x in values[a].axes for a in args):
            v = replace(v, axes=(*v.axes, x))
        where[i] = len(values)
        values.append(replace(v, args=args))
    outputs = tuple(replace(o, value=where[o.value], axes=(*o.axes, x), strides=(*o.strides, 1)) for o in graph.outputs)
    made = replace(graph, extents=(*graph.extents, 1), values=tuple(values), outputs=outputs)
    made.check()
    return made


@lru_cache(maxsize=256)
def scattered(graph: Graph) -> Scattered:
    """The parts of a group.

    Raises:
        Unsupported: it is not one sum at places with pointwise operators before and after it.
    """
    sums = [i for i in graph.live if graph.values[i].op in REDUCTIONS]
    if len(sums) != 1 or graph.values[sums[0]].op != "sum_at":
        raise Unsupported("not one sum at places and pointwise operators")
    (total,) = sums
    v = graph.values[total]
    if not set(v.axes) - {at_axis(graph, v)}:
        graph = _with_column(graph, total)
        total = next(i for i in graph.live if graph.values[i].op == "sum_at")
        v = graph.values[total]
    at, (term, place) = at_axis(graph, v), v.args
    before, results = _needed(graph, [term]), _needed(graph, [o.value for o in graph.outputs], [total])
    cols = _by_stride(graph, set(v.axes) - {at}, [*before, *results])
    wide = {at, *cols}
    for i in (*before, *results, *_needed(graph, [place])):
        if graph.values[i].op not in POINTWISE and graph.values[i].op not in LEAVES:
            raise Unsupported(f"operator {graph.values[i].op} beside sums at places")
    if not {a for i in before for a in graph.values[i].axes} <= {*v.over, *cols}:
        raise Unsupported("terms that vary over other axes than their sums")
    if any(not set(graph.values[i].axes) <= wide for i in results) or any(set(o.axes) != wide for o in graph.outputs):
        raise Unsupported("results that vary over other axes than the sums")
    tokens = _by_stride(graph, v.over, _needed(graph, [place]))
    return Scattered(
        graph,
        total,
        at,
        tokens,
        cols,
        _part(graph, (), tokens, _needed(graph, [place]), kept=place),
        _part(graph, tokens, cols, before, kept=term),
        _part(graph, (at,), cols, results, total=total),
    )
