"""The bench of a scenario on one rank: inputs, candidates, and the rank's own verification.

Every element of a collective's result is compared with its expected value, computed from the seeds of the ranks'
inputs. Inputs are small integers, a hash of (seed, call, rank, element). Any rank can thus compute any shard of any
rank's input, and sums over all ranks are exact in every dtype and in any order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from autotune.domains.c3.collectives.nccl import Collective, Spec, open_collective
from autotune.domains.c3.computation import Computation, open_compute
from autotune.domains.c3.group import Group
from autotune.domains.c3.overlap import CudaOverlap, HostOverlap, open_overlap
from autotune.domains.c3.scenario import Scenario
from autotune.domains.c3.strategy import BASELINES, ENGINES, KINDS, HostStrategy, Strategy, normalize, reject
from autotune.task import Artifact, Config, Verdict

_LATE_S = 0.002  # delay of one rank before the second call of a check

_ALONE = {"copy": 128, "sm": 64}
"""Thread blocks of an engine's kernel when no computation runs concurrently."""
_CHUNK = 1 << 24  # elements computed at a time
_WORD = (1 << 62) - 1
_A, _B = 0x369DEA0F31A53F85, 0x2545F4914F6CDD1D  # odd multipliers that spread consecutive numbers


class Run:
    """A loaded strategy, with the collective that it owns."""

    def __init__(self, computation: Computation | None, collective: Collective | None) -> None:
        self.computation, self.collective = computation, collective
        self.overlap: CudaOverlap | HostOverlap | None = None
        self.closed = False

    def __call__(self) -> None:
        assert self.overlap is not None
        self.overlap()

    def prepare(self) -> None:
        """Do the lazy work of the first call. A collective call."""
        assert self.overlap is not None
        self.overlap.prepare()

    def close(self) -> None:
        """Free everything, once. A collective call."""
        if self.closed:
            return
        self.closed = True
        if self.overlap is not None:
            self.overlap.close()
            self.overlap = None
        if self.collective is not None:
            self.collective.close()


class RankBench:
    """A scenario's computation on this rank's device, and its collective with any strategy.

    Loading, verifying and running are collective calls: every rank makes the same calls in the same order.
    """

    def __init__(self, scenario: Scenario, group: Group) -> None:
        self.scenario, self.group, self.device = scenario, group, group.device
        self.spec = Spec(scenario.collective, scenario.numel, scenario.dtype)
        self.computation: Computation = open_compute(scenario.compute, group.device, seed=group.rank)
        self._open: list[Run] = []

    def load(self, config: Config, artifact: Artifact | None, *, compute: bool = True, comm: bool = True) -> Run:
        """Load a strategy for verification; without ``compute`` or ``comm``, only the other part.

        Raises:
            Unsupported: the devices do not support it; a one-line message.
        """
        self._open = [run for run in self._open if not run.closed]
        collective = open_collective(self.spec, self.group, config, artifact) if comm else None
        run = Run(self.computation if compute else None, collective)
        self._open.append(run)  # before a step that may fail on this rank only: all ranks close it
        run.overlap = open_overlap(run.computation, collective, config, self.device)
        if collective is not None:
            ordinary(collective.input, self.group.rank)
        return run

    def verify(self, run: Run, seed: int) -> Verdict:
        """Verify two back-to-back calls on different inputs, where one rank is late for the second.

        Compares every element of both results, and the computation's result. The verdict is this rank's own.
        """
        run.prepare()
        collective, computation = run.collective, run.computation
        calls = [Call(self.spec, self.group.ranks, seed, number) for number in range(2)]
        rank, kept = self.group.rank, []
        if collective is None:
            run()
        else:
            inputs = [torch.empty_like(collective.input) for _ in calls]
            for call, given in zip(calls, inputs, strict=True):
                call.fill(given, rank)
            for call, given in zip(calls, inputs, strict=True):
                if call.number and rank == seed % self.group.ranks:
                    time.sleep(_LATE_S)
                poison(collective.output)
                collective.input.copy_(given)
                if computation is not None:
                    computation.poison()
                run()
                kept.append(collective.output.clone())
            del inputs
        verdicts = [call.check(output, rank) for call, output in zip(calls, kept, strict=False)]
        if computation is not None:
            verdicts.append(computation.check())
        if collective is not None:
            ordinary(collective.input, rank)
        failed = next((v for v in verdicts if not v.ok), None)
        return failed or Verdict(True, max((v.error for v in verdicts), default=0.0))

    def baselines(self) -> Mapping[str, Callable[[], Run]]:
        """Strategies without a tuner: both parts in sequence, and on two streams in program order."""
        return {name: partial(self.load, config, None) for name, config in BASELINES[self.device.type].items()}

    def references(self) -> Mapping[str, Callable[[], Run]]:
        """The isolated parts, which define the ideal: "compute", and "comm:ENGINE" for each engine.

        An entry raises Unsupported if its engine does not work here.
        """
        plain = BASELINES[self.device.type]["sequential"]
        found: dict[str, Callable[[], Run]] = {"compute": partial(self.load, plain, None, comm=False)}
        for strategy in self._isolated():
            found[f"comm:{strategy.engine}"] = partial(self._alone, strategy.config())
        return found

    def _isolated(self) -> list[Strategy | HostStrategy]:
        """Each engine alone, where a reduction kernel may use all SMs."""
        side = self.device.type
        found = [KINDS[side].of({"engine": name, "ctas": _ALONE.get(name, 0)}) for name in ENGINES[side]]
        return [strategy for strategy in found if reject(strategy.config(), self.scenario, side) is None]

    def _alone(self, config: Config) -> Run:
        from autotune.domains.c3.task import build

        config = normalize(config, self.scenario, self.device.type)
        return self.load(config, build(self.scenario, config, str(self.device)), compute=False)

    def bytes_moved(self) -> int:
        """Bytes of the computation's and the collective's inputs and outputs."""
        numel = self.scenario.input_numel + self.scenario.output_numel
        return self.computation.bytes_moved() + numel * self.scenario.nbytes // self.scenario.numel

    def close(self) -> None:
        """Close all open runs. A collective call."""
        for run in self._open:
            run.close()
        self._open = []


