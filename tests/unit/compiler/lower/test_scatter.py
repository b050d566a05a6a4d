"""The gradient of an embedding in regions: sums at indices as a value of the graph, its oracle, and its region."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from autotune.compiler.lower.nodes import op_name
from autotune.compiler.lower.op_names import SCATTERS
from autotune.compiler.planner.plan import make_plan
from autotune.compiler.regions.find import Region, find_regions
from autotune.compiler.schedules.cuda import legal, scheme_of
from autotune.errors import Unsupported
from autotune.ir.canonical import canonicalize
from autotune.ir.graph import Graph, at_axis
from autotune.ir.inputs import index_bounds, make_inputs
from autotune.ir.oracle import interpret, slack
from autotune.measure.verify import compare
from tests.support.capture_helpers import check
from tests.unit.compiler.lower.test_products import names as operators
from tests.unit.compiler.lower.test_products import regions_of

BACKWARD = "embedding_dense_backward"
backward = torch.ops.aten.embedding_dense_backward
IS_EARLIER = torch.__version__ < "2.13"
needs_one_operator = pytest.mark.skipif(IS_EARLIER, reason="this torch has no operator for an embedding's gradient")


def names(region: Region) -> set[str]:
    """A region's operators; the one that an embedding's gradient is decomposed to, and the mask that it comes with,
    by the gradient's name."""
    found = operators(region)
    if "_unsafe_masked_index_put_accumulate" in found:
        found = found - {"_unsafe_masked_index_put_accumulate", "ge", "lt", "ne", "bitwise_and"} | {BACKWARD}
    return found


def graph_of(region: Region) -> Graph:
    assert region.workload is not None, region.reason
    return Graph.from_json(region.workload.spec)


def sums(graph: Graph) -> list[int]:
    return [i for i in graph.live if graph.values[i].op == "sum_at"]


def evaluated(fn: Callable[..., Tensor], *args: Tensor) -> tuple[Tensor, Graph]:
    """The oracle's result for a function that is one region, at its arguments; and its graph."""
    region, *others = regions_of(fn, *args)
    if others and IS_EARLIER:
        pytest.skip("this torch converts places in a region of their own")
    assert not others
    graph = graph_of(region)
    where = {n.name: k for k, n in enumerate(n for n in region.inputs[0].graph.nodes if n.op == "placeholder")}
    given = [args[where[region.inputs[k].name]] for k in region.binding.inputs]
    flat = [t.as_strided([graph.input_numel(k)], [1]) for k, t in enumerate(given)]
    (out,) = interpret(graph, flat)
    return out, graph


