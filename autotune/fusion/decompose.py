"""Operators that are taken apart before a graph is captured, since a part of them belongs into the regions beside them.

Everything else stays as eager mode runs it: the rules know the whole operators. The table is part of the capture, so
search and deployment see the same parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

_MULTIPLIERS = (-1640531535, -2048144789, -1028477387)  # 2**32 / the golden ratio, and murmur3's two, as int32
_SHIFTS = (16, 13, 16)
_WORDS = 4
"""int32 words of one operator's seed: two are used, and 16 bytes keep every seed aligned for a kernel's loads."""


def native_dropout(input: Tensor, p: float, train: bool | None) -> Any:
    """Dropout by a hash of the element's place and a seed, instead of a stream of random numbers.

    What is random is then a seed of a few bytes, drawn from torch's generator each time; the rest is arithmetic that
    runs inside the kernel which needs the mask, and again in the backward instead of a stored mask. The hash is
    murmur3's finaliser (Appleby, 2011) on the place with one seed mixed in before it and another half-way.
    """
    whole = input.numel() if type(input.numel()) is int else 0
    if not train or not 0 < p < 1 or not input.is_floating_point() or not 0 < whole < 2**31 or _as_eager():
        return NotImplemented
    seed = aten.randint.low(-(2**31), 2**31, [_WORDS], dtype=torch.int32, device=input.device, pin_memory=False)
    place = aten.arange.default(whole, dtype=torch.int32, device=input.device, pin_memory=False)
    # The seed comes first: whatever does not depend on it would be computed once for all masks, and stored.
    h = aten.bitwise_xor.Tensor(aten.view.default(place, list(input.shape)), aten.select.int(seed, 0, 0))
    h = _fold(h * _MULTIPLIERS[0], _SHIFTS[0]) * _MULTIPLIERS[1] + aten.select.int(seed, 0, 1)
    h = _fold(_fold(h, _SHIFTS[1]) * _MULTIPLIERS[2], _SHIFTS[2])
    keep = aten.ge.Scalar(aten.bitwise_and.Scalar(h, 2**31 - 1), round(p * 2**31))
    scaled = input * (1 / (1 - p))
    return aten.where.ScalarOther(keep, scaled, 0.0), keep


def _fold(h: Tensor, shift: int) -> Tensor:
    """``h ^ (h >> shift)`` with zeros shifted in; torch's shift of a signed number repeats the sign."""
    low = aten.bitwise_and.Scalar(aten.bitwise_right_shift.Tensor_Scalar(h, shift), 2 ** (32 - shift) - 1)
    folded: Tensor = aten.bitwise_xor.Tensor(h, low)
    return folded


def _as_eager() -> bool:
    """Whether the user wants the random numbers that eager mode would draw."""
    import torch._inductor.config as config

    return bool(config.fallback_random)


def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Any:
    """On CUDA the bias is a pass of its own over the result: it belongs to what follows. (CPU kernels add it.)"""
    if bias is None or input.device.type != "cuda":
        return NotImplemented
    out = aten.convolution.default(input, weight, None, stride, padding, dilation, transposed, output_padding, groups)
    return out + aten.view.default(bias, [-1] + [1] * (out.ndim - 2))


def convolution_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    output_mask: list[bool],
) -> Any:
    """The bias's gradient is a sum over what comes before: it need not read that again."""
    if not output_mask[2] or grad_output.device.type != "cuda":
        return NotImplemented
    rest = (stride, padding, dilation, transposed, output_padding, groups, [*output_mask[:2], False])
    grads = aten.convolution_backward.default(grad_output, input, weight, bias_sizes, *rest)
    dims = [d for d in range(grad_output.ndim) if d != 1]
    return grads[0], grads[1], aten.sum.dim_IntList(grad_output, dims)


