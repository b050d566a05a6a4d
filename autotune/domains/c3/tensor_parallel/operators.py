"""Matrix products joined with a collective, as PyTorch operators with gradients.

``autotune::all_gather_matmul`` gathers rows and multiplies them. ``autotune::begin_matmul_scatter`` multiplies, and
begins to exchange the parts of a sum, which ``autotune::end_matmul_scatter`` adds. Work between the two runs during the
exchange: the gradient of the weights, in a backward pass. The strategy is that of :data:`...sites.sites` at run time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autotune.domains.c3.caller import NAMES
from autotune.domains.c3.tensor_parallel.sites import Site, sites
from autotune.errors import UserError
from autotune.task import Config

_site = lru_cache(maxsize=4096)(Site)
_library: Any = torch.library.Library("autotune", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("all_gather_matmul(Tensor x, Tensor[] factors, int ranks, str group) -> (Tensor, Tensor[])")
_library.define("begin_matmul_scatter(Tensor[] left, Tensor[] factors, int ranks, str group) -> Tensor")
_library.define("end_matmul_scatter(Tensor parts, str group) -> Tensor")


def _how(config: Config | None, ranks: int) -> tuple[int, str, int]:
    """The number of products, the engine, and the number of streams; 1, "" and 1 for the group's own collective."""
    if config is None:
        return 1, "", 1
    return int(config.get("chunks", ranks)), str(config["engine"]), 2 if config.get("order") == "comm_first" else 1


def _gather(x: Tensor, factors: Sequence[Tensor], ranks: int, group: str) -> tuple[Tensor, list[Tensor]]:
    batched = x.contiguous() if x.dim() == 3 else x.contiguous().unsqueeze(0)
    line = sites.line(group, x.device)
    rows = batched.shape[0] * batched.shape[1] * ranks
    width = sum(factor.shape[1] for factor in factors)
    site = _site("all_gather", rows, width, x.shape[-1], NAMES[x.dtype], ranks, group)
    gathered, results = line.gather_products(batched, factors, *_how(sites.strategy(site, line, x.device), ranks))
    if x.dim() == 3:
        return gathered, results
    return gathered[0], [result[0] for result in results]


def _begin(left: Sequence[Tensor], factors: Sequence[Tensor], ranks: int, group: str) -> Tensor:
    batched = [t.contiguous() if t.dim() == 3 else t.contiguous().unsqueeze(0) for t in left]
    line = sites.line(group, left[0].device)
    inner = sum(factor.shape[0] for factor in factors)
    rows = batched[0].shape[0] * batched[0].shape[1]
    site = _site("reduce_scatter", rows, factors[0].shape[1], inner, NAMES[left[0].dtype], ranks, group)
    parts = line.begin_scatter(batched, factors, *_how(sites.strategy(site, line, left[0].device), ranks))
    return parts if left[0].dim() == 3 else parts[:, 0]


def _end(parts: Tensor, group: str) -> Tensor:
    line = sites.line(group, parts.device)
    if parts.dim() == 4:
        return line.end_scatter(parts)
    return line.end_scatter(parts.unsqueeze(1))[0]


def _gather_fake(x: Tensor, factors: Sequence[Tensor], ranks: int, group: str) -> tuple[Tensor, list[Tensor]]:
    shape = [*x.shape[:-2], x.shape[-2] * ranks]
    return x.new_empty([*shape, x.shape[-1]]), [x.new_empty([*shape, factor.shape[1]]) for factor in factors]