@pytest.mark.parametrize(
    ("dtype", "itype"),
    [(torch.float32, torch.int64), (torch.bfloat16, torch.int32)],
)
@pytest.mark.parametrize(
    ("places", "ids", "columns", "padding"),
    [
        (13, (40,), 8, -1),
        (13, (5, 7), 8, 3),
        (13, (2, 3, 5), 9, 0),
        (50, (4,), 6, -1),  # most places without terms
        (2, (40,), 8, 1),
        (13, (40,), 1, -1),
        (1, (40,), 8, -1),  # one place: a plain sum
        (13, (1,), 8, -1),  # one term: a select
        (13, (1,), 8, 12),
        (1, (1,), 8, -1),
    ],
)
def test_the_oracle_adds_the_same_terms_as_torch(
    places: int, ids: tuple[int, ...], columns: int, padding: int, itype: torch.dtype, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    grad, where = torch.randn(*ids, columns, dtype=dtype), torch.randint(0, places, ids, dtype=itype)
    out, graph = evaluated(lambda g, i: backward(g, i, places, padding, False), grad, where)
    want = backward(grad.double(), where, places, padding, False)
    assert torch.allclose(out.reshape(want.shape), want, rtol=1e-12, atol=1e-12)
    assert bool(sums(graph)) == (places > 1 and grad[..., 0].numel() > 1)


@pytest.mark.parametrize("strides", [(24, 1), (1, 40), (0, 1), (17, 2)])
def test_rows_of_any_strides(strides: tuple[int, int]) -> None:
    grad = torch.randn(2000).as_strided((40, 8), strides)
    where = torch.randint(0, 13, (40,))
    out, _ = evaluated(lambda g, i: backward(g, i, 13, -1, False), grad, where)
    assert torch.allclose(out, backward(grad.double(), where, 13, -1, False))


def test_places_outside_are_left_out() -> None:
    out, graph = evaluated(
        lambda g, i: backward(g, i, 6, -1, False) * 2.0, torch.ones(5, 3), torch.tensor([0, 5, 5, 2, 2])
    )
    slot = next(k for k, d in enumerate(graph.inputs) if d == "int64")
    inputs = [torch.ones(15), torch.tensor([-1, 6, 1 << 40, 2, 2])]
    (got,) = interpret(graph, inputs if slot else inputs[::-1])
    assert got.sum(1).tolist() == [0, 0, 12, 0, 0, 0]
    assert out.sum(1).tolist() == [6, 0, 12, 0, 0, 12]


def test_the_oracle_takes_a_large_table_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    from autotune.ir import oracle as module

    (region,) = regions_of(lambda g, i, t: backward(g, i, 64, 3, False) + t, *arguments(64, 8, 100))
    graph = graph_of(region)
    inputs = make_inputs(graph, seed=2)
    (want,) = interpret(graph, inputs)
    monkeypatch.setattr(module, "_CHUNK", 100)
    (got,) = interpret(graph, inputs)
    assert torch.equal(got, want)


def arguments(places: int, columns: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(tokens, columns), torch.randint(0, places, (tokens,)), torch.randn(places, columns)


def test_the_graph_and_its_text() -> None:
    (region,) = regions_of(lambda g, i, t: backward(g, i, 64, 3, False) + t, *arguments(64, 8, 100))
    graph = graph_of(region)
    (total,) = sums(graph)
    v = graph.values[total]
    assert graph.extents[at_axis(graph, v)] == 64
    assert graph.size(v.over) == 100
    assert sorted(graph.extents) == [8, 64, 100]  # places and columns are not walked as one, though they could be
    assert Graph.from_json(graph.to_json()) == graph
    assert canonicalize(graph)[0] == graph
    assert graph.bytes_moved == 4 * (100 * 8 + 2 * 64 * 8) + 8 * 100
    (slot,) = index_bounds(graph)
    assert index_bounds(graph)[slot] == 64
    for special in (False, True):
        drawn = make_inputs(graph, seed=0, special=special)[slot]
        assert int(drawn.min()) >= 0
        assert int(drawn.max()) < 64
        assert int(drawn.bincount().max() > 30) == special  # many terms of one place are verified too
        assert int(drawn.bincount().max()) > 8  # and some are timed: drawn evenly, 5 are at one place
    inputs = make_inputs(graph, seed=0)
    (off,) = slack(graph, inputs, interpret(graph, inputs), torch.device("cpu"))
    assert off is not None
    assert 0 < float(off.max()) < 1e-3


def test_terms_of_one_place_that_cancel_may_be_added_in_any_order() -> None:
    """T5's gradient of its vocabulary was left out on an H200: a place of 966 terms was 1.8 times its tolerance off."""
    rng = torch.Generator().manual_seed(0)
    grad = torch.randn(4096, 8, generator=rng)
    grad[:3000] -= grad[:3000].mean(0)
    where = torch.cat([torch.full((3000,), 5), torch.randint(6, 8192, (1096,), generator=rng)])
    (region, *_) = regions_of(lambda g, i: backward(g, i, 8192, -1, False) * 1.0, grad, where)
    graph = graph_of(region)
    given = [grad.reshape(-1) if d == "float32" else where for d in graph.inputs]
    (want,) = interpret(graph, given)
    (more,) = slack(graph, given, [want], torch.device("cpu"))
    one_by_one = want.clone()
    one_by_one[5] = torch.from_numpy(np.cumsum(grad[:3000].numpy(), 0, dtype=np.float32)[-1])
    assert not compare(one_by_one.float(), want, "float32", 4096).ok
    assert compare(one_by_one.float(), want, "float32", 4096, slack=more).ok
    lacks_a_term = one_by_one.clone()
    lacks_a_term[5] -= grad[7]
    assert not compare(lacks_a_term.float(), want, "float32", 4096, slack=more).ok


@pytest.mark.parametrize("wrong", [{"args": [0]}, {"over": []}, {"axes": [0, 1, 2]}, {"axes": [1]}, {"dtype": "int64"}])
def test_a_malformed_sum_is_refused(wrong: dict[str, Any]) -> None:
    (region,) = regions_of(lambda g, i: backward(g, i, 64, -1, False), *arguments(64, 8, 100)[:2])
    spec = graph_of(region).to_json()
    (value,) = [v for v in spec["values"] if v["op"] == "sum_at"]
    value.update(wrong)
    with pytest.raises((ValueError, IndexError)):
        Graph.from_json(spec)


@needs_one_operator
def test_how_a_program_is_cut() -> None:
    grad, ids, tied = arguments(64, 8, 100)
    for fn in (
        lambda g, i, t: backward(g, i, 64, -1, False)[:32] + t[:32],  # a part of it
        lambda g, i, t: backward(g, i, 64, -1, False).view(8, 8, 8) + t.view(8, 8, 8).transpose(0, 1),
    ):
        found = regions_of(fn, grad, ids, tied)
        assert [names(r) for r in found if BACKWARD in names(r)] == [{BACKWARD}]
        assert any("add" in names(r) for r in found)
    for by_frequency in (False, True):
        fn = lambda g, i, t, scaled=by_frequency: backward(g, i, 64, -1, scaled) + t  # noqa: E731
        *_, region = regions_of(fn, grad, ids, tied)
        assert names(region) == {BACKWARD, "add", *["div"] * by_frequency}
        check(region)
    found = regions_of(lambda g, i, t: backward(g, i, 64, -1, False) + t, grad, ids, tied, side="cpu")
    assert not any(operators(r) & SCATTERS.keys() for r in found)
    assert any("add" in names(r) for r in found)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, i, y: x.index_add(0, i, y),
        lambda x, i, y: x.index_add(0, i.int(), y, alpha=-0.5).relu(),
        lambda x, i, y: x.new_zeros(64, 8).index_put([i - 30], y, True) + x,  # counted from the end
        lambda x, i, y: torch.ops.aten._unsafe_index_put(x, [i.view(4, 25)], y[0], True),
    ],
)
def test_additions_at_an_index(fn: Callable[..., Tensor]) -> None:
    rows, ids, x = arguments(64, 8, 100)
    (region,) = regions_of(fn, x, ids, rows)
    assert names(region) & SCATTERS.keys()
    graph = check(region)
    assert sums(graph)
    assert legal(graph, "cuda")
    (region,) = regions_of(lambda w, i: w[i].exp().sum(), x.requires_grad_(), ids, grad=True)[-1:]
    assert "index_put" in names(region) or BACKWARD in names(region)
    for kept in (lambda x, i, y: x.index_add(1, i[:8] % 8, x), lambda x, i, y: x.index_put([i], y) * 2):
        assert not any(names(r) & SCATTERS.keys() for r in regions_of(kept, x.detach(), ids, rows))
    assert not any(names(r) & SCATTERS.keys() for r in regions_of(fn, x.detach(), ids, rows, side="cpu"))


