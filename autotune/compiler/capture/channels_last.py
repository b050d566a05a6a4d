"""Convolutions with the channels last in memory, through a whole graph.

cuDNN's faster kernels want them so, and torch.compile brings the tensors of a graph into that layout where its
heuristic says that it pays. It does so piece by piece here, since regions are cut out of the graph: a convolution alone
would get its input converted, and its result converted back, a pass over memory each (65 us of a Conformer's 130 us
convolution). So the layout is decided before regions are looked for: what is between convolutions then has it as well,
and the regions are those of that layout.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import no_python_dispatcher
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils import _pytree as pytree

from autotune.compiler.capture.calls import Calls, is_static, laid_out

log = logging.getLogger("autotune")

aten = torch.ops.aten

_OPERANDS: dict[Any, int] = {aten.convolution.default: 2, aten.convolution_backward.default: 3}
"""Convolutions, with how many of their arguments have channels."""

_ALIKE = {
    *(aten.native_batch_norm_backward, aten.batch_norm_backward, aten.hardtanh_backward, aten.hardswish_backward),
    *(aten.leaky_relu_backward, aten.softplus_backward, aten.mish_backward),
}
"""Derivatives, of which the first two arguments are a gradient and what it is one of. Where these lie differently, the
real strides of the result are not those of the graph."""

_FOLLOWERS = _ALIKE | {
    *(aten.convolution, aten.convolution_backward, aten.mm, aten.addmm, aten.bmm, aten.baddbmm),
    *(aten.native_batch_norm, aten._native_batch_norm_legit_functional),
    *(aten._native_batch_norm_legit, aten._native_batch_norm_legit_no_training),
    *(aten._batch_norm_with_update_functional, aten._batch_norm_no_update),
    *(aten.max_pool2d_with_indices, aten.max_pool2d_with_indices_backward, aten.avg_pool2d, aten.avg_pool2d_backward),
    *(aten._adaptive_avg_pool2d, aten._adaptive_avg_pool2d_backward, aten._unsafe_index),
    *(aten.upsample_nearest2d, aten.upsample_nearest2d_backward),
    *(aten.upsample_bilinear2d, aten.upsample_bilinear2d_backward),
    *(aten.cat, aten.constant_pad_nd, aten._to_copy, aten.copy, aten._unsafe_view, aten.native_dropout, aten.glu),
    *(aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like, aten.new_empty, aten.new_zeros, aten.new_full),
}
"""Operators that take any strides, besides those that torch marks as pointwise, as reductions or as views.

Others may read memory as if it were contiguous (weight and group normalisation), or take no other (attention): who
calls them sees to that, and a graph shows no trace of it where it was so already."""

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
        _Walk(gm.graph).run()
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


def _is_rigid(node: fx.Node) -> bool:
    """Whether a node may rely on the strides that its arguments have in the graph, without torch telling."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return getattr(node.target, "__module__", "") not in ("_operator", "operator")
    schema = node.target._schema
    return node.target.namespace not in ("aten", "prims") or schema.is_mutable or "as_strided" in schema.name


def _is_follower(node: fx.Node) -> bool:
    """Whether a node takes any strides."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    marked = {torch.Tag.pointwise, torch.Tag.reduction}.intersection(node.target.tags)
    # Inductor's own pooling is known once Inductor is imported.
    pools = "::_low_memory_max_pool" in node.target._schema.name
    return bool(marked) or pools or _is_view(node) or node.target.overloadpacket in _FOLLOWERS


def _is_view(node: fx.Node) -> bool:
    """Whether a node's results are its first argument's memory (of an item: those of the sequence are)."""
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and _is_view(node.args[0])
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


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
                if _is_rigid(node):
                    self._restore(node)
                else:
                    if not _is_follower(node):
                        self._restore(node, but_contiguous=True)
                    elif getattr(node.target, "overloadpacket", None) in _ALIKE:
                        self._lay_alike(node)
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
        if any(x.meta["val"].shape[1] > 1 and x.meta["val"].shape[2:].numel() > 1 for x in operands):
            return operands
        for k, x in enumerate(operands):
            _, channels, height, width = shape = x.meta["val"].shape
            if height * width > 1:
                strides = [height * width * channels, 1, width * channels, channels]
                with self.graph.inserting_before(node):
                    operands[k] = Calls(self.graph, node)(aten.as_strided.default, x, list(shape), strides)
                break
        return operands

    def _lay_alike(self, node: fx.Node) -> None:
        grad, x, *others = node.args
        assert isinstance(grad, fx.Node)
        assert isinstance(x, fx.Node)
        with self.graph.inserting_before(node):
            node.args = (laid_out(Calls(self.graph, node), grad, x.meta["val"]), x, *others)

    def _restore(self, node: fx.Node, but_contiguous: bool = False) -> None:
        for x in list(node.all_input_nodes):
            if isinstance(self.before.get(x), torch.Tensor) and not (but_contiguous and x.meta["val"].is_contiguous()):
                with self.graph.inserting_before(node):
                    node.replace_input_with(x, self._restored(x, Calls(self.graph, node)))

    def _restored(self, x: fx.Node, call: Calls) -> fx.Node:
        """``x`` in the strides that it had; a view stays one, of a tensor put back: it may have gaps, and share its
        memory with another result."""
        if x not in self.before:
            return x
        if (x, False) not in self.moved:
            if _is_view(x):
                args = fx.node.map_arg(x.args, lambda a: self._restored(a, call))
                self.moved[x, False] = call(x.target, *args, **x.kwargs)  # type: ignore[arg-type]
            else:
                self.moved[x, False] = laid_out(call, x, self.before[x])
        return self.moved[x, False]

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
        args: Any
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        if node.target not in (aten.view.default, aten._unsafe_view.default):
            return node.target(*args, **kwargs)  # type: ignore[operator]
        # Fake tensors allow views that real ones do not: of one row of pixels, say, its channels last, made flat.
        x, shape = args
        if all(type(n) is int for n in (*x.shape, *x.stride(), *shape)):
            with unset_fake_temporarily(), no_python_dispatcher():
                torch.empty_strided(x.shape, x.stride(), device="meta").view(shape)
        return aten.view.default(x, shape)


__all__ = ["inductor_wants", "keep_as_laid_out", "put_channels_last"]
