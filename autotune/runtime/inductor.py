"""What the user would have had: Inductor for whole graphs and for the pieces between stored kernels, else eager."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import TorchDynamoException
from torch._guards import TracingContext, tracing

from autotune.runtime.database import warn_once

log = logging.getLogger("autotune")

_WHOLE_GRAPH_ONLY = ("triton.cudagraphs", "triton.cudagraph_trees", "cpp_wrapper", "aot_inductor.")
"""Options that mean the whole model; on a piece of it they would cost more than they bring, or be wrong."""


def compile_whole(gm: fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """A Dynamo graph by Inductor, as ``torch.compile(backend="inductor")`` with the user's options would; else eager.

    Args:
        options: keyword arguments of the backend, ``mode`` and ``options``.

    Raises:
        TorchDynamoException: Dynamo's own signals, such as a restart of its analysis.
    """
    from torch._inductor import compile_fx

    try:
        compiled: Any = compile_fx.compile_fx(gm, list(inputs), config_patches=_patches(options) or None)
        return compiled  # type: ignore[no-any-return]
    except TorchDynamoException:
        raise
    except Exception as e:
        warn_once(f"inductor {type(e).__name__}", f"autotune: Inductor does not work here, running eagerly: {_line(e)}")
        eager: Callable[..., Any] = gm.forward
        return eager


def _patches(options: Mapping[str, Any]) -> dict[str, Any]:
    """Inductor's settings from what the user gave to ``torch.compile``."""
    patches: dict[str, Any] = {}
    if options.get("mode"):
        from torch._inductor import list_mode_options

        patches.update(list_mode_options(options["mode"]))
    patches.update(options.get("options") or {})
    return patches


def piece_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Inductor's settings for a piece of a graph: the user's, without those that mean the whole."""
    return {k: v for k, v in _patches(options).items() if not k.startswith(_WHOLE_GRAPH_ONLY)}


def compile_piece(gm: fx.GraphModule, patches: Mapping[str, Any]) -> Callable[..., Any] | None:
    """An aten module by Inductor, callable with its inputs one by one; None (told once) where Inductor does not work.

    It may be called while another graph is being compiled, so it brings a tracing context of its own.
    """
    from torch._inductor import compile_fx

    examples = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    fake_mode = next((t.fake_mode for t in examples if isinstance(t, torch._subclasses.FakeTensor)), None)
    try:
        with torch.no_grad(), tracing(TracingContext(fake_mode)):
            compiled: Any = compile_fx.compile_fx(gm, examples, config_patches=dict(patches) or None)
            (output,) = gm.graph.find_nodes(op="output")
            return _as_promised(compiled, [tuple(n.meta["val"].stride()) for n in output.args[0]])
    except Exception as e:
        warn_once(f"inductor piece {type(e).__name__}", f"autotune: Inductor failed on a piece of a graph: {_line(e)}")
        log.debug("the piece that Inductor failed on: %s", gm.graph, exc_info=True)
        return None


def _as_promised(run: Callable[..., Any], strides: Sequence[tuple[int, ...]]) -> Callable[..., Any]:
    """``run`` with results in the strides that the graph promises to what comes after it.

    Inductor takes some operators apart into others whose results lie otherwise (a concatenation with an empty tensor
    becomes a copy), and the next piece checks. How results lie is settled when they are compiled: the first call tells.
    """
    other: list[int] | None = None

    def call(*inputs: Any) -> Any:
        nonlocal other
        results = run(*inputs)
        if other is None:
            other = [k for k, (t, s) in enumerate(zip(results, strides, strict=True)) if not _lies_as(t, s)]
        if not other:
            return results
        made = list(results)
        for k in other:
            made[k] = _relaid(made[k], strides[k])
        return made

    return call


def _relaid(t: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """A copy in these strides; where they are 0, one element stands for all."""
    once = t[tuple(slice(0, 1) if s == 0 else slice(None) for s in strides)]
    return torch.empty_strided(once.shape, strides, dtype=t.dtype, device=t.device).copy_(once).expand(t.shape)


def _lies_as(t: torch.Tensor, strides: Sequence[int]) -> bool:
    """Whether a tensor has these strides, but for extents below 2, where they are never used."""
    return t.numel() == 0 or all(n < 2 or a == b for n, a, b in zip(t.shape, t.stride(), strides, strict=True))


def compile_bare(gm: fx.GraphModule, examples: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """An aten module by Inductor, callable with its inputs one by one, without Dynamo's and AOTAutograd's wrappers.

    A stored kernel runs inside such wrappers just as well, so that they are no part of what the two differ in. Where
    the bare code does not take or give what the module does, it is what AOTAutograd made of it.

    Raises:
        Exception: whatever Inductor raises.
    """
    from torch._functorch import config as aot_config
    from torch._inductor import compile_fx

    bare: list[Any] = []

    def inner(module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        made = compile_fx.compile_fx_inner(module, inputs, **kwargs)
        bare.append((made, len(inputs)))
        return made

    # AOTAutograd's cache would bring back what it made before without asking for the code inside.
    with torch.no_grad(), aot_config.patch(enable_autograd_cache=False):
        whole: Any = compile_fx.compile_fx(gm, list(examples), inner_compile=inner)
        want = _tensors(whole(*examples))
        if len(bare) == 1 and bare[0][1] == len(examples):
            code = bare[0][0]
            try:
                same = _alike(_tensors(code(list(examples))), want)
            except Exception:
                same = False
            if same:
                return lambda *inputs: code(list(inputs))
    return whole  # type: ignore[no-any-return]


def _tensors(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _alike(got: Sequence[Any], want: Sequence[Any]) -> bool:
    return len(got) == len(want) and all(
        isinstance(a, torch.Tensor)
        and a.shape == b.shape
        and a.dtype == b.dtype
        and torch.allclose(a, b, equal_nan=True)
        for a, b in zip(got, want, strict=True)
    )


def _line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"
