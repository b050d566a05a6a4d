"""Constant tensors of a Dynamo graph: they depend on no input, so their elements are known at compile time.

Attention masks are constant if a model makes them from ``arange`` and comparisons alone. Their elements are found by
running those nodes once, on the graph's device.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from autotune.compiler.capture.attention.effects import Writes

log = logging.getLogger("autotune")

_LARGEST = 2**30
"""Bytes of the largest tensor that is computed."""
_KEPT = 2**20
"""Bytes of the largest tensor that is kept: a mask of long sequences and its intermediates fill gigabytes."""
_FROM = ("_operator", "operator", "torch", "torch._C", "torch.functional", "torch.nn.functional", "math")
"""Modules of the functions that may run: those of torch and Python, none of the user."""


class Constants:
    """The constant tensors of one graph.

    Args:
        graph: a Dynamo graph whose nodes have their fake results in ``meta["example_value"]``.
        writes: the in-place writes of that graph, or of one that calls it.
        given: constant tensors of placeholders, for example from a graph that calls this one.
    """

    def __init__(self, graph: fx.Graph, writes: Writes, given: Mapping[fx.Node, torch.Tensor] | None = None) -> None:
        self._graph, self._writes = graph, writes
        self._known: dict[fx.Node, Any] = dict(given or {})
        self._refused: set[fx.Node] = set()

    def of(self, node: fx.Node) -> torch.Tensor | None:
        """The tensor of ``node``; None if it is not constant. Large tensors are recomputed for each call."""
        if node in self._refused:
            return None
        needed = self._needed(node)
        found = None if needed is None else self._run(node, [n for n in self._graph.nodes if n in needed])
        if found is None:
            self._refused.add(node)
        return found

    def _needed(self, node: fx.Node) -> set[fx.Node] | None:
        """The ancestors of ``node``, with itself; None if one is an input or is written in place."""
        needed: set[fx.Node] = set()
        stack = [node]
        while stack:
            n = stack.pop()
            if n in needed:
                continue
            if n in self._refused or self._writes.touch(n) or not (n in self._known or _is_plain(n)):
                return None
            needed.add(n)
            if n not in self._known:
                stack += n.all_input_nodes
        return needed

    def _run(self, wanted: fx.Node, nodes: Sequence[fx.Node]) -> torch.Tensor | None:
        held = {n: self._known[n] for n in nodes if n in self._known}
        readers = Counter(i for n in nodes if n not in held for i in n.all_input_nodes)
        try:
            with _disable_current_modes(), torch.no_grad(), _Pure():  # type: ignore[no-untyped-call]
                for n in nodes:
                    if n in held:
                        continue
                    made = held[n] = _call(n, held)
                    if not _is_as_traced(made, n):
                        return None
                    if not isinstance(made, torch.Tensor) or made.nbytes <= _KEPT:
                        self._known[n] = made
                    readers.subtract(n.all_input_nodes)
                    for i in n.all_input_nodes:
                        if not readers[i]:
                            del held[i]
        except Exception:
            log.debug("what a mask holds could not be found out", exc_info=True)
            return None
        found = held[wanted]
        return found if isinstance(found, torch.Tensor) else None


def _is_as_traced(made: Any, node: fx.Node) -> bool:
    """True if a result has the traced type and shape; the type of a product differs under autocast."""
    traced = node.meta.get("example_value")
    return not isinstance(traced, torch.Tensor) or (made.dtype, made.shape) == (traced.dtype, traced.shape)


def _call(node: fx.Node, held: Mapping[fx.Node, Any]) -> Any:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), held.__getitem__)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


class _Impure(Exception):
    """Raised for an operator that draws random numbers or writes an argument in place."""


class _Pure(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags or func._schema.is_mutable:
            raise _Impure(str(func))
        return func(*args, **(kwargs or {}))


def _is_plain(node: fx.Node) -> bool:
    """True for a call of a torch or Python function with a static shape and at most :data:`_LARGEST` bytes."""
    if node.op not in ("call_function", "call_method"):
        return False
    if node.op == "call_function" and getattr(node.target, "__module__", None) not in (*_FROM, None):
        return False
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor):
        return value is None or type(value) in (int, float, bool)
    fixed = all(type(extent) is int for extent in value.shape)
    return fixed and value.layout == torch.strided and value.numel() * value.element_size() <= _LARGEST
