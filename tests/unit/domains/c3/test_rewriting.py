"""The pass that joins products with collectives, on graphs that the tests build."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from autotune.domains.c3.tensor_parallel import rewriting

_functional: Any = torch.ops._c10d_functional


@pytest.fixture(autouse=True)
def wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewriting, "_is_wanted", lambda site, node: True)


class Built:
    """A graph with fake tensors."""

    def __init__(self) -> None:
        self.graph, self._mode = fx.Graph(), FakeTensorMode()

    def given(self, *shape: int) -> fx.Node:
        node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
        with self._mode:
            node.meta["val"] = torch.empty(shape)
        return node

    def call(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = target(*fx.node.map_arg(args, lambda n: n.meta["val"]))
        return node

    def count(self, target: Any) -> int:
        return sum(node.target is target for node in self.graph.nodes)


def test_products_of_one_gather_with_several_waits_are_joined() -> None:
    """torch 2.15 merges equal gathers, and keeps the wait of each."""
    built = Built()
    shard, *factors = (built.given(*shape) for shape in ((4, 16), (16, 8), (16, 24)))
    gather = built.call(_functional.all_gather_into_tensor.default, shard, 2, "0")
    waits = [built.call(_functional.wait_tensor.default, gather) for _ in factors]
    products = [built.call(torch.ops.aten.mm.default, w, f) for w, f in zip(waits, factors, strict=True)]
    built.graph.output((*products, waits[1]))
    assert rewriting.join_products(built.graph) == 1
    (joined,) = (n for n in built.graph.nodes if n.target is torch.ops.autotune.all_gather_matmul.default)
    assert joined.args[:2] == (shard, factors)
    assert built.count(torch.ops.aten.mm.default) == built.count(_functional.all_gather_into_tensor.default) == 0
    (out,) = (n for n in built.graph.nodes if n.op == "output")
    assert [tuple(n.meta["val"].shape) for n in out.args[0]] == [(8, 8), (8, 24), (8, 16)]


def test_a_gather_that_something_reads_before_its_wait_stays() -> None:
    built = Built()
    shard, factor = built.given(4, 16), built.given(16, 8)
    gather = built.call(_functional.all_gather_into_tensor.default, shard, 2, "0")
    product = built.call(torch.ops.aten.mm.default, built.call(_functional.wait_tensor.default, gather), factor)
    built.graph.output((product, built.call(torch.ops.aten.neg.default, gather)))
    assert rewriting.join_products(built.graph) == 0