def open_bench(scenario: Scenario, group: Group) -> RankBench:
    """Open the bench of ``scenario`` on this rank. A collective call.

    Raises:
        UserError: the scenario's program does not exist, or fails.
    """
    return RankBench(scenario, group)


@dataclass(frozen=True)
class Call:
    """One call of a collective under test; its inputs differ from those of any other call."""

    spec: Spec
    ranks: int
    seed: int
    number: int

    @property
    def _span(self) -> int:
        """Largest absolute value of an element; bf16 represents integers up to 256 exactly."""
        return max(1, min(8, 128 // self.ranks))

    def values(self, rank: int, begin: int, end: int, device: torch.device) -> torch.Tensor:
        """Elements ``begin`` to ``end`` of the input of ``rank``, in fp32."""
        key = ((self.seed * 1_000_003 + self.number) * 1_000_003 + rank) * 0x9E3779B97F4A7C15 & _WORD
        x = torch.arange(begin, end, device=device, dtype=torch.int64)
        x = (x * _A + key) ^ (x >> 11)
        x = (x ^ (x >> 29)) * _B
        x ^= x >> 32
        return (x.remainder(2 * self._span + 1) - self._span).float()

    def fill(self, target: torch.Tensor, rank: int) -> None:
        """Write the input of ``rank`` to ``target``."""
        for lo in range(0, target.numel(), _CHUNK):
            hi = min(lo + _CHUNK, target.numel())
            target[lo:hi] = self.values(rank, lo, hi, target.device)

    def expected(self, rank: int, device: torch.device) -> Iterator[tuple[int, torch.Tensor]]:
        """The expected output of ``rank`` in fp32, as consecutive (first element, elements) chunks."""
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
        """Compare all of ``output`` on ``rank``; :func:`poison` must have overwritten it before the call."""
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
    """Overwrite an output with NaN, so that unwritten elements are detected.

    The input may be a part of the output: fill it afterwards.
    """
    output.fill_(float("nan"))


def ordinary(target: torch.Tensor, seed: int) -> None:
    """Fill with normally distributed numbers for timing: moving zeros takes less power."""
    generator = torch.Generator(target.device).manual_seed(seed)
    for lo in range(0, target.numel(), _CHUNK):
        target[lo : lo + _CHUNK].normal_(generator=generator)
