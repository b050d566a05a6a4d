"""Timing on a CPU with cold data and warm code, as in a program that works through its tensors.

Every call uses another copy of the inputs, and its results are kept until the copy is used again. Together, copies and
results are larger than the caches, so a call's data is cold.

Right before each sample of at most 50 ms, the same contender runs untimed on the previous copy, which loads its code
into the caches. One call is enough: a second one reduces a case of 40 us by 4 us. Without an untimed call, the caches
would contain the code of the previous contender.

Swept caches would contain neither data nor code. Contenders with much Python code (eager's operators, Dynamo's
wrappers, 300 to 400 us of them) would then pay for cold code regardless of the computation. Contenders with little
Python code would appear too fast.
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
from autotune.measure.timer import MIN_SAMPLES, in_rounds, sampled

Samples = list[float]
Inputs = TypeVar("Inputs")
"""A set of inputs, in the form that the contenders accept."""

_FEWEST, _MOST = 3, 64
_MOST_BYTES = 2 << 30
_LONG_US, _ONCE_US = 50_000.0, 250_000.0
"""Calls that take longer need no untimed call before a sample, and no second one to warm up: cold code costs less than
a millisecond. The second limit is higher, since a busy host may delay a short call by many milliseconds."""


def set_count(moved: int, policy: Policy) -> int:
    """Return the number of copies of the inputs for which a round evicts the first copy from the caches.

    Args:
        moved: bytes of the inputs and of the results, which are kept too.
        policy: its ``cold_bytes`` apply if the caches are smaller or unknown.
    """
    wanted = max(policy.cold_bytes, 2 * last_level_cache())
    count = min(-(-wanted // max(moved, 1)), _MOST, _MOST_BYTES // max(moved, 1))
    return max(count, _FEWEST if _FEWEST * moved <= 2 * _MOST_BYTES else 2)  # two are already cold, three certainly


def input_sets(args: Inputs, moved: int, policy: Policy) -> list[Inputs]:
    """Return :func:`set_count` copies of ``args``; tensors that share memory share it in each copy."""
    return [copy.deepcopy(args) for _ in range(set_count(moved, policy))]


def last_level_cache(root: Path = Path("/sys/devices/system/cpu")) -> int:
    """Return the bytes of the last-level caches of this process's usable processors; 0 if not reported."""
    found: dict[int, dict[str, int]] = {}
    for cpu in os.sched_getaffinity(0):
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
    """Parse a size in Linux's format ("32768K") into bytes."""
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
        before: called with a contender's name before its warm-up, to identify it if it hangs.

    Returns:
        Samples in microseconds, as many as :func:`autotune.measure.timer.interleave` takes.
    """
    names = list(calls)
    turn = _Turn(sets)
    estimates = {}
    for name in names:
        if before is not None:
            before(name)
        estimates[name] = turn.warm(calls[name], policy)
    return in_rounds(names, policy, lambda name: turn.timed(calls[name], estimates[name]))


def time_rotating(
    sets: Sequence[Inputs],
    call: Callable[[Inputs], object],
    policy: Policy,
    *,
    repeats: int,
    budget_s: float = math.inf,
    limit_us: float = math.inf,
) -> Samples:
    """Time one contender alone, with the method of :func:`rotate`.

    Args and returns: as for :func:`autotune.measure.timer.time_cpu`.
    """
    turn = _Turn(sets)
    if (estimate := turn.warm(call, policy)) > limit_us:
        repeats = MIN_SAMPLES
    return sampled(lambda: turn.timed(call, estimate), repeats, budget_s)


class _Turn:
    """Rotation of the sets, with the last results of each."""

    def __init__(self, sets: Sequence[Any]) -> None:
        self._sets, self._next = sets, 0
        self._results: list[Any] = [None] * len(sets)

    def warm(self, call: Callable[[Any], object], policy: Policy) -> float:
        """Warm up; return the microseconds of the fastest call. A long first call is the only one."""
        best = math.inf
        for _ in range(max(policy.warmup, 1)):
            best = min(best, self.sample(call))
            if best > _ONCE_US:
                break
        return best

    def timed(self, call: Callable[[Any], object], estimate_us: float) -> float:
        """Return a :meth:`sample`, of a short call right after an untimed call on the previous set."""
        if estimate_us <= _LONG_US:
            self.sample(call)
        return self.sample(call)

    def sample(self, call: Callable[[Any], object]) -> float:
        """Return the microseconds of a call with the next set, without the time to free earlier results."""
        k = self._next
        self._next = (k + 1) % len(self._sets)
        given, self._results[k] = self._sets[k], None
        begin = time.perf_counter_ns()
        result = call(given)
        took = time.perf_counter_ns() - begin
        self._results[k] = result
        return took / 1e3
