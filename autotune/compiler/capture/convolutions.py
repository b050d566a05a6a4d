"""Convolutions of Inductor's joint graphs as calls that CUDA's libraries compute faster.

A convolution of patches that do not overlap is a matrix product. Vision models split an image by such a convolution,
for which cuDNN has no tensor-core kernel with three channels in half precision
(docs/decisions/019-patches-as-products.md).

Channels-last memory format is chosen for the convolutions of a graph and everything between them. cuDNN's faster
kernels need this format, and torch.compile converts a graph's tensors to it if its heuristic predicts a gain. Since
autotune cuts regions out of the graph, Inductor would convert piece by piece, a pass over memory before and after each
convolution. The format is therefore chosen before regions are searched: operators between convolutions have it too, and
so do the regions. torch.compile leaves three-dimensional convolutions as they are, and cuDNN then converts the operands
and the result of each one in half precision (docs/decisions/018-layouts-of-the-graph.md).

The graphs are of functional aten calls, with fake tensors in ``meta["val"]``, and change in place.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from autotune.compiler.capture.rewriting import Calls, Rewrite, Strides, contiguous, is_static, laid_out, replace_calls

aten, prims = torch.ops.aten, torch.ops.prims

DEVICES = {"cuda"}
"""Types of devices whose library takes longer for the original calls."""
_ALIGNED = 8
"""Half-precision elements in the 16 bytes that a tensor-core kernel reads at a time. A convolution with a multiple of
this number of channels is left to the library."""


def multiply_patches(gm: fx.GraphModule) -> None:
    """Rewrite convolutions of patches that do not overlap, of one to three dimensions, as matrix products."""
    replace_calls(gm, _REWRITES, _are_patches)


def _forward(strides: Strides, node: fx.Node, call: Calls) -> None:
    x, weight, bias = node.args[:3]
    assert isinstance(x, fx.Node)
    assert isinstance(weight, fx.Node)
    factors = _rows(call, x, weight), call(aten.permute.default, _flat(call, weight), [1, 0])
    product = call(aten.mm.default, *factors) if bias is None else call(aten.addmm.default, bias, *factors)
    strides.replace(node, _channels_first(call, product, node.meta["val"].shape))


def _backward(strides: Strides, node: fx.Node, call: Calls) -> None:
    """Rewrite one convolution backward; dead code elimination removes unread results."""
    grad, x, weight = node.args[:3]
    assert isinstance(grad, fx.Node)
    assert isinstance(x, fx.Node)
    assert isinstance(weight, fx.Node)
    last = [0, *range(2, grad.meta["val"].ndim), 1]
    filters = weight.meta["val"].shape[0]
    grads = call(aten.view.default, contiguous(call, call(aten.permute.default, grad, last)), [-1, filters])

    def of_input() -> fx.Node:
        sizes = weight.meta["val"].shape[1:]
        places = grad.meta["val"].shape[2:]
        made = call(aten.mm.default, grads, _flat(call, weight))
        made = _first(call, made, prod(sizes))
        made = call(aten.view.default, made, [x.meta["val"].shape[0], *places, *sizes])
        made = call(aten.permute.default, made, _interleaved(len(places), back=True))
        covered = [p * k for p, k in zip(places, sizes[1:], strict=True)]
        made = call(aten.view.default, contiguous(call, made), [*x.meta["val"].shape[:2], *covered])
        rest = [e - c for e, c in zip(x.meta["val"].shape[2:], covered, strict=True)]
        if any(rest):
            made = call(aten.constant_pad_nd.default, made, [n for r in reversed(rest) for n in (0, r)], 0.0)
        return made

    def of_weight() -> fx.Node:
        product = call(aten.mm.default, call(aten.permute.default, grads, [1, 0]), _rows(call, x, weight))
        sizes = weight.meta["val"].shape
        return call(aten.view.default, contiguous(call, _first(call, product, prod(sizes[1:]))), list(sizes))

    def of_bias() -> fx.Node:
        return call(aten.sum.dim_IntList, grads, [0])

    makers: Sequence[Callable[[], fx.Node]] = (of_input, of_weight, of_bias)
    for user in list(node.users):
        made = makers[user.args[1]]()  # type: ignore[index]
        strides.replace(user, laid_out(call, made, user.meta["val"]))
    strides.graph.erase_node(node)


_REWRITES: dict[Any, Rewrite] = {
    aten.convolution.default: _forward,
    aten.convolution_backward.default: _backward,
}


def _are_patches(node: fx.Node) -> bool:
    """True if a CUDA convolution's kernel size equals its stride, and no tensor-core kernel accepts its channels."""
    backward = node.target is aten.convolution_backward.default
    tensors: list[Any] = list(node.args[1:3] if backward else node.args[:2])
    if not all(isinstance(t, fx.Node) and is_static(t) for t in tensors):
        return False
    x, weight = (t.meta["val"] for t in tensors)
    stride, padding, dilation, transposed, _, groups = node.args[4:10] if backward else node.args[3:9]
    if x.device.type not in DEVICES or x.dtype not in (torch.bfloat16, torch.float16) or x.dtype != weight.dtype:
        return False
    if transposed or groups != 1 or x.ndim != weight.ndim or x.shape[1] % _ALIGNED == 0:
        return False
    kernel = list(weight.shape[2:])
    if list(stride) != kernel or prod(kernel) == 1 or any(padding) or any(d != 1 for d in dilation):  # type: ignore[arg-type, union-attr]
        return False
    return not backward or all(u.target is operator.getitem for u in node.users)


