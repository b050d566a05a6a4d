"""Making a random program line by line.

Steps (:mod:`steps`) add lines by drawing operators and operands. Each line is evaluated on meta tensors as it is added,
so that a program is valid by construction and its shapes are torch's own.

Programs are made to be well conditioned: what is exponentiated is bounded, what is divided by is away from zero, and
what jumps (comparisons, rounding) only takes values that every correct implementation has exactly.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.random_programs.programs import FLOATS, INTEGERS, Input, dense

OUTLIER = 32.0
"""Inputs are standard normal; the special ones that verification adds reach 30 (or infinity)."""


@dataclass(frozen=True)
class Val:
    """A value of a program under construction.

    Attributes:
        bound: about how large its elements get, outliers of the inputs included.
        exact: every correct implementation has it bit for bit: an input, or moved, negated, chosen or integer.
        centred: sums of it cancel by construction (a normalised row, a softmax).
    """

    name: str
    like: Tensor = field(repr=False)
    bound: float = OUTLIER
    exact: bool = False
    centred: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.like.shape)

    @property
    def ndim(self) -> int:
        return self.like.ndim

    @property
    def dtype(self) -> str:
        return str(self.like.dtype).removeprefix("torch.")

    @property
    def floating(self) -> bool:
        return self.dtype in FLOATS

    @property
    def integer(self) -> bool:
        return self.dtype in INTEGERS


class Skip(Exception):
    """A step that does not apply to what there is; another one is drawn."""


class Maker:
    """A program under construction. ``largest`` bounds the elements of any value."""

    def __init__(self, rng: random.Random, largest: int) -> None:
        self.rng, self.largest = rng, largest
        self.inputs: list[Input] = []
        self.lines: list[str] = []
        self.pool: list[Val] = []
        self.finished: list[Val] = []
        self.env: dict[str, Any] = {"torch": torch, "F": F}

    # Inputs -----------------------------------------------------------------------------------------------------------

    def input(self, shape: Sequence[int], dtype: str, bound: int = 0, plain: bool = False) -> Val:
        """A new argument; its strides are drawn, unless ``plain``."""
        strides, offset = (dense(shape), 0) if plain else self.layout(tuple(shape))
        made = Input(f"x{len(self.inputs)}", tuple(shape), dtype, strides, offset, bound)
        self.inputs.append(made)
        with torch.device("meta"):
            self.env[made.name] = made.empty()
        limit = OUTLIER if dtype in FLOATS else float(bound or 8)
        val = Val(made.name, self.env[made.name], limit, exact=True)
        self.pool.append(val)
        return val

    def layout(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
        """(strides, offset): mostly dense; else transposed, sliced out of a larger tensor, expanded, or moved."""
        kind = self.rng.choices(["dense", "transposed", "sliced", "stepped", "expanded", "moved"], [12, 2, 2, 1, 1, 1])[
            0
        ]
        if kind == "moved":
            return dense(shape), self.rng.choice([1, 2, 3, 4, 8])
        if kind == "transposed" and len(shape) > 1:
            order = list(range(len(shape)))
            self.rng.shuffle(order)
            strides = [0] * len(shape)
            step = 1
            for d in reversed(order):
                strides[d] = step
                step *= max(shape[d], 1)
            return tuple(strides), 0
        if kind == "sliced" and shape:
            wider = [n + self.rng.choice([0, 1, 3, 8]) for n in shape]
            return dense(wider), self.rng.choice([0, 0, 1, 4])
        if kind == "stepped" and shape:
            strides = list(dense([*shape[:-1], 2 * shape[-1]]))
            strides[-1] = 2
            return tuple(strides), 0
        if kind == "expanded" and len(shape) > 1:
            d = self.rng.randrange(len(shape))
            strides = list(dense([1 if k == d else n for k, n in enumerate(shape)]))
            strides[d] = 0
            return tuple(strides), 0
        return dense(shape), 0

    # Lines ------------------------------------------------------------------------------------------------------------

    def add(
        self, text: str, bound: float = OUTLIER, *, exact: bool = False, centred: bool = False, keep: bool = True
    ) -> Val:
        """A line ``vN = text``; the value joins the pool if ``keep``. Raises Skip where it would be too large."""
        return self.add_several(text, [bound], exact=exact, centred=centred, keep=keep, single=True)[0]

    def add_several(
        self,
        text: str,
        bounds: Sequence[float],
        *,
        exact: bool = False,
        centred: bool = False,
        keep: bool = True,
        single: bool = False,
    ) -> list[Val]:
        """A line ``vN, vM = text``."""
        result = eval(text, dict(self.env))
        tensors = [result] if single else list(result)
        if any(t.numel() > self.largest for t in tensors):
            raise Skip
        out = []
        for t, bound in zip(tensors, bounds, strict=True):
            name = f"v{sum(k.startswith('v') for k in self.env)}"
            self.env[name] = t
            out.append(Val(name, t, bound, exact, centred))
        self.lines.append(f"{', '.join(v.name for v in out)} = {text}")
        if keep:
            self.pool.extend(out)
        return out

    # Choices ----------------------------------------------------------------------------------------------------------

    def pick(self, wanted: Callable[[Val], bool]) -> Val:
        """A value that is wanted, rather a late one. Raises Skip if there is none."""
        found = [v for v in self.pool if wanted(v)]
        if not found:
            raise Skip
        return self.rng.choices(found, [1 + 2 * k for k in range(len(found))])[0]

    def floating(self, least: int = 0) -> Val:
        """A float value of at least ``least`` dimensions."""
        return self.pick(lambda v: v.floating and v.ndim >= least)

    def partner(self, v: Val, wanted: Callable[[Val], bool], dtype: str, bound: int = 0) -> Val:
        """Another value that broadcasts with ``v``: one there is, or a new input (whole, a row, a column, a scalar)."""
        there = [
            w
            for w in self.pool
            if w.name != v.name and wanted(w) and _broadcasts(v.shape, w.shape) and self._small(v.shape, w.shape)
        ]
        if there and self.rng.random() < 0.5:
            return self.rng.choice(there)
        shape = list(v.shape)
        kind = self.rng.random()
        if kind < 0.6 and shape:  # a vector along some dimensions
            shape = [n if self.rng.random() < 0.5 else 1 for n in shape]
        if kind < 0.5:
            while shape and shape[0] == 1:
                del shape[0]
        return self.input(shape, dtype, bound)

    def _small(self, a: Sequence[int], b: Sequence[int]) -> bool:
        return math.prod(torch.broadcast_shapes(a, b)) <= self.largest

    def dims(self, v: Val) -> tuple[int, ...]:
        """Some dimensions of ``v`` to reduce over: the last, the first, one in the middle, several, or all."""
        n = v.ndim
        if n == 0:
            raise Skip
        kind = self.rng.choices(["last", "first", "one", "some", "tail", "all"], [6, 3, 2, 2, 2, 1])[0]
        if kind == "last" or n == 1:
            found = [n - 1]
        elif kind == "first":
            found = [0]
        elif kind == "one":
            found = [self.rng.randrange(n)]
        elif kind == "some":
            found = sorted(self.rng.sample(range(n), self.rng.randint(1, n - 1)))
        elif kind == "tail":
            found = list(range(self.rng.randint(1, n - 1), n))
        else:
            found = list(range(n))
        return tuple(found)

    def number(self) -> float:
        """A scalar that every float type holds."""
        return self.rng.choice([-16, -12, -9, -6, -4, -3, 2, 3, 4, 5, 8, 10, 14, 16]) / 8

    def scaled(self, v: Val, limit: float) -> str:
        """``v``, multiplied by a power of two if its elements may exceed ``limit``."""
        if v.bound <= limit:
            return v.name
        return f"({v.name} * {2.0 ** math.floor(math.log2(limit / v.bound))!r})"


def _broadcasts(a: Sequence[int], b: Sequence[int]) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(reversed(a), reversed(b), strict=False))


_EXTENTS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 16, 17, 24, 31, 32, 33, 40, 48, 63, 64, 65, 80, 96, 100, 127, 128, 129)
_LONG = (160, 192, 255, 256, 257, 300, 384, 500, 512, 640, 768, 1000, 1023, 1024, 1025, 1536, 2048, 3001, 4096)
_LONGEST = (5000, 8192, 14336, 16384, 32000, 40001, 65536)


def shape_of(rng: random.Random, largest: int, ndim: int | None = None) -> tuple[int, ...]:
    """A shape of at most ``largest`` elements; now and then with a long last dimension, or one of extent 0."""
    n = ndim if ndim is not None else rng.choices([1, 2, 3, 4], [1, 6, 4, 2])[0]
    while True:
        shape = [rng.choice(_EXTENTS) for _ in range(n)]
        if rng.random() < 0.5:
            shape[-1] = rng.choice(_LONG)
            if rng.random() < 0.15:
                shape[-1] = rng.choice(_LONGEST)
            if rng.random() < 0.2:
                rng.shuffle(shape)
        if largest > 100_000 and n > 1 and rng.random() < 0.5:  # large ones are rare otherwise
            rest = max(1, math.prod(shape[1:]))
            shape[0] = max(1, rng.randint(largest // 20, largest) // rest)
        if rng.random() < 0.02:
            shape[rng.randrange(n)] = 0
        if math.prod(shape) <= largest:
            return tuple(shape)
