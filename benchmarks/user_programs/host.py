"""The host that several programs share: they compile side by side, and each is timed alone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TypeVar

T = TypeVar("T")
_WAKE_S = 0.5
"""Seconds until a signal that did not end a wait is handled."""


class Host:
    """A lock of two kinds. Any thread may hold it."""

    def __init__(self) -> None:
        self._state = threading.Condition()
        self._beside = self._waiting = 0
        self._alone = False

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """While open, programs compile or search, as many as like to. One that waits to be timed goes first."""
        with self._state:
            self._state.wait_for(lambda: not self._alone and not self._waiting)
            self._beside += 1
        try:
            yield
        finally:
            with self._state:
                self._beside -= 1
                self._state.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """While open, no other program runs."""
        with self._state:
            self._waiting += 1
            try:
                self._state.wait_for(lambda: not self._alone and not self._beside)
            finally:
                self._waiting -= 1
            self._alone = True
        try:
            yield
        finally:
            with self._state:
                self._alone = False
                self._state.notify_all()


def as_they_end(futures: Iterable[Future[T]]) -> Iterator[Future[T]]:
    """Futures in the order of their ends, for a main thread that signals must reach.

    A signal that arrives while another thread starts a process does not end a wait without a time limit.
    """
    left = set(futures)
    while left:
        done, left = wait(left, timeout=_WAKE_S, return_when=FIRST_COMPLETED)
        yield from done
