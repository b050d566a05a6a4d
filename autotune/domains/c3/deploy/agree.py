"""One decision for all ranks: rank 0 looks a scenario up, and tells the others the strategy and its kernels.

Databases may differ between hosts, or change between two look-ups; ranks that run different strategies would hang.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autotune.device import environment
from autotune.domain import place
from autotune.domains.c3.deploy.match import C3Level, C3Match, match_scenario, without_search
from autotune.domains.c3.scenario import Gemm, Scenario
from autotune.errors import first_line
from autotune.measure.wire import artifact_from_wire, artifact_to_wire
from autotune.runtime.deployment import deployment
from autotune.store.records import Key, Schedule

if TYPE_CHECKING:
    from autotune.domains.c3.group import Group

log = logging.getLogger("autotune")


def decide(scenario: Scenario, group: Group, *, db: str | None = None, strict: bool = False) -> C3Match:
    """The strategy of ``scenario`` for all ranks of ``group``, who call this together. Never fails for want of one.

    What has no exact match is recorded as a miss, where a search could run it: see :func:`searchable`.
    """
    told: Any = None
    if group.rank == 0:
        told = match_to_wire(_look_up(scenario, str(group.device), db, strict))
    match = match_from_wire(group.gather(told)[0])
    deployment().count("overlaps")
    if match.schedule is not None:
        deployment().count("overlap_hits")
    return match


def searchable(scenario: Scenario) -> bool:
    """Whether a search could run the computation: a GEMM, a built-in program, or one whose inputs it can make."""
    compute = scenario.compute
    return isinstance(compute, Gemm) or bool(compute.inputs) or ":" not in compute.name


def _look_up(scenario: Scenario, device: str, db: str | None, strict: bool) -> C3Match:
    side, workload = device.partition(":")[0], scenario.workload()
    try:
        identity = place(workload, device)
        store = deployment().store(db)
        match = match_scenario(scenario, store, identity, environment(device), strict=strict, side=side)
        deployment().warn_differences(match.differences, other_device=match.level is C3Level.OTHER_DEVICE)
        if match.level is not C3Level.EXACT and searchable(scenario):
            deployment().record_misses([(workload, match.reason)], device, db, identity=identity)
        return match
    except Exception as error:  # the model runs on
        why = first_line(error)
        deployment().warn_once(f"c3 {why}", f"autotune: {scenario.label} could not be looked up: {why}")
        log.debug("the look-up that failed", exc_info=True)
        config = without_search(scenario, side)[0]
        return C3Match(C3Level.DEFAULT, config, reason=f"it could not be looked up: {why}")


def match_to_wire(match: C3Match) -> dict[str, Any]:
    """A match as JSON, kernels included."""
    out: dict[str, Any] = {"level": str(match.level), "config": match.config, "distance": match.distance,
                           "reason": match.reason, "tuned": match.tuned.to_json() if match.tuned else None}  # fmt: skip
    if match.schedule is None:
        return out
    s = match.schedule
    key = [s.key.workload, s.key.device, s.key.environment, s.key.policy]
    out["schedule"] = {"key": key, "config": s.config, "latency_us": s.latency_us, "baselines": dict(s.baselines),
                       "winner": s.winner, "family": s.family, "extent": s.extent, "when": s.when,
                       "others": s.others, "space": s.space}  # fmt: skip
    if s.artifact is not None:
        head, blob = artifact_to_wire(s.artifact)
        out["artifact"] = {"head": head, "code": base64.b64encode(blob).decode()}
    return out


def match_from_wire(data: Mapping[str, Any]) -> C3Match:
    """The inverse of :func:`match_to_wire`."""
    schedule = None
    if "schedule" in data:
        fields = dict(data["schedule"])
        key = Key(*(str(part) for part in fields.pop("key")))
        kernels = data.get("artifact")
        artifact = artifact_from_wire(kernels["head"], base64.b64decode(kernels["code"])) if kernels else None
        schedule = Schedule(key=key, artifact=artifact, **fields)
    tuned = Scenario.from_json(data["tuned"]) if data["tuned"] else None
    return C3Match(C3Level(data["level"]), dict(data["config"]), schedule, tuned, data["distance"], data["reason"])
