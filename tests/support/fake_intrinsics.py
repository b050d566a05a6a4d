"""The functions that generated CUDA code calls, in NumPy; see :mod:`fake_cuda`."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autotune.ir.graph import SHORT
from autotune.ir.ops import LIBRARY

F = np.float32
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


def _error(text: str) -> AssertionError:
    from tests.support.fake_cuda import KernelError

    return KernelError(text)


class Pointer:
    """A tensor in global memory: bounds and alignment are checked, and so is that it is read, or written once."""

    def __init__(self, short: str, data: np.ndarray[Any, Any], once: bool = False, readonly: bool = False) -> None:
        self.short, self.data, self.readonly = short, data, readonly
        self._fresh, self._written = bytearray(len(data)), bytearray(len(data))
        self.fresh = np.frombuffer(self._fresh, bool)  # written by the launch at hand
        self.written = np.frombuffer(self._written, bool) if once else None
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
    def poisoned(cls, storage: str, n: int, once: bool = False) -> Pointer:
        short = SHORT[storage]
        size = np.dtype(STORAGE[short]).itemsize
        return cls(short, np.full(n * size, 0xC7, np.uint8).view(STORAGE[short]), once)

    @classmethod
    def zeros(cls, storage: str, n: int) -> Pointer:
        return cls(SHORT[storage], np.zeros(n, STORAGE[SHORT[storage]]))

    def check(self, short: str, align: int) -> None:
        """Against a kernel's parameter: the same type, and an alignment that any tensor of ours has."""
        assert short == self.short, f"a pointer to {self.short} for a parameter of {short}"
        size = self.data.dtype.itemsize
        assert align % size == 0, f"alignment of {align} bytes for elements of {size}"

    def tensor(self) -> Tensor:
        if self.written is not None and self.short == "b1" and not self.written.all():
            self.data[~self.written] = 0  # torch knows no other booleans; the comparison shows what is missing
        raw = torch.from_numpy(self.data.view(np.int16) if self.short == "bf16" else self.data)
        return raw.view(TORCH[self.short]) if self.short in ("bf16", "b1", "e4m3", "e5m2") else raw

    def span(self, at: int, n: int) -> slice:
        if at < 0 or at + n > self.length:
            raise _error(f"elements {at}..{at + n - 1} of a tensor of {self.length}")
        if n > 1 and at * self.size % min(16, n * self.size):
            raise _error(f"{n} elements at {at} are not aligned")
        return slice(at, at + n)

    @functools.cached_property
    def values(self) -> list[Any]:
        """All of a tensor that nobody writes, as arithmetic values."""
        return decode(self.short, self.data)

    def elements(self, at: int, n: int, coherent: bool) -> list[Any]:
        """``n`` elements as arithmetic values."""
        if self.readonly:
            return self.values[self.span(int(at), n)]
        return decode(self.short, self.load(at, n, coherent))

    def load(self, at: int, n: int, coherent: bool = True) -> np.ndarray[Any, Any]:
        where = self.span(int(at), n)
        if not coherent and self._fresh.find(1, where.start, where.stop) >= 0:
            raise _error("a load through the read-only path of what the same launch wrote")
        return self.data[where]

    def store(self, at: int, values: list[Any]) -> None:
        where = self.span(int(at), len(values))
        if self.readonly:
            raise _error("a kernel writes to an input")
        if self.written is not None:
            if self._written.find(1, where.start, where.stop) >= 0:
                raise _error(f"element {at} is written twice")
            self._written[where] = _ONES[len(values)]
        self._fresh[where] = _ONES[len(values)]
        self.data[where] = values if self.short == "f32" else encode(self.short, values)


_ONES = [bytes([1]) * n for n in range(65)]


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


