"""Outputs that other groups read back: which plans may, what their kernels pass on, and where they are proposed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from autotune.compiler.assemble import Draft, draft
from autotune.compiler.planner.beam import shapes
from autotune.compiler.planner.cost import Figures
from autotune.compiler.planner.groups import Root, group_configs, names, pack, read_text, write_text
from autotune.compiler.planner.plan import all_roots, build_plan, make_plan
from autotune.compiler.schedules.cuda import scheme_of
from autotune.domains.fusion.task import FusionTask
from autotune.errors import Unsupported
from autotune.ir.graph import Graph
from autotune.ir.inputs import make_inputs
from autotune.ir.nodes import STRICT
from autotune.ir.oracle import interpret
from tests.support.read_back import cut, graph_of, mixer_norm, plain_norm, stream_norm, workload_of
from tests.support.zoo import BF16, Case, T, workloads_of
from tests.unit.compiler.planner.test_plan import run_groups


def scaled_after(x: Tensor, residual: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The transposed read follows the reduction: there is nothing to store first."""
    normed = torch.nn.functional.layer_norm(residual, (residual.shape[-1],), w, b)
    return normed + x.transpose(1, 2), normed


def with_statistics(x: Tensor, residual: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """As in training, where the backward pass reads the statistics in fp32."""
    total, normed = mixer_norm(x, residual, w, b)
    return total, normed, total.float().mean(-1)


def proposed(graph: Graph, side: str = "cuda") -> list[str]:
    return [write_text(s) for s in shapes(graph, side, "measured", Figures(), 6)]


def test_a_norm_of_a_sum_with_a_transposed_tensor_reads_the_stored_sum() -> None:
    graph = graph_of(mixer_norm)
    first, *others = proposed(graph)
    assert first == cut(graph)
    assert make_plan(graph).text in others
    tiles, rows = make_plan(graph, "cuda", first).groups
    assert [scheme_of(g.graph).name for g in (tiles, rows)] == ["transpose", "rows"]
    assert tiles.outputs == (("output", 0),)
    assert ("output", 0) in rows.inputs
    assert tiles.graph.bytes_moved + rows.graph.bytes_moved < 5.1 * 512 * 196 * 768 * 2


def test_a_transposed_sum_is_read_back_from_a_copy_of_its_type() -> None:
    graph = graph_of(stream_norm)
    first, *others = proposed(graph)
    assert first == cut(graph)
    assert make_plan(graph).text in others
    plan = make_plan(graph, "cuda", first)
    tiles, rows = plan.groups
    assert [scheme_of(g.graph).name for g in (tiles, rows)] == ["transpose", "rows"]
    assert plan.scratch == (("bfloat16", (0, 1, 2)),)
    assert set(tiles.outputs) == {("output", 0), ("scratch", 0)}
    assert ("scratch", 0) in rows.inputs
    assert tiles.graph.bytes_moved + rows.graph.bytes_moved < 6.1 * 512 * 196 * 768 * 2


@pytest.mark.parametrize(
    "graph",
    [
        pytest.param(lambda: graph_of(plain_norm, transposed=False), id="nothing is transposed"),
        pytest.param(lambda: graph_of(scaled_after), id="nothing is reduced of it"),
        pytest.param(lambda: graph_of(mixer_norm, batch=2), id="a launch takes longer"),
        pytest.param(lambda: graph_of(with_statistics), id="a result has more digits"),
    ],
)
def test_elsewhere_nothing_is_read_back(graph) -> None:
    assert not any("b" in text for text in proposed(graph()))


def test_cpus_are_proposed_none() -> None:
    assert not any("b" in text for text in proposed(graph_of(mixer_norm), "cpu"))


@pytest.mark.parametrize("fn", [mixer_norm, stream_norm])
@pytest.mark.parametrize("target", ["cuda", "cpu"])
def test_its_groups_compute_the_region(fn, target: str) -> None:
    graph = graph_of(fn, 2, 24, 64)
    plan = make_plan(graph, target, cut(graph))
    assert len(plan.scratch) == (fn is stream_norm)
    inputs = make_inputs(graph, seed=4)
    for got, want in zip(run_groups(graph, plan, inputs), interpret(graph, inputs), strict=True):
        torch.testing.assert_close(got.to(want.dtype), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fn", [mixer_norm, stream_norm])
def test_who_reads_back_is_launched_after(fn) -> None:
    graph = graph_of(fn, 2, 24, 64)
    shape = read_text(cut(graph))
    assert pack(build_plan(graph, shape)) == shape
    with pytest.raises(Unsupported, match="reads what is made after it"):
        build_plan(graph, shape[::-1])
    with pytest.raises(Unsupported, match="reads what is made after it"):
        build_plan(graph, ((shape[0][0], shape[1][0]),))


def test_the_stored_type_is_read() -> None:
    graph = graph_of(mixer_norm, 2, 24, 64)
    _, rows = make_plan(graph, "cuda", cut(graph)).groups
    assert rows.graph.inputs[rows.inputs.index(("output", 0))] == "bfloat16"


def test_strict_precision_reads_back_only_exact_outputs() -> None:
    rounded, exact = (
        replace(graph_of(mixer_norm, 2, 24, 64, dtype), precision=STRICT) for dtype in (BF16, torch.float32)
    )
    with pytest.raises(Unsupported, match="b0 is not an output to be read back"):
        build_plan(rounded, read_text(cut(rounded)))
    assert not any("b" in text for text in proposed(replace(graph_of(mixer_norm), precision=STRICT)))
    build_plan(exact, read_text(cut(exact)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("b9 / {rest}", "the region has no b9"),
        ("b0 / o0,{rest}", "a root is in two groups"),
        ("b0,v{sum} / {rest}", "a value is kept in two places"),
        ("b0 / b0,{rest}", "a root is in two groups"),
        ("{rest}", "no group has o0"),
    ],
)
def test_plans_that_make_no_sense_are_refused(text: str, said: str) -> None:
    graph = graph_of(mixer_norm, 2, 24, 64)
    rest = names(r for r in all_roots(graph) if r != Root("o", 0))
    with pytest.raises(Unsupported, match=said):
        build_plan(graph, read_text(text.format(rest=rest, sum=graph.outputs[0].value)))


def reduced(x: Tensor) -> Tensor:
    return x.sum(-1)


def test_a_reduction_is_kept_otherwise() -> None:
    (work,) = workloads_of(Case("reduced", reduced, (T(64, 128),)))
    graph = Graph.from_json(work.spec)
    text = names(all_roots(graph)).replace("o", "b")
    with pytest.raises(Unsupported, match="is not an output to be read back"):
        build_plan(graph, read_text(text))


@pytest.mark.parametrize("fn", [mixer_norm, stream_norm])
def test_kernels_of_one_batch_size_are_those_of_another(fn) -> None:
    """Deployment runs what was tuned at another number of rows: same text, launch data and tensors."""
    tuned, other = (FusionTask(workload_of(fn, batch), "cuda:0", "sm_90", 132) for batch in (64, 48))
    assert tuned.workload.family == other.workload.family
    plan = tuned.plan_of({"plan": cut(tuned.graph)})
    config = tuned.joined(plan, [on.default(g.graph) for on, g in tuned.sides(plan)])

    def drafts(task: FusionTask) -> list[Draft]:
        made = task.plan_of(config)
        return draft(task.graph, made, group_configs(made, config), 132)[0]

    for one, two in zip(drafts(tuned), drafts(other), strict=True):
        assert one.source.launch["dynamic"]
        assert (one.source.text, one.source.launch, one.refs) == (two.source.text, two.source.launch, two.refs)
