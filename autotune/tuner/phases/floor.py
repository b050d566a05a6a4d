"""Where nothing is left to win: a candidate, or what the user has, takes no longer than moving the bytes."""

from __future__ import annotations

from autotune.tuner.context import Session
from autotune.tuner.phases import finals

AT_FLOOR = "nothing is faster than moving the bytes"
_NEAR = 1.02
"""A candidate so many times the floor is at it: a short timing is no more exact."""
_PROMISING = 1.15
"""Where the model expects the default within so many times the floor, the default is measured before anything else."""


def is_at_floor(s: Session) -> bool:
    """Whether the best candidate of a session is as fast as any could be, as far as that is known."""
    if (least := s.task.least_us()) is None:  # asked before every candidate: nothing is ranked for it then
        return False
    best = s.best_us
    return best is not None and best <= _NEAR * least


def is_baseline_at_floor(s: Session) -> bool:
    """Whether a baseline is as fast as anything could be, by a final comparison with the best candidate so far.

    The comparison is stored. It is the last one of a search that ends here.

    Raises:
        WorkerFault: the machine failed.
    """
    if (least := s.task.least_us()) is None or s.context.interrupt.requested:
        return False
    known = finals.compare(s, s.task.normalize(s.task.default())).baselines.values()
    return any(us is not None and us <= _NEAR * least for us in known)


def may_be_at_floor(s: Session) -> bool:
    """Whether the cost model expects as much of the default, so that it is worth a look before parts are searched."""
    least = s.task.least_us()
    if least is None or s.narrowed is not None:
        return False
    expected = s.task.predict(s.task.normalize(s.task.default()))
    return expected is not None and expected <= _PROMISING * least
