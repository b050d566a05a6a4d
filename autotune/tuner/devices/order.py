"""In which order a run searches its workloads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autotune.tuner.budget import Budget
from autotune.tuner.context import Context
from autotune.workload import Workload


def order(
    context: Context, workloads: Sequence[Workload], shares: Sequence[float], budget: Callable[[int], Budget]
) -> list[int]:
    """The places of the workloads, the first to be searched first.

    Those with nothing left to do come first, since they take no time and leave theirs to the others; then those
    without a stored winner, so that a search that is given again and again gets to all of them; then those whose
    winner could be looked for once more. Among equals the ones with the largest shares come first.

    Args:
        budget: what a workload, by its place, would get of the run's time.
    """
    keys = [context.key(workload) for workload in workloads]
    stored = {s.key: s for device in {key.device for key in keys} for s in context.store.schedules(device)}

    def turn(i: int) -> tuple[int, float]:
        found = stored.get(keys[i])
        if found is None:
            return 1, -shares[i]
        over = not found.busy and not found.space and context.space_file is None
        done = over and context.searched(keys[i], budget(i), budget(i).timeout) is not None
        return (0 if done else 2), -shares[i]

    return sorted(range(len(workloads)), key=turn)
