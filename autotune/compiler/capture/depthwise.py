"""Depthwise convolutions of Inductor's joint graphs, written so that CUDA computes them faster.

In one dimension, a convolution with few taps becomes a sum of shifted inputs times weights. State-space layers and many
language models contain such convolutions. PyTorch's kernel takes 5 to 15 times as long as a copy of the input, and
fuses with nothing. A sum fuses with the activation behind it, in a region or in Inductor's kernels. So do the
gradients: the input's is the same sum with reversed shifts, and the weight's are sums over the positions
(docs/decisions/030-short-convolutions-as-sums.md).

In two dimensions, the input gradient is itself a depthwise convolution. With stride 1, it is the incoming gradient
convolved with the kernel rotated by 180 degrees. In half precision, cuDNN's kernels for the gradient take up to 2.5
times as long as those for the same convolution. In fp32 both take as long.

The graphs are of functional aten calls, with fake tensors in ``meta["val"]``, and change in place.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from autotune.compiler.capture.rewriting import Calls, Rewrite, Strides, contiguous, is_static, replace_calls

aten, prims = torch.ops.aten, torch.ops.prims

DEVICES = {"cuda"}
"""Types of devices whose library takes longer for the original calls."""
_HALF = (torch.bfloat16, torch.float16)
_WIDEST = 7
"""Most elements along an axis of a two-dimensional kernel."""
_MOST_TAPS = 9
"""Most elements of a one-dimensional kernel: each is a few nodes of the graph. With seven, the library takes four times
as long as Inductor's kernels of the sum; with 31, 1.2 times."""


def convolve_gradients(graph: fx.Graph) -> None:
    """Rewrite the input gradients of two-dimensional depthwise convolutions as depthwise convolutions."""
    for node in list(graph.find_nodes(op="call_function", target=aten.convolution_backward.default)):
        inputs = [n for n in node.users if n.target is operator.getitem and n.args[1] == 0]
        if not inputs or not _is_depthwise(node, 2) or not _is_faster_forward(node):
            continue
        grad, _, weight, _, stride, padding, dilation, *_, groups, wanted = node.args
        rest = [d * (k - 1) - p for d, k, p in zip(dilation, weight.meta["val"].shape[2:], padding, strict=True)]
        call = Calls(node)
        turned = call(prims.rev.default, weight, [2, 3])
        made = call(aten.convolution.default, grad, turned, None, stride, rest, dilation, False, [0, 0], groups)
        for n in inputs:
            n.replace_all_uses_with(made)
            graph.erase_node(n)
        if node.users:
            node.update_arg(10, [False, *wanted[1:]])
            node.meta["val"] = (None, *node.meta["val"][1:])
        else:
            graph.erase_node(node)


def add_taps(gm: fx.GraphModule) -> None:
    """Rewrite one-dimensional depthwise convolutions with few taps, and their gradients, as sums of products."""
    replace_calls(gm, _SUMS, _has_few_taps)


def _is_depthwise(node: fx.Node, dims: int) -> bool:
    """True for a convolution of ``dims`` dimensions, or its gradient, on CUDA with stride 1 and a filter a channel."""
    backward = node.target is aten.convolution_backward.default
    tensors: list[Any] = list(node.args[: 3 if backward else 2])
    if not all(isinstance(t, fx.Node) and is_static(t) for t in tensors):
        return False
    x, weight = (t.meta["val"] for t in tensors[-2:])
    stride, padding, dilation, transposed, _, groups = node.args[4:10] if backward else node.args[3:9]
    if any(len(one) != dims for one in (stride, padding, dilation)):  # type: ignore[arg-type]
        return False  # one number for several axes
    if x.device.type not in DEVICES or weight.ndim != dims + 2 or transposed or any(s != 1 for s in stride):  # type: ignore[union-attr]
        return False
    return bool(weight.shape[0] == x.shape[1] == groups and weight.shape[1] == 1 and groups != 1)


def _is_faster_forward(node: fx.Node) -> bool:
    """True for a gradient in half precision with a small kernel, and padding below the kernel's width."""
    weight = node.args[2].meta["val"]  # type: ignore[union-attr]
    if weight.dtype not in _HALF or max(weight.shape[2:]) > _WIDEST:
        return False
    padding, dilation = node.args[5:7]
    return all(0 <= p <= d * (k - 1) for p, d, k in zip(padding, dilation, weight.shape[2:], strict=True))  # type: ignore[arg-type]


# One dimension --------------------------------------------------------------------------------------------------------


def _has_few_taps(node: fx.Node) -> bool:
    if not _is_depthwise(node, 1):
        return False
    backward = node.target is aten.convolution_backward.default
    if backward and any(u.target is not operator.getitem for u in node.users):
        return False
    if node.meta.get("recompute") in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE):
        return False  # the nodes of a sum would have this policy, and each would be saved
    args: Any = node.args[backward:]
    x, weight = (t.meta["val"] for t in args[:2])
    (padding,), (dilation,) = args[4:6]
    taps = weight.shape[2]
    if x.shape[2] + padding <= dilation * (taps - 1):
        return False  # a tap that reads zeros alone
    return weight.dtype in (*_HALF, torch.float32) and taps <= _MOST_TAPS


