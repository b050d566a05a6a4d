"""The bench of a scenario on one rank: inputs, candidates, and the checks that every rank makes for itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch

from autotune.domains.c3.collectives.base import Collective, Spec
from autotune.domains.c3.collectives.open import open_collective
from autotune.domains.c3.group import Group
from autotune.domains.c3.measuring.verify import Call, ordinary, poison
from autotune.domains.c3.run.base import Overlap
from autotune.domains.c3.run.compute import open_compute
from autotune.domains.c3.run.open import open_overlap
from autotune.domains.c3.scenario import REDUCING, Scenario
from autotune.domains.c3.strategy import (
    HOST_NAIVE,
    HOST_SEQUENTIAL,
    NAIVE,
    SEQUENTIAL,
    HostStrategy,
    Strategy,
    normalize,
)
from autotune.task import Artifact, Config, Verdict

if TYPE_CHECKING:
    from autotune.domains.c3.run.compute import Computation

_LATE_S = 0.002  # by so much one rank comes later than the others to the second call of a check

_ISOLATED = {
    "nccl": Strategy(),
    "copy": Strategy(engine="copy"),
    "copy-pull": Strategy(engine="copy", direction="pull"),
    "sm": Strategy(engine="sm", ctas=64),
}
_ADDING = Strategy(engine="copy", ctas=128)
"""A collective that adds by copies, alone: the kernel has all SMs."""
_ISOLATED_HOST = {"gloo": HostStrategy(), "copy": HostStrategy(engine="copy")}


class Run:
    """A strategy that is loaded, with the collective that it owns; see
    :class:`autotune.domains.c3.run.base.Overlap`.
    """

    def __init__(self, computation: Computation | None, collective: Collective | None) -> None:
        self.computation, self.collective = computation, collective
        self.overlap: Overlap | None = None
        self.closed = False

    def __call__(self) -> None:
        assert self.overlap is not None
        self.overlap()

    def prepare(self) -> None:
        """Do what the first call would have to. A collective call."""
        assert self.overlap is not None
        self.overlap.prepare()

    def close(self) -> None:
        """Give everything back, once. A collective call."""
        if self.closed:
            return
        self.closed = True
        if self.overlap is not None:
            self.overlap.close()
            self.overlap = None
        if self.collective is not None:
            self.collective.close()


class RankBench:
    """A scenario's computation on this rank's device, and its collective by any strategy.

    Loading, verifying and running are collective calls: every rank does the same in the same order.
    """

    def __init__(self, scenario: Scenario, group: Group) -> None:
        self.scenario, self.group, self.device = scenario, group, group.device
        self.spec = Spec(scenario.collective, scenario.numel, scenario.dtype)
        self.computation: Computation = open_compute(scenario.compute, group.device, seed=group.rank)
        self._open: list[Run] = []

    def load(self, config: Config, artifact: Artifact) -> Run:
        """A strategy, ready to be verified.

        Raises:
            Unsupported: the devices cannot do it; one line.
        """
        return self._load(config, artifact)

    def _load(self, config: Config, artifact: Artifact | None, *, compute: bool = True, comm: bool = True) -> Run:
        self._open = [run for run in self._open if not run.closed]
        collective = open_collective(self.spec, self.group, config, artifact) if comm else None
        computation = self.computation.in_panels(int(config["panels"])) if compute else None
        run = Run(computation, collective)
        self._open.append(run)  # before anything fails on this rank alone: all close it alike
        run.overlap = open_overlap(computation, collective, config, self.device)
        if collective is not None:
            ordinary(collective.input, self.group.rank)
        return run

    def verify(self, run: Run, seed: int) -> Verdict:
        """Two calls back to back on different inputs, with one rank late to the second, then every element of both
        results, and the computation's. The verdict is this rank's own."""
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
        """What the user has without a tuner: one after the other, and on two streams in the order of a program."""
        cpu = self.device.type == "cpu"
        return {
            "sequential": partial(self._load, HOST_SEQUENTIAL if cpu else SEQUENTIAL, None),
            "naive": partial(self._load, HOST_NAIVE if cpu else NAIVE, None),
        }

    def references(self) -> Mapping[str, Callable[[], Run]]:
        """The parts alone, by which the ideal is known: "compute", and "comm:ENGINE" for each engine, which raises
        Unsupported where it does not work here."""
        cpu = self.device.type == "cpu"
        engines: Mapping[str, Strategy | HostStrategy] = _ISOLATED_HOST if cpu else _ISOLATED
        found: dict[str, Callable[[], Run]] = {
            "compute": partial(self._load, HOST_SEQUENTIAL if cpu else SEQUENTIAL, None, comm=False)
        }
        for name, strategy in engines.items():
            if name == "copy-pull" and self.spec.op in REDUCING:
                continue  # it would be the same as "copy"
            if name == "copy" and self.spec.op in REDUCING and not cpu:
                strategy = _ADDING
            found[f"comm:{name}"] = partial(self._alone, strategy.config())
        return found

    def _alone(self, config: Config) -> Run:
        from autotune.domains.c3.task import build

        config = normalize(config, self.scenario, self.device.type)
        return self._load(config, build(self.scenario, config, str(self.device)), compute=False)

    def bytes_moved(self) -> int:
        """Bytes of the computation's and the collective's inputs and outputs."""
        numel = self.scenario.input_numel + self.scenario.output_numel
        return self.computation.bytes_moved() + numel * self.scenario.nbytes // self.scenario.numel

    def close(self) -> None:
        """Close what is still open. A collective call."""
        for run in self._open:
            run.close()
        self._open = []


def open_bench(scenario: Scenario, group: Group) -> RankBench:
    """The bench of ``scenario`` on this rank. A collective call.

    Raises:
        UserError: a program that is not there, or does not run.
    """
    return RankBench(scenario, group)
