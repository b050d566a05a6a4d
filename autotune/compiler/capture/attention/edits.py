"""Nodes that a rule inserts into a Dynamo graph, each in the PyTorch context of the call that needs it."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from autotune.compiler.capture.attention.calls import fake
from autotune.compiler.capture.attention.effects import Contexts, Writes


class Edits:
    """Insertion of nodes into one graph."""

    def __init__(self, graph: fx.Graph, writes: Writes, contexts: Contexts) -> None:
        self._graph, self._writes, self._contexts = graph, writes, contexts

    def _method(self, where: fx.Node, name: str, node: fx.Node, *args: Any) -> fx.Node:
        """A method of ``node``'s result, called in the context of ``where``."""
        made = self._graph.call_method(name, (node, *args))
        given = fx.node.map_arg(args, lambda n: n.meta["example_value"])
        made.meta["example_value"] = getattr(fake(node), name)(*given)
        self._contexts.put(made, where)
        return made

    def _function(self, where: fx.Node, function: Any, *args: Any) -> fx.Node:
        """A call of a function in the context of ``where``."""
        made = self._graph.call_function(function, args)
        given = fx.node.map_arg(args, lambda n: n.meta["example_value"])
        with next(t.fake_mode for t in pytree.tree_leaves(given) if isinstance(t, FakeTensor)):
            made.meta["example_value"] = function(*given)
        self._contexts.put(made, where)
        return made

    def _size(self, where: fx.Node, node: fx.Node, axis: int) -> int | fx.Node:
        """An extent of ``node``'s result: a number, or a node for a symbol."""
        size = fake(node).shape[axis]
        return size if type(size) is int else self._method(where, "size", node, axis)

    def _of_type(self, where: fx.Node, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """``node`` in the type that autocast would have given it."""
        return node if fake(node).dtype == dtype else self._method(where, "to", node, dtype)

    def _after(self, node: fx.Node, method: str, *args: Any) -> None:
        made = self._method(node, method, node, *args)
        node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)

    def _written(self, source: fx.Node, copy: fx.Node, node: fx.Node) -> bool:
        """True if ``source`` cannot replace ``copy`` because one of them is written in place.

        For ``source`` this covers writes up to the call, or its backward; for ``copy``, writes before the call.
        """
        end = None if fake(node).requires_grad else node
        return self._writes.between([source], copy, end) or self._writes.between([copy], copy, node)
