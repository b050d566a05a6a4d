"""Random PyTorch programs of the supported operators, each the same wherever its seed is the same.

A program is a few lines of ordinary PyTorch over inputs of random shapes, types and strides: text that can be pasted
into a bug report and run. ``families.program(seed)`` makes one.
"""

from __future__ import annotations

import functools
import linecache
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FLOATS = ("float32", "float16", "bfloat16")
INTEGERS = ("int64", "int32")
NARROW = ("int16", "int8", "uint8")


@dataclass(frozen=True)
class Input:
    """A tensor argument. ``strides`` and ``offset`` are in elements; ``bound`` > 0 makes integers in [0, bound)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]
    offset: int = 0
    bound: int = 0

    @property
    def type(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def span(self) -> int:
        """Elements of memory from the tensor's base to its last element."""
        if 0 in self.shape:
            return self.offset
        return self.offset + 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))

    def empty(self) -> Tensor:
        """The tensor without its offset, for fake modes (nothing that is captured depends on where a tensor begins)."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.type)

    def make(self, rng: torch.Generator, device: str = "cpu") -> Tensor:
        """The tensor with random elements, as a view of memory that is larger than it where strides say so."""
        n = max(self.span, 1)
        if self.dtype in FLOATS:
            memory = torch.randn(n, generator=rng).to(self.type)
        elif self.dtype == "bool":
            memory = torch.randint(0, 2, (n,), generator=rng).bool()
        else:
            low = 0 if self.bound or self.dtype == "uint8" else -8
            memory = torch.randint(low, self.bound or 8, (n,), generator=rng).to(self.type)
        return memory.to(device).as_strided(self.shape, self.strides, self.offset)

    def __str__(self) -> str:
        n = max(self.span, 1)
        if self.dtype in FLOATS:
            memory = f"torch.randn({n})" + ("" if self.dtype == "float32" else f".{_METHOD[self.dtype]}()")
        elif self.dtype == "bool":
            memory = f"torch.randint(0, 2, ({n},)).bool()"
        else:
            low = 0 if self.bound or self.dtype == "uint8" else -8
            memory = f"torch.randint({low}, {self.bound or 8}, ({n},), dtype=torch.{self.dtype})"
        if self.strides == dense(self.shape) and not self.offset and 0 not in self.shape:
            return f"{memory}.view({list(self.shape)})"
        return f"{memory}.as_strided({list(self.shape)}, {list(self.strides)}, {self.offset})"


_METHOD = {"float16": "half", "bfloat16": "bfloat16"}


def dense(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, as torch has them."""
    return torch.empty(tuple(shape), device="meta").stride()


@dataclass(frozen=True)
class Program:
    """``train`` programs are captured with autograd: their float inputs require grad."""

    seed: int
    family: str
    inputs: tuple[Input, ...]
    lines: tuple[str, ...]
    results: tuple[str, ...]
    train: bool = False

    @functools.cached_property
    def source(self) -> str:
        head = f"def f({', '.join(i.name for i in self.inputs)}):"
        return "\n    ".join([head, *self.lines, f"return {', '.join(self.results)},"]) + "\n"

    @functools.cached_property
    def fn(self) -> Callable[..., tuple[Tensor, ...]]:
        space: dict[str, Any] = {"torch": torch, "F": F}
        filename = f"<program {self.seed}>"
        linecache.cache[filename] = (len(self.source), None, self.source.splitlines(True), filename)
        exec(compile(self.source, filename, "exec"), space)
        found: Callable[..., tuple[Tensor, ...]] = space["f"]
        return found

    def arguments(self, seed: int = 0, device: str = "cpu") -> list[Tensor]:
        """Random inputs; of a training program, float inputs require grad."""
        rng = torch.Generator().manual_seed(seed)
        made = [i.make(rng, device) for i in self.inputs]
        return [t.detach().requires_grad_(self.train and t.is_floating_point()) for t in made]

    def __str__(self) -> str:
        """A script that runs the program."""
        made = "\n".join(f"{i.name} = {i}" for i in self.inputs)
        call = f"f({', '.join(i.name for i in self.inputs)})"
        head = f"# program({self.seed}), {self.family}{', with autograd' if self.train else ''}"
        return f"{head}\nimport torch\nimport torch.nn.functional as F\n\n{self.source}\n{made}\nprint({call})\n"
