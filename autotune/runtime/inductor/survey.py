"""Surveys of compiled graphs: their regions, and the regions that verdicts leave to Inductor."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from autotune.workload import Workload


@dataclass(frozen=True)
class Surveyed:
    """A graph on which a verdict may be stored: a post-grad graph, or one of Dynamo's, with a device and no workload.

    Attributes:
        fingerprint: of :func:`autotune.runtime.inductor.verdict.graph_fingerprint`, for a post-grad graph.
        mode: whose verdict is obeyed.
        regions: device ("cpu" or "cuda:N") and workload of every region that stored kernels may run.
        left: workloads of further regions, which a stored verdict leaves to Inductor.
    """

    fingerprint: str
    mode: str
    regions: tuple[tuple[str, Workload | None], ...]
    left: frozenset[str]


_lock = threading.Lock()
_open: list[Callable[[Surveyed], object]] = []


@contextlib.contextmanager
def surveying(take: Callable[[Surveyed], object]) -> Iterator[None]:
    """Hand the graphs that are compiled in this context to ``take``, in any thread: autograd compiles some in its own.

    Inductor's own passes have not lowered a graph when it is handed over.
    """
    with _lock:
        _open.append(take)
    try:
        yield
    finally:
        with _lock:
            _open.remove(take)


def note(graph: Surveyed) -> None:
    """Hand a graph to every open survey."""
    with _lock:
        for take in _open:
            take(graph)


__all__ = ["Surveyed", "note", "surveying"]
