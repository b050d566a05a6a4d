"""Tensors in global memory, and the functions that load, store and unpack their elements.

A kernel's printer creates one function for each kind of access, so an access needs no look-up: it checks and moves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autotune.ir.graph import SHORT
from tests.support.simulator.errors import KernelError

STORAGE = {
    "f32": np.float32,
    "f16": np.float16,
    "bf16": np.uint16,
    "e4m3": np.uint8,
    "e5m2": np.uint8,
    "i64": np.int64,
    "i32": np.int32,
    "i16": np.int16,
    "i8": np.int8,
    "u8": np.uint8,
    "b1": np.uint8,
}
TORCH = {SHORT[name]: getattr(torch, name) for name in SHORT}
Function = Callable[..., Any]


class Pointer:
    """A tensor in global memory: bounds and alignment are checked, and so is that it is read, or written once.

    With ``again``, several threads may write the same bits to an element.
    """

    def __init__(
        self, short: str, data: np.ndarray[Any, Any], once: bool = False, readonly: bool = False, again: bool = False
    ) -> None:
        self.short, self.data, self.readonly, self.once, self.again = short, data, readonly, once, again
        self.is_fresh, self.is_written = bytearray(len(data)), bytearray(len(data))
        self.fresh = np.frombuffer(self.is_fresh, bool)  # written by the current launch
        self.written = np.frombuffer(self.is_written, bool) if once else None
        self.size, self.length = data.dtype.itemsize, len(data)

    @classmethod
    def reading(cls, t: Tensor, storage: str) -> Pointer:
        short = SHORT[storage]
        flat = t.detach().contiguous().reshape(-1)
        if short == "bf16":
            flat = flat.view(torch.int16)
        elif short in ("b1", "e4m3", "e5m2"):
            flat = flat.view(torch.uint8)
        return cls(short, flat.numpy().view(STORAGE[short]).copy(), readonly=True)

    @classmethod
    def poisoned(cls, storage: str, n: int, once: bool = False, again: bool = False) -> Pointer:
        short = SHORT[storage]
        size = np.dtype(STORAGE[short]).itemsize
        return cls(short, np.full(n * size, 0xC7, np.uint8).view(STORAGE[short]), once, again=again)

    @classmethod
    def zeros(cls, storage: str, n: int) -> Pointer:
        return cls(SHORT[storage], np.zeros(n, STORAGE[SHORT[storage]]))

    def check(self, short: str, align: int) -> None:
        """Against a kernel's parameter: the same type, and an alignment that any tensor of ours has."""
        assert short == self.short, f"a pointer to {self.short} for a parameter of {short}"
        assert align % self.size == 0, f"alignment of {align} bytes for elements of {self.size}"

    def tensor(self) -> Tensor:
        if self.written is not None and self.short == "b1" and not self.written.all():
            self.data[~self.written] = 0  # torch has no other booleans; the comparison shows missing ones
        raw = torch.from_numpy(self.data.view(np.int16) if self.short == "bf16" else self.data)
        return raw.view(TORCH[self.short]) if self.short in ("bf16", "b1", "e4m3", "e5m2") else raw

    @functools.cached_property
    def values(self) -> tuple[Any, ...]:
        """All of a tensor that nobody writes, as arithmetic values."""
        return tuple(decode(self.short, self.data))

    def check_access(self, at: int, n: int, short: str) -> None:
        """Raise where ``n`` elements of type ``short`` at ``at`` are not elements of the tensor, or not aligned."""
        assert self.short == short, f"an access of {short} to a tensor of {self.short}"
        if at < 0 or at + n > self.length:
            raise KernelError(f"elements {at}..{at + n - 1} of a tensor of {self.length}")
        if at % aligned(short, n):
            raise KernelError(f"{n} elements at {at} are not aligned")

    def load(self, at: int, n: int, coherent: bool = True) -> np.ndarray[Any, Any]:
        """Elements as they are stored, of an access that was checked."""
        if not coherent and self.is_fresh.find(1, at, at + n) >= 0:
            raise KernelError("a load through the read-only path of what the same launch wrote")
        return self.data[at : at + n]


@functools.cache
def aligned(short: str, n: int) -> int:
    """The elements of which the index of an access to ``n`` is a multiple: those of 16 bytes at most."""
    size = np.dtype(STORAGE[short]).itemsize
    return 1 if n == 1 else min(16, n * size) // size


def decode(short: str, raw: np.ndarray[Any, Any]) -> list[Any]:
    """Stored elements as arithmetic values."""
    if short == "bf16":
        return list((raw.astype(np.uint32) << 16).view(np.float32))
    if short in ("e4m3", "e5m2"):
        return list(torch.from_numpy(raw.view(np.uint8).copy()).view(TORCH[short]).float().numpy())
    if short == "f32":
        return list(raw)
    if short == "f16":
        return list(raw.astype(np.float32))
    if short == "b1":
        return [bool(x) for x in raw]
    return [int(x) for x in raw]