def encode(short: str, values: list[Any]) -> Any:
    """Arithmetic values as stored elements."""
    if short == "bf16":
        floats = np.array(values, F)
        words = floats.view(np.uint32)
        return np.where(np.isnan(floats), 0x7FC0, (words + 0x7FFF + (words >> 16 & 1)) >> 16).astype(np.uint16)
    if short in ("e4m3", "e5m2"):
        return torch.tensor([float(F(x)) for x in values]).to(TORCH[short]).view(torch.uint8).numpy()
    if short in ("f32", "f16"):
        return np.array([F(x) for x in values], STORAGE[short])
    bits = 8 * np.dtype(STORAGE[short]).itemsize
    return np.array([int(x) & ((1 << bits) - 1) for x in values], np.uint64).astype(f"uint{bits}").view(STORAGE[short])


def integer(bits: int, signed: bool = True) -> Callable[[Any], int]:
    """``int32(x)`` and the like: Python's integer, wrapped to the type."""
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)

    def wrapped(x: Any) -> int:
        if type(x) is int and low <= x <= high:
            return x
        if isinstance(x, (float, np.floating)) and not np.isfinite(x):
            return 0 if np.isnan(x) else (1 << (bits - 1)) - (1 if x > 0 else 0)
        n = int(x) & ((1 << bits) - 1)
        return n - (1 << bits) if signed and n >> (bits - 1) else n

    return wrapped


int32, uint32, int64 = integer(32), integer(32, signed=False), integer(64)
SHARED = {int32: np.dtype(np.int32), uint32: np.dtype(np.uint32), int64: np.dtype(np.int64), F: np.dtype(np.float32)}


def dtype_of(kind: Any) -> Any:
    """NumPy's type of a shared array's elements."""
    return SHARED[kind]


def _largest(a: Any, b: Any) -> Any:
    """As ``np.maximum``, which takes ten times as long for two numbers: NaN if either is."""
    a, b = F(a), F(b)
    return a if a >= b or a != a else b


def _smallest(a: Any, b: Any) -> Any:
    a, b = F(a), F(b)
    return a if a <= b or a != a else b


def _divide(a: int, b: int, bits: int = 32) -> tuple[int, int]:
    assert a >= 0 <= b, f"unsigned division of {a} by {b}"
    assert a >> (bits - 1) == 0 == b >> (bits - 1), f"division of {a} by {b} in {bits} bits"
    return divmod(int(a), int(b))