def _begin_fake(left: Sequence[Tensor], factors: Sequence[Tensor], ranks: int, group: str) -> Tensor:
    lead, total = left[0].shape[:-2], left[0].shape[-2]
    return left[0].new_empty([ranks, *lead, total // ranks, factors[0].shape[1]])


def _end_fake(parts: Tensor, group: str) -> Tensor:
    return parts.new_empty(parts.shape[1:])


for _name, _run, _fake in (
    ("all_gather_matmul", _gather, _gather_fake),
    ("begin_matmul_scatter", _begin, _begin_fake),
    ("end_matmul_scatter", _end, _end_fake),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autotune::{_name}", _fake, lib=_library)
_operators: Any = torch.ops.autotune


# ---- with gradients -------------------------------------------------------------------------------------------------


def all_gather_matmul(x: Tensor, weights: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Gather rows of all ranks, and multiply them by each weight, as ``F.linear`` does, under autocast too.

    Rows of the products follow the rows' arrival, if a search has found that faster. The backward pass adds the
    gradients of ``x`` over the ranks (reduce-scatter) while it computes those of the weights.

    Args:
        x: this rank's rows: [s, K], or [B, s, K] with the rows in dimension 1.
        weights: [N, K] each, this rank's columns of a layer.
        group: the ranks of the layer; None for all.

    Returns:
        the products, [W * s, N] or [B, W * s, N] each.

    Raises:
        UserError: the shapes or dtypes do not fit.
    """
    x, *weights = _cast(x, *weights)
    where = _check(x, weights, group)
    made: tuple[Tensor, ...] = _GatherProducts.apply(where.group_name, dist.get_world_size(where), x, *weights)  # type: ignore[no-untyped-call]
    return list(made)


def matmul_reduce_scatter(x: Tensor, weight: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Multiply by the weight, as ``F.linear`` does, and add the products over the ranks; each rank keeps its rows.

    Args:
        x: [S, K] or [B, S, K]: all rows, with this rank's columns of the layer's input.
        weight: [N, K].
        group: the ranks of the layer, which divide S; None for all.

    Returns:
        this rank's rows of the sum, [S / W, N] or [B, S / W, N]. Sums are computed in fp32 in the order of ranks.

    Raises:
        UserError: the shapes or dtypes do not fit.
    """
    x, weight = _cast(x, weight)
    where = _check(x, [weight], group)
    ranks = dist.get_world_size(where)
    if x.shape[-2] % ranks:
        raise UserError(f"matmul_reduce_scatter: {x.shape[-2]} rows do not divide among {ranks} ranks")
    made: Tensor = _ProductScatter.apply(where.group_name, ranks, x, weight)  # type: ignore[no-untyped-call]
    return made


def _cast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype of autocast, if it is on, as ``F.linear`` takes them."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t.to(dtype) if t.is_floating_point() and t.dtype is not torch.float64 else t for t in tensors)


def _check(x: Tensor, weights: Sequence[Tensor], group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if not (dist.is_available() and dist.is_initialized()):
        raise UserError("tensor parallelism works between processes: call torch.distributed.init_process_group first")
    if x.dim() not in (2, 3):
        raise UserError(f"tensor parallelism: the input has 2 or 3 dimensions, not {x.dim()}")
    for weight in weights:
        if weight.dim() != 2 or weight.shape[1] != x.shape[-1] or weight.dtype != x.dtype:
            found = f"{list(weight.shape)} {weight.dtype} for an input of {list(x.shape)} {x.dtype}"
            raise UserError(f"tensor parallelism: the weight is {found}".replace("torch.", ""))
    if x.dtype not in NAMES:
        raise UserError(f"tensor parallelism: bfloat16, float16 or float32, not {x.dtype}".replace("torch.", ""))
    found_group: Any = group if group is not None else dist.group.WORLD
    where: dist.ProcessGroup = found_group
    return where


class _GatherProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: str, ranks: int, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        gathered, results = _operators.all_gather_matmul(x, [weight.t() for weight in weights], ranks, group)
        ctx.group, ctx.ranks = group, ranks
        ctx.save_for_backward(gathered, *weights)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        gathered, *weights = ctx.saved_tensors
        _, _, for_x, *for_weights = ctx.needs_input_grad
        parts = _operators.begin_matmul_scatter(list(grads), weights, ctx.ranks, ctx.group) if for_x else None
        try:
            rows = gathered.flatten(0, -2)
            moved = [
                grad.flatten(0, -2).t() @ rows if needed else None
                for grad, needed in zip(grads, for_weights, strict=True)
            ]
        finally:  # the program may go on after an exception
            given = _operators.end_matmul_scatter(parts, ctx.group) if for_x else None
        return None, None, given, *moved


class _ProductScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: str, ranks: int, x: Tensor, weight: Tensor) -> Tensor:
        ctx.group, ctx.ranks = group, ranks
        ctx.save_for_backward(x, weight)
        parts = _operators.begin_matmul_scatter([x], [weight.t()], ranks, group)
        made: Tensor = _operators.end_matmul_scatter(parts, group)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        gathered, (given,) = _operators.all_gather_matmul(grads[0], [weight], ctx.ranks, ctx.group)
        moved = gathered.flatten(0, -2).t() @ x.flatten(0, -2) if ctx.needs_input_grad[3] else None
        return None, None, given, moved
