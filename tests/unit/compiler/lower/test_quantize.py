"""Quantisation to float8 and int8 as torchao writes it: one region each, which computes what eager torch does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autotune.compiler.capture.recording import capture
from autotune.compiler.regions.find import Region, find_regions
from autotune.ir.graph import Graph
from autotune.ir.oracle import interpret
from autotune.measure.verify import compare
from tests.support.capture_helpers import regions_of

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def t(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype)


def saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.clamp(min=-torch.finfo(dtype).max, max=torch.finfo(dtype).max).to(dtype)


def scale_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """By way of float64, as torchao has it."""
    return (torch.finfo(dtype).max / torch.clamp(amax.to(torch.float64), min=1e-12)).to(torch.float32)


def by_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = scale_of(torch.max(torch.abs(x)), E4M3)
    return saturated(x.to(torch.float32) * scale, E4M3), scale


def by_row(x: Tensor, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
    scale = scale_of(torch.amax(torch.abs(x), -1, keepdim=True), dtype)
    return saturated(x.to(torch.float32) * scale, dtype), scale


def by_power_of_two(x: Tensor) -> tuple[Tensor, Tensor]:
    amax = torch.amax(torch.abs(x), -1, keepdim=True).float()
    scale = torch.exp2(torch.floor(torch.log2(448 / torch.clamp(amax, min=1e-12))))
    return saturated(x.float() * scale, E4M3), scale


def by_block(x: Tensor) -> tuple[Tensor, Tensor]:
    v = x.view(x.shape[0], -1, 128).float()
    top = v.abs().amax(-1, keepdim=True).clamp(min=1e-4)
    return saturated(v * (448 / top), E4M3).view(x.shape), (top / 448).squeeze(-1)


def normed(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = x.float()
    return by_row(h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * w)


def both_layouts(x: Tensor) -> tuple[Tensor, ...]:
    q, scale = by_tensor(x)
    return q, q.t().contiguous(), scale


def symmetric_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = (torch.amax(torch.abs(x), -1, keepdim=True).float() / 127).clamp(min=1e-6)
    return torch.clamp(torch.round(x.float() / scale), -128, 127).to(torch.int8), scale


def asymmetric_uint8(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = x.float()
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 255).clamp(min=1e-6)
    zero = torch.clamp(-torch.round(low / scale), 0, 255)
    return torch.clamp(torch.round(x / scale) + zero, 0, 255).to(torch.uint8), scale, zero.to(torch.uint8)


def read_back(q: Tensor, scale: Tensor) -> Tensor:
    return q.to(torch.float32) * scale


CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "by_tensor": (by_tensor, (t(24, 96),)),
    "by_row": (by_row, (t(24, 96),)),
    "by_row_e5m2": (lambda x: by_row(x, E5M2), (t(24, 97, dtype=torch.float32),)),
    "by_power_of_two": (by_power_of_two, (t(24, 96),)),
    "by_block": (by_block, (t(24, 384),)),
    "normed": (normed, (t(24, 96), t(96))),
    "both_layouts": (both_layouts, (t(24, 96),)),
    "symmetric_int8": (symmetric_int8, (t(24, 96),)),
    "asymmetric_uint8": (asymmetric_uint8, (t(24, 96),)),
    "read_back": (read_back, (t(24, 96).to(E4M3), t(24, 1, dtype=torch.float32))),
    "read_back_e5m2": (read_back, (t(24, 96).to(E5M2), t(24, 1, dtype=torch.float32))),
}


def one_region(fn: Callable[..., Any], *args: Tensor) -> Region:
    (region,) = regions_of(fn, *args, grad=False)
    assert region.workload is not None, region.reason
    return region


@pytest.mark.parametrize("name", CASES)
def test_quantisation_is_one_region_that_is_right(name: str) -> None:
    fn, args = CASES[name]
    region = one_region(fn, *args)
    assert len(region.inputs) == len(args)  # all of it
    graph = Graph.from_json(region.workload.spec)
    results = interpret(graph, [args[k].reshape(-1) for k in region.binding.inputs])
    eager = fn(*args)
    eager = eager if isinstance(eager, tuple) else (eager,)
    assert len(results) == len(eager)
    for k, result in enumerate(results):
        like = region.outputs[region.binding.outputs[k]].meta["val"]
        same = [w for w in eager if w.dtype == like.dtype and w.numel() == like.numel()]
        (want,) = [w for w in same if len(same) == 1 or w.shape == like.shape]
        out = graph.outputs[k]
        laid = torch.empty(graph.output_numel(k), dtype=result.dtype)
        laid.as_strided(result.shape, out.strides, out.offset).copy_(result)
        assert compare(want, laid.view(want.shape), want.dtype, 96, off_by_one=True).ok


def test_fake_quantized_values_are_read_from_memory() -> None:
    """Or the rounding, which is what quantisation-aware training is after, would be gone."""

    def fake_quantised(x: Tensor) -> Tensor:
        q, scale = by_row(x)
        return q.to(torch.float32) / scale + x

    regions = regions_of(fake_quantised, t(24, 96), grad=False)
    assert [r.workload is not None for r in regions] == [True, True]
    assert E4M3 in [n.meta["val"].dtype for n in regions[1].inputs]


@pytest.mark.parametrize(("capability", "held"), [((8, 0), False), ((8, 9), True)])
def test_gpus_without_float8_leave_it_to_torch(
    capability: tuple[int, int], held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (gm,) = (g.module for g in capture(by_row, (t(24, 96),), grad=False))
    for node in gm.graph.nodes:  # as captured on a GPU
        if isinstance(node.meta.get("val"), Tensor):
            node.meta["val"].fake_device = torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    made = [n.meta["val"].dtype for r in find_regions(gm) for n in r.nodes]
    assert torch.float32 in made
    assert (E4M3 in made) is held


def test_float64_that_is_more_than_a_scale_stays_with_torch() -> None:
    def summed(x: Tensor) -> Tensor:
        return (x.to(torch.float64) * 3).sum(-1).to(torch.float32) + 1

    def handed_out(x: Tensor) -> tuple[Tensor, Tensor]:
        scale = torch.amax(x, -1).to(torch.float64) * 2
        return scale, scale.to(torch.float32) + 1

    for fn in (summed, handed_out):
        for region in regions_of(fn, t(24, 96), grad=False):
            assert region.workload is not None, region.reason
            assert all(n.meta["val"].dtype != torch.float64 for n in (*region.nodes, *region.inputs))


def test_numbers_that_may_not_fit_a_narrow_integer_stay_with_torch() -> None:
    def clamped(low: float, high: float) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.clamp(torch.round(x * 100), low, high).to(torch.int8)

    x = t(24, 96, dtype=torch.float32)
    assert len(one_region(clamped(-128, 127), x).nodes) >= 4
    for low, high in [(-129, 127), (-128, 128)]:
        (region,) = regions_of(clamped(low, high), x, grad=False)
        assert [n.meta["val"].dtype for n in region.outputs] == [torch.float32]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x, n: x.clamp_min(n),
        lambda x, n: x.clamp_max(n),
        lambda x, n: x == n,
        lambda x, n: x < n,
        lambda x, n: x >= n,
        lambda x, n: x | n,
        lambda x, n: x.masked_fill(x > 3, n),
        lambda x, n: torch.where(x > 3, torch.full_like(x, n), x),
    ],
)
def test_numbers_that_a_narrow_integer_does_not_hold_stay_with_torch(
    fn: Callable[[Tensor, int], Tensor], dtype: torch.dtype
) -> None:
    """torch wraps them first: of uint8, ``x.clamp_min(-5)`` is at least 251."""
    info = torch.iinfo(dtype)
    x = torch.arange(96).to(dtype)
    for n in (info.min, info.max):
        region = one_region(lambda x, n=n: fn(x, n), x)
        assert torch.equal(interpret(Graph.from_json(region.workload.spec), [x])[0].to(dtype), fn(x, n).to(dtype))
    for n in (info.min - 5, info.max + 45):
        try:
            regions = regions_of(lambda x, n=n: fn(x, n), x, grad=False)
        except Exception:  # torch refuses some itself
            continue
        for region in regions:  # a filled tensor that torch makes may still be read
            if region.workload is not None:
                graph = Graph.from_json(region.workload.spec)
                assert n not in [v.number for v in graph.values if v.op == "const"]


def test_a_float_promotes_narrow_integers() -> None:
    x = torch.arange(96).to(torch.uint8)
    region = one_region(lambda x: x.clamp_min(-5.5) + (x < 300.5), x)
    assert region.outputs[0].meta["val"].dtype == torch.float32
