"""The suite's cases: whole regions, of the sizes they say, and the same in JAX."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from autotune.compiler.capture.recording import capture
from autotune.compiler.lower.facts import GraphFacts
from autotune.compiler.regions.find import outside, regions_from
from autotune.domains.fusion.program_spec import captured
from autotune.errors import UserError
from benchmarks.fusion.agree import disagreement
from benchmarks.fusion.cases.case import Case, Draw, bytes_moved
from benchmarks.fusion.cases.mixed import ODD_SIZES
from benchmarks.fusion.suite import CASES, choose
from benchmarks.fusion.xla import xla

LISTED = {
    "layer_norm f32 16384x1024", "layer_norm bf16 8192x4096", "rms_norm bf16 8192x8192",
    "bias_gelu_residual_layer_norm f32 8192x768", "bias_gelu_residual_layer_norm bf16 8192x4096",
    "softmax_scale_mask f32 384x512x512", "softmax f32 512x65536", "outer softmax f32 4096x2048",
    "swiglu_rms_norm bf16 4096x14336", "cross_entropy bf16 2048x128256", "lstm cell f32 256x4x1024",
    "DIEN attention GRU f32 256x100x72", "group_norm_silu f16 16x320x64x64",
    "batch_norm_relu training f32 64x256x28x28",
    "rope bf16 8192x32x128", "dual-axis 32-block amax scaling bf16 8192x8192", "layer_norm backward f32 8192x1024",
    "layer_norm backward f32 32768x256", "layer_norm backward bf16 2048x4096", "rms_norm backward bf16 65536x2048",
    "softmax backward f32 384x512x512", "bias_gelu backward bf16 8192x16384", "cross_entropy backward bf16 2048x128256",
    "mixed axes f32 16384x512", "mixed axes f32 256x128", "adamw f32 24 x 768x768", "adamw f32 37 odd sizes to 2000000",
}  # fmt: skip


def test_case_suite_matches_its_list() -> None:
    assert {case.label("gpu") for case in CASES.values()} == LISTED
    assert len({case.label("cpu") for case in CASES.values()}) == len(CASES)
    assert len(ODD_SIZES) == len(set(ODD_SIZES)) == 37
    assert all(n % 2 for n in ODD_SIZES)


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_all_of_a_case_is_captured_as_regions(case: Case) -> None:
    args = case.arguments("cpu", "cpu")
    results = case.fn(*args)
    assert all(t.isfinite().all() for t in pytree.tree_leaves(results))
    graphs = capture(case.fn, args, grad=False)
    regions = []
    for graph in graphs:
        found = regions_from(facts := GraphFacts(graph.module.graph))
        assert outside(facts, found) == {}
        regions += found
    assert [region.reason for region in regions if region.workload is None] == []
    # One region moves what the function moves, except a bias that layer_norm's backward is given and does not read.
    if len(regions) == 1 and case.name not in ("lstm_cell", "attention_gru"):
        from autotune.ir.graph import Graph

        assert regions[0].workload is not None
        moved = Graph.from_json(regions[0].workload.spec).bytes_moved
        assert moved == pytest.approx(bytes_moved(args, results), rel=4e-3)


def test_inputs_are_the_same_every_time_and_each_is_different() -> None:
    first, again = (CASES["lstm_cell"].arguments("cpu", "cpu") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    draw = Draw("cpu", torch.float32)
    assert not torch.equal(draw.normal(64), draw.normal(64))


def test_memory_shown_twice_counts_once() -> None:
    x = torch.zeros(4)
    assert bytes_moved([x.expand(8, 4)], (x, [torch.zeros(2, dtype=torch.bfloat16)])) == 16 + 16 + 4


def test_cases_are_chosen_by_name_and_by_kind() -> None:
    assert [case.name for case in choose(["rope", "adamw"])] == ["rope", "adamw"]
    assert {case.kind for case in choose(["backward"])} == {"backward"}
    assert len(choose([])) == len(CASES)
    with pytest.raises(UserError, match="did you mean 'softmax'"):
        choose(["softmaxx"])


def test_a_case_is_a_target_of_the_other_commands() -> None:
    where = "benchmarks.fusion.suite"
    (found,) = captured(f"{where}:rope", f"{where}:rope_inputs", "cpu").workloads
    assert json.dumps(found[0].to_json())
    with pytest.raises(UserError, match="did you mean 'rope'"):
        captured(f"{where}:ropes", f"{where}:rope_inputs", "cpu")


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="no JAX")
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_the_twin_computes_the_same(case: Case) -> None:
    xla(case, case.arguments("cpu", "cpu"))()  # raises NoXla if they disagree


def _three() -> list[Any]:
    return [torch.ones(4), torch.ones(4, dtype=torch.bfloat16), torch.arange(3)]


def test_results_that_differ_do_not_agree() -> None:
    assert disagreement(_three(), _three()) == ""
    assert "2 results, expected 3" in disagreement(_three()[:2], _three())
    for k, value, said in (
        (0, 1.01, "result 0 is off"),
        (0, float("nan"), "off by nan"),
        (1, 1.2, "result 1"),
        (2, 7, "2"),
    ):
        wrong = _three()
        wrong[k][1] = value
        assert said in disagreement(wrong, _three())
    assert "expected" in disagreement([torch.ones(3)], [torch.ones(4)])
