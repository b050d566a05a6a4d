"""The PyTorch context (grad mode, autocast, transformations, stream) in which each node of a Dynamo graph runs.

Between tensor operations, a Dynamo graph has calls that change the context of later ones: ``_set_grad_enabled``,
``_enter_autocast`` and ``_exit_autocast``, the levels of ``torch.func``, the current device. Streams are annotations of
nodes. A rewrite that shares a result, moves a node or looks through one checks :meth:`Contexts.alike`. Under
``no_grad`` the same call has no gradient, under autocast it has another type.

There is no list of such calls, since it would differ between versions of torch. A call that neither takes a tensor nor
returns a value is treated as one. Two nodes are alike if both have the same grad mode, are inside the same contexts,
and have no other such call between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autotune.compiler.lower.nodes import stream_of


@dataclass(frozen=True)
class Context:
    """The context of one node.

    Attributes:
        grad: the grad mode, or the node after which it is unknown.
        inside: the calls that entered the open contexts, the outermost first.
        since: the latest call that set something else.
        stream: the annotation of the stream; None is the current one.
    """

    grad: bool | fx.Node
    inside: tuple[fx.Node, ...] = ()
    since: fx.Node | None = None
    stream: Any = None


class Contexts:
    """The contexts of a graph's nodes.

    Args:
        graph: a Dynamo graph whose nodes have their fake results in ``meta["example_value"]``.
        outside: the context of the graph's call; None for a graph that Dynamo passes to the backend.
    """

    def __init__(self, graph: fx.Graph, outside: Context | None = None) -> None:
        now = Context(torch.is_grad_enabled()) if outside is None else outside
        grad, since = now.grad, now.since
        entered: dict[fx.Node, bool | fx.Node] = {}
        """For each call that entered a context, the grad mode before it."""
        self._of: dict[fx.Node, Context] = {}
        for node in graph.nodes:
            stream = stream_of(node)
            self._of[node] = Context(grad, (*now.inside, *entered), since, now.stream if stream is None else stream)
            if not _changes_state(node):
                continue
            if (opened := _opened_by(node, entered)) is not None:
                # Some contexts restore the grad mode at their end, others do not.
                grad = grad if entered.pop(opened) == grad else node
            elif _enters(node):
                entered[node] = grad
                if node.target is torch.autograd.grad_mode._enter_inference_mode:
                    grad = not node.args[0]
            elif node.target is torch._C._set_grad_enabled:
                grad = bool(node.args[0])
            else:
                since = node

    def of(self, node: fx.Node) -> Context:
        return self._of[node]

    def alike(self, *nodes: fx.Node) -> bool:
        """Return True if all these nodes run in the same context."""
        first, *others = (self._of[node] for node in nodes)
        return all(other == first for other in others)

    def put(self, made: fx.Node, where: fx.Node) -> None:
        """Give a new node the context of another one."""
        self._of[made] = self._of[where]
        if "custom" in where.meta:
            made.meta["custom"] = dict(where.meta["custom"])


def _changes_state(node: fx.Node) -> bool:
    """Return True if a call neither takes a tensor nor returns a value, and is not usage logging of torch."""
    if _name(node) == "_log_api_usage_once":
        return False
    if node.op not in ("call_function", "call_method") or node.meta.get("example_value") is not None:
        return False
    return not any(isinstance(n.meta.get("example_value"), torch.Tensor) for n in node.all_input_nodes)


def _opened_by(node: fx.Node, entered: Mapping[fx.Node, Any]) -> fx.Node | None:
    """The call whose context ``node`` leaves: its only argument, or the latest one of the matching name."""
    if len(node.args) == 1 and node.args[0] in entered:
        return node.args[0]  # type: ignore[return-value]
    name = _name(node)
    matching = name.replace("decrement", "increment").replace("_exit_", "_enter_")
    named = [one for one in entered if matching not in (name, "") and _name(one) == matching]
    return named[-1] if named else None


def _enters(node: fx.Node) -> bool:
    """Return True if this call enters a context that another call leaves."""
    left = any(_changes_state(user) and user.args == (node,) for user in node.users)
    return left or any(part in _name(node) for part in ("_enter_", "increment"))


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
