"""Capture: the aten graphs of a callable, exactly as the deploying backend is handed them.

Both go through :func:`aot_backend`: torch.compile's tracer, then AOTAutograd with the few decompositions of
:mod:`autotune.fusion.decompose` (otherwise the graphs hold the operators that eager mode runs) and with the min-cut
partitioner between forward and backward.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autotune.errors import UserError, first_line
from autotune.fusion.channels_last import put_channels_last
from autotune.fusion.complexes import split_parts
from autotune.fusion.decompose import draw_seeds_at_once, table
from autotune.fusion.row_sums import split_log_softmax

Compiled = Callable[..., Any]
GraphCompiler = Callable[[fx.GraphModule, Sequence[Any], str], Compiled]
"""Takes an aten graph, example inputs and "forward", "backward" or "inference"; returns what runs in its place."""


def aot_backend(compiler: GraphCompiler) -> Callable[[fx.GraphModule, Sequence[Any]], Compiled]:
    """A backend for torch.compile that hands every aten graph to ``compiler``."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition  # type: ignore[import-untyped]
    from torch._dynamo.backends.common import aot_autograd

    def rewrite(gm: fx.GraphModule) -> None:
        split_parts(gm)
        draw_seeds_at_once(gm)

    def part(kind: str) -> Callable[[fx.GraphModule, Sequence[Any]], Any]:
        def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
            if kind == "inference":
                rewrite(gm)
                put_channels_last(gm, inference=True)
            compiled = compiler(gm, example_inputs, kind)
            return compiled if getattr(compiled, "_boxed_call", False) else make_boxed_func(compiled)

        return compile_graph

    def partition(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        rewrite(joint)
        split_log_softmax(joint)
        put_channels_last(joint, inference=False)
        return min_cut_rematerialization_partition(joint, *args, compiler="inductor", **kwargs)

    backend: Callable[[fx.GraphModule, Sequence[Any]], Compiled] = aot_autograd(
        fw_compiler=part("forward"),
        bw_compiler=part("backward"),
        inference_compiler=part("inference"),
        partition_fn=partition,
        decompositions=table(),
    )
    return backend


@dataclass(frozen=True)
class CapturedGraph:
    """One aten graph, with fake tensors in ``meta["val"]``; ``kind`` is "forward", "backward" or "inference"."""

    kind: str
    module: fx.GraphModule


@dataclass(frozen=True)
class Capture:
    """The graphs of one callable on one set of inputs, in the order they were compiled."""

    graphs: tuple[CapturedGraph, ...] = field(default_factory=tuple)


def capture(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, *, grad: bool | None = None
) -> Capture:
    """Run ``fn`` once (and its backward, where results require grad) and keep the aten graphs.

    Graph breaks give several graphs. Gradients of parameters and inputs are left as they were; what ``fn`` itself
    mutates is mutated.

    Args:
        fn: a function or module.
        args, kwargs: example inputs, on the device to capture for.
        grad: True or False to set grad mode; None leaves it.
    """
    graphs: list[CapturedGraph] = []

    def record(gm: fx.GraphModule, example_inputs: Sequence[Any], kind: str) -> Compiled:
        graphs.append(CapturedGraph(kind, gm))
        return gm.forward

    mode = contextlib.nullcontext() if grad is None else torch.set_grad_enabled(grad)
    # Every capture is a new code object: it neither finds nor evicts what the caller has compiled.
    compiled = torch.compile(_fresh(fn), backend=aot_backend(record), dynamic=False)
    with mode, torch._dynamo.config.patch(recompile_limit=256):
        results = compiled(*args, **dict(kwargs or {}))
        _run_backward(results)
    return Capture(tuple(graphs))


def capture_for_user(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    label: str = "the callable",
    grad: bool | None = None,
) -> Capture:
    """As :func:`capture`, for a callable and inputs that a user gave.

    Raises:
        UserError: the callable fails on the inputs; ``label`` names it.
    """
    if not callable(fn):
        raise UserError(f"{label} is of type {type(fn).__name__}, which cannot be called")
    try:
        return capture(fn, args, kwargs, grad=grad)
    except Exception as error:
        raise UserError(f"{label} failed on its inputs: {first_line(error)}") from error


def _fresh(fn: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return types.FunctionType(call.__code__.replace(), call.__globals__, "call", None, call.__closure__)


def _run_backward(results: Any) -> None:
    outs = [t for t in pytree.tree_leaves(results) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not outs or not torch.is_grad_enabled():
        return
    leaves = _leaves(outs)
    if leaves:
        # grad, not backward: nothing is accumulated into the user's parameters.
        torch.autograd.grad(outs, leaves, [torch.ones_like(t) for t in outs], allow_unused=True)


def _leaves(outs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that gradients of ``outs`` accumulate in."""
    found: dict[int, torch.Tensor] = {}
    stack = [t.grad_fn for t in outs if t.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor):
            found[id(leaf)] = leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return list(found.values())
