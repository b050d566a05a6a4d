"""A case's entry in the result file, or why it has none: all of its measuring, whichever process does it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch

from autotune.bench.contenders import ProcessLock, inductor_takes_lock
from autotune.errors import first_line
from autotune.measure.policy import Policy
from benchmarks.fusion.cases.case import Case
from benchmarks.fusion.instrument import CONTENDERS, Instrument
from benchmarks.fusion.measure import Figures, NotMeasured, measure, to_case

PROFILE_S = 300.0
"""Seconds that the profiling process may take for a case; twice that where others share the processors and the lock."""


@dataclass(frozen=True)
class Plan:
    """Options shared by all cases of a run.

    Attributes:
        device: "cpu" or "cuda:N".
        size: "gpu" or "cpu".
        db: database that the profiling process deploys from; None for the default.
        policy: how to time.
        bandwidth: bytes a microsecond of a copy.
        groups, sets: peers, as of :func:`benchmarks.fusion.peers.wanted`.
        databases: by ablation, where what it found is looked up; None for the default database.
        jobs: processes that measure side by side.
    """

    device: str
    size: str
    db: str | None
    policy: Policy
    bandwidth: float
    groups: frozenset[str]
    sets: Mapping[str, Mapping[str, Any]]
    databases: Mapping[str, str | None]
    jobs: int = 1

    def to_json(self) -> dict[str, Any]:
        """A JSON object from which :meth:`from_json` makes an equal plan."""
        return asdict(self) | {"policy": self.policy.to_json(), "groups": sorted(self.groups)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """Rebuild a plan."""
        own = {"policy": Policy.from_json(data["policy"]), "groups": frozenset(data["groups"])}
        return cls(**{**data, **own})


@dataclass(frozen=True)
class Answer:
    """The outcome of a case.

    Attributes:
        entry: its object in the result file; None if it could not be measured.
        missing: why not.
        spent: the process that measured may have kept an error of the device, or its memory: better go on in another.
    """

    entry: dict[str, Any] | None
    missing: str = ""
    spent: bool = False


class Entries:
    """Measures cases in this process, and in a separate profiling process. A context manager.

    What is timed, Inductor's own timing included, is timed while this process has its turn on the device
    (:mod:`autotune.bench.contenders`).
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._lock = ProcessLock(plan.device, plan.policy.lock_s)
        timeout = PROFILE_S if plan.jobs == 1 else 2 * PROFILE_S
        self._instrument = Instrument(plan.device, plan.db, timeout, plan.policy.lock_s)
        self._open = ExitStack()

    def __enter__(self) -> Entries:
        use(self.plan.device)
        self._open.enter_context(inductor_takes_lock(self._lock))
        self._open.enter_context(self._instrument)
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    def of(self, case: Case) -> Answer:
        """Measure a case."""
        plan, begin, waited = self.plan, time.monotonic(), self._lock.waited_s
        try:
            figures = measure(
                case, plan.size, plan.device, plan.policy, plan.groups, plan.sets, plan.databases, self._lock
            )
        except NotMeasured as error:
            return Answer(None, str(error))
        except RuntimeError as error:  # out of memory, or a device that gave up
            return Answer(None, first_line(error), spent=True)
        entry = to_case(case, plan.size, figures, plan.bandwidth)
        if plan.device.startswith("cuda"):
            entry |= self._profile(case, entry, figures)
        entry["measure_s"] = round(time.monotonic() - begin, 1)
        entry["waited_s"] = round(self._lock.waited_s - waited, 1)
        return Answer(entry)

    def _profile(self, case: Case, entry: Mapping[str, Any], figures: Figures) -> dict[str, Any]:
        """The fields that the profiling process adds to a case: XLA's time, kernel times and launches of all."""
        best = entry["inductor_best"]
        chosen = {"autotune"} | {name for name in ("eager", "inductor") if name in figures.us}
        chosen |= {"xla"} & self.plan.groups
        if best is not None and best != "inductor":
            chosen.add("inductor_best")
        contenders = [name for name in CONTENDERS if name in chosen]
        answer = self._instrument.ask(case.name, self.plan.size, contenders, self.plan.sets.get(best or "", {}))
        times = answer["times"]
        found: dict[str, Any] = {f"{name}_kernels_us": times[name]["us"] for name in times if name != "xla"}
        found["xla_us"] = times["xla"]["us"] if "xla" in times else None
        found["kernels"] = {name: times[name]["kernels"] for name in times}
        return found | {"not_profiled": answer["errors"], "instrument_versions": answer["versions"]}


def use(device: str) -> None:
    """Make this process ready to time on ``device``: the current one, or a CPU's cores."""
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    else:
        from autotune.measure.timer import pin_cpu

        pin_cpu()
