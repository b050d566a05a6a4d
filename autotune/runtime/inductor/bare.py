"""Inductor's code for a region alone: what a stored kernel is measured against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx


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
