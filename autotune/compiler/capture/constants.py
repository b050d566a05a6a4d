"""Tensors of a Dynamo graph that depend on none of its inputs: what they hold is known when the graph is compiled.

Attention masks are such tensors where a model makes them of ``arange`` and comparisons alone. They are found by running
those nodes once, on the device that the graph names.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

log = logging.getLogger("autotune")

_LARGEST = 2**30
"""Bytes of the largest tensor that is made to be looked at."""
_FROM = ("_operator", "operator", "torch", "torch._C", "torch.functional", "torch.nn.functional", "math")
"""Modules of the functions that are run: torch's own, none of a user's."""


class Constants:
    """What nodes of one graph hold.

    Args:
        graph: of Dynamo's, each node with its fake result in ``meta["example_value"]``.
        given: placeholders whose tensors the caller knows, as a graph that calls this one does.
    """

    def __init__(self, graph: fx.Graph, given: Mapping[fx.Node, torch.Tensor] | None = None) -> None:
        self._graph = graph
        self._found: dict[fx.Node, Any] = dict(given or {})
        self._refused: set[fx.Node] = set()
        self._written: set[int] | None = None

    def of(self, node: fx.Node) -> torch.Tensor | None:
        """The tensor that ``node`` holds; None where that is not known."""
        if node not in self._found and node not in self._refused:
            needed = self._needed(node)
            if needed is None or not self._run([n for n in self._graph.nodes if n in needed]):
                self._refused.add(node)
        found = self._found.get(node)
        return found if isinstance(found, torch.Tensor) else None

    def _needed(self, node: fx.Node) -> set[fx.Node] | None:
        """The nodes to run for ``node``; None where they lead to an input, or to what is written in place."""
        needed: set[fx.Node] = set()
        stack = [node]
        while stack:
            n = stack.pop()
            if n in needed or n in self._found:
                continue
            if n in self._refused or not _is_plain(n):
                return None
            needed.add(n)
            stack += n.all_input_nodes
        if self._written is None:
            self._written = set().union(*(_storages(_written(n)) for n in self._graph.nodes))
        return None if any(_storages(n) & self._written for n in needed) else needed

    def _run(self, nodes: Iterable[fx.Node]) -> bool:
        try:
            with _disable_current_modes(), torch.no_grad(), _Pure():  # type: ignore[no-untyped-call]
                for n in nodes:
                    args, kwargs = fx.node.map_arg((n.args, n.kwargs), self._found.__getitem__)
                    if n.op == "call_method":
                        self._found[n] = getattr(args[0], str(n.target))(*args[1:], **kwargs)
                    else:
                        self._found[n] = n.target(*args, **kwargs)  # type: ignore[operator]
        except Exception:
            log.debug("what a mask holds could not be found out", exc_info=True)
            return False
        return True


class _Impure(Exception):
    """An operator draws random numbers, or writes over an argument."""


class _Pure(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags or func._schema.is_mutable:
            raise _Impure(str(func))
        return func(*args, **(kwargs or {}))


def _is_plain(node: fx.Node) -> bool:
    """Whether a node is a call of torch's own, of fixed shapes and of a size to be made."""
    if node.op not in ("call_function", "call_method"):
        return False
    if node.op == "call_function" and getattr(node.target, "__module__", None) not in (*_FROM, None):
        return False
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor):
        return value is None or type(value) in (int, float, bool)
    fixed = all(type(extent) is int for extent in value.shape)
    return fixed and value.layout == torch.strided and value.numel() * value.element_size() <= _LARGEST


def _written(node: fx.Node) -> fx.Node | None:
    """The argument that a call writes over, if any."""
    if node.op not in ("call_function", "call_method"):
        return None
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    if isinstance(node.target, torch._ops.OpOverload):
        writes = node.target._schema.is_mutable
    elif getattr(node.target, "__module__", "") in ("_operator", "operator"):
        writes = name in _IN_PLACE
    else:
        writes = (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__iadd__")
        writes = writes or bool(node.kwargs.get("inplace"))
    out = node.kwargs.get("out")
    if isinstance(out, fx.Node):
        return out
    first = node.args[0] if node.args else None
    return first if writes and isinstance(first, fx.Node) else None


_IN_PLACE = frozenset(
    {"iadd", "iand", "iconcat", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow", "irshift", "isub"}
    | {"itruediv", "ixor", "setitem", "delitem"}
)


def _storages(node: fx.Node | None) -> set[int]:
    """What a node's fake result lies in: a view shares its storage with what it is a view of."""
    value = None if node is None else node.meta.get("example_value")
    found: set[int] = set()
    for one in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(one, torch.Tensor) and one.layout == torch.strided:
            found.add(one.untyped_storage()._cdata)
    return found


__all__ = ["Constants"]
