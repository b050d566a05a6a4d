"""Operators that run in each layer of a step, with little time of the host: gradients, and launches of kernels."""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_TENSORS = 7
"""Leading arguments that are tensors; the first three have gradients."""
_MOST_COMPILED = 4096
_compiled: dict[tuple[Any, ...], Any] = {}
"""Kernels by all that a launch is given. Lengths that vary bring other numbers, so that it is emptied at times."""


def differentiable(name: str) -> Callable[..., Tensor]:
    """The function of an attention operator with a gradient.

    AOTAutograd traces through it, so that a step calls operators without autograd.

    Args:
        name: of two operators. ``autotune::NAME_forward`` returns the output, then tensors for the backward pass.
            ``NAME_backward`` takes the output's gradient, the tensors among the arguments, all results, and the
            other arguments. It returns the gradients of query, key and value.
    """
    library = torch.ops.autotune

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> Tensor:
            found = getattr(library, f"{name}_forward").default(*given)
            ctx.save_for_backward(*given[:_TENSORS], *found)
            ctx.how = given[_TENSORS:]
            ctx.set_materialize_grads(False)
            return found[0]

        @staticmethod
        def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
            found = (None,) * 3
            if grad is not None:
                found = getattr(library, f"{name}_backward").default(grad, *ctx.saved_tensors, *ctx.how)
            return (*found, *[None] * (_TENSORS - 3 + len(ctx.how)))

    return lambda *given: Attention.apply(*given)


def launch(
    kernel: Any, grid: tuple[int, int], tensors: Sequence[Tensor], numbers: tuple[Any, ...],
    warps: int = 4, stages: int = 3,
) -> None:  # fmt: skip
    """Launch a kernel that Triton compiled for the same numbers, types and alignments.

    Triton's own launch inspects each argument again, which takes longer than many of these kernels.

    Args:
        kernel: a function under ``triton.jit`` whose parameters are the tensors, then the numbers.
        grid: blocks along the first and the second axis.
        tensors: the tensors, on one device.
        numbers: the other arguments, constants of the kernel included.
        warps: the warps of a block.
        stages: the stages in which a loop's loads are pipelined.
    """
    device = tensors[0].device
    key = (kernel, numbers, warps, stages, device, *[(t.dtype, t.data_ptr() % 16) for t in tensors])
    known = _compiled.get(key)
    if known is None:
        known = kernel[grid](*tensors, *numbers, num_warps=warps, num_stages=stages)
        if known is not None:  # None of Triton's interpreter
            if len(_compiled) >= _MOST_COMPILED:
                _compiled.clear()
            _compiled[key] = known
    else:
        known[(*grid, 1)](*tensors, *numbers, stream=torch._C._cuda_getCurrentRawStream(device.index))
