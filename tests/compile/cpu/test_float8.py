"""Floats of eight bits: what CPU kernels load and store is what torch converts, for every byte and round every tie."""

from __future__ import annotations

import math

import pytest
import torch

from autotune.compiler.targets.cpu.schedule import CpuSchedule
from autotune.ir.oracle import interpret
from autotune.measure.verify import compare
from tests.support.cpu_graphs import TORCH, Build, run

TYPES = ["float8_e4m3fn", "float8_e5m2"]


def _all(storage: str) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(TORCH[storage])


def _around(storage: str) -> torch.Tensor:
    """float32 numbers at, between and next to all values of the type, and beyond its range, with both signs."""
    held = _all(storage).float()
    held = held[torch.isfinite(held) & (held >= 0)].unique()
    more = torch.cat([held, torch.tensor([448.0, 464, 480, 496, 512, 57344, 61440, 65536, 1e9])])
    ties = torch.cat([more, (held[1:] + held[:-1]) / 2])
    beside = [torch.nextafter(ties, torch.tensor(math.inf)), torch.nextafter(ties, torch.tensor(0.0))]
    tiny = torch.tensor([1e-40, 2.0**-18, 2.0**-17, math.inf, math.nan, 3e38])
    x = torch.cat([ties, *beside, tiny, torch.rand(999) * 600, torch.rand(999) * 2.0**-7, torch.rand(999) * 7e4])
    return torch.cat([x, -x])


@pytest.mark.parametrize("storage", TYPES)
def test_every_byte_is_loaded_as_torch_reads_it(storage: str) -> None:
    x = _all(storage)
    b = Build(256)
    b.out(b.load(storage, 0), "float32")
    (got,) = run(b.graph(), [x], CpuSchedule())
    assert torch.equal(got.isnan(), x.float().isnan())
    kept = ~got.isnan()
    assert torch.equal(got[kept].view(torch.int32), x.float()[kept].view(torch.int32))  # the sign of zero too


@pytest.mark.parametrize("storage", TYPES)
def test_numbers_are_stored_as_torch_rounds_them(storage: str) -> None:
    x = _around(storage)
    b = Build(len(x))
    b.out(b.load("float32", 0), storage)
    (got,) = run(b.graph(), [x], CpuSchedule())
    most = torch.finfo(TORCH[storage]).max
    want = (x.clamp(-most, most) if storage == "float8_e4m3fn" else x).to(TORCH[storage])  # as torch 2.13 has it
    assert torch.equal(got.float().isnan(), want.float().isnan())
    kept = ~want.float().isnan()
    assert torch.equal(got.view(torch.uint8)[kept], want.view(torch.uint8)[kept])


@pytest.mark.parametrize("storage", TYPES)
def test_the_oracle_reads_them(storage: str) -> None:
    b = Build(16, 16)
    b.out(b.load(storage, 0, 1), "float32", (1, 0))
    (want,) = interpret(b.graph(), [_all(storage)])
    assert torch.equal(want.nan_to_num(7.0), _all(storage).double().view(16, 16).t().nan_to_num(7.0))


@pytest.mark.parametrize("storage", TYPES)
def test_a_verdict_takes_a_tie_either_way_and_no_more(storage: str) -> None:
    """Halfway between two numbers both are right, and nothing else; elsewhere only the nearest is."""
    dtype = TORCH[storage]
    want = torch.tensor([1.0 + torch.finfo(dtype).eps / 2, 1.0, -3.0, 0.01], dtype=torch.float64)
    good = want.to(dtype)
    assert compare(good, want, dtype).ok
    bits = good.view(torch.uint8)
    for at, step, ok in [(0, 1, True), (0, -1, False), (0, 2, False), (1, 1, False), (2, -1, False), (3, 1, False)]:
        moved = bits.clone()
        moved[at] += step
        assert compare(moved.view(dtype), want, dtype).ok is ok, (at, step)


def test_a_verdict_at_the_end_of_the_range() -> None:
    def ok(e: float, got: float, dtype: torch.dtype) -> bool:
        return compare(torch.tensor([got]).to(dtype), torch.tensor([e], dtype=torch.float64), dtype).ok

    wide, narrow = torch.float8_e5m2, torch.float8_e4m3fn
    assert ok(62000.0, math.inf, wide)
    assert not ok(62000.0, 57344.0, wide)
    assert not ok(62000.0, -math.inf, wide)
    assert ok(60800.0, 57344.0, wide)
    assert not ok(60800.0, math.inf, wide)
    assert ok(61440.0, 57344.0, wide)
    assert ok(61440.0, math.inf, wide)
    assert ok(1e9, 448.0, narrow)
    assert ok(math.inf, 448.0, narrow)
    assert not ok(1e9, math.nan, narrow)
    assert not ok(math.nan, 448.0, narrow)
