"""Convolutions with the channels last in memory, through a whole graph.

cuDNN's faster kernels want them so, and torch.compile brings the tensors of a graph into that layout where its
heuristic says that it pays. It does so piece by piece here, since regions are cut out of the graph: a convolution alone
would get its input converted, and its result converted back, a pass over memory each (65 us of a Conformer's 130 us
convolution). So the layout is decided before regions are looked for: what is between convolutions then has it as well,
and the regions are those of that layout.
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
"""Convolutions, with how many of their arguments have channels."""

Wanted = Callable[[fx.GraphModule, bool], bool]


def inductor_wants(gm: fx.GraphModule, inference: bool) -> bool:
    """Whether torch.compile would put channels last in this graph; False where this torch cannot be asked."""
    from torch._inductor.graph import GraphLowering

    try:
        return bool(GraphLowering.decide_layout_opt(gm, is_inference=inference))
    except Exception:
        log.debug("torch's choice of a layout cannot be asked for", exc_info=True)
        return False


def put_channels_last(
    gm: fx.GraphModule, inference: bool, wanted: Wanted = inductor_wants, devices: Sequence[str] = ("cpu", "cuda")
) -> None:
    """Rewrite a graph in place; results keep their strides.

    Args:
        gm: as AOTAutograd makes it, of fake tensors.
        inference: whether no derivatives are taken; ``wanted`` is told.
        wanted: says of a graph with convolutions whether to.
        devices: where.
    """
    convolutions = [n for n in gm.graph.nodes if n.target in _OPERANDS]
    if not any(_takes_part(n) for n in convolutions) or not all(_is_on(n, devices) for n in convolutions):
        return
    if wanted(gm, inference):
        _ChannelsLast(gm.graph).run()
        gm.graph.lint()
        gm.recompile()


def keep_as_laid_out(graph: fx.Graph) -> None:
    """Have Inductor take the strides of a post-grad graph as they are, where its convolutions have channels last in it.

    Else Inductor puts channels last itself, in whatever comes before or after a convolution, and goes by the order of
    the sizes there. A norm of ConvNeXt has its channels as the last size: what it keeps for the backward pass would get
    its *columns* last in memory. Search sees the strides of the graph, and so would find other regions.

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
    """Whether a convolution is of fixed shapes and on such a device."""
    operands = _operands(node)
    return all(map(is_static, operands)) and operands[0].meta["val"].device.type in devices


def _operands(node: fx.Node) -> list[fx.Node]:
    return [a for a in node.args[:2] if isinstance(a, fx.Node)]


def _takes_part(node: fx.Node) -> bool:
    """Of two dimensions, with channels that could lie elsewhere than last."""
    weight = node.args[_OPERANDS[node.target] - 1]
    return isinstance(weight, fx.Node) and weight.meta["val"].ndim == 4


class _ChannelsLast(Strides):
    def __init__(self, graph: fx.Graph) -> None:
        super().__init__(graph)
        self._moved: dict[fx.Node, fx.Node] = {}
        """Copies of nodes with their channels last."""

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
        """The operands, of which at least one tells its layout: with one channel, or one pixel, both are the same."""
        if any(x.meta["val"].shape[1] > 1 and x.meta["val"].shape[2:].numel() > 1 for x in operands):
            return operands
        for k, x in enumerate(operands):
            _, channels, height, width = shape = x.meta["val"].shape
            if height * width > 1:
                strides = [height * width * channels, 1, width * channels, channels]
                operands[k] = Calls(node)(aten.as_strided.default, x, list(shape), strides)
                break
        return operands
