"""Tools to rewrite a captured graph: new calls with fake results, and propagation of changed strides.

If a pass changes the strides of a tensor, the strides of its readers change too, or a reader gets a copy with the
original strides. Results of the graph keep their strides.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import no_python_dispatcher
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils import _pytree as pytree

aten, prims = torch.ops.aten, torch.ops.prims


class Calls:
    """Factory of calls, of operators that Inductor lowers without decomposition.

    Args:
        node: the node that the calls replace; they have its metadata.
        before: the node before which they are inserted; None for ``node``.
    """

    def __init__(self, node: fx.Node, before: fx.Node | None = None) -> None:
        self._node, self._before = node, before or node

    def __call__(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        with self._before.graph.inserting_before(self._before):
            made = self._before.graph.call_function(target, args, kwargs)
        given, named = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        made.meta = {**self._node.meta, "val": target(*given, **named)}
        made.meta.pop("tensor_meta", None)
        return made

    def to(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        """``x`` converted to a type."""
        return x if x.meta["val"].dtype == dtype else self(prims.convert_element_type.default, x, dtype)


def finish(gm: fx.GraphModule) -> None:
    """Remove dead code from a rewritten graph, check it and recompile its code."""
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()


def is_static(node: fx.Node) -> bool:
    """True if the extents of a node's tensor are static, and none is 0."""
    return all(type(extent) is int and extent for extent in node.meta["val"].shape)


def contiguous(call: Calls, x: fx.Node) -> fx.Node:
    """``x`` if it is contiguous, else a contiguous copy."""
    if x.meta["val"].is_contiguous():
        return x
    return call(aten.clone.default, x, memory_format=torch.contiguous_format)


def laid_out(call: Calls, made: fx.Node, like: torch.Tensor) -> fx.Node:
    """``made`` with the strides of ``like``.

    Arithmetic keeps the strides of its operands, but views in the graph and readers of its results rely on the strides
    of the replaced operator.
    """
    places = [[t.stride(d) for d in range(t.ndim) if t.shape[d] > 1] for t in (made.meta["val"], like)]
    if places[0] == places[1]:
        return made
    order = sorted(range(like.ndim), key=like.stride, reverse=True)
    back = sorted(range(like.ndim), key=order.__getitem__)
    turned = call(aten.permute.default, made, order) if order != sorted(order) else made
    copied = call(aten.clone.default, turned, memory_format=torch.contiguous_format)
    return call(aten.permute.default, copied, back) if turned is not made else copied


_ALIKE = {
    *(aten.native_batch_norm_backward, aten.batch_norm_backward, aten.hardtanh_backward, aten.hardswish_backward),
    *(aten.leaky_relu_backward, aten.softplus_backward, aten.mish_backward),
}
"""Derivatives whose first two arguments are a gradient and its tensor.

If these have different strides, the real strides of the result are not those of the graph.
"""

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
"""Operators that accept any strides, in addition to those that torch marks as pointwise, reductions or views.

Others may read memory as if it were contiguous (weight and group normalisation), or reject other strides (attention).
Their callers make the arguments contiguous, and a graph has no sign of that if they were contiguous already.
"""


class Strides:
    """Propagation of changed strides, from the first node to the last.

    Attributes:
        graph: a graph of fake tensors, changed in place.
        before: the original fake values of the nodes whose strides have changed.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.before: dict[fx.Node, Any] = {}
        self._back: dict[fx.Node, fx.Node] = {}
        """Copies of nodes with their original strides."""

    def replace(self, node: fx.Node, made: fx.Node) -> None:
        """Replace a node by ``made``."""
        if node.meta["val"].stride() != made.meta["val"].stride():
            self.before[made] = node.meta["val"]
        node.replace_all_uses_with(made)
        self.graph.erase_node(node)

    def follow(self, node: fx.Node) -> None:
        """Process a node whose arguments may have changed strides."""
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
        """Recompute a node's fake value; restore its arguments' strides first if it does not accept the new ones."""
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
        node.args = (laid_out(Calls(node), grad, x.meta["val"]), x, *others)

    def _restore(self, node: fx.Node, but_contiguous: bool = False) -> None:
        for x in list(node.all_input_nodes):
            if isinstance(self.before.get(x), torch.Tensor) and not (but_contiguous and x.meta["val"].is_contiguous()):
                node.replace_input_with(x, self._restored(x, Calls(node)))

    def _restored(self, x: fx.Node, call: Calls) -> fx.Node:
        """``x`` with its original strides.

        A view remains a view, of a restored tensor: it may have gaps and share memory with another result.
        """
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
        # Fake tensors allow views that real ones do not, such as a flat view of one channels-last row of pixels.
        x, shape = args
        if all(type(n) is int for n in (*x.shape, *x.stride(), *shape)):
            with unset_fake_temporarily(), no_python_dispatcher():
                torch.empty_strided(x.shape, x.stride(), device="meta").view(shape)
        return aten.view.default(x, shape)


Rewrite = Callable[[Strides, fx.Node, Calls], None]
"""Replaces a node or its users by :meth:`Strides.replace`; dead code elimination removes nodes without users."""


def replace_calls(gm: fx.GraphModule, rewrites: Mapping[Any, Rewrite], chosen: Callable[[fx.Node], bool]) -> None:
    """Replace calls of a graph in place, and propagate the strides of their results.

    Args:
        gm: a graph of fake tensors.
        rewrites: by operator.
        chosen: True for a call of one of these operators that is to be replaced.
    """
    strides, changed = Strides(gm.graph), False
    for node in list(gm.graph.nodes):
        if node.target in rewrites and chosen(node):
            rewrites[node.target](strides, node, Calls(node))
            changed = True
        else:
            strides.follow(node)
    if changed:
        finish(gm)


def _is_rigid(node: fx.Node) -> bool:
    """True if a node may depend on the strides of its arguments in the graph."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return getattr(node.target, "__module__", "") not in ("_operator", "operator")
    schema = node.target._schema
    return node.target.namespace not in ("aten", "prims") or schema.is_mutable or "as_strided" in schema.name


def _is_follower(node: fx.Node) -> bool:
    """True if a node accepts any strides."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    marked = {torch.Tag.pointwise, torch.Tag.reduction}.intersection(node.target.tags)
    # Inductor's pooling operator exists only after Inductor is imported.
    pools = "::_low_memory_max_pool" in node.target._schema.name
    return bool(marked) or pools or _is_view(node) or node.target.overloadpacket in _FOLLOWERS


def _is_view(node: fx.Node) -> bool:
    """True if a node's results share its first argument's memory (for an item: if those of the sequence do)."""
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and _is_view(node.args[0])
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view
