"""The place of a region's call in Inductor's graph."""

from __future__ import annotations

import torch
from torch import fx

from autotune.runtime.inductor.region_pass import _behind

aten = torch.ops.aten


def placed(*, read_again: bool, rows: int = 64) -> tuple[fx.Node | None, fx.Node]:
    """The call of a region ``sum`` whose input ``relu`` may have a later reader; and that input."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(aten.relu.default, (x,))
    b = graph.call_function(aten.neg.default, (x,))
    region = graph.call_function(aten.sum.dim_IntList, (a, [1], True))
    last = graph.call_function(aten.add.Tensor, (b, a if read_again else b))
    graph.output((region, last))
    for node in (x, a, b, last):
        node.meta["val"] = torch.empty(rows, 64)
    region.meta["val"] = torch.empty(rows, 1)
    return _behind([region], region, [a], [region]), a


def test_a_call_that_frees_its_input_is_placed_behind_it() -> None:
    place, made = placed(read_again=False)
    assert place is made


def test_an_input_with_a_later_reader_is_not_freed() -> None:
    assert placed(read_again=True)[0] is None
