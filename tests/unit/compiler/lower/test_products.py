"""Matrix products that regions hold: which they are, where regions begin, and that they are right."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autotune.compiler.capture.recording import capture
from autotune.compiler.lower.facts import GraphFacts
from autotune.compiler.lower.nodes import op_name
from autotune.compiler.lower.op_names import PRODUCTS
from autotune.compiler.lower.rules.reductions import is_memory_intensive
from autotune.compiler.regions import find as regions
from autotune.compiler.regions.find import Region, find_regions
from autotune.compiler.regions.grouping import Flow, merge_groups
from tests.support.capture_helpers import check
from tests.unit.compiler.lower.test_translate import t
from tests.unit.compiler.regions.test_regions import acyclic, assert_no_cycle


def regions_of(fn: Callable[..., Any], *args: Tensor, side: str = "cuda", grad: bool = False) -> list[Region]:
    found = []
    for g in capture(fn, args, grad=grad):
        here = find_regions(g.module, side)
        assert_no_cycle(g.module, here)
        found += here
    return found


def names(region: Region) -> set[str]:
    return {op_name(n) for n in region.nodes}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (lambda x, w: torch.tanh(x @ w), [(5, 7), (7, 11)]),
        (lambda x, w: torch.tanh(F.linear(x, w)), [(2, 3, 7), (11, 7)]),
        (lambda x, w, b: torch.tanh(F.linear(x, w, b)), [(5, 7), (11, 7), (11,)]),
        (lambda x, w, b: torch.addmm(b, x, w, beta=0.5, alpha=2.0).tanh(), [(5, 7), (7, 11), (5, 11)]),
        (lambda x, w, b: torch.addmm(b, x, w, beta=0).tanh(), [(5, 7), (7, 11), (11,)]),
        (lambda x, w: torch.bmm(x, w).tanh(), [(3, 5, 7), (3, 7, 11)]),
        (lambda x, w, b: torch.baddbmm(b, x, w, beta=2, alpha=0.5).tanh(), [(3, 5, 7), (3, 7, 11), (3, 5, 11)]),
        (lambda x, w: x @ w, [(1, 7), (7, 11)]),
        (lambda x, w: torch.softmax(x @ w, -1), [(5, 7), (7, 11)]),
        (lambda x, w: (x @ w).sum(), [(5, 7), (7, 11)]),
        (lambda x, w: torch.tanh(x.t() @ w), [(1, 1), (1, 33)]),
        (lambda x, w: torch.cat([x @ w, x], 1).exp(), [(5, 7), (7, 7)]),
        (lambda x, w: (x @ w).chunk(2, 1)[1] * (x @ w).chunk(2, 1)[0], [(5, 7), (7, 12)]),
        (lambda x, w: (x @ w).t() + w[0, 0], [(5, 7), (7, 12)]),
        (lambda x: torch.tanh(x @ x), [(6, 6)]),
    ],
)
def test_products_share_a_region_with_later_operators(
    fn: Callable[..., Any], shapes: list[tuple[int, ...]], dtype: torch.dtype
) -> None:
    (region,) = regions_of(fn, *(t(*s, dtype=dtype) for s in shapes))
    assert region.workload is not None, region.reason
    assert names(region) & set(PRODUCTS)
    check(region)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (lambda w, x: torch.mv(w, x).tanh(), [(11, 7), (7,)]),
        (lambda b, w, x: torch.addmv(b, w, x, beta=0.5, alpha=3).tanh(), [(11,), (11, 7), (7,)]),
        (lambda x, w, b: F.linear(x, w, b).tanh(), [(7,), (11, 7), (11,)]),
        (lambda x, w: torch.tanh(x @ w) * x[:, :1], [(5, 1), (1, 11)]),  # nothing to sum over
        (lambda x, w: torch.tanh(x @ w), [(1, 7), (7, 1)]),
    ],
)
def test_products_that_inductor_turns_into_sums_are_in_regions_on_any_device(
    fn: Callable[..., Any], shapes: list[tuple[int, ...]], dtype: torch.dtype
) -> None:
    for side in ("cpu", "cuda"):
        (region,) = regions_of(fn, *(t(*s, dtype=dtype) for s in shapes), side=side)
        assert names(region) >= {"mul", "tanh"}
        assert not names(region) & set(PRODUCTS)
        check(region)


def test_a_region_begins_with_its_products() -> None:
    """A product's operands are stored: of two layers each is a region, and of a recurrence each step."""

    def layers(x: Tensor, u: Tensor, w: Tensor) -> Tensor:
        return torch.relu(torch.relu(x.exp() @ u) @ w)

    before, one, two = regions_of(layers, t(4, 8), t(8, 16), t(16, 8))
    assert (names(before), names(one), names(two)) == ({"exp"}, {"mm", "relu"}, {"mm", "relu"})

    def recurrence(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
        projected, h = (x @ w).exp(), x[0]
        for step in range(4):
            a, b = (projected[step] + h @ u).chunk(2, 1)
            h = torch.sigmoid(a) * torch.tanh(b) + h
        return h

    steps = regions_of(recurrence, t(4, 3, 8), t(8, 16), t(8, 16))
    assert len(steps) == 4  # the first step has the projection of all steps and its own product
    assert all(names(r) & set(PRODUCTS) for r in steps)
    assert len({r.workload.fingerprint for r in steps if r.workload is not None}) == 2
    for r in steps:
        check(r)


def test_cast_that_a_product_reads_stays_before_it() -> None:
    """A cast is free where it is used, but not in a product, which reads each element many times."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x.float() @ w)

    before, product = regions_of(f, t(4, 8, dtype=torch.bfloat16), t(8, 16))
    assert (names(before), names(product)) == ({"convert_element_type"}, {"mm", "tanh"})


def test_product_region_computes_operands_that_are_read_once() -> None:
    """The weights of one vector may be dequantized where they are multiplied, of several vectors not; a bias may."""

    def vector(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        return F.linear(x, w.float() * scale).relu()

    w, scale = torch.randint(-127, 127, (16, 8), dtype=torch.int8), t(16, 1)
    (region,) = regions_of(vector, t(1, 8), w, scale)
    assert names(region) >= {"convert_element_type", "mul", "mm", "relu"}
    check(region)
    before, product = regions_of(vector, t(3, 8), w, scale)
    assert (names(before), names(product)) == ({"convert_element_type", "mul"}, {"mm", "relu"})
    (region,) = regions_of(lambda m, v: torch.mv(m.exp(), v), t(8, 4), t(4))
    check(region)
    (region,) = regions_of(lambda b, x, w: torch.addmm(b.exp(), x, w), t(16), t(3, 8), t(8, 16))
    check(region)


def test_a_product_that_is_read_in_two_ways_is_stored() -> None:
    """A rotation reads each element together with another one; in its kernel the weights would be read twice."""
    few = t(3, 2048), t(2048, 1024), t(2048, 512), t(64), t(64)

    def rotated(x: Tensor, w: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        def turn(y: Tensor) -> Tensor:
            a, b = y.chunk(2, -1)
            return y * cos + torch.cat([-b, a], -1) * sin

        return turn((x @ w).view(-1, 64)), turn((x @ v).view(-1, 64))

    found = [names(r) for r in regions_of(rotated, t(1, 2048), t(2048, 1024), t(2048, 1024), t(64), t(64))]
    assert [n for n in found if "mm" in n] == [{"mm"}] * 2
    assert [n for n in found if "mm" not in n] == [{"mul", "neg", "cat", "add"}]
    assert not any("mm" in names(r) for r in regions_of(rotated, *few))
    (small,) = regions_of(rotated, t(1, 64), t(64, 128), t(64, 64), t(64), t(64))
    assert "mm" in names(small)
    check(small)
    (chunks,) = regions_of(lambda x, w: torch.mul(*(x @ w).chunk(2, -1)), t(1, 2048), t(2048, 2048))
    assert "mm" in names(chunks)
    (joined,) = regions_of(lambda x, w: torch.cat([x @ w, x], -1).exp(), t(1, 2048), t(2048, 2048))
    assert "mm" in names(joined)


def test_a_product_that_is_gathered_is_stored() -> None:
    """Its elements are read at indices of the data, many of them more than once."""

    def scores(h: Tensor, a: Tensor, b: Tensor, source: Tensor, target: Tensor) -> Tensor:
        return F.leaky_relu((h @ a)[source] + (h @ b)[target])

    edges = torch.randint(0, 2000, (400_000,))
    found = [names(r) for r in regions_of(scores, t(2000, 64), t(64, 4), t(64, 4), edges, edges)]
    assert sorted("mm" in n for n in found) == [False, *[True] * (len(found) - 1)]
    assert {"index", "add", "gt", "mul", "where"} in found
    picked = [names(r) for r in regions_of(lambda x, w, i: (x @ w)[i].relu(), t(64, 32), t(32, 32), edges[:64] % 64)]
    assert {"mm", "index", "relu"} in picked  # no more elements than there are
    many = regions_of(lambda x, w, i: (x @ w)[i].relu(), t(1024, 32), t(32, 32), edges % 1024)
    assert [names(r) for r in many] == [{"index", "relu"}]


def test_all_products_that_are_repeated_are_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    whole = regions.translate
    monkeypatch.setattr(regions, "translate", lambda *a, **how: calls.append(a) or whole(*a, **how))

    def turned(x: Tensor, *weights: Tensor) -> Tensor:
        return sum(y + y.roll(1, 0).flip(0) + torch.cat([y[:, 8:], y[:, :8]], 1) for y in (x @ w for w in weights))

    regions_of(turned, t(1, 4096), *[t(4096, 512)] * 12)
    assert len(calls) < 30


def test_forms_that_are_left_to_torch() -> None:
    """A product that is left out may hold NaN; an operand that is given by name."""
    assert not any(
        "addmm" in names(r) for r in regions_of(lambda b, x, w: torch.addmm(b, x, w, alpha=0).relu(), *[t(4, 4)] * 3)
    )
    (graph,) = capture(lambda x, w: torch.tanh(x @ w), (t(4, 8), t(8, 16)), grad=False)
    (product,) = graph.module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    product.args, product.kwargs = product.args[:1], {"mat2": product.args[1]}
    assert [names(r) for r in find_regions(graph.module, "cuda")] == [{"tanh"}]


def test_products_in_training() -> None:
    def cell(x: Tensor, h: Tensor, w: Tensor, u: Tensor) -> Tensor:
        for _ in range(3):
            h = torch.tanh(x @ w + h @ u)
        return h

    x, h, w, u = (t(*s).requires_grad_() for s in ((4, 8), (4, 8), (8, 8), (8, 8)))
    found = regions_of(cell, x, h, w, u, grad=True)
    assert sum(bool(names(r) & set(PRODUCTS)) for r in found) >= 4
    for r in found:
        assert r.workload is not None, r.reason
        check(r)
        for product in (n for n in r.nodes if op_name(n) in PRODUCTS):
            assert not set(GraphFacts(product.graph)[product].factors) & set(r.nodes)


@pytest.mark.parametrize(
    ("a", "b", "inside"),
    [
        (t(256, 36), t(36, 108), True),
        (t(256, 36), t(108, 36).t(), True),
        (t(256, 512), t(512, 512), False),  # 67 million multiplications
        (t(8, 1024), t(1024, 1024), True),  # of few vectors
        (t(8, 2048), t(2048, 2048), False),
        (t(2048, 2048), t(2048, 8), False),
        (t(16, 8, 256), t(16, 256, 256), True),
        (t(1, 4096), t(4096, 4096), True),  # of a vector
        (t(4096, 4096), t(4096, 1), True),
        (t(4096, 4096), t(4096), True),
        (t(64, 36).t(), t(64, 108), False),  # the gradient of a weight
        (t(64, 36).t(), t(108, 64).t(), True),
        (t(1, 256).t(), t(1, 256), True),  # nothing to sum over: strides mean nothing
    ],
)
def test_which_products(a: Tensor, b: Tensor, inside: bool) -> None:
    assert is_memory_intensive(a, b) is inside


def test_other_products_stay_with_the_library() -> None:
    x, w = t(4, 8), t(8, 16)
    assert [names(r) for r in regions_of(lambda x, w: torch.tanh(x @ w), x, w, side="cpu")] == [{"tanh"}]
    whole = [torch.ones(3, 4, dtype=torch.int64), torch.ones(4, 5, dtype=torch.int64)]
    assert [names(r) for r in regions_of(lambda x, w: (x @ w) + 1, *whole)] == [{"add"}]


def test_products_alone_are_a_library_s_but_a_vector_s() -> None:
    assert not regions_of(lambda x, w: x @ w, t(4, 8), t(8, 16))
    assert not regions_of(lambda x, w, v: ((x @ w), (x @ v)), t(4, 8), t(8, 16), t(8, 3))
    assert len(regions_of(lambda x, w: x @ w, t(1, 8), t(8, 16))) == 1
    (both,) = regions_of(lambda x, w, v: (x @ w, x @ v), t(1, 8), t(8, 16), t(8, 3))  # they read the same vector
    check(both)


def test_without_a_side_the_device_of_the_tensors_decides() -> None:
    (graph,) = capture(lambda x, w: torch.tanh(x @ w), (t(4, 8), t(8, 16)), grad=False)
    assert [names(r) for r in find_regions(graph.module)] == [{"tanh"}]


def test_merge_groups_separates_groups_that_share_only_stored_values() -> None:
    for seed in range(80):
        rng = random.Random(seed)
        n = rng.randint(2, 24)
        order = list(range(n))
        before = {i: sorted(rng.sample(range(i), min(i, rng.randint(0, 3)))) for i in order}
        members = {i for i in order if rng.random() < 0.8}
        stored = {i: {p for p in before[i] if rng.random() < 0.7} for i in members if rng.random() < 0.3}
        groups = merge_groups(Flow(order, before, members, stored))
        assert sorted(i for g in groups for i in g) == sorted(members)
        owner = {i: k for k, g in enumerate(groups) for i in g}
        assert all(owner[s] != owner.get(p) for s, reads in stored.items() for p in reads), seed
        assert acyclic(order, before, groups), seed
