"""Timing on a CPU as a program sees it that works through its tensors: cold data, warm code.

Every call takes another copy of the inputs, and results are kept until their copy's turn comes again; all of that is
larger than the caches, so that whatever a call reads or writes was last touched long ago. Right before each sample
the same contender runs untimed, on the copy before: its code is in the caches then. Swept caches would hold neither
data nor code: what runs through much Python (eager's operators, Dynamo's wrappers, 300 to 400 us of them) would pay
for that whatever it computes, and what runs through little would look better than it is. One call is enough (a second
takes 4 us off a case of 40); with no call the code of the others, which ran before, is in its place.
"""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from autotune.measure.policy import Policy
from autotune.measure.timing.timer import MIN_SAMPLES, in_rounds, sampled

Samples = list[float]
Inputs = TypeVar("Inputs")
"""A set of inputs, in whatever form the contenders take it."""

_FEWEST, _MOST = 3, 64
_MOST_BYTES = 2 << 30


def set_count(moved: int, policy: Policy) -> int:
    """The number of copies of the inputs after a round through which nothing of the first is in the caches.

    Args:
        moved: bytes of the inputs and the results, which are kept as well.
        policy: its ``cold_bytes`` count where the caches are smaller or not known.
    """
    wanted = max(policy.cold_bytes, 2 * last_level_cache())
    count = min(-(-wanted // max(moved, 1)), _MOST, _MOST_BYTES // max(moved, 1))
    return max(count, _FEWEST if _FEWEST * moved <= 2 * _MOST_BYTES else 2)  # two are cold already, three surely


def input_sets(args: Inputs, moved: int, policy: Policy) -> list[Inputs]:
    """As many copies of ``args`` as :func:`set_count` asks for; tensors that share memory do so in each copy."""
    return [copy.deepcopy(args) for _ in range(set_count(moved, policy))]


def last_level_cache(root: Path = Path("/sys/devices/system/cpu")) -> int:
    """Bytes of the last-level caches of the processors that this process may use; 0 where the system does not say."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    found: dict[int, dict[str, int]] = {}
    for cpu in allowed:
        for index in root.glob(f"cpu{cpu}/cache/index*"):
            try:
                level, kind, size, shared = (
                    (index / name).read_text().strip() for name in ("level", "type", "size", "shared_cpu_list")
                )
                if kind != "Instruction":
                    found.setdefault(int(level), {})[shared] = _size(size)
            except (OSError, ValueError):
                continue
    return sum(found[max(found)].values()) if found else 0


def _size(text: str) -> int:
    """Bytes of a size as Linux writes it: "32768K"."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1]] if text[-1:] in units else int(text)


def rotate(
    calls: Mapping[str, Callable[[Inputs], object]],
    sets: Sequence[Inputs],
    policy: Policy,
    before: Callable[[str], None] | None = None,
) -> dict[str, Samples]:
    """Time contenders in rounds, each once a round, in an order that changes from round to round.

    Args:
        calls: contenders by name; each takes a set of inputs.
        sets: at least two; see :func:`input_sets`.
        before: called with a contender's name ahead of its warm-up (so that a hang can be blamed).

    Returns:
        ``policy.final_rounds`` samples each in microseconds, fewer (at least five) where ``policy.final_s`` ran out.
    """
    names = list(calls)
    turn = _Turn(sets)
    for name in names:
        if before is not None:
            before(name)
        turn.warm(calls[name], policy)
    return in_rounds(names, policy, lambda name: turn.warm_sample(calls[name]))


def time_rotating(
    sets: Sequence[Inputs],
    call: Callable[[Inputs], object],
    policy: Policy,
    *,
    repeats: int,
    budget_s: float = math.inf,
    limit_us: float = math.inf,
) -> Samples:
    """Time one contender alone, as :func:`rotate` times several.

    Args and returns: as for :func:`autotune.measure.timing.timer.time_cpu`.
    """
    turn = _Turn(sets)
    if turn.warm(call, policy) > limit_us:
        repeats = MIN_SAMPLES
    return sampled(lambda: turn.warm_sample(call), repeats, budget_s)


class _Turn:
    """The sets in turn, with the last results from each."""

    def __init__(self, sets: Sequence[Any]) -> None:
        self._sets, self._next = sets, 0
        self._results: list[Any] = [None] * len(sets)

    def warm(self, call: Callable[[Any], object], policy: Policy) -> float:
        """Warm up; microseconds of the fastest of the calls."""
        return min(self.sample(call) for _ in range(max(policy.warmup, 1)))

    def warm_sample(self, call: Callable[[Any], object]) -> float:
        """As :meth:`sample`, right after an untimed call on the set before."""
        self.sample(call)
        return self.sample(call)

    def sample(self, call: Callable[[Any], object]) -> float:
        """Microseconds of a call with the set whose turn it is. What becomes of the results is not timed."""
        k = self._next
        self._next = (k + 1) % len(self._sets)
        given, self._results[k] = self._sets[k], None
        begin = time.perf_counter_ns()
        result = call(given)
        took = time.perf_counter_ns() - begin
        self._results[k] = result
        return took / 1e3
