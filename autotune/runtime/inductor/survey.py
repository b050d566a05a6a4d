"""Surveys of compiled graphs: their regions, the regions that verdicts leave to Inductor, and their coverage."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import fx

from autotune.runtime.coverage import Row
from autotune.workload import Workload

if TYPE_CHECKING:
    from autotune.compiler.lower.facts import GraphFacts
    from autotune.compiler.regions.find import Region


@dataclass(frozen=True)
class Surveyed:
    """A graph on which a verdict may be stored: a post-grad graph, or a Dynamo graph with a device and no workload.

    Attributes:
        fingerprint: of :func:`autotune.runtime.inductor.verdict.graph_fingerprint`, for a post-grad graph.
        mode: the mode of the verdict.
        regions: device ("cpu" or "cuda:N") and workload of every region that stored kernels may run.
        left: workloads of further regions, which a stored verdict leaves to Inductor.
    """

    fingerprint: str
    mode: str
    regions: tuple[tuple[str, Workload | None], ...]
    left: frozenset[str]


Lacking = Mapping[str, Sequence[tuple[Workload, int]]]
"""Workloads with their numbers of occurrences, by device."""

_lock = threading.Lock()
_open: list[Callable[[Surveyed], object]] = []


@contextlib.contextmanager
def surveying(take: Callable[[Surveyed], object]) -> Iterator[None]:
    """Pass the graphs compiled in this context to ``take``, from any thread, since autograd compiles some in its own.

    ``take`` gets a graph before Inductor lowers it.
    """
    with _lock:
        _open.append(take)
    try:
        yield
    finally:
        with _lock:
            _open.remove(take)


def note(graph: Surveyed) -> None:
    """Pass a graph to every open survey."""
    with _lock:
        for take in _open:
            take(graph)


def lacking(graphs: Sequence[Surveyed]) -> Lacking:
    """The regions without a schedule of their device."""
    from autotune.runtime.match import look_up  # a warm start imports this module, and looks nothing up

    counts: dict[str, Counter[str]] = {}
    workloads: dict[str, Workload] = {}
    for graph in graphs:
        for device, workload in graph.regions:
            if workload is not None:
                counts.setdefault(device, Counter())[workload.fingerprint] += 1
                workloads[workload.fingerprint] = workload
    missed = {}
    for device, counted in counts.items():
        found = [(workloads[name], count) for name, count in counted.items()]
        own = {w.fingerprint for w, _ in found if look_up(w, device, packaged=False).level.own}
        missed[device] = [(w, count) for w, count in found if w.fingerprint not in own]
    return {device: found for device, found in missed.items() if found}


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


__all__ = ["Lacking", "Surveyed", "covered", "lacking", "note", "surveying"]
