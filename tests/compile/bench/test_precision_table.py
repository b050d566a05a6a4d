"""The benchmark of errors against fp64: its reference, its errors, and the kernels that it runs."""

from __future__ import annotations

import math
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autotune.ir.nodes import DEFAULT, STRICT
from benchmarks import precision, precision_table
from benchmarks.fusion.cases.case import Case, Draw, Shape
from benchmarks.precision import Prepared, Wide, errors


def scaled(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    h = x.float()
    return h / h.abs().amax(-1, keepdim=True), torch.exp(y.to(torch.float32)).to(x.dtype)


def _drawn(draw: Draw, shape: Shape) -> tuple[Tensor, ...]:
    return draw.normal(*shape), draw.normal(*shape)


CASE = Case("scaled", "forward", "scaled", torch.float32, (32, 64), (32, 64), scaled, _drawn, "")


def test_the_reference_is_fp64_where_the_program_asks_for_less() -> None:
    x, y = CASE.arguments("cpu", "cpu")
    low = x.bfloat16()
    with Wide():
        first, second = scaled(low, y)
    wide = low.double()
    assert first.dtype == second.dtype == torch.float64
    assert torch.equal(first, wide / wide.abs().amax(-1, keepdim=True))
    assert torch.equal(second, y.double().exp())


def test_errors() -> None:
    want = torch.tensor([3.0, -4.0, 0.0, 1e-9], dtype=torch.float64)
    rms = math.sqrt(25 / 4)
    found = errors([want.clone() + torch.tensor([0.0, 0.4, 0.0, 0.1])], [want])
    assert found["max"] == pytest.approx(0.1)  # of -4; 0.1 over the root mean square is less
    assert found["rms"] == pytest.approx(math.sqrt((0.16 + 0.01) / 4) / rms)
    assert errors([torch.tensor([1]), want], [torch.tensor([2]), want]) == {
        "max": 0.0,
        "rms": 0.0,
    }  # integers do not count
    infinite = want.clone()
    infinite[0] = math.inf
    assert errors([want], [infinite])["max"] == math.inf == errors([infinite], [want])["rms"]
    assert errors([infinite], [infinite]) == {"max": 0.0, "rms": 0.0}


def prepared(wanted: str, factor: float = 1.0) -> Prepared:
    """As the benchmark has it, compiled here; ``factor`` multiplies what kernels make."""
    gm, regions = precision.traced(CASE, "cpu", "cpu", wanted)
    assert regions
    built: list[Future[Any]] = []
    for region in regions:
        assert region.workload is not None
        assert region.workload.spec.get("precision", DEFAULT) == wanted
        built.append(Future())
        built[-1].set_result(precision.compiled(region.workload, "cpu", None))
    return Prepared(gm, regions, built)


def test_a_case_is_measured_with_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = precision.measured(CASE, "cpu", "cpu", {"autotune": prepared(DEFAULT), "autotune_strict": prepared(STRICT)})
    assert entry["name"] == "scaled f32 32x64"
    assert 0 < entry["autotune_strict"]["rms"] < entry["autotune"]["rms"] < 1e-6
    assert 0 < entry["eager"]["rms"] < 1e-6
    # What the kernels make is what is measured: one that is off by a thousandth shows.
    load = precision.load_executor

    class Off:
        def __init__(self, *given: Any) -> None:
            self.inner = load(*given)

        def call(self, *given: Tensor) -> list[Tensor]:
            made = self.inner.call(*given)
            return [t * 1.001 for t in (made if isinstance(made, (list, tuple)) else [made])]

    monkeypatch.setattr(precision, "load_executor", Off)
    off = precision.measured(CASE, "cpu", "cpu", {"autotune": prepared(DEFAULT)})
    assert off["autotune"]["rms"] == pytest.approx(1e-3, rel=0.01)


def test_the_table() -> None:
    four = {who: {"max": k * 1e-6, "rms": k * 1e-7} for k, who in enumerate(precision_table.CONTENDERS, 1)}
    data = {
        "cases": [{"name": "a", **four}], "when": "2026-11-22T00:00:00+00:00", "command": "c", "device": "d",
        "versions": {"torch": "2.13.0"},
    }  # fmt: skip
    text = precision_table.markdown(data)
    assert "| a | 0.1 | 0.2 | 0.3 | 0.4 | 1 | 2 | 3 | 4 |" in text
    assert "autotune: 1.50 times its rms and 1.50 times its max error" in text
    assert "strict: 2.00 times" in text


def test_a_wrong_case_is_reported(tmp_path: Path) -> None:
    from autotune.errors import UserError

    with pytest.raises(UserError, match="no case 'nothing'"):
        precision.main(["--device", "cpu", "--cases", "nothing", "--out", str(tmp_path / "x.json")])
