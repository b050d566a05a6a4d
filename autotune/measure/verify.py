"""Verification of a candidate's output against an fp64 oracle, with tolerances by storage type and reduction length.

A tolerance is ``rtol * |expected| + atol``. ``rtol`` is one rounding to the storage type plus the error of fp32
arithmetic. That error grows with the square root of the reduction length: rounding errors of a tree or blocked sum add
up like a random walk.

``atol`` is the same relative error applied to the typical size (root mean square) of the expected output: an element
that is small by cancellation has the error of the cancelled terms. ``atol`` scales with the output. A constant for
values near 1 would accept a wrong softmax over 65536 columns, whose values are near 1e-5.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from autotune.task import Verdict

_CHUNK = 1 << 24  # elements compared at a time: fp64 copies of a large output may not fit in memory

_STORAGE_EPS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7, "float64": 2.0**-52}
_FP32_EPS = 2.0**-23
_FLOAT8 = {"float8_e4m3fn": (3, -6), "float8_e5m2": (2, -14)}
"""Mantissa bits and exponent of the smallest normal number of the 8-bit floating-point types."""
_E5M2_INFINITE = 61440.0
_OTHER, _FEW, _HALVES = 0.25, 0.1, 2.0**16
"""Relative difference, and share of elements, from which numbers are others; fp32's rounding in that of halves."""
_MOST_COMPARED = 1 << 22
_TIES = 200
"""One in this many integers converted from floats may be off by one: of bfloat16 scaled to int8, 2 in 1000 are ties."""


def tolerance(storage_dtype: str, reduction_length: int = 1) -> float:
    """Return the relative tolerance of an output stored as ``storage_dtype`` after sums of ``reduction_length`` terms.

    fp32: about 1e-5 without a reduction (for approximate exp, erf and division) and 4e-5 at 16384 terms. fp16 and bf16:
    one unit in the last place more. 8-bit floats: the tolerance of fp32, since their rounding is compared separately.

    Raises:
        ValueError: ``storage_dtype`` is not a floating type.
    """
    if storage_dtype not in _STORAGE_EPS and storage_dtype not in _FLOAT8:
        raise ValueError(f"no tolerance for {storage_dtype}: integers and booleans are compared exactly")
    arithmetic = _FP32_EPS * (80.0 + 2.0 * math.sqrt(max(reduction_length, 1)))
    return arithmetic + (0.0 if storage_dtype in ("float32", "float64", *_FLOAT8) else _STORAGE_EPS[storage_dtype])


def compare(
    actual: torch.Tensor,
    expected: torch.Tensor,
    storage_dtype: str | torch.dtype,
    reduction_length: int = 1,
    *,
    off_by_one: bool = False,
    slack: torch.Tensor | None = None,
    lost: torch.Tensor | None = None,
    size: float | None = None,
) -> Verdict:
    """Compare a candidate's output with the oracle's.

    NaN matches only NaN, and an infinity only one of the same sign. For a finite expected value within rounding of the
    storage type's largest number, infinity is accepted too.

    Args:
        actual: the candidate's output, of any shape and type ``storage_dtype``, on any device.
        expected: the oracle's result before rounding to storage, fp64 (or integer or bool), same number of elements.
        storage_dtype: "float32", "float16", "bfloat16", "int32", "bool", ... or the torch type.
        reduction_length: the largest number of terms reduced into one element.
        off_by_one: for integers converted from floats (quantisation): one in 200 elements may differ by one, since fp32
            may resolve a tie or a truncation either way.
        slack: for floats, the allowed error of each element beyond its tolerance; for booleans, a mask of elements that
            may have either value.
        lost: for floats, a mask of ``expected``'s shape; its elements may also be NaN or infinite.
        size: :func:`typical` of ``expected``, if already computed.

    Returns:
        ``error`` is the largest ratio of error to tolerance; infinite if NaN, infinities or shapes do not match.
    """
    name = str(storage_dtype).removeprefix("torch.")
    if actual.numel() != expected.numel():
        return Verdict(False, math.inf, f"{actual.numel()} elements where {expected.numel()} are expected")
    if actual.numel() == 0:
        return Verdict(True, 0.0)
    got, want = actual.detach().reshape(-1), expected.detach().reshape(-1)
    if name not in _STORAGE_EPS and name not in _FLOAT8:
        return _compare_exact(got, want, off_by_one, slack)
    dtype = getattr(torch, name)
    rtol = tolerance(name, reduction_length)
    atol = rtol * (typical(want) if size is None else size)
    worst, worst_at = 0.0, 0
    for lo in range(0, got.numel(), _CHUNK):
        a = got[lo : lo + _CHUNK].to(torch.float64)
        e = want[lo : lo + _CHUNK].to(device=a.device, dtype=torch.float64)
        if name == "float8_e4m3fn":  # saturates, as torch 2.13 and Inductor do; older eager torch gives NaN
            e = e.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
        stored = e.to(dtype).to(torch.float64)  # exact result, rounded: may overflow to infinity
        same = (a == stored) | (torch.isnan(a) & torch.isnan(stored))
        allowed = rtol * e.abs() + atol
        if name in _FLOAT8:
            mantissa, least = _FLOAT8[name]
            edge = ((e.abs() / _E5M2_INFINITE - 1).abs() <= rtol) & (torch.sign(a) == torch.sign(e))
            same |= edge & (torch.isinf(a) | (a.abs() == torch.finfo(dtype).max))
            exponent = torch.frexp(e).exponent.clamp(min=least + 1) - 1
            allowed += torch.ldexp(torch.ones_like(e), exponent - mantissa - 1)  # half the distance to the next
        else:
            same |= (e.abs() >= 0.99 * torch.finfo(dtype).max) & torch.isinf(a) & (torch.sign(a) == torch.sign(e))
        if slack is not None:
            allowed += slack.reshape(-1)[lo : lo + _CHUNK].to(a.device)
        if lost is not None:
            same |= lost.reshape(-1)[lo : lo + _CHUNK].to(a.device) & ~torch.isfinite(a)
        ratio = (a - e).abs() / allowed
        # A NaN or an infinity on one side only, or infinities of opposite sign, give NaN or infinity here.
        ratio = torch.where(torch.isnan(ratio), math.inf, ratio)
        ratio = torch.where(same, 0.0, ratio)
        top, at = torch.max(ratio, dim=0)
        if float(top) > worst:
            worst, worst_at = float(top), lo + int(at)
    if worst <= 1.0:
        return Verdict(True, worst)
    return Verdict(False, worst, _describe(actual, got, want, worst_at, worst))


