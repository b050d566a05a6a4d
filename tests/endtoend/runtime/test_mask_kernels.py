"""Inductor's kernels for the bounds of masks whose sizes are symbols: reductions of int32 take no int64.

No GPU is needed: the kernels are printed for one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import autotune.compiler.capture.attention.padded
import autotune.compiler.capture.attention.spanned  # noqa: F401  # both define operators
from tests.support.triton_code import hopper, kernels


@pytest.mark.parametrize(
    ("compute", "shape"),
    [
        pytest.param(lambda x: torch.ops.autotune.mask_bounds(x, x.shape[1], True), (4, 3000), id="causal"),
        pytest.param(lambda x: torch.ops.autotune.mask_bounds(x, x.shape[1], False), (4, 3000), id="encoder"),
        pytest.param(lambda x: torch.ops.autotune.mask_spans(x), (4, 300, 3000), id="spans"),
    ],
)
def test_a_reduction_of_places_has_one_type(compute: Callable[[Tensor], Any], shape: tuple[int, ...]) -> None:
    """Triton rejects a loop whose variable begins as int32 and becomes the int64 of a symbolic size."""
    with hopper():
        printed = kernels(compute, torch.ones(shape, dtype=torch.bool), symbolic=True)
    reduced = [text for text in printed if re.search(r"for r\d_offset", text)]
    assert reduced
    for text in reduced:
        sizes = re.findall(r"(tmp\d+) = ks\d+\n", text.partition("for r")[2])
        assert not [size for size in sizes if re.search(rf"tl\.where\([^\n]*\b{size}\b", text)]
