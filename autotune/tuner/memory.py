"""Cache of values shared by the threads of the search and of :mod:`autotune.tuner.prefetch`; one computes each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Memory(Generic[K, V]):
    """Cache of the newest ``most`` values by key.

    A thread that needs a value in computation by another thread waits only for that value.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._known: dict[K, Future[V]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: K, make: Callable[[], V]) -> V:
        """Return the value of a key, computed by ``make`` if it is new.

        Raises:
            Exception: what ``make`` raised; the next call computes the value again.
        """
        with self._lock:
            found = self._known.get(key)
            if found is None:
                own: Future[V] = Future()
                while len(self._known) >= self._most:
                    del self._known[next(iter(self._known))]
                self._known[key] = own
        if found is not None:
            return found.result()
        try:
            own.set_result(make())
        except BaseException as error:
            own.set_exception(error)
            with self._lock:
                self._known.pop(key, None)
        return own.result()
