"""Channels-last memory format for the convolutions of a graph and everything between them.

cuDNN's faster kernels need this format, and torch.compile converts a graph's tensors to it if its heuristic predicts a
gain. Since autotune cuts regions out of the graph, Inductor would convert piece by piece. A single convolution would
have its input converted and its result converted back, a pass over memory each (65 us of a Conformer's 130 us
convolution). The format is therefore chosen before regions are searched: operators between convolutions have it too,
and so do the regions.

torch.compile leaves three-dimensional convolutions as they are, and cuDNN then converts the operands and the result of
each one in half precision: 11 of 42 ms of a step of a 3D U-Net (fp16, one H200).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from autotune.compiler.capture.rewriting import Calls, Strides, is_static

log = logging.getLogger("autotune")

aten = torch.ops.aten

_OPERANDS: dict[Any, int] = {aten.convolution.default: 2, aten.convolution_backward.default: 3}
"""Convolutions, with the number of their arguments that have channels."""

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Memory format by the dimensions of a convolution's tensors."""
_GROUPS: dict[Any, int] = {aten.convolution.default: 8, aten.convolution_backward.default: 9}
_HALF = (torch.float16, torch.bfloat16)
_LEAST_CHANNELS = 8
"""cuDNN pads fewer channels of half precision."""

Wanted = Callable[[fx.GraphModule, bool], bool]


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


def put_channels_last(
    gm: fx.GraphModule,
    inference: bool,
    wanted: Wanted = inductor_wants,
    devices: Sequence[str] = ("cpu", "cuda"),
    converts: Callable[[Sequence[fx.Node]], bool] = cudnn_converts,
) -> None:
    """Convert the convolutions of a graph to channels last, in place; results keep their strides.

    Args:
        gm: a graph of AOTAutograd, with fake tensors.
        inference: True for a graph without derivatives; an argument of ``wanted``.
        wanted: returns True if a graph with two-dimensional convolutions should be converted.
        devices: types of devices to convert on.
        converts: returns True if three-dimensional convolutions should be converted.
    """
    convolutions = [n for n in gm.graph.nodes if n.target in _OPERANDS]
    if not all(_is_on(n, devices) for n in convolutions):
        return
    planes, volumes = ([n for n in convolutions if _dimensions(n) == count] for count in _FORMATS)
    chosen = volumes if volumes and converts(volumes) else []
    if planes and wanted(gm, inference):
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


def _is_on(node: fx.Node, devices: Sequence[str]) -> bool:
    """True for a convolution with static shapes on one of the devices."""
    operands = _operands(node)
    return all(map(is_static, operands)) and operands[0].meta["val"].device.type in devices


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
