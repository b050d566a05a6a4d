"""The Triton kernels of attention by spans in Triton's interpreter, against torch's formula in fp64.

A separate process: ``TRITON_INTERPRET`` holds from the import of Triton on. Prints a JSON line for each mask.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor
from triton.runtime import interpreter

from autotune.compiler.capture.attention import spans
from autotune.compiler.capture.attention.operators import _spans
from tests.support.compiler.padded_attention import seen_probabilities

_SHAPES = ((2, 4, 2, 70, 70, 16), (1, 2, 2, 64, 64, 24), (2, 2, 1, 33, 50, 16), (3, 2, 1, 1, 1, 16))
"""Batch, heads, heads of keys, queries, keys, head size."""


def accept_numpy() -> None:
    """Let the interpreter convert arrays of one element, which it does by ``int``; NumPy 2.5 has that no more."""
    scope: Any = getattr(interpreter, "_LangPatchScope", None)
    if scope is not None:
        own = scope.set_attr

        def set_attr(self: Any, to: Any, name: str, value: Any) -> Any:
            of_one = (lambda x: int(x.handle.data.item())) if name == "__index__" else value
            return own(self, to, name, of_one)

        scope.set_attr = set_attr


def masks(batch: int, queries: int, keys: int) -> dict[str, Tensor]:
    lower = torch.ones(queries, keys, dtype=torch.bool).tril()
    which = torch.randint(0, 2, (batch, max(queries, keys))).cumsum(-1) // 3
    numbers = which[:, :queries, None], which[:, None, :keys]
    same = numbers[0] == numbers[1]
    return {
        "documents": same,
        "causal documents": same & lower,
        "causal": lower.expand(batch, queries, keys),
        "random": torch.rand(batch, queries, keys) < 0.4,
        "empty rows": same & lower & (numbers[0] > 3),
        "all": torch.ones(batch, queries, keys, dtype=torch.bool),
        "none": torch.zeros(batch, queries, keys, dtype=torch.bool),
        "apart": (numbers[0] % 3) == (numbers[1] % 3),
    }


def main() -> None:
    torch.manual_seed(0)
    accept_numpy()
    small = spans.Blocks(32, 16, 4, 1), spans.Blocks(32, 16, 4, 1), spans.Blocks(16, 32, 4, 1)
    spans.blocks_of = lambda size: small
    for b, h, few, queries, keys, size in _SHAPES:
        for name, mask in masks(b, queries, keys).items():
            lengths = (queries, h), (keys, few), (keys, few)
            q, k, v = (torch.randn(b, n, heads, size).transpose(1, 2) for n, heads in lengths)
            grad = torch.randn(b, queries, h, size).transpose(1, 2)
            wide = [x.double().requires_grad_() for x in (q, k, v)]
            p = seen_probabilities(wide[0], wide[1], mask[:, None], 0.3)
            want = p @ wide[2].repeat_interleave(h // few, 1)
            wants = want, *torch.autograd.grad(want, wide, grad.double())
            rows, columns, holes = _spans(mask)
            out, lse = spans.forward(q, k, v, mask, rows, holes, 0.3)
            got = out, *spans.backward(grad, q, k, v, mask, rows, columns, holes, out, lse, 0.3)
            apart = max(float((x - y).detach().abs().max()) for x, y in zip(got, wants, strict=True))
            print(json.dumps([name, queries, holes.tolist(), apart]), flush=True)


if __name__ == "__main__":
    main()
