"""One scenario of the suite: its search, and the one comparison that all its figures are of."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotune.domain import identity_of, open_task
from autotune.domains.c3.measuring.ranks import Ranks
from autotune.domains.c3.results import Isolated
from autotune.domains.c3.scenario import Entry, Scenario
from autotune.domains.c3.strategy import BASELINES, by_rule
from autotune.errors import quoted_command
from autotune.measure.outcome import Outcome
from autotune.measure.pool import CompilePool
from autotune.measure.worker import Contender, WorkerFault
from autotune.store.records import Key, Measurement, Schedule
from autotune.task import REFERENCE, Config, Status, config_key
from benchmarks.c3.families import AS_THEY_ARE, families, fixed, from_label, label

if TYPE_CHECKING:
    from autotune.measure.policy import Policy
    from autotune.store import Store
    from autotune.tuner.result import Progress, Result

_RECORD, _RECORD_S = "benchmarks.c3.timeline:record", 120.0
_MOST_TRIALS, _PATIENCE = 256, 48  # as of a search without a number of trials
_FIXED = "fixed "  # names of strategies that are in every comparison
PROFILED = ("naive", "copy_engine", "tuned")
"""Whose engine is looked at with a profiler."""


class NotMeasured(Exception):
    """A scenario could not be compared; one line."""


@dataclass
class Means:
    """State shared by the scenarios of a run.

    Attributes:
        ranks: the rank processes, for searches and comparisons alike.
        rule: the strategy that the rule chooses is measured too.
    """

    store: Store
    device: str
    policy: Policy
    ranks: Ranks
    pool: CompilePool
    seed: int = 0
    rule: bool = True

    @property
    def side(self) -> str:
        return self.device.partition(":")[0]


@dataclass(frozen=True)
class _Rival:
    """One who takes part in the comparison: the name of its outcome, and its strategy."""

    outcome: str
    config: Config


class Case:
    """One scenario under measurement."""

    def __init__(self, entry: Entry, scenario: Scenario, means: Means) -> None:
        from autotune import device as devices

        self.entry, self.scenario, self.means = entry, scenario, means
        self.workload = scenario.workload()
        self.task = open_task(self.workload, means.device)
        where = identity_of(self.workload, means.device)
        store = means.store
        self.key = Key(
            store.put_workload(self.workload),
            store.put_device(where),
            store.put_environment(devices.environment(means.device)),
            means.policy.key,
        )

    def search(
        self, trials: int | None, timeout: float | None, progress: Callable[[Progress], None] | None = None
    ) -> dict[str, Any]:
        """Measure every family, then search.

        Args:
            trials: candidates in addition to the families.

        Returns:
            What to keep of the search.

        Raises:
            KeyboardInterrupt: the user interrupts the run.
        """
        import warnings

        from autotune.api import tune_workloads
        from autotune.tuner.result import BusyMachine

        space = self.task.space()
        # The largest family last: if the time ends before, it loses the smallest share of its candidates.
        own = sorted(self._families().values(), key=len)
        members = [config for family in own for config in family]
        different = {config_key(c): c for c in map(self.task.normalize, members) if space.contains(c)}
        missing = len(different.keys() - self._known().keys())
        patience = None
        if trials is not None:
            trials += missing
        elif missing:  # a finished search would not start again for the families
            trials, patience = _MOST_TRIALS, _PATIENCE
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BusyMachine)  # all is compared again here
            (result,) = tune_workloads(
                [self.workload],
                self.means.device,
                self.means.store,
                trials=trials,
                timeout=timeout,
                patience=patience,
                seed=self.means.seed,
                policy=self.means.policy,
                progress=progress,
                command=quoted_command("python", "-m", "benchmarks.c3", "--cases", self.entry.name),
                seeds={self.workload.fingerprint: list(different.values())},
                measurer=self.means.ranks,
                pool=self.means.pool,
            )
        if result.interrupted:
            raise KeyboardInterrupt
        return _kept(result)

    def compare(self) -> dict[str, Any]:
        """Everybody against each other in one interleaved run; the case as results have it.

        Raises:
            NotMeasured: nothing is stored for the scenario, or the comparison did not come about.
        """
        known = self._known()
        schedule = self._schedule()
        rivals = self._rivals(known, schedule)
        outcomes, errors = self._run(rivals)
        parts = {n: o for n, o in outcomes.items() if n.startswith(REFERENCE) and o.latency_us}
        alone = Isolated.of({n: min(o.samples) for n, o in parts.items()})
        medians = Isolated.of({n: o.latency_us for n, o in parts.items() if o.latency_us})
        sequential = outcomes["sequential"].latency_us if "sequential" in outcomes else None
        if alone is None or medians is None or sequential is None:
            why = "; ".join(f"{name}: {reason}" for name, reason in errors.items())
            raise NotMeasured(f"the computation, the collective or both one after the other could not be timed: {why}")
        seen = self._seen([rivals[name] for name in PROFILED if name in rivals])
        entries = {name: self._figures(r, outcomes, alone, seen.get(r.outcome)) for name, r in rivals.items()}
        scenario = self.scenario
        return {
            "name": self.entry.name,
            "kind": alone.kind,
            "class": self.entry.expected,
            "collective": scenario.collective,
            "compute": scenario.compute.label,
            "nbytes": scenario.nbytes,
            "scenario": scenario.to_json(),
            "t_gemm_ms": _ms(alone.compute),
            "t_comm_ms": _ms(alone.comm),
            "t_comm_engine": alone.engine,
            "t_comm_by_engine_ms": {name: _ms(us) for name, us in alone.engines.items()},
            "t_gemm_median_ms": _ms(medians.compute),
            "t_comm_median_by_engine_ms": {name: _ms(us) for name, us in medians.engines.items()},
            "ideal": round(alone.ideal, 4),
            "sequential_ms": _ms(sequential),
            "rounds": max(len(o.samples) for o in outcomes.values()),
            "strategies": {name: entries.get(name) for name in (*self._families(), "tuned")},
            "beside": {n.removeprefix(_FIXED): e["ms"] for n, e in entries.items() if n.startswith(_FIXED) and e},
            "default": entries.get("default"),
            "measured": self._labelled(known),
            "errors": errors,
            "timeline": {n: seen[rivals[n].outcome] for n in ("naive", "tuned") if rivals[n].outcome in seen},
        }

    def beside_tuned(self, strategy: str) -> dict[str, Any] | None:
        """A strategy and the tuned one in one interleaved run; None where one of them fails.

        Args:
            strategy: its label.

        Raises:
            NotMeasured: as :meth:`compare`.
        """
        own = self._tuned(self._schedule())
        rivals = self._sharing({"tuned": own, "fixed": self.task.normalize(from_label(strategy, self.means.side))})
        outcomes, _ = self._run(rivals)
        times = {name: outcomes[r.outcome].latency_us for name, r in rivals.items() if r.outcome in outcomes}
        tuned, fixed = times.get("tuned"), times.get("fixed")
        if tuned is None or fixed is None:
            return None
        return {"label": strategy, "ms": _ms(fixed), "tuned_ms": _ms(tuned)}

    def _families(self) -> Mapping[str, list[Config]]:
        return families(self.means.side, self.scenario.collective)

    def _known(self) -> dict[str, Measurement]:
        """The time of each strategy in the search, or its failure; a repeated timing replaces a first one."""
        key = self.key
        every = self.means.store.measurements(key.workload, key.device, key.environment, key.policy)
        order = {"screen": 0, "repeat": 1}
        found: dict[str, Measurement] = {}
        for m in sorted((m for m in every if m.stage in order), key=lambda m: order[m.stage]):
            found[config_key(m.config)] = m
        return found

    def _schedule(self) -> Schedule:
        found = self.means.store.schedule_of(self.key)
        if found is None:
            raise NotMeasured("nothing is stored for it: run without --no-search")
        return found

    def _best(self, members: Sequence[Config], known: Mapping[str, Measurement]) -> Config | None:
        keys = {config_key(self.task.normalize(c)) for c in members}
        working = [m for k, m in known.items() if k in keys and m.status is Status.OK and m.latency_us is not None]
        return min(working, key=lambda m: m.latency_us or 0.0).config if working else None

    def _rivals(self, known: Mapping[str, Measurement], schedule: Schedule) -> dict[str, _Rival]:
        """By the names of results."""
        side = self.means.side
        chosen: dict[str, Config] = {}
        for name, members in self._families().items():
            if name in AS_THEY_ARE:
                chosen[name] = self.task.normalize(members[0])
            elif (best := self._best(members, known)) is not None:
                chosen[name] = best
        chosen["tuned"] = self._tuned(schedule)
        if self.means.rule:
            chosen["default"] = by_rule(self.scenario, side)[0]
        chosen |= {_FIXED + label(config, side): self.task.normalize(config) for config in fixed(side)}
        return self._sharing(chosen)

    def _tuned(self, schedule: Schedule) -> Config:
        """The deployed strategy, if a baseline may have won."""
        own = schedule.config
        return self.task.normalize(BASELINES[self.means.side][schedule.winner] if own is None else own)

    def _sharing(self, chosen: Mapping[str, Config]) -> dict[str, _Rival]:
        """Equal strategies share one outcome, be it a baseline's."""
        outcome = {config_key(self.task.normalize(c)): name for name, c in BASELINES[self.means.side].items()}
        rivals = {}
        for name, config in chosen.items():
            rivals[name] = _Rival(outcome.setdefault(config_key(config), name), config)
        return rivals

    def _run(self, rivals: Mapping[str, _Rival]) -> tuple[dict[str, Outcome], dict[str, str]]:
        """Outcomes by name, and why those that failed did."""
        contenders, errors = [], {}
        for rival in {rival.outcome: rival for rival in rivals.values()}.values():
            if rival.outcome in BASELINES[self.means.side]:
                continue
            built = self.means.pool.submit(self.workload, self.means.device, rival.config).result()
            if built.artifact is None:
                errors[rival.outcome] = built.reason
            else:
                contenders.append(Contender(rival.outcome, rival.config, built.artifact))
        self.means.ranks.open(self.workload)
        try:
            outcomes = self.means.ranks.compare(contenders, seed=self.means.seed + 2)
        except WorkerFault as fault:
            raise NotMeasured(str(fault)) from None
        errors |= {name: outcome.reason for name, outcome in outcomes.items() if not outcome.ok}
        return {name: outcome for name, outcome in outcomes.items() if outcome.ok}, errors

    def _figures(
        self, rival: _Rival, outcomes: Mapping[str, Outcome], alone: Isolated, seen: Mapping[str, Any] | None
    ) -> dict[str, Any] | None:
        outcome = outcomes.get(rival.outcome)
        if outcome is None or outcome.latency_us is None:
            return None
        return {
            "ms": _ms(outcome.latency_us),
            **alone.figures(outcome.latency_us),
            "noise": round(outcome.noise or 0.0, 4),
            "strategy": dict(rival.config),
            "label": label(rival.config, self.means.side),
            "engine_seen": dict(seen["seen"]) if seen else None,
        }

    def _seen(self, rivals: Sequence[_Rival]) -> dict[str, dict[str, Any]]:
        """The engines in the first rank's profile, by outcome; empty without a profile."""
        configs = {rival.outcome: dict(rival.config) for rival in rivals}
        arguments = {"scenario": self.scenario.to_json(), "configs": configs}
        try:
            found: dict[str, dict[str, Any]] = self.means.ranks.call(_RECORD, arguments, _RECORD_S)[0]
        except WorkerFault as fault:
            say(f"  no profile: {fault}")
            return {}
        return found

    def _labelled(self, known: Mapping[str, Measurement]) -> dict[str, float | None]:
        """Milliseconds of every measured strategy, null for one that failed. A member of a family has
        the same name in all scenarios, whatever its configuration in this one."""
        side = self.means.side
        found = {label(m.config, side): m for m in known.values() if m.status is not Status.INVALID}
        for config in (c for family in self._families().values() for c in family):
            m = known.get(config_key(self.task.normalize(config)))
            if m is not None:
                found[label(config, side)] = m
        return {n: None if m.latency_us is None else _ms(m.latency_us) for n, m in sorted(found.items())}


def _kept(result: Result) -> dict[str, Any]:
    counts = ("measured", "reused", "failed", "restarts")
    names = (*counts, "winner", "deployed_us", "stop", "seconds", "restart_s", "error")
    return {name: value for name, value in result.to_json().items() if name in names}


def _ms(us: float) -> float:
    return round(us / 1e3, 5)


def say(text: str) -> None:
    """A line on stderr."""
    print(text, file=sys.stderr, flush=True)
