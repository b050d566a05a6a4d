"""The example models: what they compute, that all of it is captured, and that they run with stored kernels."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

import autotune
from autotune.compiler.capture.recording import capture
from autotune.compiler.lower.nodes import is_written_back, op_name
from autotune.compiler.lower.op_names import GENERATORS, PRODUCTS, VIEWS
from autotune.compiler.regions.find import Region, find_regions
from autotune.domains.fusion.program_spec import resolve
from autotune.errors import UserError
from examples.decode import Block
from examples.models import NAMES, Example, make
from tests.support.capture_helpers import check
from tests.support.deployment import Tune

OPAQUE = {
    "mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "inductor_seeds", "inductor_lookup_seed",  # of all dropouts
    "_unsafe_masked_index_put_accumulate", "index_put",  # additions at indices of the data
    "copy_",  # of statistics, into a model's buffers
}  # fmt: skip
"""Operators of the models that are in no region; everything else must be."""


@functools.cache
def example(name: str) -> Example:
    return make(name, "cpu", "cpu")


@functools.cache
def captured(name: str) -> tuple[tuple[torch.fx.GraphModule, tuple[Region, ...]], ...]:
    one = example(name)
    graphs = capture(one.module, one.inputs, grad=one.train)
    return tuple((g.module, tuple(find_regions(g.module))) for g in graphs)


def result(one: Example) -> Tensor:
    out = one.module(*one.inputs)
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("name", NAMES)
def test_a_step_gives_finite_results_and_gradients(name: str) -> None:
    one = example(name)
    out = result(one)
    assert torch.isfinite(out).all()
    if not one.train:
        assert not any(p.requires_grad for p in one.module.parameters())
        return
    assert out.ndim == 0
    parameters = dict(one.module.named_parameters())
    grads = torch.autograd.grad(out, list(parameters.values()), allow_unused=True)
    for where, g in zip(parameters, grads, strict=True):
        assert g is not None, where
        assert torch.isfinite(g).all(), where


@pytest.mark.parametrize("name", NAMES)
def test_all_memory_intensive_operators_are_in_regions(name: str) -> None:
    graphs = captured(name)
    assert len(graphs) == (2 if example(name).train else 1)
    for module, regions in graphs:
        assert all(r.workload is not None for r in regions), [r.reason for r in regions]
        inside = {n for r in regions for n in r.nodes}
        calls = [n for n in module.graph.nodes if n.op == "call_function" and n not in inside]
        names = {op_name(n) for n in calls if not is_written_back(n)}
        assert names - VIEWS - GENERATORS - {"getitem"} <= OPAQUE


@pytest.mark.parametrize("name", NAMES)
def test_every_region_agrees_with_its_operators(name: str) -> None:
    done = set()
    for _, regions in captured(name):
        for region in regions:
            assert region.workload is not None
            if region.workload.fingerprint not in done:
                done.add(region.workload.fingerprint)
                check(region)


@pytest.mark.parametrize("name", ["transformer_train", "dien_infer", "crnn_infer"])
def test_regions_for_a_gpu_hold_small_products(name: str) -> None:
    """At these sizes all products are small."""
    done: set[str] = set()
    for module, _ in captured(name):
        for region in find_regions(module, "cuda"):
            assert region.workload is not None, region.reason
            if {"mm", "addmm", "bmm"} & {op_name(n) for n in region.nodes} and region.workload.fingerprint not in done:
                done.add(region.workload.fingerprint)
                check(region)
    assert len(done) >= 5


def test_the_decoder_s_block_is_three_regions() -> None:
    """The norm, what makes the gated activation, and the rest; the weights become numbers in the kernels."""
    block = Block(32, 48).requires_grad_(False)
    (graph,) = capture(block, (torch.randn(1, 32, dtype=torch.bfloat16),), grad=False)
    regions = find_regions(graph.module, "cuda")
    assert [sum(op_name(n) in PRODUCTS for n in r.nodes) for r in regions] == [0, 2, 1]
    for region in regions:
        assert torch.int8 in {n.meta["val"].dtype for n in region.inputs} or region is regions[0]
        check(region)


def test_steps_of_recurrences_are_few_workloads() -> None:
    """More steps are more regions, and no more to tune."""
    different = []
    for steps in (6, 12):
        one = make("dien_infer", "cpu", "cpu", steps=steps, batch=16)
        (graph,) = capture(one.module, one.inputs, grad=False)
        regions = find_regions(graph.module)
        assert len(regions) >= 2 * steps
        different.append(len({r.workload.fingerprint for r in regions if r.workload is not None}))
    assert different[0] == different[1] < 14


@pytest.mark.parametrize(("name", "changes"), [("llama_train", {}), ("dien_infer", {"steps": 2})])
def test_runs_with_stored_kernels(tune: Tune, name: str, changes: dict[str, object]) -> None:
    one = make(name, "cpu", "cpu", **changes)
    with torch.set_grad_enabled(one.train):
        assert tune(one.module, one.inputs)
        got = torch.compile(one.module, backend="autotune")(*one.inputs)
        want = one.module(*one.inputs)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    counters = autotune.counters()
    assert counters.hits
    assert counters.misses == counters.fallbacks == 0
    if one.train:
        parameters = list(one.module.parameters())
        mine, theirs = (torch.autograd.grad(loss, parameters) for loss in (got, want))
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


def test_models_and_inputs_are_always_the_same() -> None:
    state = torch.get_rng_state()
    one, two = (make("bert_infer", "cpu", "cpu") for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(one.inputs, two.inputs, strict=True))
    torch.testing.assert_close(result(one), result(two))


def test_names_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXAMPLE_SIZE", "cpu")
    monkeypatch.setenv("EXAMPLE_LAYERS", "1")
    fn, (args, kwargs), _ = resolve("examples.models.bert:infer", "examples.models.bert:infer_inputs", "cpu")
    assert not kwargs
    assert isinstance(fn, torch.nn.Module)
    assert len(fn.layers) == 1
    assert torch.isfinite(fn(*args)[1]).all()
    fn, (args, _), _ = resolve("examples.models.llama:model", "examples.models.llama:inputs", "cpu")
    assert fn(*args).ndim == 0  # a training target returns the loss
    monkeypatch.setenv("EXAMPLE_STEPS", "3")
    _, (args, _), _ = resolve("examples.models.crnn:infer", "examples.models.crnn:infer_inputs", "cpu")
    assert args[0].shape[-1] == 8  # three steps of the LSTMs
    with pytest.raises(UserError, match="no 'train'"):
        resolve("examples.models.asr:train", "examples.models.asr:infer_inputs", "cpu")


def test_unknown_names_are_reported() -> None:
    with pytest.raises(ValueError, match="unknown model 'bert'"):
        make("bert", "cpu", "cpu")
    with pytest.raises(ValueError, match="unknown size"):
        make("bert_infer", "cpu", "huge")
    assert len(make("bert_infer", "cpu", "cpu", layers=1, unknown=3).module.layers) == 1


def test_dropout_runs_in_stored_kernels_and_its_gradient_agrees(tune: Tune) -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x @ w, 0.25) * 2

    x, w = torch.randn(64, 32, requires_grad=True), torch.randn(32, 48, requires_grad=True)
    assert tune(f, (x, w))
    run = torch.compile(f, backend="autotune")
    masks = []
    for _ in range(2):
        y = run(x, w)
        kept = y != 0
        torch.testing.assert_close(y, torch.where(kept, (x @ w) * (2 / 0.75), 0.0), rtol=1e-4, atol=1e-4)
        (dw,) = torch.autograd.grad(y.sum(), w)
        torch.testing.assert_close(dw, x.t() @ (kept * (2 / 0.75)), rtol=1e-4, atol=1e-4)
        masks.append(kept)
    assert not torch.equal(*masks)
    assert 0.68 < torch.stack(masks).float().mean().item() < 0.82
    counters = autotune.counters()
    assert counters.hits == 2
    assert counters.misses == counters.fallbacks == 0
