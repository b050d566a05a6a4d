"""The gradient of a collective's result: the collective that undoes its data's way."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed what 2.11 has.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def attach(tensor: Tensor, moved: Tensor, collective: str, group: dist.ProcessGroup) -> Tensor:
    """``moved``, the result of ``collective`` on ``tensor``, as a function of it.

    The backward pass runs torch's own collective in ``group``, on every rank alike, on the stream of the backward.
    """
    made: Tensor = _Moved.apply(tensor, moved, collective, group)  # type: ignore[no-untyped-call]
    return made


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, moved: Tensor, collective: str, group: dist.ProcessGroup) -> Tensor:
        ctx.collective, ctx.group, ctx.shape = collective, group, tensor.shape
        return moved.view_as(moved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0].contiguous()
        if ctx.collective == "all_reduce":
            back = grad.clone()
            dist.all_reduce(back, group=ctx.group)
        else:
            back = torch.empty(ctx.shape or (1,), dtype=grad.dtype, device=grad.device)
            move = {"all_gather": _reduce_scatter, "reduce_scatter": _all_gather}.get(
                ctx.collective, dist.all_to_all_single
            )
            move(back, grad, group=ctx.group)
        return back.view(ctx.shape), None, None, None
