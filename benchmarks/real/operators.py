"""A backend that compiles no C++: Inductor's graphs, run operator by operator around our kernels.

Dynamo, AOTAutograd and Inductor's passes are those of deployment, and so are the regions, their look-ups and launchers.
Only the code between the regions is torch's operators. A step of a model takes a tenth of the time of Inductor's C++.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autotune.compiler.capture.attention import rewrite_attention
from autotune.compiler.capture.hooks import Hook, hooked
from autotune.compiler.capture.recording import boxed, post_grad
from autotune.runtime.inductor import index_check, region_op
from autotune.runtime.inductor.region_call import load_call
from autotune.runtime.inductor.region_pass import replace_regions

Sizes = Mapping[Any, int]
"""Numbers by symbol."""


def backend(gm: fx.GraphModule, inputs: Sequence[Any], *, ours: bool = True) -> Callable[..., Any]:
    """For ``torch.compile``.

    Args:
        ours: False leaves every region to torch's operators, and attention as it is written.
    """
    from torch._functorch import config as aot_config
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    hook = hooked(Hook(replace_regions, None, config.post_grad_custom_post_pass)) if ours else None
    if ours:
        rewrite_attention(gm)
    inner: Any = _by_operators
    with aot_config.patch(enable_autograd_cache=False):
        compiled: Any = compile_fx(gm, list(inputs), inner_compile=inner, config_patches=hook)
        return compiled  # type: ignore[no-any-return]


def _by_operators(gm: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    post_grad(gm, inputs, is_inference=bool(options.get("is_inference")))
    known: dict[Any, int] = {}
    for node in gm.graph.nodes:
        if node.target is torch.ops.autotune.region.default:
            name, read = node.args
            node.target, node.args = _region(region_op.pending(name), [n.meta["val"] for n in read], known), tuple(read)
        elif node.target is torch.ops.autotune.index_check.default:
            indices, name = node.args
            node.target, node.args = _check(name, known), tuple(indices)
    places = _symbols([n.meta.get("val") for n in gm.graph.nodes if n.op == "placeholder"])
    gm.recompile()
    run_all = boxed(gm)

    def call(values: list[Any]) -> Any:
        known.update({symbol: int(read(values)) for symbol, read in places})
        return run_all(values)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _region(pending: region_op.Pending, inputs: Sequence[Tensor], sizes: Sizes) -> Callable[..., list[Tensor]]:
    """A callable for a region, with ``inputs`` in any strides: it copies those with other strides than traced.
    Elements that the region does not write stay NaN."""
    run = load_call(pending.text)
    layouts, outputs = ([(t.shape, t.stride(), t.dtype) for t in given] for given in (inputs, pending.outputs))

    def new(layout: tuple[Any, Any, torch.dtype]) -> Tensor:
        shape, stride, dtype = layout
        made = torch.empty_strided(_numbers(shape, sizes), _numbers(stride, sizes), dtype=dtype)
        return made.fill_(float("nan")) if dtype.is_floating_point else made

    def region(*tensors: Tensor) -> list[Tensor]:
        read = [
            t if t.stride() == _numbers(layout[1], sizes) else new(layout).copy_(t)
            for t, layout in zip(tensors, layouts, strict=True)
        ]
        made = [new(layout) for layout in outputs]
        run(*read, *made)
        return made

    return region


def _check(name: str, sizes: Sizes) -> Callable[..., None]:
    """The check of index tensors that regions read."""

    def check(*indices: Tensor) -> None:
        for index, one in zip(indices, index_check.pending(name), strict=True):
            low, extent = _numbers((one.low, one.extent), sizes)
            index_check.check_index(index, low, extent, one.text)

    return check


def _numbers(extents: Sequence[Any], sizes: Sizes) -> tuple[int, ...]:
    return tuple(e if isinstance(e, int) else int(e.node.expr.xreplace(sizes)) for e in extents)


def _symbols(values: Sequence[Any]) -> list[tuple[Any, Callable[[Sequence[Any]], int]]]:
    """The symbols of a graph's inputs, each with a function that reads it from them."""
    found: list[tuple[Any, Callable[[Sequence[Any]], int]]] = []
    for k, value in enumerate(values):
        if isinstance(value, torch.SymInt):
            found.append((value.node.expr, operator.itemgetter(k)))
        elif isinstance(value, Tensor):
            extents = [(dim, e) for dim, e in enumerate(value.shape) if isinstance(e, torch.SymInt)]
            found += [(e.node.expr, lambda given, k=k, dim=dim: given[k].shape[dim]) for dim, e in extents]
    return [(expression, read) for expression, read in found if expression.is_symbol]