def test_bytes_that_index_are_a_mask() -> None:
    def put(x: Tensor, m: Tensor, y: Tensor) -> Tensor:
        return torch.ops.aten.index_put(x, [m], y, True) * 2

    x, y = torch.randn(40, 9), torch.randn(9)
    for dtype in (torch.uint8, torch.bool):
        found = regions_of(put, x, torch.randint(0, 2, (40,)).to(dtype), y)
        assert not any(names(r) & SCATTERS.keys() for r in found)


@pytest.mark.parametrize(
    "fn",
    [
        lambda g, i, t: t[0] + backward(torch.ones_like(g), i, 8, -1, False) * 2,
        lambda g, i, t: t + backward(g, torch.zeros_like(i), 8, -1, False),
        lambda g, i, t: t + backward(g, i[:1].expand(40), 8, -1, False),
        lambda g, i, t: t[0].index_add(0, i, torch.ones_like(i, dtype=torch.float32)).exp(),  # how often each occurs
    ],
)
def test_scatter_without_any_kernel_is_left_out_of_regions(fn: Callable[..., Tensor]) -> None:
    found = regions_of(fn, torch.randn(40, 8), torch.randint(0, 8, (40,)), torch.randn(8, 8))
    assert any(r.workload for r in found)
    assert not any(names(r) & SCATTERS.keys() for r in found)
    for region in found:
        if region.workload:
            check(region)
            make_plan(graph_of(region))


@pytest.mark.parametrize(("tokens", "fits"), [(10_000_000, True), (1 << 30, True), (1 << 31, False)])
def test_a_block_of_many_terms_owns_few_places(tokens: int, fits: bool) -> None:
    """A term's number and an index share a word there."""
    with FakeTensorMode():
        given = torch.empty(100_000), torch.empty(tokens, dtype=torch.int64), torch.empty(tokens)
        gm = make_fx(lambda x, i, y: x.index_add(0, i, y) * 2)(*given)
    (region,) = find_regions(gm, "cuda")
    graph = graph_of(region)
    assert legal(graph, "cuda") == fits
    if fits:
        (group,) = make_plan(graph).groups
        scheme, wide = scheme_of(group.graph), {"owned": 256}
        for config in (scheme.default(group.graph), scheme.normalize(group.graph, wide), *scheme.seeds(group.graph)):
            assert scheme.reject(group.graph, config) is None


