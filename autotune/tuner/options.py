"""The options of a run, and the budget for the search of one workload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from autotune import numerics
from autotune.errors import UserError
from autotune.measure.policy import Policy
from autotune.space import Config
from autotune.tuner.samplers import DEFAULT, make_sampler

FINAL_SHARE = 0.25
"""Share of a search's time reserved for the final comparison."""
_FINAL_MOST_S = 30.0
_MOST_TRIALS, _PATIENCE = 256, 48
_LEAST_PATIENCE = 12
_PACE_LEAST = 4


@dataclass(frozen=True)
class SearchOptions:
    """Options of a run, the same for all of its workloads and devices.

    Attributes:
        trials: candidates for each workload, its parts included, but without the few compositions measured as a whole;
            None for as long as there is gain.
        timeout: seconds for all workloads together. Each workload gets a share of the remaining time by its weight, so
            unused time goes to later workloads.
        patience: candidates measured without a gain of 1% before a workload's search ends; see :class:`Budget`.
        sampler: of :data:`autotune.tuner.samplers.SAMPLERS`.
        seed: of the sampler and of the random inputs for verification.
        space_file: a user's narrowed copy of the domain's search space. The default and stored candidates outside it
            are compared, but never deployed.
        method: a method of the domain, "" for all of them; see :meth:`autotune.task.Task.under`.
        policy: measurement policy, part of the key of all stored records; None for the domain's.
        weights: fingerprint to share of the time; 1 for a missing one.
        seeds: fingerprint to configurations measured before the sampler's proposals; they count as ``trials``.
        numerics: torch's numeric settings of the workloads' program, applied where they are measured; a result of
            :func:`autotune.numerics.read`. None for those of this process.
        every: True to begin every workload even if the time is up, the last ones for a moment each.

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
        make_sampler(self.sampler, 0)  # raises UserError
        if min(self.weights.values(), default=1.0) <= 0:
            raise UserError("weights must be above 0")

    def budget(self, seconds: float | None) -> Budget:
        """Return the budget of a workload that gets ``seconds``; None for no limit."""
        return Budget(self.trials, seconds, self.patience)

    def to_json(self) -> dict[str, Any]:
        """Return keyword arguments for equal options elsewhere, with this process's numerics and without ``policy``."""
        given = numerics.read() if self.numerics is None else dict(self.numerics)
        return asdict(replace(self, policy=None, numerics=given))


@dataclass(frozen=True)
class Budget:
    """Limits of a search; the first one reached ends it.

    Attributes:
        trials: maximum of new candidates measured; repeats and rejected ones are free. None for as long as there is
            gain, and 256 at most.
        timeout: seconds, including the final comparison, for which a quarter (at most 30 s) is reserved; None for no
            limit.
        patience: candidates measured without a gain of 1% before giving up; None for half of ``trials`` and at least 40
            (48 if ``trials`` is None), 0 for never.
        final: seconds of ``timeout`` reserved for the final comparison, if known from earlier workloads.
        waits: seconds that a search waits for its first candidate after its time, and that the final comparison waits
            for baselines: nothing is decided without them. None to wait until the run ends.
    """

    trials: int | None = None
    timeout: float | None = None
    patience: int | None = None
    final: float | None = None
    waits: float | None = None

    def __post_init__(self) -> None:
        if self.trials is not None and self.trials < 1:
            raise UserError(f"--trials {self.trials}: measure at least one candidate")
        if self.timeout is not None and not self.timeout > 0:
            raise UserError(f"--timeout {self.timeout}: give a number of seconds above 0")
        if self.patience is not None and self.patience < 0:
            raise UserError(f"patience {self.patience}: give a number of candidates, or 0 for no limit")

    @property
    def until_s(self) -> float | None:
        """Seconds after which no further candidate is begun.

        Candidates compiled by then may still be measured, for a quarter of that time more and a second at most.
        """
        if self.timeout is None:
            return None
        kept = min(_FINAL_MOST_S, FINAL_SHARE * self.timeout) if self.final is None else self.final
        return max(self.timeout - kept, 0.0)

    @property
    def most(self) -> int:
        """``trials``, or the default maximum if it is None."""
        return _MOST_TRIALS if self.trials is None else self.trials

    @property
    def patience_now(self) -> int:
        if self.patience is not None:
            return self.patience
        return _PATIENCE if self.trials is None else max(40, self.trials // 2)

    def part(self, share: float, seconds: float | None) -> Budget:
        """Return the budget of a part that is ``share`` (0 to 1) of the whole.

        A part gets its share of the candidates, at least one. Its patience scales with the square root of its share,
        since a small part's gain is a small gain of the whole.

        Args:
            seconds: for the part alone; None for no limit.
        """
        trials = None if self.trials is None else max(1, round(self.trials * share))
        patience = self.patience
        if patience is None:
            patience = max(_LEAST_PATIENCE, round(self.patience_now * share**0.5))
        waits = None if self.waits is None else self.waits * share
        return replace(self, trials=trials, timeout=seconds, patience=patience, waits=waits)


@dataclass
class Pace:
    """Time per candidate, from this run's searches."""

    seconds: float = 0.0
    candidates: int = 0

    def add(self, seconds: float, candidates: int) -> None:
        """Add a search of ``candidates`` that took ``seconds``."""
        self.seconds += seconds
        self.candidates += candidates

    @property
    def each(self) -> float | None:
        """Seconds per candidate; None for fewer than 4 candidates, whose mean startup costs would dominate."""
        return self.seconds / self.candidates if self.candidates >= _PACE_LEAST else None
