"""The input's gradient of a depthwise convolution, written as a depthwise convolution.

Where the stride is 1, the gradient is the incoming one convolved with the kernel turned by half a circle. In half
precision cuDNN's kernels for that gradient take up to 2.5 times as long as those for the same convolution. A kernel of
7 x 7 on 128 x 512 x 14 x 14 takes 225 and 113 us, one of 3 x 3 takes 46 and 38 us (channels last, bf16, one H200). In
fp32 both take as long, and the gradient of a kernel of 9 x 9 takes a third.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from autotune.compiler.capture.calls import Calls, is_static

aten, prims = torch.ops.aten, torch.ops.prims

DEVICES = {"cuda"}
"""Types of devices whose library takes longer for the gradient."""
_WIDEST = 7


def convolve_gradients(graph: fx.Graph) -> None:
    """Rewrite a graph of Inductor's joint passes in place.

    Args:
        graph: functional aten calls, with fake tensors in ``meta["val"]``.
    """
    for node in list(graph.find_nodes(op="call_function", target=aten.convolution_backward.default)):
        inputs = [n for n in node.users if n.target is operator.getitem and n.args[1] == 0]
        if not inputs or not _is_depthwise(node):
            continue
        grad, _, weight, _, stride, padding, dilation, *_, groups, wanted = node.args
        rest = [d * (k - 1) - p for d, k, p in zip(dilation, weight.meta["val"].shape[2:], padding, strict=True)]
        with graph.inserting_before(node):
            call = Calls(graph, node)
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


def _is_depthwise(node: fx.Node) -> bool:
    """Of two dimensions on CUDA, with stride 1, a kernel a channel, and no more padding than the kernel is wide."""
    tensors: list[Any] = list(node.args[:3])
    if not all(isinstance(t, fx.Node) and is_static(t) for t in tensors):
        return False
    grad, x, weight = (t.meta["val"] for t in tensors)
    stride, padding, dilation, transposed, _, groups = node.args[4:10]
    if any(len(one) != 2 for one in (stride, padding, dilation)):  # type: ignore[arg-type]
        return False  # one number for both axes
    if grad.device.type not in DEVICES or weight.ndim != 4 or transposed or any(s != 1 for s in stride):  # type: ignore[union-attr]
        return False
    if grad.dtype not in (torch.bfloat16, torch.float16) or max(weight.shape[2:]) > _WIDEST:
        return False
    if not weight.shape[0] == x.shape[1] == groups or weight.shape[1] != 1 or groups == 1:
        return False
    return all(0 <= p <= d * (k - 1) for p, d, k in zip(padding, dilation, weight.shape[2:], strict=True))  # type: ignore[arg-type]


__all__ = ["convolve_gradients"]
