"""Faults and excessive costs in the check of other libraries' models."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import model_check
from benchmarks.form import read, write
from benchmarks.model_check import ALL, dearer, parse, table, wrong
from benchmarks.real import check
from benchmarks.real.further import FURTHER
from benchmarks.real.models import make

GOOD: dict[str, Any] = {
    "name": "bert_train",
    "regions": 3,
    "refused": {},
    "error": {"compile": 1e-6, "autotune": 1e-6},
    "graphs": {"compile": 2, "autotune": 2},
    "breaks": {"compile": 1, "autotune": 1},
    "recompiled": {"compile": 0, "autotune": 0},
    "cached": {"compile": 2, "autotune": 2},
    "counters": {"hits": 3},
    "seconds": {"compile cold": 20.0, "autotune cold": 24.0, "compile warm": 4.0, "autotune warm": 4.3},
}


def test_a_good_case_is_right_and_not_dearer() -> None:
    assert wrong(GOOD) == []
    assert dearer(GOOD) == {}
    assert wrong({**GOOD, "error": {"compile": 0.0, "autotune": 1e-6}}) == [], "rounding of another order"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"error": {"compile": 1e-6, "autotune": 1e-3}}, "error 1.0e-03"),
        ({"error": {"compile": 1e-6, "autotune": float("inf")}}, "error inf"),
        ({"error": {"compile": 1e-6, "autotune": float("nan")}}, "error nan"),
        ({"error": {"compile": 1.5, "autotune": 1.4}}, "tells nothing"),
        ({"graphs": {"compile": 2, "autotune": 3}}, "graphs: 3"),
        ({"breaks": {"compile": 1, "autotune": 2}}, "breaks: 2"),
        ({"recompiled": {"compile": 0, "autotune": 1}}, "recompiled: 1"),
        ({"cached": {"compile": 2, "autotune": 0}}, "cached graphs: 0"),
        ({"counters": {"hits": 2}}, "hits: 2 of 3"),
        ({"counters": {"hits": 2, "misses": 1}}, "misses: 1"),
        ({"counters": {"hits": 3, "fallbacks": 1}}, "fallbacks: 1"),
        ({"counters": {"hits": 3, "wrong_results": 1}}, "wrong_results: 1"),
        ({"refused": {"softmax": "BuildError: why"}}, "no schedule for softmax"),
    ],
)
def test_each_fault_is_named(change: dict[str, Any], said: str) -> None:
    (found,) = wrong({**GOOD, **change})
    assert said in found


def test_a_dear_first_step_is_named() -> None:
    seconds = {**GOOD["seconds"], "autotune cold": 30.0, "autotune warm": 6.0}
    assert dearer({**GOOD, "seconds": seconds}) == {"cold": 1.5, "warm": 1.5}


def test_the_table_counts_errors() -> None:
    cases = [
        {**GOOD, "wrong": []},
        {**GOOD, "name": "vit_infer", "regions": 0, "wrong": ["misses: 1"]},
    ]
    text = table(cases)
    assert "cold start over torch.compile's: 1.20x in the geometric mean of 2" in text
    assert "1 of 2 wrong; without a region: vit_infer" in text
    assert "cold" not in table([{k: v for k, v in case.items() if k != "seconds"} for case in cases])


def test_models_are_named_by_parts() -> None:
    assert parse([]).models == list(ALL)
    assert parse(["--models", "gptj,mamba_"]).models == [
        "gptj_train", "gptj_infer", "gptj_decode", "mamba_train", "mamba_infer"
    ]  # fmt: skip
    with pytest.raises(SystemExit):
        parse(["--models", "no such model"])


def test_a_failure_is_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(*arguments: object) -> dict[str, Any]:
        raise RuntimeError("prepare: no such library\nmore")

    monkeypatch.setattr(model_check, "apart", fails)
    assert model_check.main(["--models", "mamba_train"]) == 1
    said = capsys.readouterr()
    assert "mamba_train: failed: RuntimeError: prepare: no such library\n" in said.err
    assert "nothing was checked" in said.out


def test_results_of_another_form_are_an_error_that_a_file_can_hold(tmp_path: Path) -> None:
    one, nan = torch.ones(2), torch.tensor([1.0, float("nan")])
    found = [check._apart([got], [one]) for got in (torch.ones(3), nan, one * 3e38, one)]
    assert found == [check.INFINITE, check.INFINITE, check.INFINITE, 0.0]
    assert wrong({**GOOD, "error": {"compile": 1e-6, "autotune": found[0]}})
    case = {**GOOD, "error": {"compile": 1e-6, "autotune": found[0]}}
    write(tmp_path / "x.json", "a machine", [case], extra={"suite": "model_check"})
    assert read(tmp_path / "x.json")["cases"] == [case]


def test_a_missing_gradient_is_zero() -> None:
    """torch.compile makes zeros for tensors that a graph passes on without a use, eager mode none."""

    class Half(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.used * x).sum()

    made = check.Made("half", "train", None, Half(), {"x": torch.ones(2)}, 1, None, torch.float32, 4)  # type: ignore[arg-type]
    loss, used, unused = check._step(made.module, made)
    assert (loss.item(), used.tolist(), unused.tolist()) == (2.0, [1.0, 1.0], [0.0, 0.0])


@pytest.mark.parametrize("family", FURTHER)
def test_every_further_architecture_can_be_made(family: str) -> None:
    library = FURTHER[family].library
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed (extra bench)")
    import benchmarks.model_check_imports  # noqa: F401

    made = make(f"{family}_infer", "cpu")
    assert made.parameters > 0
    assert len(next(iter(made.inputs.values()))) == FURTHER[family].few
