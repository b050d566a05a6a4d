"""Split of a group with index-adds (``sum_at``) into three programs: the indices (*destinations*), the terms, the
results.

Each is a separate program over the same values. The destinations are walked along the *tokens* (the axes that are
summed over). The terms are walked along the *columns* (the axes that a term and its sum share) of one token, and the
results along the columns of one *destination*. Several sums, such as those of an embedding that was read twice, share
the result's destinations and columns, and have separate tokens. See :mod:`autotune.compiler.targets.cuda.scatter`.

:class:`ScatteredRows` is the same for one sum along rows with separate indices, such as the gradient of ``gather``. See
:mod:`autotune.compiler.targets.cuda.scatter_rows`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from autotune.compiler.program.program import Pass, Program, stride_of
from autotune.compiler.program.vectors import narrowest
from autotune.errors import Unsupported
from autotune.ir.graph import LEAVES, REDUCTIONS, Graph, Value, at_axis
from autotune.ir.nodes import POINTWISE

MOST_SUMS = 4
"""Most sums of one group: each has a separate list in shared memory."""


@dataclass(frozen=True)
class Sum:
    """One ``sum_at``.

    Attributes:
        total: its value.
        term: the value of its terms.
        destination: the value of its indices.
        tokens: the axes that it sums over, outermost first.
        destinations: the program that computes and keeps ``destination``.
        terms: the program that computes and keeps ``term``.
    """

    total: int
    term: int
    destination: int
    tokens: tuple[int, ...]
    destinations: Program
    terms: Program

    @property
    def n_tokens(self) -> int:
        return self.terms.n_rows

    @property
    def place_vector(self) -> int:
        """Number of indices that a thread reads at a time: 16 or 32 bytes if it divides their number."""
        return _pick(self.terms.graph, self.tokens)


@dataclass(frozen=True)
class Scattered:
    """A group of index-adds with pointwise operators before and after them.

    Attributes:
        graph: the group, with a column of extent 1 if it had none.
        sums: the index-adds along the axis ``at``.
        cols: the column axes, outermost first.
        results: the program that reads the sums and stores all outputs.
    """

    graph: Graph
    sums: tuple[Sum, ...]
    at: int
    cols: tuple[int, ...]
    results: Program

    @property
    def n_tokens(self) -> int:
        """Of all sums."""
        return sum(one.n_tokens for one in self.sums)

    @property
    def n_destinations(self) -> int:
        return self.graph.extents[self.at]

    @property
    def n_cols(self) -> int:
        return self.graph.size(self.cols)

    @property
    def unit(self) -> int:
        """Bytes of the narrowest storage type among tensors with columns: the unit of ``vector_bytes``."""
        return min(narrowest(self.results), *(narrowest(one.terms) for one in self.sums))

    def vector(self, vector_bytes: int) -> int:
        """Elements that a thread takes at a time along the columns; 0 where these do not divide them."""
        n, rest = divmod(vector_bytes, self.unit)
        return n if n and not rest and n <= 16 and self.graph.extents[self.cols[-1]] % n == 0 else 0


def _needed(graph: Graph, roots: Iterable[int], stop: Iterable[int] = ()) -> list[int]:
    """The values that make ``roots``, those of ``stop`` taken as given, in order; constants are left out."""
    given = set(stop)
    return graph.making(roots, lambda i: i in given or graph.values[i].op == "const")


def _by_stride(graph: Graph, axes: Iterable[int], values: Iterable[int]) -> tuple[int, ...]:
    """Axes by falling stride in the largest of the loads among ``values`` that move along them."""
    chosen = set(axes)
    loads = [v for v in (graph.values[i] for i in values) if v.op == "load" and chosen & set(v.axes)]
    largest = max(loads, key=lambda v: graph.size(chosen & set(v.axes)), default=None)
    return tuple(sorted(chosen, key=lambda a: (-stride_of(largest, a) if largest else 0, a)))


def _part(
    graph: Graph, rows: tuple[int, ...], cols: tuple[int, ...], values: list[int], takes: tuple[int, ...] = ()
) -> Program:
    """The program of one pass over ``values``: it keeps the last one, or takes sums and stores all outputs."""
    program = Program(graph, rows, cols)
    row = tuple(i for i in values if program.domain(i) == "row")
    wide = tuple(i for i in values if program.domain(i) != "row")
    if not takes:
        if not values or values[-1] not in wide:
            raise Unsupported("terms or indices that are the same everywhere")
        return replace(program, passes=(Pass(row_values=row, compute=wide, kept_out=wide[-1:]),))
    stores = Pass(row_values=row, kept_in=takes, compute=wide, stores=tuple(range(len(graph.outputs))))
    return replace(program, passes=(Pass(kept_out=takes), stores))


def _with_column(graph: Graph, totals: list[int]) -> Graph:
    """The graph with an axis of extent 1 for terms and results; the destinations are computed without it."""
    x = len(graph.extents)
    destinations = set(_needed(graph, [graph.values[i].args[1] for i in totals]))
    values: list[Value] = []
    plain: dict[int, int] = {}
    for i, v in enumerate(graph.values):  # for the destinations
        if i in destinations or v.op == "const":
            plain[i] = len(values)
            values.append(replace(v, args=tuple(plain[a] for a in v.args)))
    where: dict[int, int] = {}
    for i, v in enumerate(graph.values):
        if v.op == "const":
            where[i] = plain[i]
            continue
        args = tuple(where[a] for a in v.args)
        if i in totals:
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


def _pick(graph: Graph, tokens: Sequence[int]) -> int:
    """The largest of 4, 2 and 1 indices that divides the innermost axis of the tokens."""
    return next(n for n in (4, 2, 1) if graph.extents[tokens[-1]] % n == 0)


def _results(graph: Graph, totals: list[int]) -> list[int]:
    """The values between the sums and the outputs. Raises Unsupported if one varies over other axes than the sums."""
    values, wide = graph.values, set(graph.values[totals[0]].axes)
    found = _needed(graph, [o.value for o in graph.outputs], totals)
    if any(not set(values[i].axes) <= wide for i in found) or any(set(o.axes) != wide for o in graph.outputs):
        raise Unsupported("results that vary over other axes than the sums")
    return found


def _check_pointwise(graph: Graph, values: Iterable[int]) -> None:
    """Raise Unsupported unless all values are loads, constants, indices and pointwise operators."""
    for op in (graph.values[i].op for i in values):
        if op not in POINTWISE and op not in LEAVES:
            raise Unsupported(f"operator {op} with sums at indices")


def _totals(graph: Graph) -> list[int]:
    found = [i for i in graph.live if graph.values[i].op in REDUCTIONS]
    if not 0 < len(found) <= MOST_SUMS or any(graph.values[i].op != "sum_at" for i in found):
        raise Unsupported("more than a few sums at indices and pointwise operators")
    return found


@lru_cache(maxsize=256)
def scattered(graph: Graph) -> Scattered:
    """The parts of a group. Raises Unsupported where it is not sums at the same destinations with pointwise operators
    before and after them.
    """
    totals = _totals(graph)
    if any(len(graph.values[i].axes) == 1 for i in totals):
        if any(len(graph.values[i].axes) > 1 for i in totals):
            raise Unsupported("sums with and without columns")
        graph = _with_column(graph, totals)
        totals = _totals(graph)
    values = graph.values
    (at, wide), *others = [(at_axis(graph, values[i]), set(values[i].axes)) for i in totals]
    if any(other != (at, wide) for other in others):
        raise Unsupported("sums at different indices")
    if any(not set(values[values[i].args[1]].axes) <= set(values[i].over) for i in totals):
        raise Unsupported("indices that differ between the columns of a term")
    results = _results(graph, totals)
    before = {i: _needed(graph, [values[i].args[0]]) for i in totals}
    cols = _by_stride(graph, wide - {at}, [*(j for i in totals for j in before[i]), *results])
    sums = []
    for i in totals:
        (term, destination), over = values[i].args, values[i].over
        finding = _needed(graph, [destination])
        _check_pointwise(graph, (*before[i], *results, *finding))
        if not {a for j in before[i] for a in values[j].axes} <= {*over, *cols}:
            raise Unsupported("terms that vary over other axes than their sums")
        tokens = _by_stride(graph, over, finding)
        destinations, terms = _part(graph, (), tokens, finding), _part(graph, tokens, cols, before[i])
        sums.append(Sum(i, term, destination, tokens, destinations, terms))
    return Scattered(graph, tuple(sums), at, cols, _part(graph, (at,), cols, results, tuple(totals)))


@dataclass(frozen=True)
class ScatteredRows:
    """An index-add along rows, each with its own indices, with pointwise operators before and after it.

    The rows are the axes that the terms and the sum share. Rows whose indices are the same are *repeats* of one *key*:
    the keys are the axes that the indices vary over, and all rows where these are few.

    Attributes:
        graph: the group.
        total, term, destination: the values of the sum, of its terms and of its indices.
        at: the axis of the result that the indices count along.
        tokens: the axes that are summed over, outermost first.
        repeats, keys: the axes of the rows, outermost first.
        destinations: the program of the indices, walked along the tokens.
        terms: that of the terms, walked along the tokens, or along the last key axis if ``is_across``.
        results: the program that reads the sums, walked along ``at``, and stores all outputs.
        is_across: True if adjacent terms in memory belong to adjacent keys.
    """

    graph: Graph
    total: int
    term: int
    destination: int
    at: int
    tokens: tuple[int, ...]
    repeats: tuple[int, ...]
    keys: tuple[int, ...]
    destinations: Program
    terms: Program
    results: Program
    is_across: bool

    @property
    def n_tokens(self) -> int:
        return self.graph.size(self.tokens)

    @property
    def n_destinations(self) -> int:
        return self.graph.extents[self.at]

    @property
    def n_keys(self) -> int:
        return self.graph.size(self.keys)

    @property
    def n_repeats(self) -> int:
        return self.graph.size(self.repeats)

    @property
    def unit(self) -> int:
        """Bytes of the narrowest storage type of terms and results: the unit of ``vector_bytes``."""
        return min(narrowest(self.results), narrowest(self.terms))

    def vector(self, vector_bytes: int) -> int:
        """Elements that a thread takes at a time; 0 where these do not divide what terms and results walk along."""
        n, rest = divmod(vector_bytes, self.unit)
        extents = (self.graph.extents[self.terms.cols[-1]], self.n_destinations)
        return n if n and not rest and n <= 16 and all(e % n == 0 for e in extents) else 0

    @property
    def pick(self) -> int:
        """Number of indices that a thread reads at a time."""
        return _pick(self.graph, self.tokens)


FEW_KEYS = 16
"""Keys below which every row is a key."""


@lru_cache(maxsize=256)
def scattered_rows(graph: Graph) -> ScatteredRows:
    """The parts of a group. Raises Unsupported where it is not one sum at indices along rows with pointwise operators
    before and after it.
    """
    totals = _totals(graph)
    if len(totals) > 1:
        raise Unsupported("several sums at indices along rows")
    values, (total,) = graph.values, totals
    (term, destination), over = values[total].args, set(values[total].over)
    at = at_axis(graph, values[total])
    wide = set(values[total].axes)
    results = _results(graph, totals)
    before, finding = _needed(graph, [term]), _needed(graph, [destination])
    _check_pointwise(graph, (*before, *results, *finding))
    shared = wide - {at}
    if not {a for j in before for a in values[j].axes} <= over | shared:
        raise Unsupported("terms that vary over other axes than their sums")
    keyed = set(values[destination].axes) - over
    if graph.size(keyed) < FEW_KEYS:
        keyed = shared
    repeats = _by_stride(graph, shared - keyed, before)
    keys = _by_stride(graph, keyed, before)
    tokens = _by_stride(graph, over, [*before, *finding])
    loads = [v for v in (values[i] for i in before) if v.op == "load" and set(v.axes) & over]
    largest = max(loads, key=lambda v: graph.size(v.axes), default=None)
    is_across = bool(keys) and largest is not None and stride_of(largest, keys[-1]) == 1
    rows, cols = (*repeats, *keys), tokens
    if is_across:
        rows, cols = (*repeats, *keys[:-1], *tokens), keys[-1:]
    return ScatteredRows(
        graph, total, term, destination, at, tokens, repeats, keys,
        destinations=_part(graph, keys, tokens, finding),
        terms=_part(graph, rows, cols, before),
        results=_part(graph, (*repeats, *keys), (at,), results, (total,)),
        is_across=is_across,
    )  # fmt: skip
