"""Base class of the example models: sizes by name, and targets for ``autotune search``."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

SIZES = ("gpu", "cpu")
"""``gpu`` is the paper's size (what is measured), ``cpu`` the same model small enough for a test."""

DEPTHS = ("layers", "steps")
"""What repeats in a model, by the names of configurations' fields: its layers, the steps of its recurrences."""


def default_size() -> str:
    """``$EXAMPLE_SIZE``, or ``gpu`` where torch sees a GPU."""
    return os.environ.get("EXAMPLE_SIZE") or ("gpu" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        sizes: a configuration for each of :data:`SIZES`.
        build: (configuration, train) to a module; in training its forward returns the loss, a scalar.
        batch: (configuration, train, device) to the module's positional arguments; random, the same every time.
        kinds: "train", "infer" or both.
    """

    sizes: Mapping[str, Any]
    build: Callable[[Any, bool], nn.Module]
    batch: Callable[[Any, bool, str], tuple[Tensor, ...]]
    kinds: tuple[str, ...]

    def config(self, size: str | None = None) -> Any:
        """The configuration called ``size``; by default :func:`default_size`, with the depth of the environment.

        ``$EXAMPLE_LAYERS`` are the layers of those that have any, ``$EXAMPLE_STEPS`` the steps of recurrences.
        """
        if size is not None:
            return self.sizes[size]
        config = self.sizes[default_size()]
        given = {name: os.environ.get(f"EXAMPLE_{name.upper()}") for name in DEPTHS if hasattr(config, name)}
        return dataclasses.replace(config, **{name: int(n) for name, n in given.items() if n})

    def module(self, kind: str, config: Any, device: str = "cpu") -> nn.Module:
        """The module in the configuration's type, in train or eval mode, with random but fixed weights.

        Args:
            kind: "train", or "infer" (then no parameter requires a gradient).
        """
        train = kind == "train"
        cuda = [torch.device(device)] if device.startswith("cuda") else []
        # The caller's random state is left alone.
        with torch.random.fork_rng(devices=cuda), torch.device(device):
            torch.manual_seed(0)
            made = self.build(config, train)
        return made.to(dtype=config.dtype).train(train).requires_grad_(train)

    def target(self, name: str) -> Any:
        """The target of ``package.module:name`` on a command line.

        ``train`` and ``infer`` are modules and ``train_inputs`` and ``infer_inputs`` make their inputs; ``model`` and
        ``inputs`` are those of the first kind there is.
        """
        kind, _, what = name.partition("_")
        if name in ("model", "inputs"):
            kind, what = self.kinds[0], "inputs" if name == "inputs" else ""
        if kind not in self.kinds or what not in ("", "inputs"):
            raise AttributeError(f"no attribute {name!r}")
        config = self.config()
        if not what:
            return _cached(self, kind)

        def inputs(device: str) -> tuple[Tensor, ...]:
            return self.batch(config, kind == "train", device)

        return inputs

    def __hash__(self) -> int:
        return id(self)


@functools.cache
def _cached(family: Family, kind: str) -> nn.Module:
    return family.module(kind, family.config(), "cuda" if torch.cuda.is_available() else "cpu")


def generator(device: str, seed: int = 0) -> torch.Generator:
    """A generator on ``device``."""
    return torch.Generator(device=device).manual_seed(seed)


def tokens(device: str, shape: tuple[int, ...], high: int, seed: int = 0, low: int = 1) -> Tensor:
    """Random whole numbers in ``[low, high)``."""
    return torch.randint(low, high, shape, generator=generator(device, seed), device=device)


def normal(device: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(shape, generator=generator(device, seed), device=device).to(dtype)


def lengths(device: str, batch: int, longest: int) -> Tensor:
    """Lengths between half of ``longest`` and ``longest``, [batch]."""
    return longest - torch.arange(batch, device=device) * longest // (2 * batch)
