"""The C3 domain: a computation beside a collective as something to be searched. It is measured by several processes,
:class:`autotune.domains.c3.measuring.ranks.Ranks`, each of which has an
:class:`autotune.domains.c3.measuring.bench.RankBench`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from autotune.domains.c3 import rule
from autotune.domains.c3.links import links
from autotune.domains.c3.scenario import Scenario
from autotune.domains.c3.strategy import (
    HOST_NAIVE,
    HOST_SEQUENTIAL,
    NAIVE,
    SEQUENTIAL,
    Strategy,
    improper,
    kernel_of,
    normalize,
    reject,
)
from autotune.errors import BuildError, Unsupported, UserError
from autotune.measure.policy import MIB, Policy
from autotune.task import Artifact, Choice, Config, Task, config_key
from autotune.workload import Workload

if TYPE_CHECKING:
    from autotune.device import DeviceIdentity
    from autotune.measure.worker import Measurer
    from autotune.space import Space

_GENERATOR = "c3-1"


class C3Task(Task):
    """A scenario on the devices from ``device`` on; see ``autotune.task.Task``.

    Raises:
        UserError: the workload's scenario does not fit together.
    """

    def __init__(self, workload: Workload, device: str) -> None:
        self.workload, self.device = workload, device
        self.scenario = Scenario.from_json(workload.spec)
        self.side = side_of(device)

    @cached_property
    def sms(self) -> int:
        """Streaming multiprocessors of the device; 0 on a CPU."""
        return _target(self.device)[1] if self.side == "cuda" else 0

    def space(self, file: str | None = None) -> Space:
        from autotune.space import load_space

        space = load_space("c3", self.side, file)
        limits = {"panels": self._possible, "chunks": self._possible}
        limits |= {"reserve": self._possible} if self.side == "cuda" else {"threads": self._fits}
        for name, possible in limits.items():
            space = space.restrict(name, [c for c in space[name].choices if possible(name, c)] or [space_default(name)])
        return space

    def _possible(self, name: str, choice: Choice) -> bool:
        """Whether a choice of one parameter has an effect on this scenario, beside the defaults of the others."""
        config = Strategy(order="comm_first", engine="copy").config() if self.side == "cuda" else dict(HOST_NAIVE)
        config[name] = choice
        return normalize(config, self.scenario, self.side)[name] == choice and self.reject(config) is None

    def _fits(self, name: str, threads: Choice) -> bool:
        """Whether so many threads leave something of a rank's share of the processors; all of it is the choice 0."""
        from autotune.device import usable_processors

        return int(threads) < max(1, usable_processors() // self.scenario.ranks)

    def default(self) -> Config:
        return rule.default(self.scenario, self.side)

    def seeds(self) -> Sequence[Config]:
        """Strategies by rule, and those of a user without a tuner."""
        plain = [HOST_SEQUENTIAL, HOST_NAIVE] if self.side == "cpu" else [SEQUENTIAL, NAIVE]
        suggested = (self.adapt(c) for c in rule.choose(self.scenario, self.side))
        found = [*(c for c in suggested if c is not None), *map(self.normalize, plain)]
        return list({config_key(c): c for c in found}.values())

    def reject(self, config: Config) -> str | None:
        return reject(config, self.scenario, self.side, sms=self.sms)

    def normalize(self, config: Config) -> Config:
        return normalize(config, self.scenario, self.side)

    def adapt(self, config: Config) -> Config | None:
        fitted = self.space().project(config)
        if fitted is None:
            return None
        fitted = self.normalize(fitted)
        return fitted if self.reject(fitted) is None else None

    def build(self, config: Config) -> Artifact:
        return build(self.scenario, config, self.device)


def side_of(device: str) -> str:
    """ "cuda" or "cpu"."""
    return device.partition(":")[0]


def space_default(name: str) -> Choice:
    """The value of a parameter with which it has no effect."""
    return 0 if name in ("reserve", "threads") else 1


def _target(device: str) -> tuple[str, int]:
    from autotune.device import describe_cuda

    return describe_cuda(device)


def build(scenario: Scenario, config: Config, device: str) -> Artifact:
    """The kernel that a strategy needs, with what it does in ``launch["op"]``; see
    :func:`autotune.domains.c3.strategy.kernel_of`.

    Raises:
        BuildError: it cannot be compiled; or the strategy, which may come from a database, is none.
    """
    if why := improper(config, side_of(device)):
        raise BuildError(why)
    if side_of(device) == "cpu":
        return Artifact("cpu", (), generator=_GENERATOR)
    target = _target(device)[0]
    op = kernel_of(config, scenario.collective)
    if not op:
        return Artifact(target, (), generator=_GENERATOR)
    from autotune.domains.c3.collectives.kernels import build_comm

    try:
        kernel = build_comm(op, scenario.ranks, scenario.dtype, target)
    except Unsupported as error:
        raise BuildError(str(error)) from error
    return Artifact(target, (kernel,), generator=_GENERATOR)


def open_measurer(workload: Workload, device: str, policy: Policy) -> Measurer:
    """The ranks, which take the devices from ``device`` on.

    Raises:
        UserError: there are fewer GPUs than ranks.
    """
    check_devices(int(workload.spec["ranks"]), device)
    from autotune.domains.c3.measuring.ranks import Ranks

    return Ranks(workload, device, policy)


def check_devices(ranks: int, device: str) -> None:
    """Refuse a number of ranks that the machine has no GPUs for.

    Raises:
        UserError: there are fewer GPUs, from ``device`` on, than ranks.
    """
    if side_of(device) == "cpu" or int(os.environ.get("WORLD_SIZE", "1")) >= ranks:  # torchrun's ranks have their own
        return
    import torch

    first = int(device.partition(":")[2] or 0)
    there = max(0, torch.cuda.device_count() - first)
    if there < ranks:
        after = f" from cuda:{first} on" if first else ""
        raise UserError(
            f"{ranks} ranks need {ranks} GPUs, but there are {there}{after}; use fewer ranks, or --device cpu"
        )


def place(workload: Workload, device: str) -> DeviceIdentity:
    """One of the devices, how many take part, and how they are linked."""
    from autotune.device import identify

    ranks = int(workload.spec["ranks"])
    one = identify(device)
    return replace(one, count=ranks, links=links(device, ranks) if one.kind == "cuda" else "")


CUDA = Policy(
    method="ranks-graph",
    screen_repeats=9,
    screen_s=0.4,
    repeat_repeats=20,
    repeat_top=4,
    final_rounds=20,
    final_top=3,
    timeout_s=20.0,
    load_s=60.0,
    wake_s=0.05,
)
CPU = replace(CUDA, method="ranks-cpu", warmup=2, cold_bytes=16 * MIB)


def policy(device: str) -> Policy:
    """How scenarios are measured: every sample begins on all ranks at once, and the slowest rank's time counts.

    Samples are dear, as they are long, and good, as a rank has its device to itself.
    """
    return CUDA if side_of(device) == "cuda" else CPU
