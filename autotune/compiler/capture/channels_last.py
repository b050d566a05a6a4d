"""Channels-last memory format for the convolutions of a graph and everything between them.

cuDNN's faster kernels need this format, and torch.compile converts a graph's tensors to it if its heuristic predicts a
gain. Since autotune cuts regions out of the graph, Inductor would convert piece by piece. A single convolution would
have its input converted and its result converted back, a pass over memory each (65 us of a Conformer's 130 us
convolution). The format is therefore chosen before regions are searched: operators between convolutions have it too,
and so do the regions.
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

Wanted = Callable[[fx.GraphModule, bool], bool]


def inductor_wants(gm: fx.GraphModule, inference: bool) -> bool:
    """True if torch.compile would use channels last in this graph; False if its heuristic fails."""
    from torch._inductor.graph import GraphLowering

    try:
        return bool(GraphLowering.decide_layout_opt(gm, is_inference=inference))
    except Exception:
        log.debug("torch's choice of a layout cannot be asked for", exc_info=True)
        return False


def put_channels_last(
    gm: fx.GraphModule, inference: bool, wanted: Wanted = inductor_wants, devices: Sequence[str] = ("cpu", "cuda")
) -> None:
    """Convert the convolutions of a graph to channels last, in place; results keep their strides.

    Args:
        gm: a graph of AOTAutograd, with fake tensors.
        inference: True for a graph without derivatives; an argument of ``wanted``.
        wanted: returns True if a graph with convolutions should be converted.
        devices: types of devices to convert on.
    """
    convolutions = [n for n in gm.graph.nodes if n.target in _OPERANDS]
    if not any(_takes_part(n) for n in convolutions) or not all(_is_on(n, devices) for n in convolutions):
        return
    if wanted(gm, inference):
        _ChannelsLast(gm.graph).run()
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

    convolutions = [n for n in graph.find_nodes(op="call_function", target=aten.convolution.default) if _takes_part(n)]
    if convolutions and all(_lies_last(n) for n in convolutions):
        config.layout_optimization = False


def _lies_last(convolution: fx.Node) -> bool:
    return all(
        is_static(x) and x.meta["val"].is_contiguous(memory_format=torch.channels_last) for x in _operands(convolution)
    )


def _is_on(node: fx.Node, devices: Sequence[str]) -> bool:
    """True for a convolution with static shapes on one of the devices."""
    operands = _operands(node)
    return all(map(is_static, operands)) and operands[0].meta["val"].device.type in devices


def _operands(node: fx.Node) -> list[fx.Node]:
    return [a for a in node.args[:2] if isinstance(a, fx.Node)]


def _takes_part(node: fx.Node) -> bool:
    """True for a two-dimensional convolution, whose channels are last or not."""
    weight = node.args[_OPERANDS[node.target] - 1]
    return isinstance(weight, fx.Node) and weight.meta["val"].ndim == 4


class _ChannelsLast(Strides):
    def __init__(self, graph: fx.Graph) -> None:
        super().__init__(graph)
        self._moved: dict[fx.Node, fx.Node] = {}
        """Channels-last copies of nodes."""

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node.target in _OPERANDS and _takes_part(node):
                operands = [self._channels_last(node, x) for x in node.args[: _OPERANDS[node.target]]]
                operands = self._told(node, operands)
                node.args = (*operands, *node.args[len(operands) :])
                self.evaluate(node)
            else:
                self.follow(node)

    def _channels_last(self, node: fx.Node, x: Any) -> fx.Node:
        if x.meta["val"].is_contiguous(memory_format=torch.channels_last):
            return x  # type: ignore[no-any-return]
        if x not in self._moved:
            self._moved[x] = Calls(node)(aten.clone.default, x, memory_format=torch.channels_last)
        return self._moved[x]

    def _told(self, node: fx.Node, operands: list[fx.Node]) -> list[fx.Node]:
        """The operands, with the strides of one changed if all are ambiguous.

        With one channel or one pixel, the strides of both formats are the same.
        """
        if any(x.meta["val"].shape[1] > 1 and x.meta["val"].shape[2:].numel() > 1 for x in operands):
            return operands
        for k, x in enumerate(operands):
            _, channels, height, width = shape = x.meta["val"].shape
            if height * width > 1:
                strides = [height * width * channels, 1, width * channels, channels]
                operands[k] = Calls(node)(aten.as_strided.default, x, list(shape), strides)
                break
        return operands
