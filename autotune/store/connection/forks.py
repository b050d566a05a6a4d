"""Forks of a process that uses SQLite: a fork waits until no thread is in a transaction.

SQLite's locks belong to a process, and SQLite keeps their state in memory. A child that inherits an open connection
appears to hold the parent's locks. It then cannot write, or the parent removes the log that the child writes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

WAIT_S = 5.0
"""Maximum number of seconds that a fork waits."""


class Forks:
    """The transactions of a process, and its forks.

    Attributes:
        close_idle: closes idle connections before a fork, when no thread is in a transaction.
    """

    def __init__(self) -> None:
        self.close_idle: Callable[[], None] = lambda: None
        self._own = threading.local()
        self._changed = threading.Condition()
        self._transactions = self._forks = 0
        os.register_at_fork(before=self._before, after_in_parent=self._after, after_in_child=self._reset)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Context manager of a transaction, which waits for forks. It may be nested."""
        depth = self._depth()
        with self._changed:
            while self._forks and not depth:
                self._changed.wait()
            self._transactions += 1
        self._own.depth = depth + 1
        try:
            yield
        finally:
            self._own.depth = depth
            with self._changed:
                self._transactions = max(0, self._transactions - 1)
                self._changed.notify_all()

    def _depth(self) -> int:
        """The number of the thread's transactions."""
        return getattr(self._own, "depth", 0)

    def _before(self) -> None:
        with self._changed:
            self._forks += 1
            self._changed.wait_for(lambda: self._transactions <= self._depth(), WAIT_S)
        self.close_idle()

    def _after(self) -> None:
        with self._changed:
            self._forks -= 1
            self._changed.notify_all()

    def _reset(self) -> None:
        """Forget the threads of the parent: only the one that forked is in the child."""
        self._changed = threading.Condition()
        self._transactions, self._forks = self._depth(), 0


FORKS = Forks()
"""Those of this process."""
