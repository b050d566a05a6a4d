"""Comparing with the oracle: tolerances that pass honest rounding and nothing else."""

from __future__ import annotations

import math

import pytest
import torch

from autotune.measure import verify
from autotune.measure.verify import compare, tolerance

INF, NAN = math.inf, math.nan


def t(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("columns", [16, 1000, 65536])
def test_honest_layer_norm_passes_in_every_type(dtype: torch.dtype, columns: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, columns).to(dtype)
    got = torch.nn.functional.layer_norm(x.float(), (columns,)).to(dtype)
    want = torch.nn.functional.layer_norm(x.double(), (columns,))
    verdict = compare(got, want, dtype, columns)
    assert verdict.ok, verdict
    assert verdict.error <= 1


@pytest.mark.parametrize(("dtype", "wrong"), [("float32", 1e-3), ("float16", 5e-3), ("bfloat16", 3e-2)])
def test_one_slightly_wrong_element_fails(dtype: str, wrong: float) -> None:
    want = torch.rand(64, 64, dtype=torch.float64) + 1
    got = want.to(getattr(torch, dtype))
    got[3, 5] = want[3, 5] * (1 + wrong)
    verdict = compare(got, want, dtype, 64)
    assert not verdict.ok
    assert verdict.error > 1
    assert "[3, 5]" in verdict.detail


def test_small_outputs_are_not_passed_by_an_absolute_tolerance() -> None:
    want = torch.softmax(torch.randn(4, 65536, dtype=torch.float64), -1)
    assert compare(want.float(), want, "float32", 65536).ok
    assert not compare(torch.zeros(4, 65536), want, "float32", 65536).ok


def test_cancellation_is_forgiven() -> None:
    want = torch.randn(1000, dtype=torch.float64)
    want[7] = 1e-9
    got = want.float()
    got[7] = 3e-7
    assert compare(got, want, "float32").ok


@pytest.mark.parametrize(
    ("got", "want", "ok"),
    [
        (NAN, NAN, True),
        (INF, INF, True),
        (-INF, -INF, True),
        (INF, -INF, False),
        (NAN, INF, False),
        (INF, NAN, False),
        (NAN, 1.0, False),
        (1.0, NAN, False),
        (INF, 1.0, False),
        (1.0, INF, False),
        (3e38, INF, False),
    ],
)
def test_nan_and_infinity_must_match(got: float, want: float, ok: bool) -> None:
    verdict = compare(t(1, got), t(1, want, dtype=torch.float64), "float32")
    assert verdict.ok is ok
    assert verdict.error == (0 if ok else INF)


def test_overflow_of_the_storage_type_is_right() -> None:
    want = t(1e5, -1e5, 65510, dtype=torch.float64)
    assert compare(t(INF, -INF, 65504, dtype=torch.float16), want, "float16").ok
    assert compare(t(INF, -INF, INF, dtype=torch.float16), want, "float16").ok
    assert not compare(t(-INF, -INF, 65504, dtype=torch.float16), want, "float16").ok
    assert not compare(t(INF, dtype=torch.float16), t(6e4, dtype=torch.float64), "float16").ok


def test_integers_are_exact_unless_said_otherwise() -> None:
    want = torch.arange(5000, dtype=torch.int64)
    got = want.to(torch.int32)
    assert compare(got, want, "int32").ok
    got[17] += 1
    assert not compare(got, want, "int32").ok
    assert compare(got, want, "int32", off_by_one=True).ok
    got[17] += 1
    assert not compare(got, want, "int32", off_by_one=True).ok
    assert not compare(want + 1, want, "int64", off_by_one=True).ok


def test_booleans_and_expectations_in_floating_point() -> None:
    assert compare(torch.tensor([True, False]), torch.tensor([1.0, 0.0], dtype=torch.float64), "bool").ok
    verdict = compare(torch.tensor([True, True]), torch.tensor([True, False]), "bool")
    assert not verdict.ok
    assert "1 of 2 elements" in verdict.detail


def test_empty_wrong_size_and_zero_outputs() -> None:
    assert compare(torch.empty(0), torch.empty(0, dtype=torch.float64), "float32").ok
    assert not compare(torch.zeros(3), torch.zeros(4, dtype=torch.float64), "float32").ok
    assert compare(torch.zeros(3), torch.zeros(3, dtype=torch.float64), "float32").ok
    assert not compare(torch.ones(3), torch.zeros(3, dtype=torch.float64), "float32").ok


def test_chunks_join_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_CHUNK", 7)
    want = torch.rand(10, 10, dtype=torch.float64)
    got = want.float()
    assert compare(got, want, "float32").ok
    got[9, 3] += 1
    verdict = compare(got, want, "float32")
    assert not verdict.ok
    assert "[9, 3]" in verdict.detail


def test_tolerance_grows_with_the_reduction_and_the_type() -> None:
    assert 9e-6 < tolerance("float32") < 1.1e-5
    assert tolerance("float32", 16384) < 5e-5
    assert tolerance("float32") < tolerance("float32", 1000) < tolerance("float16", 1000) < tolerance("bfloat16", 1000)
    with pytest.raises(ValueError, match="compared exactly"):
        tolerance("int32")


@pytest.mark.parametrize(("part", "passes"), [(0.95, True), (1.05, False)])
def test_one_element_beyond_its_tolerance_is_enough(part: float, passes: bool) -> None:
    want = torch.ones(4096, dtype=torch.float64)
    got = want.clone()
    got[4000] += part * 2 * tolerance("float32")  # relative to the element, and to the typical one
    assert compare(got.float(), want, "float32").ok == passes


@pytest.mark.parametrize(("off", "passes"), [(5, True), (6, False)])
def test_one_in_two_hundred_may_be_off_by_one(off: int, passes: bool) -> None:
    want = torch.arange(1000, dtype=torch.int32)
    got = want.clone()
    got[:off] += 1
    assert compare(got, want, "int32", off_by_one=True).ok == passes
