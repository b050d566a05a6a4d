"""Plans: which kernels a region becomes, what travels between them, and that together they compute the region."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from autotune.compiler.planner.groups import Plan, read_text
from autotune.compiler.planner.plan import all_roots, build_plan, greedy, make_plan, sketch
from autotune.compiler.schedules.cuda import legal
from autotune.errors import Unsupported
from autotune.ir.canonical import canonicalize
from autotune.ir.graph import REDUCTIONS, Graph
from autotune.ir.inputs import make_inputs
from autotune.ir.oracle import interpret
from tests.support.cpu_graphs import TORCH, Build, layer_norm
from tests.support.zoo import ZOO, workload, workloads

REGIONS = [(c, k) for c in ZOO for k in range(len(c.groups))]


def graph_of(name: str, k: int = 0) -> Graph:
    return Graph.from_json(workloads(name)[k].spec)


def run_groups(graph: Graph, plan: Plan, inputs: list[Tensor]) -> list[Tensor]:
    """The groups one after the other by the oracle, through buffers laid out as the executor does."""
    made = {
        "input": dict(enumerate(inputs)),
        "output": {k: torch.zeros(graph.output_numel(k), dtype=_wide(o.dtype)) for k, o in enumerate(graph.outputs)},
        "scratch": {k: torch.zeros(n, dtype=_wide(d)) for k, (d, n) in enumerate(plan.scratch_numel(graph))},
    }
    written = {"output": set(), "scratch": set()}
    for group in plan.groups:
        for kind, k in group.inputs:
            assert kind == "input" or k in written[kind], "a group reads what no group before it wrote"
        results = interpret(group.graph, [made[kind][k] for kind, k in group.inputs])
        for (kind, k), o, got in zip(group.outputs, group.graph.outputs, results, strict=True):
            assert k not in written[kind], "written twice"
            written[kind].add(k)
            place = made[kind][k].as_strided([group.graph.extents[a] for a in o.axes], o.strides, o.offset)
            place.copy_(got)
    assert written["output"] == set(range(len(graph.outputs)))
    assert written["scratch"] == set(range(len(plan.scratch)))
    return [
        made["output"][k].as_strided([graph.extents[a] for a in o.axes], o.strides, o.offset)
        for k, o in enumerate(graph.outputs)
    ]


def _wide(storage: str) -> torch.dtype:
    """Floats in float64, so that the plan alone is compared and not where it rounds."""
    return torch.float64 if TORCH[storage].is_floating_point else TORCH[storage]


@pytest.mark.parametrize(("case", "k"), REGIONS, ids=lambda v: str(v))
def test_groups_are_well_formed_and_compute_the_region(case, k: int) -> None:
    graph = graph_of(case.name, k)
    for target in ("cpu", "cuda"):
        plan = make_plan(graph, target)
        assert len(plan.groups) == ((target == "cuda" and case.on_cuda) or case.groups)[k]
        check_form(graph, plan, target)
        for special in (False, True):
            inputs = make_inputs(graph, seed=k + 1, special=special)
            for got, want in zip(run_groups(graph, plan, inputs), interpret(graph, inputs), strict=True):
                torch.testing.assert_close(got.to(want.dtype), want, rtol=1e-12, atol=1e-12, equal_nan=True)


def check_form(graph: Graph, plan: Plan, target: str) -> None:
    """Each group is legal, names what it reads and writes once, and every output is stored by one of them."""
    stored: list[int] = []
    for group in plan.groups:
        group.graph.check()
        assert legal(group.graph, target)
        assert len(group.inputs) == len(set(group.inputs)) == len(group.graph.inputs)
        assert len(group.outputs) == len(set(group.outputs)) == len(group.graph.outputs)
        for (kind, n), dtype in zip(group.inputs, group.graph.inputs, strict=True):
            assert dtype == (graph.inputs[n] if kind == "input" else plan.scratch[n][0])
        for (kind, n), o in zip(group.outputs, group.graph.outputs, strict=True):
            assert o.dtype == (graph.outputs[n].dtype if kind == "output" else plan.scratch[n][0])
            stored += [n] if kind == "output" else []
    assert sorted(stored) == list(range(len(graph.outputs)))


def test_plan_is_a_function_of_the_graph() -> None:
    """Deployment makes it again from the graph alone."""
    for case, k in REGIONS:
        spec = workloads(case.name)[k].spec
        assert make_plan(Graph.from_json(spec)) == make_plan(Graph.from_json(spec))


def test_a_value_between_groups_goes_through_scratch() -> None:
    graph = graph_of("mean_cross_entropy")
    ((whole,),) = read_text(make_plan(graph, "cpu").text)
    rows = [r for r in whole if r.kind == "r" and graph.values[r.number].axes]
    plan = build_plan(graph, ((tuple(rows),), (tuple(r for r in whole if r not in rows),)), "cpu")
    first, second = plan.groups
    assert [kind for kind, _ in first.inputs] == ["input"]
    assert ("scratch", 0) in first.outputs
    assert ("scratch", 0) in second.inputs
    assert all(dtype in ("float32", "int64") for dtype, _ in plan.scratch)
    for (dtype, n), (_, axes) in zip(plan.scratch_numel(graph), plan.scratch, strict=True):
        assert n == graph.size(axes)
        assert dtype in TORCH


def test_row_and_column_statistics_as_a_kernel_each() -> None:
    graph = graph_of("relu_statistics")
    parts: dict[tuple[int, ...], list[str]] = {}
    for root in all_roots(graph):
        value = root.value(graph)
        while graph.values[value].op not in REDUCTIONS:
            value = max(graph.values[value].args)
        parts.setdefault(graph.values[value].over, []).append(root)
    plan = build_plan(graph, tuple((tuple(roots),) for roots in parts.values()), "cpu")
    over = [{graph.values[r.number].over for r in g.roots if r.kind == "r"} for g in plan.groups]
    assert [len(o) for o in over] == [1, 1]
    assert over[0] != over[1]
    assert plan.scratch == ()  # neither needs what the other reduces
    assert sorted(n for g in plan.groups for _, n in g.outputs) == [0, 1, 2, 3]


def test_dependent_reductions_over_the_same_axes_are_one_kernel() -> None:
    for name in ("ln_f32", "softmax_mask", "cross_entropy", "swiglu_rms", "group_norm"):
        plan = make_plan(Graph.from_json(workload(name).spec))
        assert len(plan.groups) == 1
        assert plan.scratch == ()


def normalized_by_columns_then_rows() -> Graph:
    """Column maxima, row sums of the differences, column maxima of their differences: three dependent kernels."""
    b = Build(6, 10)
    x = b.load("float32", 0, 1)
    y = b.sub(x, b.reduce("max", x, 0))
    z = b.sub(y, b.reduce("sum", y, 1))
    b.out(b.sub(z, b.reduce("max", z, 0)), "float32")
    return b.graph()


def test_no_group_waits_for_one_behind_it() -> None:
    """The last column maxima must not join the group of the first ones: the row sums are between them."""
    graph = normalized_by_columns_then_rows()
    plan = make_plan(graph)
    assert len(plan.groups) == 3
    inputs = make_inputs(graph, seed=5)
    (got,) = run_groups(graph, plan, inputs)
    torch.testing.assert_close(got, interpret(graph, inputs)[0])
    assert [d for d, _ in plan.scratch] == ["float32", "float32"]


def test_bool_and_integer_scratch() -> None:
    b = Build(5, 7)
    x = b.load("int64", 0, 1)
    any_ = b.reduce("max", b.gt(x, b.const(90, "int64")), 0)
    b.out(b.where(any_, x, b.reduce("sum", x, 1)), "int64")
    graph = b.graph()
    plan = make_plan(graph)
    assert {d for d, _ in plan.scratch} <= {"bool", "int64"}
    assert plan.scratch
    inputs = make_inputs(graph, seed=2)
    inputs[0][3] = 95
    (got,) = run_groups(graph, plan, inputs)
    assert torch.equal(got, interpret(graph, inputs)[0])


def test_unused_values_need_no_group() -> None:
    b = Build(5, 7)
    x = b.load("float32", 0, 1)
    b.reduce("sum", x, 0)
    b.out(b.reduce("sum", x, 1), "float32")
    (group,) = make_plan(b.graph()).groups
    assert [v.op for v in group.graph.values] == ["load", "sum"]


def test_one_kernel_reads_an_input_once() -> None:
    (group,) = make_plan(layer_norm(4, 8)).groups
    assert sorted(group.inputs) == [("input", 0), ("input", 1), ("input", 2)]


@pytest.mark.parametrize("side", ["cpu", "cuda"])
def test_a_group_that_its_canonical_form_rules_out_is_cut(side: str) -> None:
    """Of Qwen3's norm of its keys, backward: tensors of one size have neighbours along two axes."""
    graph = Graph.from_json(json.loads((Path(__file__).parent / "qk_norm_backward.json").read_text()))
    with pytest.raises(Unsupported, match="no kernel for the group"):
        build_plan(graph, greedy(graph, side), side)
    plan = make_plan(graph, side)
    inputs = make_inputs(graph, seed=3)
    for got, want in zip(run_groups(graph, plan, inputs), interpret(graph, inputs), strict=True):
        torch.testing.assert_close(got.to(want.dtype), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("side", ["cpu", "cuda"])
def test_a_group_is_judged_by_the_graph_that_is_built(side: str) -> None:
    """Of SigLIP's layer norms, backward: a sum that is a result of the region and of its group, and is kept once."""
    graph = Graph.from_json(json.loads((Path(__file__).parent / "layer_norm_backward_of_channels.json").read_text()))
    graphs = [graph, *(graph_of(c.name, k) for c, k in REGIONS)]
    for graph in graphs:
        plan = make_plan(graph, side)
        home = {r.number: k for k, group in enumerate(plan.groups) for r in group.roots if r.kind == "r"}
        for k, group in enumerate(plan.groups):
            assert canonicalize(sketch(graph, group.roots, home, k))[0] == group.graph
