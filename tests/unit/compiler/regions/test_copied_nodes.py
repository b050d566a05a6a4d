"""Tensors in memory between regions: the narrower of a tensor and its source."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from autotune.compiler.capture.recording import capture
from autotune.compiler.lower.nodes import op_name
from autotune.compiler.regions.find import Finder, Region, find_regions
from autotune.compiler.regions.grouping import MOST_REPEATED
from autotune.domains.fusion.inspection import check_source
from autotune.errors import Unsupported
from tests.support.capture_helpers import check, regions_of
from tests.unit.compiler.lower.test_translate import t

HALF = torch.bfloat16


def types(regions: list[Region]) -> list[tuple[list[torch.dtype], list[torch.dtype]]]:
    """Of each region, those of its matrices: inputs, outputs."""

    def of(nodes: tuple[torch.fx.Node, ...]) -> list[torch.dtype]:
        return [n.meta["val"].dtype for n in nodes if n.meta["val"].ndim > 1 and n.meta["val"].shape[-1] > 1]

    return [(of(r.inputs), of(r.outputs)) for r in regions]


def norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def around(wide: Tensor, w: Tensor) -> Tensor:
    """Reads a tensor before a product and after it."""
    return (wide * 0.5 + (norm(wide).to(HALF) @ w)).to(HALF)


def halves() -> tuple[Tensor, Tensor]:
    return t(8, 16, dtype=HALF), t(16, 16, dtype=HALF)


def test_every_region_casts_for_itself() -> None:
    regions = regions_of(lambda x, w: around(torch.relu(x).float(), w), *halves())
    assert types(regions) == [([HALF], [HALF, HALF]), ([HALF, HALF], [HALF])]
    assert [op_name(n) for n in regions[0].outputs] == ["relu", "convert_element_type"]
    for r in regions:
        check(r)


def test_a_cast_of_a_stored_tensor_is_no_result() -> None:
    regions = regions_of(lambda x, w: around(x.float(), w), *halves())
    assert types(regions) == [([HALF], [HALF]), ([HALF, HALF], [HALF])]
    for r in regions:
        check(r)


def test_a_few_operators_are_done_again_and_many_are_not() -> None:
    def f(x: Tensor, w: Tensor, many: int) -> Tensor:
        wide = (x.t() @ w).float()
        for _ in range(many):
            wide = torch.sigmoid(wide)
        return around(wide, w)

    for many, kept in ((MOST_REPEATED - 1, HALF), (MOST_REPEATED, torch.float32)):
        regions = regions_of(lambda x, w, many=many: f(x, w, many), t(16, 16, dtype=HALF), t(16, 16, dtype=HALF))
        assert kept in types(regions)[1][0]
        assert (torch.float32 in types(regions)[0][1]) is (kept is torch.float32)
        for r in regions:
            check(r)


def test_region_stores_a_tensor_no_wider_than_its_source() -> None:
    def f(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return around(x.float() + y.float(), w)

    regions = regions_of(f, t(8, 16, dtype=HALF), *halves())
    assert types(regions)[0] == ([HALF, HALF], [torch.float32, HALF])


def test_a_cast_that_others_read_is_stored() -> None:
    """Its readers are in no region, or the caller."""

    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.relu(x).float()
        return wide, around(wide, w)

    def g(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.relu(x).float()
        return wide.cumsum(0), around(wide, w)

    for fn in (f, g):
        regions = regions_of(fn, *halves())
        assert torch.float32 in types(regions)[0][1]
        assert not any(op_name(n) == "relu" for r in regions for n in r.outputs)


def test_rows_of_an_embedding_s_gradient_are_as_narrow_as_they_come() -> None:
    """On a GPU, where the sum at places is a region: it casts what it adds."""

    def f(ids: Tensor, table: Tensor, scale: Tensor) -> Tensor:
        return norm(torch.nn.functional.embedding(ids, table) * scale)

    table, scale = t(32, 16, dtype=HALF).requires_grad_(), t(16, dtype=HALF).requires_grad_()
    graphs = capture(f, (torch.randint(0, 32, (24,)), table, scale), grad=True)
    regions = find_regions(graphs[1].module, "cuda")
    (scatter,) = (r for r in regions if any("index_put" in op_name(n) for n in r.nodes))
    assert [n.meta["val"].dtype for n in scatter.inputs if n.meta["val"].ndim == 2] == [HALF]
    for r in regions:
        check(r)


def test_region_stores_a_tensor_that_its_reader_cannot_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    (graph,) = capture(lambda x, w: around(torch.relu(x).float(), w), halves())
    made = Finder.region

    def region(self: Finder, nodes: list[torch.fx.Node]) -> Region:
        found = made(self, nodes)
        for n in self.copied - set(nodes):
            error = Unsupported("not here")
            error.node = n  # type: ignore[attr-defined]
            raise error
        return found

    monkeypatch.setattr(Finder, "region", region)
    regions = find_regions(graph.module)
    assert types(regions) == [([HALF], [torch.float32, HALF]), ([torch.float32, HALF], [HALF])]


def test_program_omits_nodes_read_only_by_copies() -> None:
    """The second region makes the masked rows itself. Kept in the first one, where nobody reads them, they tied its
    rows to the mask's, and the stored program had another graph."""

    def step(x: Tensor, r: Tensor, w: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        to = torch.ops.prims.convert_element_type.default
        g = to(x, torch.float32) * to(r, torch.float32)
        y = to(g - g.sum(-1, keepdim=True) * to(r, torch.float32), HALF)
        hidden = y.relu() @ w
        masked = torch.where((ids == -1).unsqueeze(-1), torch.zeros(()), to(y, torch.float32))
        table = torch.ops.aten.index_put(torch.zeros(321, 64), [ids], masked, True)
        return hidden, to(table, HALF) + hidden[:321] @ w

    args = (t(512, 64, dtype=HALF), t(512, 64, dtype=HALF), t(64, 64, dtype=HALF), torch.zeros(512, dtype=torch.int64))
    first, second = find_regions(make_fx(step)(*args), "cuda")
    assert {op_name(n) for n in first.nodes} >= {"where", "eq"}
    assert "where" not in {op_name(n) for n in first.submodule.graph.nodes if n.op == "call_function"}
    assert "where" in {op_name(n) for n in second.submodule.graph.nodes if n.op == "call_function"}
    for region in (first, second):
        assert region.workload is not None
        assert check_source(region.workload) == ""
