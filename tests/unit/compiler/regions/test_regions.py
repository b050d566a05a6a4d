"""Ends of regions: opaque calls, cycles, operators without a rule; and a region's description."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from autotune.compiler.capture.recording import capture
from autotune.compiler.lower.nodes import op_name
from autotune.compiler.regions import aten, find
from autotune.compiler.regions.find import Region, find_regions
from autotune.compiler.regions.grouping import Flow, merge_groups
from autotune.compiler.regions.symbols import traced
from autotune.domains.fusion.builtin import BertLayer
from autotune.errors import Repeated
from tests.support.capture_helpers import check, regions_of
from tests.support.group_order import acyclic, can_be_ordered
from tests.unit.compiler.lower.test_translate import t


def bert(train: bool, dtype: torch.dtype = torch.float32) -> tuple[BertLayer, Tensor, Tensor]:
    layer = BertLayer(48, 4).to(dtype).train(train)
    mask = torch.ones(2, 10, dtype=torch.int64)
    mask[1, 6:] = 0
    return layer, t(2, 10, 48, dtype=dtype), mask


def assert_no_cycle(module: fx.GraphModule, regions: list[Region]) -> None:
    owner: dict[fx.Node, object] = {n: r for r in regions for n in r.nodes}
    before: dict[object, set[object]] = {}
    for node in module.graph.nodes:
        me = owner.get(node, node)
        # A region reads through the views between its nodes: they are copied into it.
        reads = me.inputs if isinstance(me, Region) else node.all_input_nodes
        before.setdefault(me, set()).update(owner.get(i, i) for i in reads)
    for me, them in before.items():
        them.discard(me)
    assert can_be_ordered(before), "contracting the regions makes a cycle"


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bert_layer(train: bool, dtype: torch.dtype) -> None:
    layer, x, mask = bert(train, dtype)
    captured = capture(layer, (x, mask), grad=train)
    assert [g.kind for g in captured] == (["forward", "backward"] if train else ["inference"])
    opaque = {"addmm", "mm", "native_dropout", "t"}
    for g in captured:
        regions = find_regions(g.module)
        assert_no_cycle(g.module, regions)
        assert all(r.workload is not None for r in regions), [r.reason for r in regions]
        covered = {n for r in regions for n in r.nodes}
        assert not {op_name(n) for n in covered} & opaque
        left = {op_name(n) for n in g.module.graph.nodes if n.op == "call_function"} - {op_name(n) for n in covered}
        assert not left & {
            "add",
            "native_layer_norm",
            "gelu",
            "mul",
            "gelu_backward",
            "native_layer_norm_backward",
            "sum",
        }
        for r in regions:
            check(r)


def test_bert_inference_regions_are_the_expected_ones() -> None:
    layer, x, mask = bert(train=False)
    labels = [r.workload.label for r in regions_of(layer, x, mask, grad=False) if r.workload is not None]
    assert labels == ["rsub f32 20", "layer_norm f32 20x48", "gelu f32 3840", "layer_norm f32 20x48"]


def test_residual_around_a_matrix_product_makes_two_regions() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        h = torch.tanh(x)
        return h * (h @ w)

    regions = regions_of(f, t(4, 4), t(4, 4))
    assert [[op_name(n) for n in r.nodes] for r in regions] == [["tanh"], ["mul"]]


def test_work_parallel_to_a_matrix_product_joins_its_epilogue() -> None:
    """tanh could run before the product or after it; only after it, it is one region with the multiplication."""

    def f(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x) * (y @ w)

    (region,) = regions_of(f, t(4, 4), t(4, 4), t(4, 4))
    assert [op_name(n) for n in region.nodes] == ["tanh", "mul"]


def test_operators_without_a_rule_cost_only_themselves() -> None:
    def f(x: Tensor) -> Tensor:
        y = torch.relu(x) * 2
        return torch.softmax(torch.cumsum(y, 1) + y, 1)

    regions = regions_of(f, t(4, 6))
    assert [[op_name(n) for n in r.nodes] for r in regions] == [
        ["relu", "mul"],
        ["add", "amax", "sub", "exp", "sum", "div"],
    ]
    for r in regions:
        check(r)


def test_forms_without_a_rule_cost_only_themselves() -> None:
    """A view that is not aligned, and a result that no rule gives: found while translating, then left out."""

    def f(x: Tensor) -> Tensor:
        y = torch.relu(x) * 2
        z = y.view(4, 9).sigmoid() + 1  # [6, 6] taken apart in no aligned way
        return z * 3

    regions = regions_of(f, t(6, 6))
    assert [[op_name(n) for n in r.nodes] for r in regions] == [["relu", "mul"], ["sigmoid", "add", "mul"]]
    for r in regions:
        check(r)

    def g(x: Tensor) -> Tensor:
        values, where = (x * 2).max(1)
        return values + where.float()

    regions = regions_of(g, t(4, 6))
    assert [[op_name(n) for n in r.nodes] for r in regions] == [["mul"], ["convert_element_type", "add"]]
    for r in regions:
        check(r)


def test_two_gathers_in_a_row_are_one_load() -> None:
    def f(x: Tensor, i: Tensor, j: Tensor) -> Tensor:
        y = torch.tanh(x) * 2
        rows = torch.index_select(y, 0, i) + 1
        return torch.relu(torch.index_select(rows, 1, j)) * 3

    (region,) = regions_of(f, t(8, 6), torch.tensor([3, 1, 7, 3]), torch.tensor([0, 5, 5]))
    assert [op_name(n) for n in region.nodes] == ["tanh", "mul", "index", "add", "index", "relu", "mul"]
    check(region)


def test_two_gathers_through_a_reshape() -> None:
    """The elements of two indices are concatenated, and not split."""

    def f(x: Tensor, i: Tensor, j: Tensor) -> Tensor:  # an input of the region, seen through a view
        rows = torch.index_select(x.view(8, 6), 0, i) + 1
        return torch.index_select(rows.t(), 0, j) * 3

    regions = regions_of(f, t(48), torch.tensor([3, 1, 7, 3]), torch.tensor([0, 5, 5]))
    for r in regions:
        check(r)
    assert [[op_name(n) for n in r.nodes] for r in regions] == [["index", "add", "index", "mul"]]

    def g(x: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return F.group_norm(x, 4)[:, :, i, j] * 2

    regions = regions_of(g, t(2, 8, 4, 6), torch.tensor([3, 1, 0]), torch.tensor([0, 5, 5]))
    for r in regions:
        check(r)
    (found,) = [[op_name(n) for n in r.nodes] for r in regions]
    assert "var_mean" in found
    assert "index" in found


def norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def test_a_norm_that_is_read_at_more_indices_is_stored() -> None:
    """Each edge of a graph network reads norms of its nodes. A region of both would compute a norm for each edge."""

    def messages(nodes: Tensor, edges: Tensor, ends: Tensor) -> Tensor:
        h = norm(nodes)
        return torch.cat([h[ends[0]], h[ends[1]], edges], dim=-1)

    nodes, edges, ends = t(3000, 128), t(30000, 128), torch.randint(0, 3000, (2, 30000))
    stored, read = regions_of(messages, nodes, edges, ends, grad=False)
    assert [op_name(n) for n in read.nodes] == ["index", "index", "cat"]
    assert set(read.inputs) & set(stored.outputs)
    for r in (stored, read):
        check(r)
    for few in (ends[:, :1500], ends[:, :5000]):  # no more rows than the table has, or few more
        (together,) = regions_of(messages, nodes, edges[: few.shape[1]], few, grad=False)
        check(together)


def test_norms_that_are_read_by_several_are_counted_together() -> None:
    def rounds(nodes: Tensor, ends: Tensor) -> Tensor:
        h = norm(nodes)
        return torch.stack([h[at] for at in ends]).sum(0)

    stored, read = regions_of(rounds, t(3000, 128), torch.randint(0, 3000, (8, 3000)), grad=False)
    assert op_name(stored.nodes[-1]) != "index"
    assert [op_name(n) for n in read.nodes].count("index") == 8


def test_a_sum_at_indices_that_is_read_in_two_ways_is_stored() -> None:
    def rotated(rows: Tensor, at: Tensor, w: Tensor) -> Tensor:
        found = torch.zeros(3000, 512).index_add(0, at, rows)
        return found * w + found.flip(-1)

    given = (t(9000, 512), torch.randint(0, 3000, (9000,)), t(512))
    (graph,) = capture(rotated, given, grad=False)
    regions = find.regions_from(find.GraphFacts(graph.module.graph, "cuda"))
    assert [{op_name(n) for n in r.nodes} & {"index_put", "index_add", "rev", "flip"} for r in regions] == [
        {"index_put"},
        {"rev"},
    ]


def test_stored_regions_may_repeat_sums() -> None:
    """An earlier version made such regions, and other sizes of a dynamic shape may."""

    def messages(nodes: Tensor, ends: Tensor) -> Tensor:
        return norm(nodes)[ends]

    nodes = t(3000, 128)
    (region,) = regions_of(messages, nodes, torch.randint(0, 3000, (1000,)), grad=False)
    program = aten.to_json(region.submodule)
    for tensor in program["inputs"]:
        tensor["shape"] = [30000 if n == 1000 else n for n in tensor["shape"]]
    module = traced(program, "cpu")
    with pytest.raises(Repeated):
        find.workload_of(module)
    workload, _ = find.workload_of(module, once=False)
    assert "30000" in workload.label


def test_sums_that_do_not_vary_with_an_index_are_in_the_region_that_reads_there() -> None:
    def picked(logits: Tensor, labels: Tensor) -> Tensor:  # a row's sum serves all of its labels
        return torch.log_softmax(logits, -1).gather(1, labels)

    def enlarged(x: Tensor) -> Tensor:  # a channel's sums serve all of its pixels
        centred = x - x.mean((0, 2, 3), keepdim=True)
        return F.interpolate(centred, scale_factor=2, mode="nearest")

    for f, given in ((picked, (t(2048, 32), torch.randint(0, 32, (2048, 64)))), (enlarged, (t(4, 8, 64, 64),))):
        (region,) = regions_of(f, *given, grad=False)
        check(region)


def test_a_concatenation_of_many_tensors_stays_with_torch() -> None:
    def f(x: Tensor, n: int) -> Tensor:
        return torch.stack([torch.tanh(r) for r in x.unbind(0)[:n]]) * 2

    (region,) = regions_of(lambda x: f(x, 16), t(20, 6))
    assert "cat" in [op_name(n) for n in region.nodes]
    regions = regions_of(lambda x: f(x, 17), t(20, 6))
    assert "cat" not in [op_name(n) for r in regions for n in r.nodes]
    for r in (region, *regions):
        check(r)


def test_float64_complex_and_empty_tensors_stay_with_torch() -> None:
    assert regions_of(lambda x: x * 2 + 1, t(4).double()) == []
    assert regions_of(lambda x: x * 2 + 1, t(4).to(torch.complex64)) == []
    assert regions_of(lambda x: x * 2 + 1, t(0, 4)) == []
    (region,) = regions_of(lambda x: (x.double() * 2).float() + 1, t(4))
    assert [op_name(n) for n in region.nodes] == ["add"]


def test_views_alone_are_no_region() -> None:
    assert regions_of(lambda x: x.view(2, 8).t()[1:], t(4, 4)) == []
    assert regions_of(lambda x, w: x.view(4, 4).t() @ w, t(16), t(4, 4)) == []


def test_views_at_the_border_are_read_through() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return torch.relu((x @ w).view(2, 2, 8).transpose(0, 1)).reshape(4, 8) @ w.t()

    (region,) = regions_of(f, t(4, 8), t(8, 8))
    assert op_name(region.nodes[0]) == "relu"
    assert [op_name(n) for n in region.inputs] == ["mm"]
    check(region)


def test_steps_of_a_recurrence_are_one_workload() -> None:
    """Each step reads another slice of one projection: where the slice begins is not part of the workload."""

    def f(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
        projected, h = x @ w, x[0]
        for step in range(4):
            a, b = (projected[step] + h @ u).chunk(2, 1)
            h = torch.sigmoid(a) * torch.tanh(b)
        return h

    regions = regions_of(f, t(4, 3, 8), t(8, 16), t(8, 16))
    assert len(regions) == 4
    assert len({r.workload.fingerprint for r in regions if r.workload is not None}) == 1
    for r in regions:
        check(r)


def test_a_window_that_is_not_aligned_or_not_alone_stays_inside() -> None:
    (region,) = regions_of(lambda x: x[:, 1:].exp(), t(4, 7))
    assert region.inputs[0].op == "placeholder"
    (region,) = regions_of(lambda x: x[2:] * x[:2], t(4, 8))
    assert len(region.inputs) == 1
    (region,) = regions_of(lambda x: x[2:].exp(), t(4, 8))
    assert op_name(region.inputs[0]) == "slice"
    check(region)


def test_random_numbers_and_mutation_are_opaque() -> None:
    def f(x: Tensor) -> Tensor:
        x.add_(1)
        return x * torch.rand_like(x)

    regions = regions_of(f, t(4, 4))
    names = [op_name(n) for r in regions for n in r.nodes]
    assert "rand_like" not in names
    assert "copy_" not in names
    assert {"add", "mul"} <= set(names)


def test_joined_regions_keep_the_order_of_random_draws() -> None:
    """As one region, ``relu`` and ``add`` would have the second draw run before the first."""

    def f(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a = torch.relu(x @ w)
        first = torch.poisson(a)
        return a, first, torch.poisson(y) + 1

    regions = regions_of(f, t(8, 8), t(8, 8).abs(), t(8, 8))
    assert [[op_name(n) for n in r.nodes] for r in regions] == [["relu"], ["add"]]


def test_a_region_that_reads_nothing_is_not_lowered() -> None:
    regions = regions_of(lambda x: torch.ones_like(x).sum(-1), t(4, 4))
    assert [r.workload for r in regions] == [None]
    assert "reads no tensors" in regions[0].reason


def test_submodule_is_the_region() -> None:
    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = F.layer_norm(x, (8,), w)
        return y, y @ y.t()

    x, w = t(4, 8), t(8)
    (region,) = regions_of(f, x, w, grad=False)
    values = {n.name: v for n, v in zip(region.inputs, _matching(region, x, w), strict=True)}
    (got,) = region.submodule(*values.values())
    torch.testing.assert_close(got, f(x, w)[0])


def _matching(region: Region, *tensors: Tensor) -> list[Tensor]:
    return [next(t for t in tensors if t.shape == n.meta["val"].shape) for n in region.inputs]


def test_the_same_graph_gives_the_same_regions() -> None:
    layer, x, mask = bert(train=True)
    module = capture(layer, (x, mask), grad=True)[1].module
    one, other = find_regions(module), find_regions(module)
    assert [(r.nodes, r.inputs, r.outputs, r.binding) for r in one] == [
        (r.nodes, r.inputs, r.outputs, r.binding) for r in other
    ]


def test_grouping_never_makes_a_cycle_and_is_maximal() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        n = rng.randint(2, 24)
        order = list(range(n))
        before = {i: sorted(rng.sample(range(i), min(i, rng.randint(0, 3)))) for i in order}
        members = {i for i in order if rng.random() < 0.6}
        groups = merge_groups(Flow(order, before, members))
        assert sorted(i for g in groups for i in g) == sorted(members)
        assert acyclic(order, before, groups), seed
        for a in range(len(groups)):
            for b in range(a + 1, len(groups)):
                touch = any(p in groups[a] for i in groups[b] for p in before[i]) or any(
                    p in groups[b] for i in groups[a] for p in before[i]
                )
                merged = [g for k, g in enumerate(groups) if k not in (a, b)] + [groups[a] + groups[b]]
                assert not touch or not acyclic(order, before, merged), (seed, groups[a], groups[b])


def test_equal_layers_are_translated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linears = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for linear in self.linears:
                x = torch.softmax(linear(x), -1).sin()
            return x.t().contiguous().t().softmax(0)  # the same operators over another layout

    translated: list[int] = []
    translate = find.translate
    monkeypatch.setattr(find, "translate", lambda *given, **how: translated.append(1) or translate(*given, **how))
    found = regions_of(Layers(), torch.randn(8, 16), grad=False)
    workloads = [r.workload for r in found]
    assert None not in workloads
    assert len(translated) == len({w.fingerprint for w in workloads if w})
    assert len(workloads) > len(translated)
    monkeypatch.setattr(find.Finder, "_workload", lambda self, inputs, module: find.workload_of(module))
    plain = regions_of(Layers(), torch.randn(8, 16), grad=False)
    assert [(r.workload, r.binding) for r in plain] == [(r.workload, r.binding) for r in found]
    assert [r.workload.source for r in plain if r.workload] == [r.workload.source for r in found if r.workload]


def test_regions_exclude_nodes_on_a_stream() -> None:
    """Its kernels would run on the current stream, and later work on the other stream would not wait for them."""

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.Stream("cpu"):
            beside = (x.cos() + 1).softmax(-1)
        return beside, (x.sin() + 1).softmax(-1)

    (graph,) = capture(f, (t(8, 64),), grad=False)
    (region,) = find_regions(graph.module)
    names = [op_name(n) for n in region.nodes]
    assert "sin" in names
    assert "cos" not in names
    assert [n.meta.get("custom") for n in region.nodes] == [None] * len(names)