def _rows(call: Calls, x: fx.Node, weight: fx.Node) -> fx.Node:
    """The patches of ``x``, [images * patches, channels * kernel], with the padding of :func:`_padded`."""
    kernel, (images, channels, *extents) = weight.meta["val"].shape[2:], x.meta["val"].shape
    places = [e // k for e, k in zip(extents, kernel, strict=True)]
    for dim, (e, p, k) in enumerate(zip(extents, places, kernel, strict=True), start=2):
        if e != p * k:
            x = call(aten.slice.Tensor, x, dim, 0, p * k)
    apart = [n for p, k in zip(places, kernel, strict=True) for n in (p, k)]
    made = call(aten.view.default, x, [images, channels, *apart])
    made = call(aten.permute.default, made, _interleaved(len(kernel)))
    rows = call(aten.view.default, contiguous(call, made), [images * prod(places), channels * prod(kernel)])
    return _padded(call, rows)


def _interleaved(dims: int, back: bool = False) -> list[int]:
    """The permutation of [image, channel, place, kernel, place, kernel, ...] to [image, places..., channel, kernel...],
    or its inverse."""
    order = [0, *range(2, 2 + 2 * dims, 2), 1, *range(3, 3 + 2 * dims, 2)]
    return sorted(range(len(order)), key=order.__getitem__) if back else order


def _flat(call: Calls, weight: fx.Node) -> fx.Node:
    filters = weight.meta["val"].shape[0]
    return _padded(call, call(aten.view.default, contiguous(call, weight), [filters, -1]))


def _padded(call: Calls, rows: fx.Node) -> fx.Node:
    """Rows zero-padded to a multiple of 16 bytes: products of other rows take three times as long."""
    behind = -rows.meta["val"].shape[1] % _ALIGNED
    return call(aten.constant_pad_nd.default, rows, [0, behind], 0.0) if behind else rows


def _first(call: Calls, rows: fx.Node, count: int) -> fx.Node:
    return rows if rows.meta["val"].shape[1] == count else call(aten.slice.Tensor, rows, 1, 0, count)


def _channels_first(call: Calls, rows: fx.Node, shape: Sequence[int]) -> fx.Node:
    images, filters, *places = shape
    dims = len(places)
    made = call(aten.view.default, rows, [images, *places, filters])
    return call(aten.permute.default, made, [0, dims + 1, *range(1, dims + 1)])


log = logging.getLogger("autotune")


_OPERANDS: dict[Any, int] = {aten.convolution.default: 2, aten.convolution_backward.default: 3}
"""Convolutions, with the number of their arguments that have channels."""

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Memory format by the dimensions of a convolution's tensors."""
FORMAT_DEVICES = {"cpu", "cuda"}
"""Types of devices whose library has this format."""
_GROUPS: dict[Any, int] = {aten.convolution.default: 8, aten.convolution_backward.default: 9}
_HALF = (torch.float16, torch.bfloat16)
_LEAST_CHANNELS = 8
"""cuDNN pads fewer channels of half precision."""


def inductor_wants(gm: fx.GraphModule, inference: bool) -> bool:
    """True if torch.compile would use channels last in this graph; False if its heuristic fails."""
    from torch._inductor.graph import GraphLowering

    try:
        return bool(GraphLowering.decide_layout_opt(gm, is_inference=inference))
    except Exception:
        log.debug("torch's choice of a layout cannot be asked for", exc_info=True)
        return False


def cudnn_converts(convolutions: Sequence[fx.Node]) -> bool:
    """True if cuDNN would convert most operands of three-dimensional convolutions to channels last.

    It does so in half precision. Groups stay as they are, since they were not measured. So does every graph under the
    user's ``layout_optimization=False``.
    """
    from torch._inductor import config

    kernels = [kernel for n in convolutions if (kernel := _kernel(n)) is not None]
    half = all(kernel.is_cuda and kernel.dtype in _HALF for kernel in kernels)
    wide = any(min(kernel.shape[:2]) >= _LEAST_CHANNELS for kernel in kernels)
    return config.layout_optimization and half and wide and all(n.args[_GROUPS[n.target]] == 1 for n in convolutions)


def put_channels_last(gm: fx.GraphModule, inference: bool) -> None:
    """Convert the convolutions of a graph to channels last, in place; results keep their strides.

    Args:
        gm: a graph of AOTAutograd, with fake tensors.
        inference: True for a graph without derivatives.
    """
    convolutions = [n for n in gm.graph.nodes if n.target in _OPERANDS]
    if not all(map(_is_convertible, convolutions)):
        return
    planes, volumes = ([n for n in convolutions if _dimensions(n) == count] for count in _FORMATS)
    chosen = volumes if volumes and cudnn_converts(volumes) else []
    if planes and inductor_wants(gm, inference):
        chosen += planes
    if chosen:
        _ChannelsLast(gm.graph, chosen).run()
        gm.graph.lint()
        gm.recompile()


def keep_as_laid_out(graph: fx.Graph) -> None:
    """Make Inductor keep the strides of a post-grad graph if all its convolutions are channels last already.

    Inductor's layout optimization would change the format of the operators around a convolution by the order of their
    sizes. A norm of ConvNeXt has its channels as the last size, so the tensor saved for the backward pass would get its
    *columns* last in memory. The search uses the strides of the graph, so its regions would differ from those deployed.

    This changes Inductor's setting, which :func:`autotune.compiler.capture.hooks.hooked` patches for one compilation.
    """
    from torch._inductor import config

    every = graph.find_nodes(op="call_function", target=aten.convolution.default)
    convolutions = [n for n in every if _dimensions(n) in _FORMATS]
    if convolutions and all(_lies_last(n) for n in convolutions):
        config.layout_optimization = False


def _lies_last(convolution: fx.Node) -> bool:
    form = _FORMATS[_dimensions(convolution)]
    return all(is_static(x) and x.meta["val"].is_contiguous(memory_format=form) for x in _operands(convolution))


def _is_convertible(node: fx.Node) -> bool:
    """True for a convolution with static shapes on a device whose library has the format."""
    operands = _operands(node)
    return all(map(is_static, operands)) and operands[0].meta["val"].device.type in FORMAT_DEVICES


def _operands(node: fx.Node) -> list[fx.Node]:
    return [a for a in node.args[:2] if isinstance(a, fx.Node)]


def _dimensions(node: fx.Node) -> int:
    """Number of dimensions of a convolution's tensors: two more than those of its kernel; 0 if unknown."""
    kernel = _kernel(node)
    return 0 if kernel is None else kernel.ndim


def _kernel(convolution: fx.Node) -> torch.Tensor | None:
    weight = convolution.args[_OPERANDS[convolution.target] - 1]
    return weight.meta["val"] if isinstance(weight, fx.Node) else None


class _ChannelsLast(Strides):
    def __init__(self, graph: fx.Graph, convolutions: Sequence[fx.Node]) -> None:
        super().__init__(graph)
        self._chosen = frozenset(convolutions)
        self._moved: dict[fx.Node, fx.Node] = {}
        """Channels-last copies of nodes."""

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node in self._chosen:
                operands = [self._channels_last(node, x) for x in node.args[: _OPERANDS[node.target]]]
                operands = self._told(node, operands)
                node.args = (*operands, *node.args[len(operands) :])
                self.evaluate(node)
            else:
                self.follow(node)

    def _channels_last(self, node: fx.Node, x: Any) -> fx.Node:
        form = _FORMATS[x.meta["val"].ndim]
        if x.meta["val"].is_contiguous(memory_format=form):
            return x  # type: ignore[no-any-return]
        if x not in self._moved:
            self._moved[x] = Calls(node)(aten.clone.default, x, memory_format=form)
        return self._moved[x]

    def _told(self, node: fx.Node, operands: list[fx.Node]) -> list[fx.Node]:
        """The operands, with the strides of the input or the kernel changed if those of both are ambiguous.

        With one channel or one pixel, the strides of both formats are the same. PyTorch decides by these two, and the
        backward pass of a first convolution would copy its gradient back: 2 of 35 ms of a 3D U-Net's step.
        """
        decisive = range(len(operands) - 2, len(operands))
        shapes = [operands[k].meta["val"].shape for k in decisive]
        if any(shape[1] > 1 and shape[2:].numel() > 1 for shape in shapes):
            return operands
        for k, shape in zip(decisive, shapes, strict=True):
            x = operands[k]
            if shape[2:].numel() > 1:
                operands[k] = Calls(node)(aten.as_strided.default, x, list(shape), _strides_last(shape))
                break
        return operands


def _strides_last(shape: Sequence[int]) -> list[int]:
    """Channels-last strides of a tensor with one channel."""
    strides, step = [0] * len(shape), 1
    for d in (1, *range(len(shape) - 1, 1, -1), 0):
        strides[d] = step
        step *= shape[d]
    return strides
