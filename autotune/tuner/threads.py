"""Objects that the threads of a search share: a cache of values, the lease of its claims, and the user's interrupt.

One thread computes each cached value. The claims of a search are released at its end, and after the first Ctrl-C it
stores its results.
"""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future
from types import FrameType
from typing import Any, Generic, TypeVar

from autotune.store.store import Store

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Shared(Generic[V]):
    """Iterable over the items of an iterator for several threads; the first one that needs an item computes it."""

    def __init__(self, items: Iterable[V]) -> None:
        self._items = iter(items)
        self._known: list[V] = []
        self._error: Exception | None = None
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[V]:
        for k in itertools.count():
            with self._lock:
                if k == len(self._known):
                    try:
                        self._known.append(self._next())
                    except StopIteration:
                        return
            yield self._known[k]

    def _next(self) -> V:
        """The next item; an iterator that has failed fails again for each thread."""
        if self._error is not None:
            raise self._error
        try:
            return next(self._items)
        except StopIteration:
            raise
        except Exception as error:
            self._error = error
            raise


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


LEASE_S = 30.0
"""Seconds that a claim outlives a killed search on another host. On this host, the death is detected at once."""


class Lease:
    """Renews every claim of ``owner`` from a thread, since one measurement may take longer than a lease."""

    def __init__(self, store: Store, owner: str) -> None:
        self._store, self._owner = store, owner
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="autotune-lease", daemon=True)

    def __enter__(self) -> Lease:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join(timeout=LEASE_S)
        self._store.release_all(self._owner)

    def _run(self) -> None:
        while not self._stop.wait(LEASE_S / 3):
            try:
                self._store.renew(self._owner, LEASE_S)
            except Exception:  # the search's next write reports a database that stays unreachable
                continue


class Interrupt:
    """A context in which the first SIGINT sets :attr:`requested` and the next raises KeyboardInterrupt.

    It does nothing outside the main thread, where Python delivers no signals, or if a handler is not Python's. The
    previous handler is restored on exit, and gets each further SIGINT.
    """

    def __init__(self) -> None:
        self.requested = False
        self._old: Any = None
        self._installed = False

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is not None:
            self._old = signal.signal(signal.SIGINT, self._handle)
            self._installed = True
        return self

    def __exit__(self, *error: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, self._old)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self.requested = True
        elif callable(self._old):
            self._old(number, frame)
        else:
            raise KeyboardInterrupt
