"""How much a search may spend."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autotune.errors import UserError

_FINAL_SHARE, _FINAL_MOST_S = 0.25, 30.0
_MOST_TRIALS, _PATIENCE = 256, 48
_LEAST_PATIENCE = 12
_PACE_LEAST = 4


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
        kept = min(_FINAL_MOST_S, _FINAL_SHARE * self.timeout) if self.final is None else self.final
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


class Clock:
    """Shares a run's seconds among its workloads.

    What every workload takes whatever it gets (its inputs, the baselines' compilation, the final comparison) is learnt
    from those that are done, and kept for those that are left, so that a run of many keeps to its time as a whole. The
    first one's is not what the others take: the worker and the compiling processes start in it.

    Args:
        timeout: seconds for all; None for no limit.
        shares: of each workload, in order.
        devices: on which they are searched side by side, each workload on one; each has a clock of its own.
    """

    def __init__(self, timeout: float | None, shares: Sequence[float], devices: int = 1) -> None:
        self._timeout, self._shares, self._devices = timeout, list(shares), devices
        self._begin = time.monotonic()
        self._fixed: list[float] = []

    @property
    def up(self) -> bool:
        """Whether the time is over."""
        return self._timeout is not None and time.monotonic() - self._begin >= self._timeout

    def beside(self) -> Clock:
        """The clock of another device, which began when this one did."""
        other = Clock(self._timeout, self._shares, self._devices)
        other._begin = self._begin
        return other

    def granted(self, i: int) -> float | None:
        """Workload ``i``'s share of what the devices have together, whatever was used so far; the whole at most."""
        if self._timeout is None:
            return None
        return self._timeout * min(1.0, self._devices * self._shares[i] / sum(self._shares))

    def budget(self, i: int, trials: int | None, patience: int | None, then: Sequence[int] | None = None) -> Budget:
        """The budget of workload ``i``, which comes next on this device, and after it ``then``; None for all that
        follow."""
        if self._timeout is None:
            return Budget(trials, None, patience)
        left = max(self._timeout - (time.monotonic() - self._begin), 1.0)
        shares = [self._shares[k] for k in (i, *(range(i + 1, len(self._shares)) if then is None else then))]
        part = shares[0] / sum(shares)
        if not self._fixed:
            return Budget(trials, left * part, patience)
        first, *others = self._fixed
        fixed = statistics.fmean(others or [min(first, _FINAL_SHARE * left * part)])
        search = max((left - fixed * len(shares)) * part, _LEAST_S)
        return Budget(trials, search + fixed, patience, fixed)

    def done(self, seconds: float, searched: float) -> None:
        """A workload took ``seconds``, ``searched`` of them for its search."""
        if seconds > 0:
            self._fixed.append(max(seconds - searched, 0.0))


_LEAST_S = 1.0