def log_sigmoid_forward(self: Tensor) -> Any:
    """Without the buffer between forward and backward, which is torch's own affair and empty on CUDA."""
    low = aten.minimum.default(self, aten.scalar_tensor.default(0.0, dtype=self.dtype, device=self.device))
    return low - aten.log1p.default(aten.exp.default(-aten.abs.default(self))), self.new_zeros((1,))


def log_sigmoid_backward(grad_output: Tensor, self: Tensor, buffer: Tensor) -> Any:
    return grad_output * aten.sigmoid.default(-self)


def native_group_norm(input: Tensor, *args: Any) -> Any:
    """On a contiguous copy where an extent of 1 leaves open what layout a CPU tensor has.

    Which of two layouts the kernel takes it for depends on strides that are never used, and those of a trace are not
    always those of a run: torch then refuses its own call. (Within a region the copy is free.)
    """
    if input.device.type != "cpu" or 1 not in input.shape or input.is_contiguous():
        return NotImplemented
    return aten.native_group_norm.default(input.contiguous(), *args)


def native_group_norm_backward(grad_out: Tensor, input: Tensor, *args: Any) -> Any:
    """As the forward."""
    if input.device.type != "cpu" or 1 not in input.shape or (input.is_contiguous() and grad_out.is_contiguous()):
        return NotImplemented
    return aten.native_group_norm_backward.default(grad_out.contiguous(), input.contiguous(), *args)


def cat(tensors: list[Tensor], dim: int = 0) -> Any:
    """Without tensors of shape [0], which torch lets take part: a key-value cache begins as one.

    A region holds no empty tensors, so that each layer's first concatenation would be a copy beside the regions.
    """
    whole = [x for x in tensors if x.ndim != 1 or type(x.shape[0]) is not int or x.shape[0] != 0]
    if not whole or len(whole) == len(tensors) or any(x.dtype != whole[0].dtype for x in tensors):
        return NotImplemented
    return aten.cat.default(whole, dim)


def table() -> dict[Any, Callable[..., Any]]:
    """The decompositions, for AOTAutograd."""
    found: Mapping[Any, Callable[..., Any]] = {
        aten.cat.default: cat,
        aten.native_group_norm.default: native_group_norm,
        aten.native_group_norm_backward.default: native_group_norm_backward,
        aten.native_dropout.default: native_dropout,
        aten.convolution.default: convolution,
        aten.convolution_backward.default: convolution_backward,
        aten.log_sigmoid_forward.default: log_sigmoid_forward,
        aten.log_sigmoid_backward.default: log_sigmoid_backward,
    }
    return dict(found)


def draw_seeds_at_once(gm: fx.GraphModule) -> None:
    """All seeds of a graph by one call, each a window of its result."""
    seeds = [n for n in gm.graph.nodes if _is_seed(n)]
    by_device: dict[torch.device, list[fx.Node]] = {}
    for n in seeds:
        by_device.setdefault(n.kwargs["device"], []).append(n)
    for nodes in by_device.values():
        if len(nodes) > 1:
            _merge(gm, nodes)
    if seeds:
        gm.recompile()


def _is_seed(n: fx.Node) -> bool:
    return n.target is aten.randint.low and n.args == (-(2**31), 2**31, [_WORDS])


def _merge(gm: fx.GraphModule, nodes: list[fx.Node]) -> None:
    with gm.graph.inserting_before(nodes[0]):
        args = (*nodes[0].args[:2], [len(nodes), _WORDS])
        drawn = gm.graph.call_function(aten.randint.low, args, dict(nodes[0].kwargs))
        like = nodes[0].meta["val"]
        drawn.meta = {**nodes[0].meta, "val": like.new_empty((len(nodes), _WORDS))}
        for k, n in enumerate(nodes):
            one = gm.graph.call_function(aten.select.int, (drawn, 0, k))
            one.meta = {**n.meta, "val": drawn.meta["val"][k]}
            n.replace_all_uses_with(one)
    for n in nodes:
        gm.graph.erase_node(n)


__all__ = ["draw_seeds_at_once", "table"]
