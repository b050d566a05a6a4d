"""One strategy for all ranks: rank 0 looks it up and sends it to the others, and all ranks open it or a default.

Databases may differ between hosts, or change between two look-ups, and ranks with different strategies would hang.
If a rank cannot run the strategy, all ranks use the first default that all of them can run.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from autotune.device import environment
from autotune.domain import identity_of
from autotune.domains.c3.caller import Buffers, CallerComputation, Shapes
from autotune.domains.c3.collectives.nccl import Collective, Spec, open_collective
from autotune.domains.c3.group import Group
from autotune.domains.c3.match import C3Level, C3Match, match_scenario, without_search
from autotune.domains.c3.overlap import CudaOverlap, HostOverlap, open_overlap
from autotune.domains.c3.scenario import Gemm, Scenario
from autotune.errors import UserError, first_line
from autotune.measure.child import artifact_from_wire, artifact_to_wire
from autotune.runtime.deployment import deployment
from autotune.store.records import Key, Schedule
from autotune.task import Artifact, Config

log = logging.getLogger("autotune")
Overlap = CudaOverlap | HostOverlap


def decide(scenario: Scenario, group: Group, *, db: str | None = None, strict: bool = False) -> C3Match:
    """The strategy of ``scenario`` for all ranks of ``group``. A collective call that always returns a strategy.

    A scenario without an exact match is recorded as a miss if a search could run it: see :func:`searchable`.
    """
    message: Any = None
    if group.rank == 0:
        message = match_to_wire(look_up(scenario, str(group.device), db, strict))
    match = match_from_wire(group.gather(message)[0])
    deployment().count("overlaps")
    if match.schedule is not None:
        deployment().count("overlap_hits")
    return match


def searchable(scenario: Scenario) -> bool:
    """True if a search could run the computation: a GEMM, a built-in program, or one with an input factory."""
    compute = scenario.compute
    return isinstance(compute, Gemm) or bool(compute.inputs) or ":" not in compute.name


def look_up(scenario: Scenario, device: str, db: str | None = None, strict: bool = False) -> C3Match:
    """The strategy of ``scenario`` for this rank alone; :func:`decide` has that of all ranks. Never raises."""
    side, workload = device.partition(":")[0], scenario.workload()
    try:
        identity = identity_of(workload, device)
        store = deployment().store(db)
        match = match_scenario(scenario, store, identity, environment(device), strict=strict)
        deployment().warn_differences(match.differences, other_device=match.level is C3Level.OTHER_DEVICE)
        if match.level is not C3Level.EXACT and searchable(scenario):
            deployment().record_misses([(workload, match.reason)], device, db, identity=identity)
        return match
    except Exception as error:  # the model continues with a default
        why = first_line(error)
        deployment().warn_once(f"c3 {why}", f"autotune: the look-up of {scenario.label} failed: {why}")
        log.debug("the look-up that failed", exc_info=True)
        config = without_search(scenario, side)[0]
        return C3Match(C3Level.DEFAULT, config, reason=f"the look-up failed: {why}")


def match_to_wire(match: C3Match) -> dict[str, Any]:
    """A match as JSON, including its kernels."""
    out: dict[str, Any] = {"level": str(match.level), "config": match.config, "distance": match.distance,
                           "reason": match.reason, "tuned": match.tuned.to_json() if match.tuned else None}  # fmt: skip
    if (s := match.schedule) is not None:
        out["schedule"] = {**vars(s), "key": vars(s.key), "baselines": dict(s.baselines), "artifact": None}
    if s is not None and s.artifact is not None:
        head, blob = artifact_to_wire(s.artifact)
        out["artifact"] = {"head": head, "code": base64.b64encode(blob).decode()}
    return out


def match_from_wire(data: Mapping[str, Any]) -> C3Match:
    """The inverse of :func:`match_to_wire`."""
    schedule = None
    if "schedule" in data:
        kernels = data.get("artifact")
        artifact = artifact_from_wire(kernels["head"], base64.b64decode(kernels["code"])) if kernels else None
        schedule = Schedule(**{**data["schedule"], "key": Key(**data["schedule"]["key"]), "artifact": artifact})
    tuned = Scenario.from_json(data["tuned"]) if data["tuned"] else None
    return C3Match(C3Level(data["level"]), dict(data["config"]), schedule, tuned, data["distance"], data["reason"])


@dataclass(frozen=True)
class Ready:
    """A strategy that is ready to run on the caller's tensors.

    Attributes:
        whole: the strategy, enqueued call by call; the caller's computation is not captured in a graph.
        still: the same, but the computation stays on the caller's stream or thread, where its backward pass also runs.
    """

    scenario: Scenario
    match: C3Match
    group: Group
    collective: Collective
    buffers: Buffers
    compute: CallerComputation
    whole: Overlap
    still: Overlap

    def close(self) -> None:
        """Free all parts. A collective call."""
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
    """Open the strategy of ``match``, or the first default that all ranks can run. A collective call.

    Args:
        dtype, shapes: dtype and shapes of the caller's tensors.

    Raises:
        UserError: the ranks cannot run any default.
    """
    rest = [c for c in without_search(scenario, group.device.type) if c != match.config]
    problem = ""
    for config in [match.config, *rest]:
        why = f"{match.label} cannot be run here: {problem}"
        found = C3Match(C3Level.DEFAULT, config, reason=why) if problem else match
        opened = _Opened(group)
        reason = opened.open(compute, scenario, config, found.artifact)
        failed = next(((rank, why) for rank, why in enumerate(group.gather(reason)) if why), None)
        if failed is None and opened.parts is not None:
            collective, caller, whole, still = opened.parts
            buffers = Buffers(collective.input, collective.output, dtype, shapes)
            return Ready(scenario, found, group, collective, buffers, caller, whole, still)
        assert failed is not None
        opened.give_up()
        if not problem:
            problem = f"{failed[1]} (rank {failed[0]})"
            deployment().count("overlap_faults")
            text = f"autotune: {match.label} cannot run here: {problem}; a default strategy runs"
            deployment().warn_once(f"overlap {problem}", text)
    raise UserError(f"no strategy of {scenario.label} can run here: {problem}")


class _Opened:
    """The parts of a strategy that this rank has opened."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.collective: Collective | None = None
        self.parts: tuple[Collective, CallerComputation, Overlap, Overlap] | None = None

    def open(
        self, compute: Callable[..., Any] | Gemm, scenario: Scenario, config: Config, artifact: Artifact | None
    ) -> str:
        """Open all parts; returns the reason for a failure, or ""."""
        group, side = self.group, self.group.device.type
        spec = Spec(scenario.collective, scenario.numel, scenario.dtype)
        try:
            collective = self.collective = open_collective(spec, group, config, artifact)
            caller = CallerComputation(compute)
            whole = still = open_overlap(caller, collective, config, group.device, graph=False)
            staying: Config = {**config, **({"threads": 0} if side == "cpu" else {"reserve": 0})}
            if staying != config:
                still = open_overlap(caller, collective, staying, group.device, graph=False)
            self.parts = collective, caller, whole, still
        except Exception as error:
            log.debug("a strategy that cannot be run: %s", config, exc_info=True)
            return first_line(error)
        return ""

    def give_up(self) -> None:
        """Close the opened parts on every rank; the collective only if all ranks have opened it."""
        everywhere = all(self.group.gather(self.collective is not None))
        if everywhere and self.collective is not None:
            with suppress(Exception):
                self.collective.close()
