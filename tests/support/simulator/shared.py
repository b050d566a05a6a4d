"""Shared memory of a block: every access is checked for bounds, races and copies that are under way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.simulator.errors import KernelError

if TYPE_CHECKING:
    from tests.support.simulator.machine import Machine

Stamp = tuple[int, int, int, int, int]
"""Who touched a word: a thread by its number and its block's, in which epoch of the block, of the cluster and of
its warp.

A barrier begins an epoch."""
WARP = 32


class Buffer:
    """The bytes of one array, and the last accesses of each word of 32 bits."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = np.full(nbytes, 0xC7, np.uint8)  # not zeros: nobody may count on them
        words = -(-nbytes // 4)
        self.writer: list[Stamp | None] = [None] * words
        self.readers: list[tuple[Stamp, ...]] = [()] * words
        self.in_flight: set[int] = set()


class Words:
    """One view of a buffer, by elements of a type. Threads of its block read it; those of its cluster write it."""

    def __init__(self, machine: Machine, number: int, buffer: Buffer, dtype: np.dtype[Any]) -> None:
        self.machine, self.number, self.buffer, self.dtype = machine, number, buffer, dtype
        self.data = buffer.bytes.view(dtype)
        self.length, self.each = len(self.data), dtype.itemsize // 4  # words of 32 bits an element
        self.float = dtype == np.float32

    def __getitem__(self, place: int) -> Any:
        self.touch(place, False)
        found = self.data[place]
        return found if self.float else int(found)

    def __setitem__(self, place: int, value: Any) -> None:
        self.touch(place, True)
        self.data[place] = value

    def touch(self, place: int, write: bool) -> None:
        """Note an access, and raise where one by another thread is not ordered before it by a barrier."""
        if not 0 <= place < self.length:
            raise KernelError(f"index {place} outside a shared array of {self.length}")
        buffer, stamp = self.buffer, self.machine.now.stamp
        for word in (place,) if self.each == 1 else range(place * self.each, (place + 1) * self.each):
            if word in buffer.in_flight:
                raise KernelError(f"word {word} of shared memory is touched before its copy is there")
            last, readers = buffer.writer[word], buffer.readers[word]
            if last is not None and last is not stamp and _apart(last, stamp):
                _race(last, stamp, word)
            if write:
                for before in readers:
                    if _apart(before, stamp):
                        _race(before, stamp, word)
                buffer.readers[word] = ()
                buffer.writer[word] = stamp
            elif not readers or readers[0][2] != stamp[2]:
                buffer.readers[word] = (stamp,)
            elif stamp[4] or readers[0][4]:
                buffer.readers[word] = _with_reader(readers, stamp)
            elif len(readers) == 1 and readers[0] is not stamp:  # whoever writes is another than one of two
                buffer.readers[word] = (readers[0], stamp)


def _with_reader(readers: tuple[Stamp, ...], now: Stamp) -> tuple[Stamp, ...]:
    """The readers of a word, of each warp at most two, of its last epoch."""
    others = tuple(r for r in readers if r[0] // WARP != now[0] // WARP)
    own = tuple(r for r in readers if r[0] // WARP == now[0] // WARP and r[4] == now[4])
    return (*others, *own, now) if len(own) < 2 and now not in own else (*others, *own)


def _apart(before: Stamp, now: Stamp) -> bool:
    """Return True if two threads accessed a word with no barrier between."""
    if before[1] != now[1]:
        return before[3] >= now[3]
    if before[0] // WARP == now[0] // WARP and before[4] < now[4]:
        return False
    return before[0] != now[0] and before[2] >= now[2]


def _race(before: Stamp, now: Stamp, word: int) -> None:
    names = " and ".join(f"{block}:{thread}" for thread, block, *_ in (before, now))
    raise KernelError(f"threads {names} race for word {word} of shared memory")
