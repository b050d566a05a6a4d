"""The coverage of a program: operators that stored kernels run, operators that Inductor compiles, and the reasons.

Each graph that is looked up adds a row for each kind of region and operator. :func:`autotune.coverage` returns the
rows, and ``autotune compare`` prints those that move the most bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from autotune.words import size, wrapped_table

if TYPE_CHECKING:
    from torch import fx

    from autotune.compiler.lower.facts import GraphFacts
    from autotune.compiler.regions.find import Region

SMALL = 0.01
"""Share of all bytes below which :meth:`Coverage.lines` sums rows."""


@dataclass(frozen=True)
class Row:
    """Regions or operators with the same outcome.

    Attributes:
        what: a region's label, or the name of an operator outside of regions.
        stored: True if a stored kernel runs it, False if Inductor compiles it.
        why: the reason why no stored kernel runs it, or the fit of the stored kernel; may be empty.
        count: number of occurrences in the graphs.
        bytes: read and written by all of them; None if sizes are symbolic.
    """

    what: str
    stored: bool
    why: str
    count: int = 1
    bytes: int | None = 0


class Coverage:
    """Rows sorted by the bytes that they move, the most first.

    ``str`` returns a table of the rows that Inductor compiles.
    """

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        found: dict[tuple[str, bool, str], Row] = {}
        for row in rows:
            key = row.what, row.stored, row.why
            known = found.get(key)
            if known is not None:
                moved = None if known.bytes is None or row.bytes is None else known.bytes + row.bytes
                row = replace(row, count=known.count + row.count, bytes=moved)
            found[key] = row
        self.rows: Sequence[Row] = tuple(sorted(found.values(), key=_rank))

    def to_json(self) -> list[dict[str, Any]]:
        """The rows as JSON objects."""
        return [asdict(row) for row in self.rows]

    def lines(self, small: float = SMALL) -> Iterator[str]:
        """Yield a table of the rows that Inductor compiles.

        Args:
            small: rows with less than this share of all bytes, including stored kernels', are summed in the last line.
        """
        whole = sum(row.bytes or 0 for row in self.rows)
        rest = [row for row in self.rows if not row.stored]
        shown = [row for row in rest if row.bytes is None or row.bytes >= small * whole]
        if shown:
            rows = [(row.what, str(row.count), _moved(row), row.why) for row in shown]
            yield from wrapped_table(("region or operator", "calls", "moved", "why Inductor compiles it"), rows)
        if hidden := [row for row in rest if row not in shown]:
            calls, moved = sum(row.count for row in hidden), sum(row.bytes or 0 for row in hidden)
            yield f"{calls} more calls move {size(moved)} together, less than {small:.0%} of all bytes each"
        if whole:
            ours = sum(row.bytes or 0 for row in self.rows if row.stored)
            yield f"stored kernels run {ours / whole:.0%} of the {size(whole)} that memory-intensive operators move"

    def __str__(self) -> str:
        return "\n".join(self.lines())


def _rank(row: Row) -> tuple[float, str]:
    return (-float("inf") if row.bytes is None else -row.bytes, row.what)


def _moved(row: Row) -> str:
    return "unknown" if row.bytes is None else size(row.bytes)


def covered(facts: GraphFacts, fates: Mapping[Region, tuple[bool, str]]) -> Iterator[Row]:
    """Yield the coverage of a graph, a row for each region, and for each operator outside of regions.

    Library calls and operators that move no bytes are omitted.

    Args:
        facts: of the graph in which the regions were found.
        fates: for each region, True if a stored kernel runs it, and the reason.
    """
    # A warm start, which finds no regions, imports this module.
    from autotune.compiler.lower.facts import LIBRARY_CALL, UNKNOWN_BYTES, moved_bytes
    from autotune.compiler.regions.find import outside

    for region, (stored, why) in fates.items():
        what = region.workload.label if region.workload else ", ".join(_operators(facts, region.nodes))
        moved = sum(facts[n].touched_bytes for n in (*region.inputs, *region.outputs))
        yield Row(what, stored, why, bytes=moved if moved < UNKNOWN_BYTES else None)
    for node, why in outside(facts, fates).items():
        moved = moved_bytes(facts, [node], facts[node].operator)
        if why != LIBRARY_CALL and moved:
            what = facts[node].operator or str(node.target)
            yield Row(what, False, why, bytes=moved if moved < UNKNOWN_BYTES else None)


def _operators(facts: GraphFacts, nodes: Sequence[fx.Node]) -> list[str]:
    return list(dict.fromkeys(facts[n].operator for n in nodes if facts[n].operator != "getitem"))
