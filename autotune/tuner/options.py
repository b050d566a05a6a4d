"""The options of a run, and how much the search of one workload may spend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from autotune import numerics
from autotune.errors import UserError
from autotune.measure.policy import Policy
from autotune.space import Config
from autotune.tuner.proposals.samplers import DEFAULT, check_sampler

FINAL_SHARE = 0.25
"""Of a search's time, kept for the final comparison."""
_FINAL_MOST_S = 30.0
_MOST_TRIALS, _PATIENCE = 256, 48
_LEAST_PATIENCE = 12
_PACE_LEAST = 4


@dataclass(frozen=True)
class SearchOptions:
    """Options of a run, the same for all of its workloads and devices.

    Attributes:
        trials: candidates for each workload, its parts included (but not the few compositions that are measured as a
            whole); None for as long as there is gain.
        timeout: seconds for all workloads together. Each gets what is left by its weight, so that time one does not
            need goes to those after it.
        patience: candidates measured without a gain of 1% before a workload is left; see :class:`Budget`.
        sampler: of :data:`autotune.tuner.proposals.samplers.SAMPLERS`, or ``NONE`` for the domain's cost model alone.
        seed: of the sampler and of the random inputs that candidates are verified on.
        space_file: a user's narrowed copy of the domain's search space. The default and stored candidates that it
            leaves out are compared with, but never deployed.
        method: of the domain, "" for its whole; see :meth:`autotune.task.Task.under`.
        policy: how to measure, part of the key under which everything is stored; None for the domain's.
        weights: fingerprint to share of the time; 1 where it is missing.
        seeds: fingerprint to configurations that are measured before the sampler is asked; they count as ``trials``.
        numerics: torch's settings of the program that the workloads are of, which are put in force where they are
            measured; as :func:`autotune.numerics.read` gives them. None for those of this process.
        every: begin every workload, the last ones for a moment each, also where the time is up.

    Raises:
        UserError: a value is out of range, or the sampler is unknown.
    """

    trials: int | None = None
    timeout: float | None = None
    patience: int | None = None
    sampler: str = DEFAULT
    seed: int = 0
    space_file: str | None = None
    method: str = ""
    policy: Policy | None = None
    weights: Mapping[str, float] = field(default_factory=dict)
    seeds: Mapping[str, Sequence[Config]] = field(default_factory=dict)
    numerics: numerics.Numerics | None = None
    every: bool = False

    def __post_init__(self) -> None:
        self.budget(self.timeout)
        check_sampler(self.sampler)
        if min(self.weights.values(), default=1.0) <= 0:
            raise UserError("weights must be above 0")

    def budget(self, seconds: float | None) -> Budget:
        """The budget of a workload that gets so many seconds; None for no limit."""
        return Budget(self.trials, seconds, self.patience)

    def to_json(self) -> dict[str, Any]:
        """Keyword arguments for equal options in another process: without ``policy``, with this process's numerics."""
        given = numerics.read() if self.numerics is None else dict(self.numerics)
        return asdict(replace(self, policy=None, numerics=given))


@dataclass(frozen=True)
class Budget:
    """How much a search may spend; whichever runs out first ends it.

    Attributes:
        trials: new candidates measured at most; repeats and rejected ones cost none. None for as long as there is gain,
            and 256 at most.
        timeout: seconds, the final comparison included, for which a quarter (at most 30 s) is kept; None for no limit.
        patience: candidates measured without a gain of 1% before giving up; None for half of ``trials`` and at least
            40 (48 where ``trials`` is None), 0 for never.
        final: seconds of ``timeout`` kept for the final comparison, where that is known better.
    """

    trials: int | None = None
    timeout: float | None = None
    patience: int | None = None
    final: float | None = None

    def __post_init__(self) -> None:
        if self.trials is not None and self.trials < 1:
            raise UserError(f"--trials {self.trials}: at least one candidate has to be measured")
        if self.timeout is not None and not self.timeout > 0:
            raise UserError(f"--timeout {self.timeout}: give a number of seconds above 0")
        if self.patience is not None and self.patience < 0:
            raise UserError(f"patience {self.patience}: give a number of candidates, or 0 for no limit")

    @property
    def until_s(self) -> float | None:
        """Seconds after which no further candidate is begun, but for what is compiled by then: a quarter more, and at
        most a second, may be spent to measure that."""
        if self.timeout is None:
            return None
        kept = min(_FINAL_MOST_S, FINAL_SHARE * self.timeout) if self.final is None else self.final
        return max(self.timeout - kept, 0.0)

    @property
    def most(self) -> int:
        """``trials``, or the limit where there is none."""
        return _MOST_TRIALS if self.trials is None else self.trials

    @property
    def patience_now(self) -> int:
        if self.patience is not None:
            return self.patience
        return _PATIENCE if self.trials is None else max(40, self.trials // 2)

    def part(self, share: float, seconds: float | None) -> Budget:
        """The budget of a part that is ``share`` (0 to 1) of the whole.

        A part gets its share of the candidates, at least one. Its patience shrinks with the root of its share, since
        what a small part can gain is little of the whole.

        Args:
            seconds: for the part alone; None for no limit.
        """
        trials = None if self.trials is None else max(1, round(self.trials * share))
        patience = self.patience
        if patience is None:
            patience = max(_LEAST_PATIENCE, round(self.patience_now * share**0.5))
        return replace(self, trials=trials, timeout=seconds, patience=patience)


@dataclass
class Pace:
    """How long a candidate takes, by what was measured in this run."""

    seconds: float = 0.0
    candidates: int = 0

    def add(self, seconds: float, candidates: int) -> None:
        """Learn from a search of ``candidates``."""
        self.seconds += seconds
        self.candidates += candidates

    @property
    def each(self) -> float | None:
        """Seconds a candidate; None where a few alone were measured, which say more of what came before the first."""
        return self.seconds / self.candidates if self.candidates >= _PACE_LEAST else None