class _Taps:
    """Sums of shifted tensors of [batch, channels, positions], in the order of their memory and in fp32.

    Args:
        call: makes the nodes.
        weight: the kernel, [channels, 1, taps].
        like: the tensor whose axes give the order.
        recompute: True if the backward pass is to compute the shifted tensors again. torch's partitioner does not
            recompute a padding by itself, and would save each of them.
    """

    def __init__(self, call: Calls, weight: fx.Node, like: fx.Node, recompute: bool = False) -> None:
        self._call, self._recompute = call, recompute
        self._order = _order_in_memory(like.meta["val"])
        self._positions = self._order.index(2)
        self.rest = [d for d, axis in enumerate(self._order) if axis != 1]
        """The dimensions of an ordered tensor that are not its channels."""
        taps = call(aten.permute.default, call.to(weight, torch.float32), [2, 1, 0])
        if self._order[-1] == 1:  # a thread loads the weights of adjacent channels as vectors
            taps = contiguous(call, taps)
        self._weights = [self._along(call(aten.select.int, taps, 0, k)) for k in range(taps.meta["val"].shape[0])]

    def ordered(self, x: fx.Node) -> fx.Node:
        """``x`` with its axes in the order of memory."""
        return self._call(aten.permute.default, x, self._order)

    def shifted(self, ordered: fx.Node, starts: Sequence[int], length: int) -> Iterator[fx.Node]:
        """For each start, ``length`` positions of a tensor from there on in fp32, with zeros outside of the tensor."""
        extent = ordered.meta["val"].shape[self._positions]
        behind = [0, 0] * (2 - self._positions)
        for start in starts:
            pad = [*behind, -start, start + length - extent]
            made = self._call(aten.constant_pad_nd.default, ordered, pad, 0.0) if any(pad) else ordered
            wide = self._call.to(made, torch.float32)
            if self._recompute:
                for node in {made, wide} - {ordered}:
                    node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
                    # Several checkpoints share it, and torch would save what another checkpoint reads.
                    node.meta.pop("ac_graph_id", None)
            yield wide

    def sum(self, ordered: fx.Node, starts: Sequence[int], length: int, bias: fx.Node | None = None) -> fx.Node:
        """The sum of shifted tensors times the weights, [batch, channels, length], in the type of ``ordered``."""
        call = self._call
        total = None if bias is None else self._along(call.to(bias, torch.float32))
        for tap, weight in zip(self.shifted(ordered, starts, length), self._weights, strict=True):
            term = call(aten.mul.Tensor, tap, weight)
            total = term if total is None else call(aten.add.Tensor, term, total)
        assert total is not None
        made = call.to(total, ordered.meta["val"].dtype)
        return call(aten.permute.default, made, [self._order.index(d) for d in range(3)])

    def _along(self, vector: fx.Node) -> fx.Node:
        shape = [1 if d in self.rest else -1 for d in range(3)]
        return self._call(aten.reshape.default, vector, shape)


def _order_in_memory(x: torch.Tensor) -> list[int]:
    """The dimensions of ``x`` from the outermost in memory on; those without a stride are first."""
    strides = [step if extent > 1 and step else math.inf for extent, step in zip(x.shape, x.stride(), strict=True)]
    return sorted(range(x.ndim), key=strides.__getitem__, reverse=True)


def _convolved(strides: Strides, node: fx.Node, call: Calls) -> None:
    args: Any = node.args
    x, weight, bias, _, (padding,), (dilation,) = args[:6]
    starts = [k * dilation - padding for k in range(weight.meta["val"].shape[2])]
    backward = aten.convolution_backward.default
    read_again = any(u.target is backward and u.args[1] is x and u.args[10][1] for u in x.users)
    taps = _Taps(call, weight, x, read_again)
    strides.replace(node, taps.sum(taps.ordered(x), starts, node.meta["val"].shape[2], bias))


def _gradients(strides: Strides, node: fx.Node, call: Calls) -> None:
    args: Any = node.args
    given, x, weight, _, _, (padding,), (dilation,) = args[:7]
    taps = _Taps(call, weight, x)
    starts = [k * dilation - padding for k in range(weight.meta["val"].shape[2])]
    grad = contiguous(call, taps.ordered(given))  # a region that stores it stores this copy alone

    def summed(terms: fx.Node) -> fx.Node:
        return call(aten.sum.dim_IntList, terms, taps.rest)

    def of_input() -> fx.Node:
        return taps.sum(grad, [-start for start in starts], x.meta["val"].shape[2])

    def of_weight() -> fx.Node:
        wide = call.to(grad, torch.float32)
        shifted = taps.shifted(taps.ordered(x), starts, given.meta["val"].shape[2])
        sums = [summed(call(aten.mul.Tensor, tap, wide)) for tap in shifted]
        columns = [call(aten.reshape.default, one, [-1, 1, 1]) for one in sums]
        return call.to(call(aten.cat.default, columns, 2), weight.meta["val"].dtype)

    def of_bias() -> fx.Node:
        return call.to(summed(call.to(grad, torch.float32)), grad.meta["val"].dtype)

    makers = (of_input, of_weight, of_bias)
    for user in list(node.users):
        strides.replace(user, makers[user.args[1]]())  # type: ignore[index]
    strides.graph.erase_node(node)


_SUMS: dict[Any, Rewrite] = {
    aten.convolution.default: _convolved,
    aten.convolution_backward.default: _gradients,
}
