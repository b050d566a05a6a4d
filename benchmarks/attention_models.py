"""In which models of other libraries attention is rewritten, and whether their results stay eager mode's.

    python -m benchmarks.attention_models            # lengths are symbols
    python -m benchmarks.attention_models --static   # lengths are numbers

The models are the small versions of :mod:`benchmarks.model_check`. Each is compiled by Dynamo alone, with attention
rewritten, and called with sequences of two lengths. A line each: how many calls were rewritten, what is left of masks,
and the largest difference from eager mode's result. Returns 1 where one is above 1e-4 of the largest element.
"""

from __future__ import annotations

import argparse
import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.functional import scaled_dot_product_attention
from torch.utils import _pytree as pytree

import benchmarks.model_check_imports  # noqa: F401
from autotune.compiler.capture.attention import rewrite_attention
from autotune.errors import first_line
from benchmarks.model_check import ALL
from benchmarks.real.models import Made, make

SHORTER = 3
"""Tokens by which the second sequence is shorter."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--static", action="store_true", help="compile each length for itself")
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(ALL), metavar="A,B")
    args = parser.parse_args(argv)
    bad = rewritten = 0
    # A step of decoding changes its cache: two calls do not agree.
    for name in (n for n in args.models if not n.endswith("_decode")):
        try:
            made = make(name, "cpu", tiny=True)
            changed, masks, apart = checked(made, dynamic=not args.static)
        except Exception as error:
            print(f"{name:30} not checked: {first_line(error)}", flush=True)
            continue
        bad, rewritten = bad + (apart > 1e-4), rewritten + (changed > 0)
        left = ", ".join(f"{count} {what}" for what, count in masks.items()) or "no attention of torch's"
        print(f"{name:30} {changed} rewritten: {left}; {apart:.1e} apart", flush=True)
    print(f"rewritten in {rewritten} steps; wrong in {bad}")
    return int(bad > 0)


def checked(made: Made, dynamic: bool) -> tuple[int, Counter[str], float]:
    """The number of rewritten calls, masks by kind, and the distance of results from eager mode's."""
    made.module.eval()  # no dropout
    changed, masks, apart = 0, Counter[str](), 0.0

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        nonlocal changed
        changed += rewrite_attention(gm)
        for module in gm.modules():
            for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
                if node.target is scaled_dot_product_attention:
                    masks[_mask(node)] += 1
        return gm.forward

    torch._dynamo.reset()
    run = torch.compile(made.module, backend=backend, dynamic=dynamic)
    for fewer in (0, SHORTER):
        given = {k: _shorter(v, fewer) for k, v in made.inputs.items()}
        with torch.set_grad_enabled(made.train):
            want, got = (_result(f(**copy.deepcopy(given))) for f in (made.module, run))
        apart = max(apart, float((want - got).abs().max() / (want.abs().max() + 1e-9)))
    return changed, masks, apart


def _mask(node: fx.Node) -> str:
    mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    return "masked" if mask is not None else "causal" if node.kwargs.get("is_causal") else "without a mask"


def _shorter(value: Any, fewer: int) -> Any:
    tokens = isinstance(value, Tensor) and value.dim() == 2 and not value.is_floating_point()
    return value[:, : value.shape[1] - fewer].contiguous() if tokens else value


def _result(out: Any) -> Tensor:
    """The loss, or the first tensor of numbers."""
    loss = getattr(out, "loss", None)
    leaves = [loss] if loss is not None else pytree.tree_leaves(dict(out) if isinstance(out, Mapping) else out)
    return next(t.detach() for t in leaves if isinstance(t, Tensor) and t.is_floating_point())


if __name__ == "__main__":
    raise SystemExit(main())
