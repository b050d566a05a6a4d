"""Timing on a CPU as a program sees it that works through its tensors: cold data, warm code.

Every call takes another copy of the inputs, and results are kept until their copy's turn comes again; all of that is
larger than the caches, so that whatever a call reads or writes was last touched long ago. Right before each sample
the same contender runs untimed, on the copy before: its code is in the caches then. Swept caches would hold neither
data nor code, and what is compiled would pay 300 to 400 us for Dynamo's wrappers, whatever it computes. One call is
enough (a second takes 4 us off a case of 40); with no call the code of the others, which ran before, is in its place.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.bench.case import Arguments
from autotune.measure.policy import Policy

Samples = list[float]

_FEWEST, _MOST = 3, 64
_MOST_BYTES = 2 << 30


def input_sets(args: Arguments, moved: int, policy: Policy) -> list[Arguments]:
    """Copies of a case's inputs, so many that a round through them leaves nothing of the first in the caches.

    Args:
        args: the inputs; tensors that share memory do so in each copy.
        moved: bytes of the inputs and the results, which are kept as well.
        policy: its ``cold_bytes`` count where the caches are smaller or not known.
    """
    wanted = max(policy.cold_bytes, 2 * last_level_cache())
    count = min(-(-wanted // max(moved, 1)), _MOST, _MOST_BYTES // max(moved, 1))
    return [copy.deepcopy(args) for _ in range(max(count, _FEWEST))]


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
    """Bytes of what Linux writes: "32768K"."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1]] if text[-1:] in units else int(text)


def rotate(
    calls: Mapping[str, Callable[[Arguments], object]], sets: Sequence[Arguments], policy: Policy
) -> dict[str, Samples]:
    """Time contenders in rounds, each once a round, in an order that rotates from round to round.

    Args:
        calls: contenders by name; each takes a set of inputs.
        sets: at least two; see :func:`input_sets`.

    Returns:
        ``policy.final_rounds`` samples each in microseconds, fewer (at least five) where ``policy.final_s`` ran out.
    """
    from autotune.measure.timer import rounds

    names = list(calls)
    turn = _Turn(sets)
    for name in names:
        for _ in range(max(policy.warmup, 1)):
            turn.sample(calls[name])
    samples: dict[str, Samples] = {name: [] for name in names}
    for order in rounds(names, policy):
        for name in order:
            turn.sample(calls[name])
            samples[name].append(turn.sample(calls[name]))
    return samples


class _Turn:
    """Whose turn it is among the sets, and what was computed from each the last time."""

    def __init__(self, sets: Sequence[Arguments]) -> None:
        self._sets, self._next = sets, 0
        self._results: list[Any] = [None] * len(sets)

    def sample(self, call: Callable[[Arguments], object]) -> float:
        """Microseconds of a call with the set whose turn it is. What becomes of the results is not timed."""
        k = self._next
        self._next = (k + 1) % len(self._sets)
        given, self._results[k] = self._sets[k], None
        begin = time.perf_counter_ns()
        result = call(given)
        took = time.perf_counter_ns() - begin
        self._results[k] = result
        return took / 1e3


__all__ = ["input_sets", "last_level_cache", "rotate"]
