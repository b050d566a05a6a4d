"""Norms of a sum with a transposed tensor, and the plan that stores the sum first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autotune.compiler.planner.groups import Root, names
from autotune.compiler.planner.plan import all_roots
from autotune.ir.graph import Graph
from autotune.workload import Workload
from tests.support.zoo import BF16, Case, T, workloads_of


def mixer_norm(x: Tensor, residual: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """MLP-Mixer's: tokens were mixed along their axis, so that ``x`` has its channels far apart."""
    total = residual + x.transpose(1, 2)
    return total, torch.nn.functional.layer_norm(total, (total.shape[-1],), w, b)


def plain_norm(x: Tensor, residual: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    total = residual + x
    return total, torch.nn.functional.layer_norm(total, (total.shape[-1],), w, b)


def stream_norm(x: Tensor, residual: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The same with a transposed residual stream, and so a transposed sum: as timm's MLP-Mixer has it."""
    total = residual.transpose(1, 2) + x.transpose(1, 2)
    return total, torch.nn.functional.layer_norm(total, (total.shape[-1],), w, b)


def workload_of(
    fn: Callable[..., Any],
    batch: int = 512,
    tokens: int = 196,
    channels: int = 768,
    dtype: torch.dtype = BF16,
    transposed: bool = True,
) -> Workload:
    rows, across = (tokens, channels), (channels, tokens)
    x, residual = (across if transposed else rows, across if fn is stream_norm else rows)
    inputs = (T(batch, *x, d=dtype), T(batch, *residual, d=dtype), *[T(channels, d=dtype)] * 2)
    (work,) = workloads_of(Case("norm", fn, inputs))
    return work


def graph_of(fn: Callable[..., Any], *sizes: Any, **how: Any) -> Graph:
    return Graph.from_json(workload_of(fn, *sizes, **how).spec)


def cut(graph: Graph) -> str:
    """The plan that stores the sum first."""
    rest = names(r for r in all_roots(graph) if r != Root("o", 0))
    return f"b0 / {rest}"