def is_other(
    eager: torch.Tensor,
    expected: torch.Tensor,
    slack: Callable[[], torch.Tensor | None],
    size: float | None = None,
    *,
    overflows: bool = False,
) -> bool:
    """True if a tenth of eager mode's elements are other numbers than the oracle's, beyond all rounding.

    The graph of a region is then not that of its operators, and the oracle shares the mistake. Eager mode rounds after
    each operator, which few programs magnify to a quarter.

    Args:
        eager: numbers of the operators, floats or integers made from floats.
        expected: numbers of the oracle, in the same shape.
        slack: the allowed error of each element by the rounding of fp32; called only if it decides.
        size: :func:`typical` of ``expected``, if already computed.
        overflows: the operators compute in float16, so that infinities and NaN of eager mode do not count.
    """
    step = max(1, -(-eager.numel() // _MOST_COMPARED))
    want = expected.reshape(-1)[::step].double()
    seen = eager.reshape(-1)[::step].double()
    apart = (seen - want).abs()
    beyond = ~(apart <= _OTHER * (want.abs() + (typical(want) if size is None else size))) & want.isfinite()
    if overflows:
        beyond &= seen.isfinite()
    if float(beyond.double().mean()) <= _FEW:
        return False
    allowed = slack()
    if allowed is not None:
        beyond &= ~(apart <= allowed.reshape(-1)[::step] * _HALVES)
    return float(beyond.double().mean()) > _FEW


def typical(want: torch.Tensor) -> float:
    """Return the root mean square of the finite elements; 1 if none is finite or all are zero."""
    total, count, want = 0.0, 0, want.detach().reshape(-1)
    for lo in range(0, want.numel(), _CHUNK):
        e = want[lo : lo + _CHUNK].to(torch.float64)
        finite = torch.isfinite(e)
        total += float(torch.where(finite, e, 0.0).square().sum())
        count += int(finite.sum())
    rms = math.sqrt(total / count) if count and math.isfinite(total) else 0.0
    return rms if rms > 0 else 1.0


def _compare_exact(got: torch.Tensor, want: torch.Tensor, off_by_one: bool, either: torch.Tensor | None) -> Verdict:
    want = want.to(device=got.device)
    if want.dtype.is_floating_point:
        want = want.to(torch.float64)
        wrong = got.to(torch.float64) != want
    else:
        wrong = got.to(torch.int64) != want.to(torch.int64)
    if either is not None:
        wrong &= ~either.reshape(-1).to(wrong.device)
    count = int(wrong.sum())
    if count == 0:
        return Verdict(True, 0.0)
    if off_by_one:
        near = bool(((got.to(torch.float64) - want.to(torch.float64)).abs() <= 1).all())
        if near and count * _TIES <= max(got.numel(), _TIES):
            return Verdict(True, count * _TIES / max(got.numel(), _TIES))
    at = int(torch.nonzero(wrong)[0, 0])
    detail = (
        f"{count} of {got.numel()} elements differ, the first at {at}: {got[at].item()} instead of {want[at].item()}"
    )
    return Verdict(False, math.inf, detail)


def _describe(actual: torch.Tensor, got: torch.Tensor, want: torch.Tensor, at: int, ratio: float) -> str:
    index, rest = [], at
    for extent in reversed(actual.shape):
        index.append(rest % extent)
        rest //= extent
    a, e = float(got[at]), float(want[at])
    size = f"{ratio:.3g} times the tolerance" if math.isfinite(ratio) else "not comparable"
    return f"{a:.9g} instead of {e:.9g} at {list(reversed(index))} ({size})"
