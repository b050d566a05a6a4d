"""Capture: the graphs of a callable at the point where deployment searches for regions.

Capture and deployment both run Dynamo, AOTAutograd with Inductor's decompositions and partitioner, Inductor's
joint-graph passes, and its post-grad passes up to ``post_grad_custom_post_pass``. In that pass, capture keeps the
graph, and deployment replaces its regions (:mod:`autotune.runtime.inductor.region_pass`). Capture generates no code:
the graphs run eagerly.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autotune.compiler.capture.attention import rewrite_attention
from autotune.compiler.capture.hooks import Hook, hooked, takes_bias_apart
from autotune.compiler.capture.options import requirements
from autotune.errors import UserError, first_line

Compiled = Callable[..., Any]


@dataclass(frozen=True)
class CapturedGraph:
    """One graph, with fake tensors in ``meta["val"]``; ``kind`` is "forward", "backward" or "inference"."""

    kind: str
    module: fx.GraphModule


class _Recorded(Exception):
    """Raised by the recording pass to skip the rest of Inductor's passes."""


def recording_backend(record: Callable[[CapturedGraph], None], fuse_attention: bool = True) -> Callable[..., Compiled]:
    """A backend for torch.compile that passes every graph to ``record`` and runs it eagerly."""
    from torch._functorch import config as aot_config
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.fx_passes.post_grad import view_to_reshape

    kept: list[fx.GraphModule] = []
    whole: list[fx.GraphModule] = []

    def keep(graph: fx.Graph) -> None:
        takes_bias_apart(graph)
        kept.append(fx.GraphModule(graph.owning_module or torch.nn.Module(), _copied(graph)))
        if graph.owning_module is whole[0]:  # the graphs that it calls come before it
            raise _Recorded

    def inner(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Compiled:
        kind = "inference" if kwargs.get("is_inference") else "backward" if kwargs.get("is_backward") else "forward"
        eager = _copy(gm)
        view_to_reshape(eager)  # type: ignore[no-untyped-call]  # a slice of a padded product has gaps
        whole[:] = [gm]
        kept.clear()
        post_grad(gm, inputs, is_inference=kind == "inference")
        for module in kept:
            record(CapturedGraph(kind, module))
        return boxed(eager)

    def backend(gm: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Compiled:
        if fuse_attention and not requirements():
            rewrite_attention(gm)
        patches = hooked(Hook(keep, b"autotune capture", config.post_grad_custom_post_pass))
        # A cached graph would be returned without a call of ``inner``.
        with aot_config.patch(enable_autograd_cache=False):
            run: Any = inner
            compiled: Any = compile_fx(gm, list(inputs), inner_compile=run, config_patches=patches)
            return compiled  # type: ignore[no-any-return]

    return backend


def post_grad(gm: fx.GraphModule, inputs: Sequence[Any], *, is_inference: bool) -> None:
    """Run Inductor's passes between AOTAutograd and code generation on a graph, up to the recording pass."""
    from torch._inductor import compile_fx
    from torch._inductor.fx_passes.post_grad import view_to_reshape
    from torch._inductor.virtualized import V

    view_to_reshape(gm)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        fake_mode = compile_fx.fake_tensor_prop(gm, inputs)
    with V.set_fake_mode(fake_mode), contextlib.suppress(_Recorded):
        compile_fx._recursive_post_grad_passes(gm, is_inference=is_inference)


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph and of the graphs that it calls; passes over the original do not change it."""
    copy = fx.GraphModule(gm, _copied(gm.graph))
    for name, inner in copy.named_children():
        if isinstance(inner, fx.GraphModule):
            setattr(copy, name, _copy(inner))
    return copy


def _copied(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy


def boxed(gm: fx.GraphModule) -> Compiled:
    """The graph with the calling convention of Inductor's code: it takes its inputs in a list and empties the list."""
    from torch.fx.graph import _BoxedCodeGen

    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()

    def run(inputs: list[Any]) -> Any:
        return gm.forward(inputs)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def capture(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    grad: bool | None = None,
    dynamic: bool | None = False,
    fuse_attention: bool = True,
) -> tuple[CapturedGraph, ...]:
    """Run ``fn`` once (and its backward, if results require grad) and return the graphs in the order of compilation.

    Graph breaks give several graphs. Gradients of parameters and inputs do not change; ``fn`` itself may mutate state.

    Args:
        fn: a function or module.
        args, kwargs: example inputs, on the device to capture for.
        grad: True or False to set grad mode; None to keep it.
        dynamic: the argument of torch.compile.
        fuse_attention: True to rewrite attention first, as deployment does by its setting ``attention``.
    """
    graphs: list[CapturedGraph] = []
    mode = contextlib.nullcontext() if grad is None else torch.set_grad_enabled(grad)
    compiled = torch.compile(fresh(fn), backend=recording_backend(graphs.append, fuse_attention), dynamic=dynamic)
    with mode, torch._dynamo.config.patch(recompile_limit=256):
        results = compiled(*args, **dict(kwargs or {}))
        _run_backward(results)
    return tuple(graphs)


def capture_for_user(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    label: str = "the callable",
    grad: bool | None = None,
    fuse_attention: bool = True,
) -> tuple[CapturedGraph, ...]:
    """Call :func:`capture` for a user's callable and inputs.

    Raises:
        UserError: the callable fails on the inputs; ``label`` names it.
    """
    if not callable(fn):
        raise UserError(f"{label} is a {type(fn).__name__}, which cannot be called")
    try:
        return capture(fn, args, kwargs, grad=grad, fuse_attention=fuse_attention)
    except Exception as error:
        raise UserError(f"{label} failed on its inputs: {first_line(error)}") from error


def fresh(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A callable with a new code object: compiling it neither uses nor evicts the owner's compiled code."""

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
