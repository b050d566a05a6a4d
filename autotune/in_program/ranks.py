"""Search by one of the ranks that compile equal graphs; the others wait for it, and compile with its results."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any

from autotune.runtime.deployment import deployment

COMPILE_S = 3600.0
"""Seconds that ranks wait while one compiles, in addition to the budget."""
GRACE_S = 30.0
"""Seconds that ranks wait for a search beyond its budget."""
_LOOK_S = 0.05


class RankTurn:
    """A rank's part in the search of one graph.

    Attributes:
        searches: True if this rank searches.
        alone: True if no other rank waits for it.
    """

    def __init__(self, store: Any, key: str) -> None:
        self._store, self._key = store, key
        self.alone = store is None
        self.searches = self.alone or store.add(f"{key}/claim", 1) == 1

    def begin(self, seconds: float) -> None:
        """Announce the search and its seconds."""
        if not self.alone:
            self._store.set(f"{self._key}/begun", str(seconds))

    def end(self) -> None:
        """Release the waiting ranks."""
        if not self.alone:
            self._store.set(f"{self._key}/done", "1")

    def wait(self) -> bool:
        """Wait for the searching rank; False after the time limit."""
        limit, begun = time.monotonic() + COMPILE_S, False
        while time.monotonic() < limit:
            if self._store.check([f"{self._key}/done"]):
                return True
            if not begun and self._store.check([f"{self._key}/begun"]):
                begun = True
                limit = time.monotonic() + float(self._store.get(f"{self._key}/begun")) + GRACE_S
            time.sleep(_LOOK_S)
        deployment().warn_once(
            "search of another rank",
            "autotune: another rank's search did not end in time: this rank continues without it",
        )
        return False


@contextlib.contextmanager
def rank_turn(graph: str) -> Iterator[RankTurn]:
    """Context manager of this rank's part in the search of a graph, which always releases the others at its end.

    Args:
        graph: of :func:`autotune.runtime.inductor.code.name_of`. Ranks of one host share a database and a search.
    """
    own = RankTurn(_store(), f"autotune/search/{socket.gethostname()}/{graph}")
    try:
        yield own
    finally:
        if own.searches:
            own.end()


def has_ranks() -> bool:
    """True in a program of several ranks."""
    import torch.distributed as dist

    return bool(dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def _store() -> Any:
    """The key-value store of the ranks; None in a program of one rank."""
    import torch.distributed as dist

    if not has_ranks():
        return None
    return dist.distributed_c10d._get_default_store()
