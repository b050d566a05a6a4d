"""Programs of regions with symbolic sizes are those of the regions that were found."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

from autotune.compiler.regions import aten
from autotune.compiler.regions.aten import at_sizes, expression_of, symbols_of
from autotune.compiler.regions.find import find_regions, workload_of
from autotune.compiler.regions.symbols import concrete, symbolic_program, traced


def test_joined_parts_that_read_the_numbers_of_their_rows() -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        options = {"start": 0, "step": 1, "dtype": torch.int64, "device": "cpu", "requires_grad": False}
        rows = torch.ops.prims.iota(x.shape[0], **options).view(-1, 1)
        one, other = x + rows, y * rows
        return one.exp() - rows, other.sin()

    gm = make_fx(f, core_aten_decompositions(), tracing_mode="symbolic")(torch.randn(12, 8), torch.randn(12, 8))
    numbers, origin = concrete(gm)
    (region,) = find_regions(numbers)
    assert region.workload is not None
    assert region.workload.label.endswith("of 2 parts")
    program = aten.to_json(symbolic_program(region, origin))
    first = next(iter(gm.graph.nodes)).meta["val"]
    sizes = {expression_of(symbol): size for symbol, size in zip(first.shape, (12, 8), strict=True)}
    assert sizes.keys() == set(symbols_of(program))
    again, _ = workload_of(traced(at_sizes(program, sizes), "cpu"))
    assert again.fingerprint == region.workload.fingerprint
