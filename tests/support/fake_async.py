"""Asynchronous copies to shared memory in :mod:`fake_cuda`: they land when they are awaited, and not before.

A word whose copy is under way may not be touched by anyone; a copy that nobody awaits is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.fake_intrinsics import STORAGE, Pointer, decode

if TYPE_CHECKING:
    from tests.support.fake_cuda import Machine, _Words

_NAME = re.compile(r"\b(copy|take|put)_([a-z]+\d+)_(\d+)(?:_[a-z])?\b")
_AWAIT = re.compile(r"\bawait_copies_(\d+)\b")


def _error(text: str) -> AssertionError:
    from tests.support.fake_cuda import KernelError

    return KernelError(text)


class Copies:
    """The functions of one machine's kernel."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def space(self, text: str) -> dict[str, Any]:
        makers = {"copy": self._copy, "take": self._take, "put": self._put}
        found: dict[str, Any] = {
            m.group(0): makers[m.group(1)](m.group(2), int(m.group(3))) for m in _NAME.finditer(text)
        }
        found.update({m.group(0): self._await(int(m.group(1))) for m in _AWAIT.finditer(text)})
        return found | {"commit_copies": self._commit, "rounds": lambda n: n}

    def _words(self, word: int, step: int, nbytes: int) -> list[int]:
        """The words of a vector, in pieces of 16 bytes; an access must be aligned to its piece."""
        out: list[int] = []
        for piece, done in enumerate(range(0, nbytes, 16)):
            n = min(16, nbytes - done) // 4
            first = word + piece * step
            if first % n:
                raise _error(f"{n} words at word {first} of shared memory are not aligned")
            out += range(first, first + n)
        return out

    def _copy(self, short: str, n: int) -> Callable[..., None]:
        def copy(array: _Words, word: int, step: int, pointer: Pointer, at: int) -> None:
            assert pointer.short == short, f"a copy of {short} from a tensor of {pointer.short}"
            data = np.frombuffer(pointer.load(at, n).tobytes(), np.uint32)
            places = self._words(word, step, data.nbytes)
            thread = self.machine.now
            for k, bits in zip(places, data, strict=True):
                array[k] = 0xC7C7C7C7  # what it will be is not there yet
                thread.block.in_flight[(array.key, k)] = thread
                thread.copies[-1].append((array, k, int(bits)))

        return copy

    def _commit(self) -> None:
        self.machine.now.copies.append([])

    def _await(self, most: int) -> Callable[[], None]:
        def wait() -> None:
            thread = self.machine.now
            while len(thread.copies) - 1 > most:
                for array, k, bits in thread.copies.pop(0):
                    del thread.block.in_flight[(array.key, k)]
                    array[k] = bits

        return wait

    def _take(self, short: str, n: int) -> Callable[..., Any]:
        size = max(4, n * np.dtype(STORAGE[short]).itemsize)

        def take(array: _Words, word: int, step: int) -> Any:
            words = np.array([array[k] for k in self._words(word, step, size)], np.uint32)
            return tuple(decode(short, words.view(STORAGE[short])[:n]))

        return take

    def _put(self, short: str, n: int) -> Callable[..., None]:
        def put(array: _Words, word: int, step: int, values: Any) -> None:
            data = np.array(values, STORAGE[short]).view(np.uint32)
            assert len(values) == n
            for k, bits in zip(self._words(word, step, data.nbytes), data, strict=True):
                array[k] = bits

        return put
