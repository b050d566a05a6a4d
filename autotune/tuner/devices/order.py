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
    without a stored winner, so that a search that is given again and again gets to all of them: first the ones that no
    search has ended, since one that takes long may come to nothing each time. Last come those whose winner could be
    looked for once more. Among equals the ones with the largest shares come first.

    Args:
        budget: what a workload, by its place, would get of the run's time.
    """
    keys = [context.key(workload) for workload in workloads]
    stored = {s.key: s for device in {key.device for key in keys} for s in context.store.schedules(device)}

    def turn(i: int) -> tuple[int, float]:
        found = stored.get(keys[i])
        if found is None:
            ended = context.store.get_effort(keys[i], context.scope(keys[i])) is not None
            return (2 if ended else 1), -shares[i]
        over = not found.busy and not found.space and context.space_file is None
        done = over and context.searched(keys[i], budget(i), budget(i).timeout) is not None
        return (0 if done else 3), -shares[i]

    return sorted(range(len(workloads)), key=turn)
