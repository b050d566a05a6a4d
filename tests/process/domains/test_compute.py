"""Computations: right in every layout and dtype, and checked."""

from __future__ import annotations

import pytest
import torch

from autotune.domains.c3.computation import open_compute
from autotune.domains.c3.scenario import LAYOUTS, Gemm, Program
from autotune.errors import UserError


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_a_gemm(layout: str, dtype: str) -> None:
    made = open_compute(Gemm(101, 48, 64, dtype, layout), "cpu", seed=1)
    assert made.bytes_moved() == (101 * 64 + 64 * 48 + 101 * 48) * (4 if dtype == "f32" else 2)
    for _ in range(2):
        made.poison()
        assert not made.check().ok
        made.run()
        verdict = made.check()
        assert verdict.ok, verdict.detail
    made.output()[100, 47] += 1
    assert not made.check().ok


def test_a_gemms_reference_is_made_in_blocks_of_a_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm = Gemm(33, 35, 17, "f32", "nt")
    whole = open_compute(gemm, "cpu", seed=2).reference
    monkeypatch.setattr("autotune.domains.c3.computation._BLOCK", 17 * 4)
    torch.testing.assert_close(open_compute(gemm, "cpu", seed=2).reference, whole)
    assert whole.dtype is torch.float64
    assert open_compute(Gemm(4, 4, 4, "bf16"), "cpu").reference.dtype is torch.float32


def test_inputs_follow_the_seed() -> None:
    first, same, other = (open_compute(Gemm(4, 4, 4, "f32"), "cpu", seed=s).reference for s in (1, 1, 2))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("name", ["scaled", "pair"])
def test_a_users_program(name: str) -> None:
    made = open_compute(Program(f"tests.support.c3.programs:{name}", "tests.support.c3.programs:inputs"), "cpu")
    made.run()
    assert made.check().ok
    assert torch.equal(made.output(), made.reference)
    made.poison()
    assert not made.check().ok
    assert made.bytes_moved() == (64 * 32 * 4 * 2 if name == "scaled" else 64 * 32 * 4 + 32 * 4 + 64 * 32)


@pytest.mark.parametrize("name", ["noisy", "counting"])
def test_irreproducible_results_are_not_compared(name: str) -> None:
    made = open_compute(Program(f"tests.support.c3.programs:{name}", "tests.support.c3.programs:inputs"), "cpu")
    made.poison()
    made.run()
    assert made.output().isfinite().all()  # inputs are not poisoned where a program returns them
    assert made.check().ok


@pytest.mark.slow
def test_a_built_in_workload_runs_as_it_would_be_deployed() -> None:
    made = open_compute(Program("layer_norm"), "cpu")
    for _ in range(2):
        made.poison()
        made.run()
        assert made.check().ok


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (Program("layer_nrom"), "did you mean 'layer_norm'"),
        (Program("tests.support.c3.programs:scaled"), "needs --inputs"),
        (
            Program("tests.support.c3.programs:broken", "tests.support.c3.programs:inputs"),
            "failed on its inputs: ValueError: not this one",
        ),
    ],
)
def test_mistakes_are_one_line(program: Program, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        open_compute(program, "cpu")
    assert "\n" not in str(caught.value)
