"""Is a collective's result right? Every element is compared with what the ranks' inputs, known by their seed, come to.

Inputs are small integers, made from (seed, call, rank, element), so that any share of any rank's input can be made on
any rank, and that sums of all ranks are exact in every dtype and in any order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from autotune.domains.c3.collectives.base import Spec
from autotune.task import Verdict

_CHUNK = 1 << 24  # elements made at a time
_WORD = (1 << 62) - 1
_A, _B = 0x369DEA0F31A53F85, 0x2545F4914F6CDD1D  # odd multipliers that spread consecutive numbers


@dataclass(frozen=True)
class Call:
    """One call of a collective under test; its inputs differ from those of any other call."""

    spec: Spec
    ranks: int
    seed: int
    number: int

    @property
    def _span(self) -> int:
        """Elements lie between minus and plus this: bf16 holds integers up to 256 exactly."""
        return max(1, min(8, 128 // self.ranks))

    def values(self, rank: int, begin: int, end: int, device: torch.device) -> torch.Tensor:
        """Elements ``begin`` to ``end`` of the input of ``rank``, fp32."""
        key = ((self.seed * 1_000_003 + self.number) * 1_000_003 + rank) * 0x9E3779B97F4A7C15 & _WORD
        x = torch.arange(begin, end, device=device, dtype=torch.int64)
        x = (x * _A + key) ^ (x >> 11)
        x = (x ^ (x >> 29)) * _B
        x ^= x >> 32
        return (x.remainder(2 * self._span + 1) - self._span).float()

    def fill(self, target: torch.Tensor, rank: int) -> None:
        """Write the input of ``rank``."""
        for lo in range(0, target.numel(), _CHUNK):
            hi = min(lo + _CHUNK, target.numel())
            target[lo:hi] = self.values(rank, lo, hi, target.device)

    def expected(self, rank: int, device: torch.device) -> Iterator[tuple[int, torch.Tensor]]:
        """The output of ``rank``, as (first element, elements) from the first to the last, fp32."""
        part, op = self.spec.part(self.ranks), self.spec.op
        if op in ("all_gather", "all_to_all"):
            first = rank * part if op == "all_to_all" else 0
            for source in range(self.ranks):
                for lo in range(0, part, _CHUNK):
                    hi = min(lo + _CHUNK, part)
                    yield source * part + lo, self.values(source, first + lo, first + hi, device)
            return
        first, length = (rank * part, part) if op == "reduce_scatter" else (0, self.spec.numel)
        for lo in range(0, length, _CHUNK):
            hi = min(lo + _CHUNK, length)
            total = self.values(0, first + lo, first + hi, device)
            for source in range(1, self.ranks):
                total += self.values(source, first + lo, first + hi, device)
            yield lo, total

    def check(self, output: torch.Tensor, rank: int) -> Verdict:
        """Compare all of ``output``, which :func:`poison` overwrote before the call, on ``rank``."""
        wrong, first, got, want = 0, -1, 0.0, 0.0
        for lo, values in self.expected(rank, output.device):
            found = output[lo : lo + values.numel()].float()
            bad = found != values  # NaN differs from everything
            count = int(bad.sum())
            if count and first < 0:
                at = int(torch.nonzero(bad)[0, 0])
                first, got, want = lo + at, float(found[at]), float(values[at])
            wrong += count
        if not wrong:
            return Verdict(True, 0.0)
        what = "was not written" if math.isnan(got) else f"is {got:g} instead of {want:g}"
        share = first // self.spec.part(self.ranks)
        where = "" if self.spec.op == "reduce_scatter" else f" (share {share})"
        text = (f"{self.spec.op}, call {self.number}, rank {rank}: {wrong} of {output.numel()} elements are wrong; "
                f"element {first}{where} {what}")  # fmt: skip
        return Verdict(False, math.inf, text)


def poison(output: torch.Tensor) -> None:
    """Overwrite an output, so that what is not written shows. The input may lie in it: fill that afterwards."""
    output.fill_(float("nan"))


def ordinary(target: torch.Tensor, seed: int) -> None:
    """Random normal numbers, as what is timed should have: moving zeros takes less power."""
    generator = torch.Generator(target.device).manual_seed(seed)
    for lo in range(0, target.numel(), _CHUNK):
        target[lo : lo + _CHUNK].normal_(generator=generator)
