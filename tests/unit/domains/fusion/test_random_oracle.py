"""Random programs: the oracle of their regions against PyTorch in float64; and operators outside of regions."""

from __future__ import annotations

from collections import Counter

import pytest

from autotune.compiler.lower.nodes import tensors_of
from tests.support.random_programs.checks import has_fused, left_out, oracle_against_eager, parts_of, regions_of
from tests.support.random_programs.families import program

OPAQUE = {
    "flip",  # negative strides
    "gather",  # where what it takes is indexed by another tensor again; rare
    "cumsum",
    "cumprod",  # the backward of prod
    "scatter_add",  # the backward of gather
    "index_put",  # the backward of indexing
    "index_add",
    "embedding_dense_backward",
    "softplus_backward",
    "hardswish_backward",
    "hardsigmoid_backward",
    "hardtanh_backward",
    "elu_backward",
    "log_sigmoid_backward",
}
"""Operators that may be left to PyTorch, in these programs."""


@pytest.mark.programs(1.0)
def test_the_oracle_agrees_with_eager(seed: int) -> None:
    p = program(seed)
    for r in regions_of(p):
        assert r.workload is not None, f"{r.reason}\n{p}"
        for special in (False,) if has_fused(r) else (False, True):
            why = oracle_against_eager(r, seed, special)
            assert not why, f"{why}\n{p}\n{r.submodule.code}"


@pytest.mark.slow
def test_almost_everything_is_in_a_region() -> None:
    """The rest is known, and belongs to tensors without elements or to operators left to PyTorch."""
    whole, left = 0, Counter[str]()
    programs = [p for p in map(program, range(70)) if not any(0 in i.shape for i in p.inputs)]
    for p in programs:
        parts = parts_of(p)
        names = [n for gm, regions in parts for n in left_out(gm, regions)]
        assert all(r.workload is not None for _, regions in parts for r in regions), str(p)
        whole += not names
        left.update(names)
    assert set(left) <= OPAQUE, set(left) - OPAQUE
    assert left["gather"] <= 3
    assert whole >= 0.85 * len(programs), (whole, len(programs), left)


def test_tensors_without_elements_are_left_to_torch() -> None:
    programs = [p for p in map(program, range(200)) if any(0 in i.shape for i in p.inputs)]
    assert len(programs) >= 3
    for p in programs:
        for r in regions_of(p):
            assert all(0 not in t.shape for n in r.nodes for t in tensors_of(n.meta["val"])), str(p)
