"""A case of the suite: one PyTorch function, inputs for a GPU and for a CPU, and the name of its JAX twin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

SIZES = ("gpu", "cpu")
_SHORT = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}

Shape = tuple[int, ...]
Arguments = tuple[Any, ...]


class Draw:
    """Reproducible random inputs on one device: each tensor has a separate seed.

    Args:
        device: "cpu" or "cuda:N".
        dtype: the default type of :meth:`normal`.
    """

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._made = 0

    def _generator(self) -> torch.Generator:
        self._made += 1
        return torch.Generator(device=self.device).manual_seed(self._made)

    def normal(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        """Normally distributed, with standard deviation ``scale``."""
        drawn = torch.randn(shape, generator=self._generator(), device=self.device)
        return drawn.mul_(scale).to(dtype or self.dtype)

    def positive(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Uniform between 0.5 and 1.5: scales, variances, reciprocal deviations."""
        drawn = torch.rand(shape, generator=self._generator(), device=self.device)
        return drawn.add_(0.5).to(dtype or self.dtype)

    def index(self, below: int, *shape: int) -> Tensor:
        """int64, uniform in [0, below)."""
        return torch.randint(below, shape, generator=self._generator(), device=self.device)


@dataclass(frozen=True)
class Case:
    """One case.

    Attributes:
        name: what ``--cases`` takes; an identifier.
        kind: "forward", "backward" or "mixed".
        title: the operators, for tables.
        dtype: of the floats that are not statistics.
        gpu, cpu: the extents that ``inputs`` takes, for each size.
        fn: takes and returns tensors only (lists of them for the optimiser); writes to none; needs no autograd.
        inputs: positional arguments for extents.
        twin: its function in :mod:`benchmarks.fusion.cases.twins`.
        shown: replaces the extents in the label where they do not say it.
    """

    name: str
    kind: str
    title: str
    dtype: torch.dtype
    gpu: Shape
    cpu: Shape
    fn: Callable[..., Any]
    inputs: Callable[[Draw, Shape], Arguments]
    twin: str
    shown: Callable[[Shape], str] | None = None

    def shape(self, size: str) -> Shape:
        """The extents of "gpu" or "cpu"."""
        return self.gpu if size == "gpu" else self.cpu

    def label(self, size: str) -> str:
        """Such as ``layer_norm backward f32 8192x1024``."""
        shape = self.shape(size)
        return f"{self.title} {_SHORT[self.dtype]} {self.shown(shape) if self.shown else 'x'.join(map(str, shape))}"

    def arguments(self, size: str, device: str) -> Arguments:
        """Inputs on ``device``, the same every time."""
        return self.inputs(Draw(device, self.dtype), self.shape(size))


def bytes_moved(args: Any, results: Any) -> int:
    """Bytes a perfect implementation moves: every input read once, every result written once.

    Memory that broadcast views show more than once counts once.
    """
    tensors = [t for t in pytree.tree_leaves((args, results)) if isinstance(t, Tensor)]
    return sum(_elements(t) * t.element_size() for t in tensors)


def _elements(t: Tensor) -> int:
    n = 1
    for extent, stride in zip(t.shape, t.stride(), strict=True):
        n *= extent if stride or extent == 0 else 1
    return n
