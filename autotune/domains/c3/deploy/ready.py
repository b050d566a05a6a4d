"""Making what a strategy needs at deploy time; or what another needs, where this machine or group cannot run it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotune.domains.c3.collectives.base import Collective, Spec
from autotune.domains.c3.collectives.open import open_collective
from autotune.domains.c3.deploy.buffers import Buffers, Shapes
from autotune.domains.c3.deploy.compute import CallerCompute
from autotune.domains.c3.deploy.match import C3Level, C3Match, without_search
from autotune.domains.c3.run.base import Overlap
from autotune.domains.c3.run.open import open_overlap
from autotune.domains.c3.scenario import Gemm, Scenario
from autotune.errors import UserError, first_line
from autotune.runtime.deployment import deployment
from autotune.task import Artifact, Config

if TYPE_CHECKING:
    import torch

    from autotune.domains.c3.group import Group

log = logging.getLogger("autotune")


@dataclass(frozen=True)
class Ready:
    """A strategy, ready to run on tensors of the caller.

    Attributes:
        whole: the strategy as it is, enqueued call by call: what a caller's computation does is not captured unasked.
        still: the same with the computation left on the caller's stream or thread, where its backward will run too.
    """

    scenario: Scenario
    match: C3Match
    group: Group
    collective: Collective
    buffers: Buffers
    compute: CallerCompute
    whole: Overlap
    still: Overlap

    def close(self) -> None:
        """Give everything back. A collective call."""
        self.whole.close()
        if self.still is not self.whole:
            self.still.close()
        self.collective.close()


def make_ready(
    compute: Callable[..., Any] | Gemm,
    scenario: Scenario,
    match: C3Match,
    group: Group,
    dtype: torch.dtype,
    shapes: Shapes,
) -> Ready:
    """The strategy of ``match``, or the first default that all ranks can run. A collective call.

    Args:
        dtype, shapes: of the caller's tensors.

    Raises:
        UserError: not even the plainest one can be run.
    """
    rest = [c for c in without_search(scenario, group.device.type) if c != match.config]
    problem = ""
    for nth, config in enumerate([match.config, *rest]):
        if nth:
            why = f"{match.label} cannot be run here: {problem}"
            found = C3Match(C3Level.DEFAULT, config, reason=why)
        else:
            found = match
        opened = _Opened(group)
        reason = opened.open(compute, scenario, config, found.artifact)
        failed = next(((rank, why) for rank, why in enumerate(group.gather(reason)) if why), None)
        if failed is None and opened.parts is not None:
            collective, caller, whole, still = opened.parts
            buffers = Buffers(collective.input, collective.output, dtype, shapes)
            return Ready(scenario, found, group, collective, buffers, caller, whole, still)
        assert failed is not None
        opened.give_up()
        if not nth:
            problem = f"{failed[1]} (rank {failed[0]})"
            deployment().count("overlap_faults")
            text = f"autotune: {match.label} cannot be run here: {problem}; a default is"
            deployment().warn_once(f"overlap {problem}", text)
    raise UserError(f"no strategy of {scenario.label} can be run here: {problem}")


class _Opened:
    """What has been opened of a strategy on this rank."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.collective: Collective | None = None
        self.parts: tuple[Collective, CallerCompute, Overlap, Overlap] | None = None

    def open(
        self, compute: Callable[..., Any] | Gemm, scenario: Scenario, config: Config, artifact: Artifact | None
    ) -> str:
        """Open everything; returns why it cannot be, or ""."""
        group, side = self.group, self.group.device.type
        spec = Spec(scenario.collective, scenario.numel, scenario.dtype)
        try:
            collective = self.collective = open_collective(spec, group, config, artifact)
            caller = CallerCompute(compute, int(config["panels"]))
            moving, staying = _eager(config, side), _eager(_still(config, side), side)
            whole = still = open_overlap(caller, collective, moving, group.device)
            if staying != moving:
                still = open_overlap(caller, collective, staying, group.device)
            self.parts = collective, caller, whole, still
        except Exception as error:
            log.debug("a strategy that cannot be run: %s", config, exc_info=True)
            return first_line(error)
        return ""

    def give_up(self) -> None:
        """Close what was opened, on every rank alike; the collective only where all ranks have it."""
        everywhere = all(self.group.gather(self.collective is not None))
        if everywhere and self.collective is not None:
            with suppress(Exception):
                self.collective.close()


def _eager(config: Mapping[str, Any], side: str) -> Config:
    return {**config, "launch": "eager"} if side == "cuda" else dict(config)


def _still(config: Config, side: str) -> Config:
    if side == "cpu":
        return {**config, "threads": 0}
    return {**config, "reserve": 0, "priority": "equal" if config["priority"] == "gemm" else config["priority"]}
