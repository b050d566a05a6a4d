"""The first phase: propose, compile and screen candidates until a budget is spent or nothing more is gained."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field

from optuna.trial import Trial

from autotune.measure.outcome import Outcome
from autotune.measure.pool import Built
from autotune.space import Space
from autotune.store.records import Measurement
from autotune.task import Config, Status, config_key
from autotune.tuner import seeds
from autotune.tuner.context import Session
from autotune.tuner.options import Budget
from autotune.tuner.phases.finals import is_at_floor
from autotune.tuner.samplers import is_guided
from autotune.tuner.seeds import Pruning, Seed
from autotune.tuner.studies import History
from autotune.tuner.threads import LEASE_S

_ASKS = 24  # consecutive useless proposals of the sampler before a search without it
_LISTABLE = 20_000  # largest space that this search enumerates
_DRAWS = 2000  # random candidates drawn from a larger space
_POLL_S = 0.25  # between queries of other searches' measurements
_QUIET_S = 5.0  # limit of a CPU measurement's wait for the compilation of its batch
_POLISHED = 10
"""Known candidates before neighbours of the best alternate with the sampler's proposals. With fewer, the best is
arbitrary."""
_GUESSED = 10
"""Maximum of proposals in progress before any result. Optuna draws its first ten at random; later proposals improve
with the number of results."""
_GAIN = 0.01
_SPARED = ("default", "asked", "elsewhere")
"""Origins of seeds that are measured regardless of the cost model."""
_HARVEST_S, _HARVEST_SHARE = 1.0, 0.25  # limits for measuring compiled candidates after the time
NO_GAIN = "no gain"
EXHAUSTED = ("every candidate of the space is known", "no untried candidate was found")
SEEDS = "what was suggested is measured"
TIME_UP = "the time is up"
TRIALS_UP = "the trials are used up"
AT_FLOOR = "nothing is faster than moving the bytes"
ALIKE = "a workload that differs in constants alone was searched"


@dataclass
class _Candidate:
    config: Config
    trials: list[Trial] = field(default_factory=list)
    future: Future[Built] | None = None


class _Queue:
    """Seeds, each computed when it is needed; true while there are any."""

    def __init__(self, seeds: Iterable[Seed]) -> None:
        self._seeds = iter(seeds)
        self._first: Seed | None = None

    def __bool__(self) -> bool:
        self._first = self._first or next(self._seeds, None)
        return self._first is not None

    def take(self) -> Seed:
        first, self._first = self._first or next(self._seeds), None
        return first


class Explorer:
    """Runs the screening phase of a session.

    Candidates are compiled before their turn to be measured. On a GPU, compilation and measurement overlap. On a CPU
    they alternate, since compiling would disturb the measurement.

    Args:
        until_s: seconds after the session's start when screening ends; None for no limit.
        patience: measured candidates without a gain of 1% after which screening ends; 0 for never. A nonzero patience
            also ends it at the floor, where no gain is possible.
        history: the study that proposes; None for seeds only (and neighbours, with ``polish``).
        polish: True to replace every other proposal of the sampler by a neighbour of the best so far. Kernels differ by
            one or two per cent near the optimum, and a sampler that models the whole space resolves that slowly.
        prune: True to skip proposals that the cost model expects to be slow.
        least: number of the session's measured candidates before ``until_s`` ends it.
    """

    def __init__(
        self,
        session: Session,
        space: Space,
        history: History | None,
        seeds: Iterable[Seed],
        *,
        until_s: float | None,
        patience: int,
        polish: bool = False,
        prune: bool = False,
        least: int = 0,
    ) -> None:
        self.s, self.space, self.history = session, space, history
        self.context = session.context
        self._until_s, self._patience, self._polish, self._least = until_s, patience, polish, least
        self._listable = space.size <= _LISTABLE
        self._names = {p.name for p in space}
        self._seeds = _Queue(seeds)
        self._flying: dict[str, _Candidate] = {}
        self._awaited: dict[str, _Candidate] = {}
        self._polled = self._batch = 0.0
        self._attempts = 0
        self._since_gain = 0
        self._mark: float | None = None
        self._exhausted = False
        self._polished = False
        self._rng = random.Random(self.context.options.seed)
        self._prune = Pruning(session) if prune else None
        self._hopeless: set[str] = set()
        self._beside = session.task.device.startswith("cuda")
        self._depth = self.context.pool.processes + (2 if self._beside else 0)

    def run(self) -> str:
        """Screen candidates until a stop condition holds; return the reason.

        Raises:
            WorkerFault: the machine failed.
        """
        began = self.s.elapsed
        try:
            while True:
                reason = self._enough(began)
                if reason == TIME_UP and self._until_s is not None:
                    granted = max(0.0, self._until_s - began)
                    self._harvest(self.s.elapsed + min(_HARVEST_S, _HARVEST_SHARE * granted))
                if reason and reason != TRIALS_UP:
                    return reason
                self._settle()
                if self._beside or not self._flying:
                    self._fill()
                if self._flying:
                    self._advance()
                elif self._awaited and self._attempts < self.s.trials:
                    time.sleep(_POLL_S)  # other searches are measuring all that is left
                elif self._attempts >= self.s.trials:
                    return TRIALS_UP
                elif self._exhausted:
                    if self.history is None:
                        return SEEDS
                    return EXHAUSTED[0] if self._listable else EXHAUSTED[1]
        finally:
            self._abandon()

    def _enough(self, began: float) -> str:
        if self.context.interrupt.requested:
            return "interrupted"
        late = self._until_s is not None and self.s.elapsed >= self._until_s
        if late and ((self.s.tried and self.s.measured >= self._least) or self._has_waited(began)):
            return TIME_UP
        if self._patience and is_at_floor(self.s):
            return AT_FLOOR
        if self._attempts >= self.s.trials:
            return TRIALS_UP
        if self._patience and self._since_gain >= self._patience and not self._seeds:
            return f"{NO_GAIN} of {_GAIN:.0%} in {self._patience} candidates"
        return ""

    def _has_waited(self, began: float) -> bool:
        """True if candidates take longer to compile than the budget waits for them, after the time or the begin."""
        waits = self.s.budget.waits
        if waits is None or self._until_s is None:
            return False
        return self.s.elapsed >= max(self._until_s, began) + waits

    def _fill(self) -> None:
        """Keep enough candidates compiling. After the seeds, the number of results limits the proposals in progress."""
        self._batch = time.monotonic()
        while self._attempts < self.s.trials and not self._exhausted:
            room = self._depth if self._seeds else min(self._depth, max(_GUESSED, len(self.s.known)))
            if len(self._flying) >= room:
                return
            candidate = self._propose()
            if candidate is None:
                return
            self._start(candidate)

    def _start(self, candidate: _Candidate) -> None:
        self._attempts += 1
        candidate.future = self.s.build(candidate.config)
        self._flying[config_key(candidate.config)] = candidate

    def _propose(self) -> _Candidate | None:
        """Return the next candidate that this search has to measure, or None."""
        while self._seeds:
            seed = self._seeds.take()
            if (found := self._admit(seed.config, spared=seed.origin in _SPARED)) is not None:
                return found
        self._polished = self.history is None or (len(self.s.known) >= _POLISHED and not self._polished)
        if self._polish and self._polished and (found := self._neighbour()) is not None:
            return found
        if self.history is not None:
            for _ in range(_ASKS):
                if self.context.interrupt.requested:
                    return None
                trial, config = self.history.ask()
                if (found := self._admit(config, trial)) is not None:
                    return found
            for config in self._fresh():
                if (found := self._admit(config)) is not None:
                    return found
        self._exhausted = True
        return None

    def _neighbour(self) -> _Candidate | None:
        """Return an unknown neighbour of the best candidate that has one, or None."""
        for m in self._inside():
            steps = self.space.neighbours(m.config)
            self._rng.shuffle(steps)
            for config in map(self.s.task.normalize, steps):
                key = config_key(config)
                if self._met(key):
                    continue
                if (found := self._admit(config)) is not None:
                    return found
        return None

    def _met(self, key: str) -> bool:
        """True if a candidate is known, in progress or pruned."""
        return key in self.s.known or key in self._flying or key in self._awaited or key in self._hopeless

    def _inside(self) -> list[Measurement]:
        """Return the working candidates of this space, fastest first, without those of other compositions."""
        return [m for m in self.s.ranking() if m.config.keys() == self._names]

    def _fresh(self) -> list[Config]:
        """Return up to four unknown candidates, found without the sampler: random ones and neighbours of the best."""
        if self._listable:
            pool = [self.space.at(i) for i in range(self.space.size)]
            self._rng.shuffle(pool)
        else:
            pool = [c for m in self._inside()[:3] for c in self.space.neighbours(m.config)]
            pool += [self.space.sample(self._rng) for _ in range(_DRAWS)]
        fresh = []
        for config in map(self.s.task.normalize, pool):
            key = config_key(config)
            if self._met(key) or self.s.task.reject(config):
                continue
            fresh.append(config)
            if len(fresh) == 4:
                break
        return fresh

    def _admit(self, config: Config, trial: Trial | None = None, spared: bool = False) -> _Candidate | None:
        """Return the candidate if this search has to measure it. If not, its trial is finished now or later.

        Args:
            spared: True to measure it regardless of the cost model.
        """
        config = self.s.task.normalize(config)
        key = config_key(config)
        for busy in (self._flying.get(key), self._awaited.get(key)):
            if busy is not None:
                if trial is not None:
                    busy.trials.append(trial)
                return None
        candidate = _Candidate(config, [trial] if trial is not None else [])
        known = self.s.known.get(key)
        if known is None and (why := self.s.task.reject(config)) is not None:
            invalid = Outcome(Status.INVALID, reason=why)
            known = self.s.keep(Measurement.of(self.s.key, config, "screen", invalid, self.s.context.run))
            self.s.failed[str(Status.INVALID)] += 1
        if known is not None:
            self._answer(candidate, known)
            return None
        if self._prune and not spared and (expected := self._prune.hopeless(config)) is not None:
            self._hopeless.add(key)
            if trial is not None and self.history is not None:
                self.history.skip(trial, config, expected)
            return None
        if self.context.store.claim(self.s.key, config, "screen", self.context.owner, LEASE_S):
            return candidate
        # Another search measures it, or has done so since this one began.
        if (measured := self.context.store.get_measurement(self.s.key, config, "screen")) is None:
            self._awaited[key] = candidate
        else:
            self._reuse(candidate, measured)
        return None

    def _reuse(self, candidate: _Candidate, measured: Measurement) -> None:
        self.s.known[config_key(candidate.config)] = measured
        self.s.reused += 1
        self._answer(candidate, measured)

    def _settle(self) -> None:
        """Use the new measurements of other searches, and claim the candidates that they released."""
        if not self._awaited or time.monotonic() - self._polled < _POLL_S:
            return
        self._polled = time.monotonic()
        for key, candidate in list(self._awaited.items()):
            m = self.context.store.get_measurement(self.s.key, candidate.config, "screen")
            if m is not None:
                del self._awaited[key]
                self._reuse(candidate, m)
            elif self._attempts < self.s.trials and self.context.store.claim(
                self.s.key, candidate.config, "screen", self.context.owner, LEASE_S
            ):
                del self._awaited[key]
                self._start(candidate)

    def _advance(self) -> None:
        """Measure one compiled candidate, or wait briefly for one."""
        futures = {c.future: key for key, c in self._flying.items() if c.future is not None}
        done, compiling = wait(futures, timeout=_POLL_S, return_when=FIRST_COMPLETED)
        if not done:
            return
        if compiling and not self._beside and time.monotonic() - self._batch < _QUIET_S:
            wait(compiling, timeout=_POLL_S)
            return
        self._take(next(k for k, c in self._flying.items() if c.future in done))  # in the order of proposal

    def _harvest(self, until_s: float) -> None:
        """Measure the compiled candidates after the time is up, since measuring is cheap compared with compiling.

        Does nothing on a CPU while candidates are still compiling.

        Args:
            until_s: seconds after the session's start when the last measurement may begin.
        """
        if not self._beside and not all(c.future is not None and c.future.done() for c in self._flying.values()):
            return
        for key, c in list(self._flying.items()):
            if self.context.interrupt.requested or self.s.elapsed >= until_s:
                return
            if c.future is not None and c.future.done():
                self._take(key)

    def _take(self, key: str) -> None:
        candidate = self._flying[key]
        assert candidate.future is not None
        best = self.s.best_us
        limit = best * self.context.policy.hopeless if best is not None else None
        m = self.s.measure(candidate.config, candidate.future.result(), "screen", limit)
        del self._flying[key]
        if m.run == self.context.run:
            self.s.measured += 1
            if m.status is not Status.OK:
                self.s.failed[str(m.status)] += 1
        else:
            self.s.reused += 1
        self._count(m)
        self._answer(candidate, m)
        what = f"{m.latency_us:.1f} us" if m.latency_us is not None else f"{m.status}: {m.reason}"
        self.s.report("search", what)

    def _count(self, m: Measurement) -> None:
        """Count measured candidates since the last gain."""
        if not self.s.allows(m.config):
            return
        if m.latency_us is not None and (self._mark is None or m.latency_us < self._mark * (1 - _GAIN)):
            self._mark, self._since_gain = m.latency_us, 0
        else:
            self._since_gain += 1

    def _answer(self, candidate: _Candidate, m: Measurement) -> None:
        if self.history is None:
            return
        spared = config_key(m.config) in self.s.spared
        if not candidate.trials and not spared:
            self.history.add(m)
        for trial in candidate.trials:
            if spared:
                self.history.drop(trial)
            else:
                self.history.tell(trial, m)

    def _abandon(self) -> None:
        for candidate in [*self._flying.values(), *self._awaited.values()]:
            if candidate.future is not None and self.s.whole is not None:  # a part's search may continue
                self.context.pool.keep(self.s.task.workload, self.s.task.device, candidate.config, candidate.future)
            elif candidate.future is not None:
                candidate.future.cancel()
            self.context.store.release(self.s.key, candidate.config, "screen", self.context.owner)
            if self.history is not None:
                for trial in candidate.trials:
                    self.history.drop(trial)


def explore(s: Session, budget: Budget, *, until_s: float | None) -> str:
    """Screen candidates of a workload that is searched as a whole, or of one part; return the stop reason.

    Args:
        until_s: seconds after the session's start when screening ends; None for no limit.

    Raises:
        WorkerFault: the machine failed.
    """
    options, workload = s.context.options, s.task.workload
    space = s.task.space(options.space_file)
    stored = learn_stored(s)
    history = History(sampler=options.sampler, seed=options.seed, space=space, known=stored)
    store, asked = s.context.store, [*options.seeds.get(workload.fingerprint, ())]
    if s.whole is None and (lead := s.context.lead(s.task)) is not None:
        asked.insert(0, lead)
    near = store.neighbours(workload.family, s.key.device, workload.fingerprint, extent=workload.extent)
    before = seeds.winners(store, s.key)
    liked = seeds.remembered(s.context, s.task, space)
    configs = [m.config for _, m in near]
    begin = seeds.planned(s.task, space, configs, options.seed, asked=asked, elsewhere=before, liked=liked)
    guided = is_guided(options.sampler)
    explorer = Explorer(
        s, space, history, begin, until_s=until_s, patience=budget.patience_now, polish=guided, prune=guided
    )
    began, measured = s.elapsed, s.measured
    stop = explorer.run()
    s.context.pace.add(s.elapsed - began, s.measured - measured)
    return stop


def follow(s: Session) -> str:
    """Screen the configuration of a session's leader, and no other.

    Returns:
        The stop reason; "" if the configuration does not fit or does not work, and more may be measured.

    Raises:
        WorkerFault: the machine failed.
    """
    if (fitted := s.context.lead(s.task)) is None:
        return ""
    learn_stored(s)
    space = s.task.space_for(fitted, s.context.options.space_file)
    stop = Explorer(s, space, None, [Seed(fitted, "asked")], until_s=s.budget.until_s, patience=0).run()
    found = s.known.get(config_key(fitted))
    works = found is not None and found.status is Status.OK and s.allows(fitted)
    if works and not s.context.interrupt.requested:
        return ALIKE
    unreached = found is None and stop == TIME_UP  # it may still be compiling
    used_up = s.trials_left is not None and s.trials_left < 1
    return stop if unreached or used_up or s.context.interrupt.requested else ""


def settled(stop: str, budget: Budget, granted: float | None) -> bool:
    """True if a search that stopped for ``stop`` would gain nothing from more time."""
    if stop in EXHAUSTED or stop == AT_FLOOR:
        return True
    patient = budget.patience is None or not budget.patience or budget.patience >= Budget().patience_now
    return stop.startswith(NO_GAIN) and (granted is None or patient)


def learn_stored(s: Session) -> list[Measurement]:
    """Load the earlier measurements of this key; return the first timings, which are the study's objective."""
    key = s.key
    rank = {"screen": 0, "repeat": 1, "final": 2}
    every = s.context.store.measurements(key.workload, key.device, key.environment, key.policy)
    screens = []
    for m in sorted(every, key=lambda m: rank.get(m.stage, 0)):
        s.learn(m)
        if m.stage == "screen":
            screens.append(m)
    s.reused = sum(m.status is not Status.INVALID and m.run != s.context.run for m in screens)
    return screens
