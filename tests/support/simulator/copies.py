"""Asynchronous copies to shared memory: they land when they are awaited, and not before.

A word whose copy is under way may not be touched by anyone; a copy that nobody awaits is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.simulator.errors import KernelError
from tests.support.simulator.tensors import STORAGE, Function, Pointer, decode

if TYPE_CHECKING:
    from tests.support.simulator.machine import Machine
    from tests.support.simulator.shared import Words


def _places(word: int, step: int, nbytes: int) -> list[int]:
    """The words of a vector, in pieces of 16 bytes; an access must be aligned to its piece."""
    out: list[int] = []
    for piece, done in enumerate(range(0, nbytes, 16)):
        n = min(16, nbytes - done) // 4
        first = word + piece * step
        if first % n:
            raise KernelError(f"{n} words at word {first} of shared memory are not aligned")
        out += range(first, first + n)
    return out


class Copies:
    """Makes the functions of one machine's kernel: each method answers the one for elements of a type and a number."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def copy(self, short: str, n: int, _hint: str) -> Function:
        def copy(array: Words, word: int, step: int, pointer: Pointer, at: int) -> None:
            pointer.check_access(at, n, short)
            data = np.frombuffer(pointer.load(at, n).tobytes(), np.uint32)
            group = self.machine.now.copies[-1]
            for k, bits in zip(_places(word, step, data.nbytes), data, strict=True):
                array[k] = 0xC7C7C7C7  # what it will be is not there yet
                array.buffer.in_flight.add(k)
                group.append((array, k, int(bits)))

        return copy

    def commit_copies(self) -> Function:
        return lambda: self.machine.now.copies.append([])

    def await_copies(self, most: int) -> Function:
        def wait() -> None:
            copies = self.machine.now.copies
            while len(copies) - 1 > most:
                for array, k, bits in copies.pop(0):
                    array.buffer.in_flight.remove(k)
                    array[k] = bits

        return wait

    def take(self, short: str, n: int) -> Function:
        size = max(4, n * np.dtype(STORAGE[short]).itemsize)

        def take(array: Words, word: int, step: int) -> Any:
            words = np.array([array[k] for k in _places(word, step, size)], np.uint32)
            return tuple(decode(short, words.view(STORAGE[short])[:n]))

        return take

    def put(self, short: str, n: int) -> Function:
        def put(array: Words, word: int, step: int, values: Any) -> None:
            data = np.array(values, STORAGE[short]).view(np.uint32)
            assert len(values) == n
            for k, bits in zip(_places(word, step, data.nbytes), data, strict=True):
                array[k] = bits

        return put
