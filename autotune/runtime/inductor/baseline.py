"""Inductor's code of an aten module, which stored kernels are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensor, FakeTensorMode


def compile_bare(gm: fx.GraphModule, examples: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """Compile an aten module by Inductor, as a function of its inputs without Dynamo's and AOTAutograd's wrappers.

    A stored kernel runs inside such wrappers as well, so a comparison omits them. If the inner code takes or returns
    other tensors than the module, AOTAutograd's whole code is returned.

    Raises:
        Exception: any error of Inductor's.
    """
    from torch._functorch import config as aot_config
    from torch._inductor import compile_fx

    bare: list[Any] = []

    def inner(module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        made = compile_fx.compile_fx_inner(module, inputs, **kwargs)
        bare.append((made, len(inputs)))
        return made

    # AOTAutograd's cache would return earlier code without calling ``inner``.
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


def compile_cached(gm: fx.GraphModule, examples: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """Compile an aten module by Inductor directly, with a cache on disk that fake and real inputs share.

    Args:
        examples: real tensors, or fake tensors of :func:`fake_mode`; Inductor's cache requires that mode.

    Raises:
        Exception: any error of Inductor's.
    """
    from torch._inductor.compile_fx import compile_fx

    mode = fake_mode()
    fakes = [t if isinstance(t, FakeTensor) else mode.from_tensor(t, static_shapes=True) for t in examples]
    with torch.no_grad():
        made: Any = compile_fx(gm, fakes)
    return made  # type: ignore[no-any-return]


def fake_mode() -> FakeTensorMode:
    """The mode of tensors without data that :func:`compile_cached` takes."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv())


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
