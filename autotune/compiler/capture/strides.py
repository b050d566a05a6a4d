"""Other strides, followed through a graph: who reads such a tensor has others too, or gets it in those that it had.

A pass that lays a tensor out otherwise walks its graph by :class:`Strides`. Results of the graph keep their strides.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import no_python_dispatcher
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils import _pytree as pytree

from autotune.compiler.capture.calls import Calls, laid_out

aten = torch.ops.aten

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


class Strides:
    """A walk from the first node to the last.

    Attributes:
        graph: changed in place, of fake tensors.
        before: fake values of the graph as it was, of the nodes whose strides are others now.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.before: dict[fx.Node, Any] = {}
        self._back: dict[fx.Node, fx.Node] = {}
        """Copies of nodes in the strides that they had."""

    def replace(self, node: fx.Node, made: fx.Node) -> None:
        """Put ``made`` in a node's place."""
        if node.meta["val"].stride() != made.meta["val"].stride():
            self.before[made] = node.meta["val"]
        node.replace_all_uses_with(made)
        self.graph.erase_node(node)

    def follow(self, node: fx.Node) -> None:
        """A node whose arguments may have other strides."""
        if node.op == "output":
            self._restore(node)
        elif any(a in self.before for a in node.all_input_nodes):
            if _is_rigid(node):
                self._restore(node)
            else:
                if not _is_follower(node):
                    self._restore(node, but_contiguous=True)
                elif getattr(node.target, "overloadpacket", None) in _ALIKE:
                    self._lay_alike(node)
                self.evaluate(node)

    def evaluate(self, node: fx.Node) -> None:
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
        if x not in self._back:
            if _is_view(x) and any(a in self.before for a in x.all_input_nodes):
                args = fx.node.map_arg(x.args, lambda a: self._restored(a, call))
                self._back[x] = call(x.target, *args, **x.kwargs)  # type: ignore[arg-type]
            else:
                self._back[x] = laid_out(call, x, self.before[x])
        return self._back[x]

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


__all__ = ["Strides"]
