"""Convolutions with the channels last in memory, through a whole graph.

cuDNN's faster kernels want them so, and torch.compile brings the tensors of a graph into that layout where its
heuristic says that it pays. It does so piece by piece here, since regions are cut out of the graph: a convolution alone
would get its input converted, and its result converted back, a pass over memory each (65 us of a Conformer's 130 us
convolution). So the layout is decided before regions are looked for: what is between convolutions then has it as well,
and the regions are those of that layout.
"""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._prims_common import suggest_memory_format
from torch.utils import _pytree as pytree

from autotune.fusion.calls import Calls, laid_out

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
    gm: fx.GraphModule, inference: bool, wanted: Wanted = inductor_wants, devices: Sequence[str] = ("cuda",)
) -> None:
    """Rewrite a graph in place; results keep their strides.

    Args:
        gm: as AOTAutograd makes it, of fake tensors.
        inference: whether no derivatives are taken; ``wanted`` is told.
        wanted: says of a graph with convolutions whether to.
        devices: where. (On a CPU the libraries convert blocks themselves.)
    """
    convolutions = [n for n in gm.graph.nodes if n.target in _OPERANDS]
    if not any(_takes_part(n) for n in convolutions) or not all(_is_on(n, devices) for n in convolutions):
        return
    if all(_can_be_undone(n) for n in gm.graph.nodes) and wanted(gm, inference):
        _Walk(gm.graph).run()
        gm.graph.lint()
        gm.recompile()


def _is_on(node: fx.Node, devices: Sequence[str]) -> bool:
    values = [a.meta["val"] for a in node.args[:2] if isinstance(a, fx.Node)]
    return all(type(n) is int and n for v in values for n in v.shape) and values[0].device.type in devices


def _takes_part(node: fx.Node) -> bool:
    """Of two dimensions, with channels that could lie elsewhere than last."""
    weight = node.args[_OPERANDS[node.target] - 1]
    return isinstance(weight, fx.Node) and weight.meta["val"].ndim == 4


def _is_rigid(node: fx.Node) -> bool:
    """Whether a node may rely on the strides that its arguments have in the graph, without torch telling."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return getattr(node.target, "__module__", "") not in ("_operator", "operator")
    schema = node.target._schema
    return node.target.namespace not in ("aten", "prims") or schema.is_mutable or "as_strided" in schema.name


def _can_be_undone(node: fx.Node) -> bool:
    """Whether a rigid node's arguments can be given the strides of the graph: those of tensors without gaps can."""
    if node.op not in ("call_function", "call_method", "call_module") or not _is_rigid(node):
        return True
    return all(_is_dense(x) for a in node.all_input_nodes if a.op != "placeholder" for x in _tensors(a.meta.get("val")))


def _is_dense(x: torch.Tensor) -> bool:
    if x.storage_offset() or not all(type(n) is int for n in (*x.shape, *x.stride())):
        return False
    places = sorted((s, e) for s, e in zip(x.stride(), x.shape, strict=True) if e != 1)
    steps = itertools.accumulate((e for _, e in places), operator.mul, initial=1)
    return all(s == step for (s, _), step in zip(places, steps, strict=False))


def _tensors(value: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]


class _Walk:
    """From the first node to the last: what has got other strides is followed, and put back where those matter."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.before: dict[fx.Node, Any] = {}
        """Fake values of the graph as it was, of the nodes whose strides are others now."""
        self.moved: dict[tuple[fx.Node, bool], fx.Node] = {}
        """Copies: of a node with its channels last (True), or in the strides that it had (False)."""

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node.op == "output":
                self._restore(node)
            elif node.target in _OPERANDS and _takes_part(node):
                operands = [self._channels_last(node, x) for x in node.args[: _OPERANDS[node.target]]]
                operands = self._told(node, operands)
                node.args = (*operands, *node.args[len(operands) :])
                self._evaluate(node)
            elif any(a in self.before for a in node.all_input_nodes):
                if _is_rigid(node) and node.op != "placeholder":
                    self._restore(node)
                else:
                    self._evaluate(node)

    def _channels_last(self, node: fx.Node, x: Any) -> fx.Node:
        if x.meta["val"].is_contiguous(memory_format=torch.channels_last):
            return x  # type: ignore[no-any-return]
        if (x, True) not in self.moved:
            with self.graph.inserting_before(node):
                call = Calls(self.graph, node)
                self.moved[x, True] = call(aten.clone.default, x, memory_format=torch.channels_last)
        return self.moved[x, True]

    def _told(self, node: fx.Node, operands: list[fx.Node]) -> list[fx.Node]:
        """The operands, of which at least one tells its layout: with one channel, or one pixel, both are the same."""
        if any(suggest_memory_format(x.meta["val"]) is torch.channels_last for x in operands):
            return operands
        *others, weight = operands
        _, channels, height, width = shape = weight.meta["val"].shape
        strides = [height * width * channels, 1, width * channels, channels]
        with self.graph.inserting_before(node):
            return [*others, Calls(self.graph, node)(aten.as_strided.default, weight, list(shape), strides)]

    def _restore(self, node: fx.Node) -> None:
        for x in list(node.all_input_nodes):
            if x not in self.before or not isinstance(self.before[x], torch.Tensor):
                continue
            if (x, False) not in self.moved:
                with self.graph.inserting_before(node):
                    self.moved[x, False] = laid_out(Calls(self.graph, node), x, self.before[x])
            node.replace_input_with(x, self.moved[x, False])

    def _evaluate(self, node: fx.Node) -> None:
        """A node's fake value anew; its arguments are put back first where it does not take them as they are."""
        old = node.meta["val"]
        try:
            new = self._value(node)
        except (RuntimeError, ValueError):  # a view that these strides do not allow
            self._restore(node)
            new = self._value(node)
        pairs = zip(pytree.tree_leaves(new), pytree.tree_leaves(old), strict=True)
        node.meta["val"] = new
        node.meta.pop("tensor_meta", None)
        if any(isinstance(a, torch.Tensor) and a.stride() != b.stride() for a, b in pairs):
            self.before[node] = old

    @staticmethod
    def _value(node: fx.Node) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        # The unsafe one trusts its caller in that the view is possible.
        target: Any = aten.view.default if node.target is aten._unsafe_view.default else node.target
        return target(*args, **kwargs)


__all__ = ["inductor_wants", "put_channels_last"]
