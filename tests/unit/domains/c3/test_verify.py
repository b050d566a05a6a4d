"""Right results of a collective pass, and its possible faults are caught."""

from __future__ import annotations

import pytest
import torch

from autotune.domains.c3.collectives.nccl import Spec
from autotune.domains.c3.measuring import bench
from autotune.domains.c3.measuring.bench import Call, ordinary, poison
from autotune.domains.c3.scenario import COLLECTIVES, REDUCING

CPU = torch.device("cpu")
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


def inputs(call: Call) -> list[torch.Tensor]:
    part = call.spec.part(call.ranks)
    numel = part if call.spec.op == "all_gather" else call.spec.numel
    made = [torch.empty(numel, dtype=DTYPES[call.spec.dtype]) for _ in range(call.ranks)]
    for rank, tensor in enumerate(made):
        call.fill(tensor, rank)
    return made


def result(call: Call, given: list[torch.Tensor], rank: int) -> torch.Tensor:
    """The table of collectives/nccl.py in plain torch; sums are rounded after each rank, as a ring's are."""
    part = call.spec.part(call.ranks)
    share = slice(rank * part, (rank + 1) * part)
    if call.spec.op == "all_gather":
        return torch.cat(given)
    if call.spec.op == "all_to_all":
        return torch.cat([t[share] for t in given])
    total = given[0].clone()
    for other in given[1:]:
        total += other
    return total[share] if call.spec.op == "reduce_scatter" else total


def sized(op: str, ranks: int) -> int:
    return 1001 if op == "all_reduce" else 251 * ranks


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 3, 16])
@pytest.mark.parametrize("op", COLLECTIVES)
def test_right_results_pass_on_every_rank(op: str, ranks: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_CHUNK", 100)  # shares are made in several pieces
    call = Call(Spec(op, sized(op, ranks), dtype), ranks, 1, 0)
    given = inputs(call)
    for rank in range(0, ranks, max(1, ranks // 3)):
        verdict = call.check(result(call, given, rank), rank)
        assert verdict.ok, verdict.detail


@pytest.mark.parametrize("op", COLLECTIVES)
def test_wrong_results_do_not(op: str) -> None:
    ranks, rank = 4, 1
    call = Call(Spec(op, sized(op, ranks), "f32"), ranks, 1, 1)
    given = inputs(call)
    right = result(call, given, rank)

    def says(output: torch.Tensor) -> str:
        verdict = call.check(output, rank)
        assert not verdict.ok
        assert verdict.error == float("inf")  # any memory may have been written: the ranks are restarted
        return verdict.detail

    unwritten = right.clone()
    poison(unwritten[17:18])
    assert f"rank 1: 1 of {right.numel()} elements are wrong; element 17" in says(unwritten)
    assert says(unwritten).endswith("was not written")
    off = right.clone()
    off[-1] += 1
    assert f"element {right.numel() - 1}" in says(off)
    before = Call(call.spec, ranks, 1, 0)
    says(result(before, inputs(before), rank))  # stale: what the call before had
    seeded = Call(call.spec, ranks, 2, 1)
    says(result(seeded, inputs(seeded), rank))
    without = [*given[:-1], torch.zeros_like(given[-1])]
    says(result(call, without, rank))  # a rank is missing
    if op != "all_reduce":
        says(result(call, given, rank + 1) if op != "all_gather" else result(call, given[::-1], rank))
    says(right.roll(1))


def test_shares_are_named_where_there_are_any() -> None:
    call = Call(Spec("all_gather", 400, "f32"), 4, 1, 0)
    output = result(call, inputs(call), 0)
    output[250] = -99
    assert "element 250 (share 2) is -99 instead of" in call.check(output, 0).detail
    call = Call(Spec("reduce_scatter", 400, "f32"), 4, 1, 0)
    output = result(call, inputs(call), 3)
    output[50] = -99
    assert "element 50 is -99" in call.check(output, 3).detail


def test_inputs_differ_between_ranks_calls_seeds_and_places() -> None:
    spec = Spec("all_to_all", 40_000, "bf16")
    reference = Call(spec, 2, 0, 0).values(0, 0, 20_000, CPU)
    assert reference.min() == -8
    assert reference.max() == 8
    assert abs(float(reference.mean())) < 0.2
    others = [Call(spec, 2, 0, 0).values(1, 0, 20_000, CPU), Call(spec, 2, 0, 1).values(0, 0, 20_000, CPU),
              Call(spec, 2, 1, 0).values(0, 0, 20_000, CPU), Call(spec, 2, 0, 0).values(0, 20_000, 40_000, CPU),
              reference.roll(1)]  # fmt: skip
    for other in others:
        equal = float((reference == other).float().mean())
        assert equal < 0.1, "17 values at random are equal one time in 17"
    again = Call(spec, 2, 0, 0).values(0, 100, 200, CPU)
    assert torch.equal(reference[100:200], again)


@pytest.mark.parametrize("op", REDUCING)
def test_sums_of_many_ranks_are_exact_in_bf16(op: str) -> None:
    call = Call(Spec(op, 64_000, "bf16"), 64, 9, 0)
    values = torch.stack([call.values(rank, 0, 1000, CPU) for rank in range(64)])
    assert values.abs().sum(0).max() <= 256  # so is every partial sum, in any order


def test_ordinary_numbers_are_finite_and_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_CHUNK", 300)
    a, b = torch.full((1000,), float("nan"), dtype=torch.bfloat16), torch.zeros(1000, dtype=torch.bfloat16)
    ordinary(a, 0)
    ordinary(b, 1)
    assert a.isfinite().all()
    assert not torch.equal(a, b)
    assert 0.8 < float(a.float().std()) < 1.2