def _one(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: F(f(F(x)))


def _library(name: str) -> Callable[[Any], Any]:
    function = getattr(torch, name)
    return lambda x: F(function(torch.tensor(F(x))).item())


def _trunc(x: Any) -> Any:
    return F(np.trunc(F(x)))


PLAIN: dict[str, Callable[..., Any]] = {
    "ex2": _one(np.exp2),
    "rcp": lambda x: F(1) / F(x),
    "fma": lambda a, b, c: F(float(a) * float(b) + float(c)),
    "sel": lambda c, a, b: a if c else b,
    "fmax": _largest,
    "fmin": _smallest,
    "rsqrt": lambda x: F(1) / np.sqrt(F(x)),
    "sqrt": _one(np.sqrt),
    "rint": _one(np.rint),
    "pin": int32,
    "to_l2": lambda p, at: p.span(int(at), 1) and None,
    "tied": lambda x, word: F(x),
    "least": lambda a, b: min(int32(a), int32(b)),
    "least64": lambda a, b: min(int64(a), int64(b)),
    "udiv": lambda a, b: _divide(a, b)[0],
    "urem": lambda a, b: _divide(a, b)[1],
    "udiv64": lambda a, b: _divide(a, b, 64)[0],
    "urem64": lambda a, b: _divide(a, b, 64)[1],
    "tanh_": _one(np.tanh),
    "sigmoid_": lambda x: F(1) / (F(1) + np.exp(-F(x))),
    "rcp_rn": lambda x: F(1) / F(x),
    "sqrt_rn": _one(np.sqrt),
    "rsqrt_rn": lambda x: F(1) / np.sqrt(F(x)),
    "sigmoid_rn": lambda x: F(1) / (F(1) + np.exp(-F(x))),
    "erf_": lambda x: F(math.erf(float(x))),
}
LIBDEVICE = {
    "expf": _one(np.exp),
    "exp2f": _one(np.exp2),
    "erff": lambda x: F(math.erf(float(x))),
    "tanhf": _one(np.tanh),
    **{f"{name}f": _library(name) for name in LIBRARY},
    "powf": lambda a, b: F(np.power(F(a), F(b))),
    "floorf": _one(np.floor),
    "ceilf": _one(np.ceil),
    "truncf": _trunc,
}
MATH = {"log": _one(np.log), "log2": _one(np.log2), "copysign": lambda a, b: F(np.copysign(a, b))}
WAITING = frozenset(["cluster_sync", "cluster_wait"])
"""Functions at which a thread waits for those of other blocks."""

_MEMORY = re.compile(r"\b(ld|lk|lg|lw|lr|sg|st|touch|un)_([a-z]+\d+)_(\d+)(?:_([a-z]))?\b")


COHERENT = ("c",)
"""Hints of loads that see what the same launch wrote."""


def _load(short: str, n: int, hint: str) -> Callable[..., Any]:
    def load(p: Pointer, at: int) -> Any:
        assert p.short == short, f"a load of {short} from a tensor of {p.short}"
        out = p.elements(at, n, coherent)
        return out[0] if n == 1 else tuple(out)

    coherent = hint in COHERENT
    return load


def _guarded(short: str, n: int, hint: str) -> Callable[..., Any]:
    plain = _load(short, n, hint)

    def load(p: Pointer, at: int, where: bool) -> Any:
        if where:
            return plain(p, at)
        zeros = decode(short, np.zeros(n, STORAGE[short]))
        return zeros[0] if n == 1 else tuple(zeros)

    return load


def _raw(short: str, n: int, hint: str) -> Callable[..., Any]:
    def load(p: Pointer, at: int) -> Any:
        assert p.short == short
        data = p.load(at, n, hint in COHERENT).tobytes()
        return tuple(int(w) for w in np.frombuffer(data.ljust(4, b"\0"), np.uint32))

    return load


def _touch(short: str, n: int, hint: str) -> Callable[..., Any]:
    raw = _raw(short, n, hint)
    return lambda p, at: int32(raw(p, at)[0])


def _raw_guarded(short: str, n: int, hint: str) -> Callable[..., Any]:
    plain, words = _raw(short, n, hint), max(1, n * np.dtype(STORAGE[short]).itemsize // 4)

    def load(p: Pointer, at: int, where: bool) -> Any:
        return plain(p, at) if where else (0,) * words

    return load


def _unpack(short: str, n: int, _: str) -> Callable[..., Any]:
    def unpack(words: tuple[int, ...]) -> Any:
        return tuple(decode(short, np.array(words, np.uint32).view(STORAGE[short])[:n]))

    return unpack


def _store(short: str, n: int, _: str) -> Callable[..., Any]:
    def store(p: Pointer, at: int, values: Any) -> None:
        assert p.short == short, f"a store of {short} to a tensor of {p.short}"
        p.store(at, [values] if n == 1 else list(values))

    return store


def _store_where(short: str, n: int, hint: str) -> Callable[..., Any]:
    plain = _store(short, n, hint)

    def store(p: Pointer, at: int, values: Any, where: bool) -> None:
        if where:
            plain(p, at, values)

    return store


def space(text: str) -> dict[str, Any]:
    """What the kernel of that text finds under its names, besides ``cuda``."""
    makers = {
        "ld": _load,
        "lk": _load,
        "lg": _guarded,
        "lw": _raw_guarded,
        "lr": _raw,
        "un": _unpack,
        "st": _store,
        "sg": _store_where,
        "touch": _touch,
    }
    found = list(_MEMORY.finditer(text))
    memory = {m.group(0): makers[m.group(1)](m.group(2), int(m.group(3)), m.group(4) or "") for m in found}
    return {
        "math": SimpleNamespace(**MATH),
        "libdevice": SimpleNamespace(**LIBDEVICE),
        "inf": F(np.inf),
        "nan": F(np.nan),
        "float32": F,
        "int32": int32,
        "uint32": uint32,
        "int64": int64,
        "boolean": bool,
        "cluster_arrive": lambda: None,
        **PLAIN,
        **memory,
    }
