"""In-place writes of a Dynamo graph, the PyTorch context in which each of its nodes runs, and edits that respect both.

A Dynamo graph is not functional yet: a tensor may change between two readers (:class:`Writes`).

The context (:class:`Contexts`) is grad mode, autocast, transformations and stream. Between tensor operations, a Dynamo
graph has calls that change the context of later ones: ``_set_grad_enabled``, ``_enter_autocast`` and
``_exit_autocast``, the levels of ``torch.func``, the current device. Streams are annotations of nodes. A rewrite that
shares a result, moves a node or looks through one checks :meth:`Contexts.alike`. Under ``no_grad`` the same call has no
gradient, under autocast it has another type.

There is no list of such calls, since it would differ between versions of torch. A call that neither takes a tensor nor
returns a value is treated as one. Two nodes are alike if both have the same grad mode, are inside the same contexts,
and have no other such call between them.

A rule inserts nodes by :class:`Edits`, each in the context of the call that needs it.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from autotune.compiler.capture.attention.calls import fake
from autotune.compiler.lower.nodes import stream_of

_OPERATORS = (
    *("iadd", "iand", "iconcat", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow", "irshift", "isub"),
    *("itruediv", "ixor", "setitem", "delitem"),
)
"""Names of the functions of :mod:`operator` that write their first argument in place."""
_SILENT = ("batch_norm", "instance_norm", "native_batch_norm", "embedding_bag", "rrelu")
"""Names of PyTorch functions that may write arguments in place without a sign in their names or an ``inplace`` flag."""


class Writes:
    """The memory that a graph writes in place, by node; the writes of a called graph count at the call.

    Fake results identify the memory: a view shares its storage with its base.

    Args:
        gm: a graph whose nodes have their fake results in ``meta["example_value"]``.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self._places: dict[fx.Node, int] = {}
        self._writers: list[tuple[fx.Node, set[int]]] = []
        self._everywhere = self._of(gm)

    def touch(self, node: fx.Node) -> bool:
        """True if any node, earlier or later, writes a node's memory in place."""
        return bool(_storages(node) & self._everywhere)

    def between(self, nodes: Iterable[fx.Node], first: fx.Node, last: fx.Node | None) -> bool:
        """True if a node after ``first`` and before ``last`` writes the memory of ``nodes`` in place.

        Args:
            first, last: nodes of one graph, as it was at construction; ``last=None`` is the graph's end.
        """
        memory = set().union(*map(_storages, nodes))
        if not memory & self._everywhere:
            return False
        begin, end = self._places[first], len(self._places) if last is None else self._places[last]
        return any(
            writer.graph is first.graph and begin < self._places[writer] < end and bool(written & memory)
            for writer, written in self._writers
        )

    def _of(self, gm: fx.GraphModule) -> set[int]:
        every: set[int] = set()
        for node in gm.graph.nodes:
            self._places[node] = len(self._places)
            written = set().union(*map(_storages, _written(node)))
            for inner in called(gm, node):
                written |= self._of(inner)
            if written:
                self._writers.append((node, written))
                every |= written
        return every


def called(gm: fx.GraphModule, node: fx.Node) -> list[fx.GraphModule]:
    """The graphs that a node calls, for example for activation checkpointing or a condition."""
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return []
    names = [str(n.target) for n in node.all_input_nodes if n.op == "get_attr"]
    inner = [getattr(gm, name, None) for name in names]
    return [one for one in inner if isinstance(one, fx.GraphModule)]


def _written(node: fx.Node) -> list[fx.Node]:
    """The arguments that a call writes in place, or a superset of them if that is unclear."""
    if node.op not in ("call_function", "call_method"):
        return []
    first = [a for a in node.args[:1] if isinstance(a, fx.Node)]
    found = _nodes(node.kwargs.get("out"))
    if node.op == "call_method":
        name = str(node.target)
        plain = not name.endswith("_") or (name.endswith("__") and name != "__setitem__" and name[2] != "i")
        return found + ([] if plain else first)
    target: Any = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        owner = node.graph.owning_module
        return [] if owner is not None and called(owner, node) else node.all_input_nodes
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, "default", None)
    if isinstance(target, torch._ops.OpOverload):
        return found + _by_schema(node, target._schema)
    name = getattr(target, "__name__", "_")
    if getattr(operator, name, None) is target:
        return first if name in _OPERATORS else []
    if _is_inplace(node):
        return found + first
    bounded = name == "embedding" and [*node.args[3:4], node.kwargs.get("max_norm")] not in ([None], [None, None])
    known = _is_of_torch(target) and not name.endswith("_") and name not in _SILENT
    return found if known and not bounded else node.all_input_nodes


def _by_schema(node: fx.Node, schema: torch.FunctionSchema) -> list[fx.Node]:
    found = []
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            found += _nodes(given)
    return found


def _is_of_torch(target: Any) -> bool:
    """True for a function of PyTorch or Python; any other may write its arguments in place."""
    module = (getattr(target, "__module__", None) or "").partition(".")[0]
    return inspect.isbuiltin(target) or module in ("torch", "math", "operator", "_operator", "builtins")


def _is_inplace(node: fx.Node) -> bool:
    """True if a call has ``inplace=True``, an option of functions in ``torch.nn.functional``."""
    if not inspect.isfunction(node.target):
        return False
    try:
        return bool(inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments.get("inplace"))
    except (TypeError, ValueError):
        return True


def _nodes(value: Any) -> list[fx.Node]:
    return [n for n in pytree.tree_leaves(value) if isinstance(n, fx.Node)]


def _storages(node: fx.Node) -> set[int]:
    values = pytree.tree_leaves(node.meta.get("example_value"))
    dense = (v for v in values if isinstance(v, torch.Tensor) and v.layout == torch.strided)
    return {_unwrapped(v).untyped_storage()._cdata for v in dense}


def _unwrapped(value: torch.Tensor) -> torch.Tensor:
    while is_functorch_wrapped_tensor(value):
        value = get_unwrapped(value)
    return value


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