def encode(short: str, values: Sequence[Any]) -> Any:
    """Arithmetic values as stored elements."""
    if short == "bf16":
        floats = np.array(values, np.float32)
        words = floats.view(np.uint32)
        return np.where(np.isnan(floats), 0x7FC0, (words + 0x7FFF + (words >> 16 & 1)) >> 16).astype(np.uint16)
    if short in ("e4m3", "e5m2"):
        return torch.tensor([float(np.float32(x)) for x in values]).to(TORCH[short]).view(torch.uint8).numpy()
    if short in ("f32", "f16"):
        return np.array(values, np.float32).astype(STORAGE[short])
    bits = 8 * np.dtype(STORAGE[short]).itemsize
    return np.array([int(x) & ((1 << bits) - 1) for x in values], np.uint64).astype(f"uint{bits}").view(STORAGE[short])


# ---- what accesses become -------------------------------------------------------------------------------------------


@functools.cache
def load(storage: str, n: int, form: str, coherent: bool, guarded: bool) -> Function:
    """The function of a pointer, an index and, where ``guarded``, a test, that a load of the kernel IR becomes.

    Args:
        coherent: it sees what the same launch wrote.
    """
    short = SHORT[storage]
    if form == "words":
        plain, zeros = _words(short, n, coherent), _as_words(np.zeros(n, STORAGE[short]))
    else:
        assert form in ("plain", "fixed", "partial"), f"a load of form {form}"
        make = _partial if form == "partial" else _elements
        plain, zeros = make(short, n, coherent), tuple(decode(short, np.zeros(n, STORAGE[short])))
        zeros = zeros[0] if n == 1 else zeros
    return (lambda p, at, test: plain(p, at) if test else zeros) if guarded else plain


def _elements(short: str, n: int, coherent: bool) -> Function:
    whole = aligned(short, n)

    def elements(p: Pointer, at: int) -> Any:
        if p.short != short or at < 0 or at + n > p.length or at % whole:
            p.check_access(at, n, short)
        found = p.values[at : at + n] if p.readonly else tuple(decode(short, p.load(at, n, coherent)))
        return found[0] if n == 1 else found

    return elements


def _partial(short: str, n: int, coherent: bool) -> Function:
    """Elements of an aligned vector of 16 bytes or less: at least one is the tensor's, and the others are noise."""
    noise = tuple(decode(short, np.full(n * np.dtype(STORAGE[short]).itemsize, 0xC7, np.uint8).view(STORAGE[short])))
    assert n * np.dtype(STORAGE[short]).itemsize <= 16, f"a partial load of {n} elements"
    whole = _elements(short, n, coherent)

    def elements(p: Pointer, at: int) -> Any:
        if at >= 0 and at + n <= p.length:
            return whole(p, at)
        first, last = max(at, 0), min(at + n, p.length)
        p.check_access(first, 1, short)
        if at % n:
            raise KernelError(f"{n} elements at {at} are not aligned")
        return (*noise[: first - at], *decode(short, p.load(first, last - first, coherent)), *noise[last - at :])

    return elements


def _words(short: str, n: int, coherent: bool) -> Function:
    def words(p: Pointer, at: int) -> Any:
        p.check_access(at, n, short)
        return _as_words(p.load(at, n, coherent))

    return words


def _as_words(data: np.ndarray[Any, Any]) -> Any:
    return tuple(np.frombuffer(data.tobytes().ljust(4, b"\0"), np.uint32).tolist())


@functools.cache
def unpack(storage: str, n: int) -> Function:
    """The function of words that gives the elements in them."""
    short = SHORT[storage]

    @functools.lru_cache(maxsize=4096)  # several passes unpack the same words
    def elements(words: tuple[int, ...]) -> tuple[Any, ...]:
        return tuple(decode(short, np.array(words, np.uint32).view(STORAGE[short])[:n]))

    return elements


@functools.cache
def store(storage: str, n: int, guarded: bool) -> Function:
    """The function of a pointer, an index, one value or a tuple and, where ``guarded``, a test, that stores."""
    short = SHORT[storage]
    whole, ones = aligned(short, n), bytes([1]) * n

    def plain(p: Pointer, at: int, values: Any) -> None:
        if p.short != short or at < 0 or at + n > p.length or at % whole:
            p.check_access(at, n, short)
        end = at + n
        if p.readonly:
            raise KernelError("a kernel writes to an input")
        data = values if short == "f32" else encode(short, [values] if n == 1 else values)
        if p.once:
            if p.is_written.find(1, at, end) >= 0:
                same = p.data[at:end].tobytes() == np.asarray(data, p.data.dtype).tobytes()
                if not (p.again and same):
                    raise KernelError(f"element {at} is written twice")
            p.is_written[at:end] = ones
        p.is_fresh[at:end] = ones
        p.data[at:end] = data

    def where(p: Pointer, at: int, values: Any, test: bool) -> None:
        if test:
            plain(p, at, values)

    return where if guarded else plain