@needs_one_operator
def test_rows_are_made_where_they_are_added_if_nothing_else_reads_them() -> None:
    grad, ids, _ = arguments(64, 8, 100)
    (region,) = regions_of(lambda g, i: backward(torch.tanh(g) * 2, i, 64, -1, False), grad, ids)
    assert names(region) == {"tanh", "mul", BACKWARD}
    found = [names(r) for r in regions_of(lambda g, i: backward(torch.softmax(g, -1), i, 64, -1, False), grad, ids)]
    assert len(found) == 2
    assert {BACKWARD} in found

    def twice(g: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.tanh(g)
        return backward(rows, i, 64, -1, False), backward(rows, i, 9, -1, False)

    found = regions_of(twice, grad, ids % 9)
    assert [names(r) for r in found if "tanh" in names(r)] == [{"tanh"}]


def test_plan_cuts_a_scatter_region_that_no_kernel_holds() -> None:
    grad, ids, tied = arguments(64, 8, 100)
    (region,) = regions_of(lambda g, i, t: torch.softmax(backward(g, i, 64, -1, False) + t, -1), grad, ids, tied)
    graph = graph_of(region)
    plan = make_plan(graph)
    held = [g for g in plan.groups if sums(g.graph)]
    assert len(held) == 1
    assert scheme_of(held[0].graph).name == "scatter"
    assert len(plan.groups) > 1
    assert not legal(graph, "cuda")
    assert not legal(held[0].graph, "cpu")
    with pytest.raises(Unsupported):
        make_plan(graph, "cpu")


@needs_one_operator
def test_a_diagonal_of_sums_is_read_from_memory() -> None:
    grad, ids, tied = torch.randn(40, 8), torch.randint(0, 8, (40,)), torch.randn(8, 8)
    found = regions_of(lambda g, i, t: (backward(g, i, 8, -1, False) + t).diagonal() * 2, grad, ids, tied)
    assert [names(r) for r in found] == [{BACKWARD}, {"add", "mul"}]
    for region in found:
        check(region)


def test_sums_that_are_read_in_another_shape_are_stored_first() -> None:
    """As where a loss is computed from some of the rows of a layer that has rows and columns of tokens."""
    rows, ids, x = arguments(64, 8, 100)

    def spread(x: Tensor, i: Tensor, y: Tensor) -> Tensor:
        return torch.softmax(x.new_zeros(64, 8).index_add(0, i, y).view(4, 16, 8).tanh(), 1)

    added, read = regions_of(spread, x, ids, rows)
    assert names(added) == {"index_put"}
    assert "tanh" in names(read)
    for region in (added, read):
        graph = check(region)
        assert bool(sums(graph)) is (region is added)
        assert legal(graph, "cuda")


class Tied(nn.Module):
    """Words, positions and types as BERT has them, a norm, and a decoder tied to the words."""

    def __init__(self, words: int, width: int, padding: int | None) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width, padding_idx=padding)
        self.places, self.kinds = nn.Embedding(24, width), nn.Embedding(2, width)
        self.norm, self.dense = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, ids: Tensor, kinds: Tensor, targets: Tensor) -> Tensor:
        at = torch.arange(ids.shape[1], device=ids.device)
        h = self.norm(self.words(ids) + self.places(at) + self.kinds(kinds))
        logits = F.linear(F.gelu(self.dense(h)), self.words.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@needs_one_operator
def test_gradients_of_three_embeddings_share_a_launch() -> None:
    model = Tied(150, 32, 0)
    ids, kinds = torch.randint(0, 150, (4, 24)), torch.randint(0, 2, (4, 24))
    (region,) = [r for r in regions_of(model, ids, kinds, ids, grad=True) if BACKWARD in names(r)]
    assert names(region) == {BACKWARD}  # of all three, whose rows the region before stores
    assert sum(op_name(n) in SCATTERS for n in region.nodes) == 3
    plan = make_plan(graph_of(region))
    assert [scheme_of(g.graph).name for g in plan.groups] == ["scatter"] * 3
    assert len(plan.launches) == 1  # they are small, and share one
    (words,) = [g for g in plan.groups if 150 in g.graph.extents]
    assert len(words.graph.inputs) == 2  # rows and places; the decoder's gradient is added by the product that makes it
    assert len(words.outputs) == 1


@needs_one_operator
def test_an_embedding_that_is_read_twice_is_written_once() -> None:
    def step(weight: Tensor, one: Tensor, other: Tensor) -> Tensor:
        return (F.embedding(one, weight).tanh().sum() + F.embedding(other, weight).exp().sum()).mul(2)

    weight = torch.randn(50, 16, requires_grad=True)
    ids = torch.randint(0, 50, (40,)), torch.randint(0, 50, (4, 9))
    found = [r for r in regions_of(step, weight, *ids, grad=True) if BACKWARD in names(r)]
    (region,) = found
    (group,) = make_plan(graph_of(region)).groups
    assert len(sums(group.graph)) == 2
    assert [kind for kind, _ in group.outputs] == ["output"]  # no sums in memory between
    check(region)


def test_a_training_step_is_right() -> None:
    torch.manual_seed(0)
    model = Tied(40, 16, 0)
    ids, kinds = torch.randint(0, 40, (3, 24)), torch.randint(0, 2, (3, 24))
    found = regions_of(model, ids, kinds, ids, grad=True)
    assert IS_EARLIER or any(BACKWARD in names(r) for r in found)
    for region in found:
        for special in {False, BACKWARD in names(region)}:
            check(region, special=special)


# scatter_add along a dimension, the gradient of gather ----------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("shared", [False, True])
def test_the_oracle_adds_lines_as_torch(dim: int, shared: bool) -> None:
    """Each line has indices of its own, or several lines share them."""
    terms, base = torch.randn(5, 6, 7), torch.randn(5, 6, 7)
    index = torch.randint(0, 5, (1, 6, 7) if shared and dim else (5, 6, 7))

    def fn(i: Tensor, y: Tensor, x: Tensor) -> Tensor:  # in the order of their first use
        return torch.scatter_add(x, dim, i.expand(y.shape), y * 3)

    out, graph = evaluated(fn, index, terms, base)
    assert len(sums(graph)) == 1
    want = fn(index, terms.double(), base.double())
    torch.testing.assert_close(out.reshape(want.shape).double(), want, atol=1e-5, rtol=1e-5)


def test_the_gradient_of_one_element_a_row_is_pointwise() -> None:
    """As in the losses of reinforcement learning: the gradient of a row is written once, with that of its softmax."""

    def chosen(logits: Tensor, ids: Tensor) -> Tensor:
        return torch.log_softmax(logits, -1).gather(-1, ids[..., None]).squeeze(-1)

    logits, ids = torch.randn(4, 16, 100, requires_grad=True), torch.randint(0, 100, (4, 16))
    *_, region = regions_of(chosen, logits, ids, grad=True)
    assert "scatter_add" in names(region)
    graph = graph_of(region)
    assert not sums(graph)
    assert scheme_of(make_plan(graph, "cuda").groups[0].graph).name == "rows"


def test_a_part_of_a_tensor_stays_outside() -> None:
    """Fewer indices than elements along another dimension than the one that is added along."""
    x, y, index = torch.randn(5, 6), torch.randn(5, 6), torch.randint(0, 5, (3, 4))
    found = regions_of(lambda x, i, y: torch.scatter_add(x, 0, i, y) * 2, x, index, y)
    assert not any("scatter_add" in names(r) for r in found)
    assert not any("scatter_add" in names(r) for r in regions_of(torch.scatter_add, x, 0, index, y, side="cpu"))


def test_rows_of_more_sums_than_shared_memory_holds_stay_outside() -> None:
    """As with the largest words of a vocabulary, in a loss of distillation. Its neighbours stay in regions."""

    def chosen(logits: Tensor, ids: Tensor) -> Tensor:
        return torch.log_softmax(logits, -1).gather(-1, ids)

    for words, inside in ((16384, True), (16385, False)):
        logits, ids = torch.randn(16, words, requires_grad=True), torch.randint(0, words, (16, 8))
        found = regions_of(chosen, logits, ids, grad=True)
        assert any("scatter_add" in names(r) for r in found) == inside
        assert any({"exp", "sum"} <= names(r) for r in found)
        for region in found:
            make_plan(graph_of(region), "cuda")


@pytest.mark.parametrize("shape", [(1, 40), (18, 1), (1, 1)])
def test_equal_terms_at_separate_indices_stay_outside(shape: tuple[int, int]) -> None:
    """As in the gradient of a mean of what ``gather`` read. Their neighbours stay in regions."""

    def fn(x: Tensor, index: Tensor, y: Tensor) -> Tensor:
        terms = x.exp().expand(18, 40)
        return (torch.scatter_add(x.new_zeros(18, 20), -1, index, terms) + torch.softmax(y, -1)).tanh()

    found = regions_of(fn, torch.randn(shape), torch.randint(0, 20, (18, 40)), torch.randn(18, 20))
    assert not any("scatter_add" in names(r) for r in found)
    assert any({"sum", "tanh"} <= names(r) for r in found)
    for region in found:
        make_plan(graph_of(region), "cuda")
