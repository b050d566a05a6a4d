"""Device time by kernel: the sum of a contender's kernels as CUPTI reports them, one instrument for PyTorch and XLA.

XLA has no graph replay, and the wall time of its dispatch is not its kernels'. Each run follows a sweep of the L2;
sweeps are kernels too, and mark in the trace where one run ends and the next begins.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autotune.bench.kernels import Span, record

ROUNDS = 20
_SWEEP = (4096, 1 << 15)  # 256 MiB of int16: no case reduces that type, so the kernel's name is the sweep's alone
_TRIES = 3


class TraceError(Exception):
    """The trace does not hold what was run."""


@dataclass(frozen=True)
class KernelTime:
    """Times of the kernels of one run.

    Attributes:
        us: microseconds in which at least one of its kernels, copies or fills ran; the median over the rounds.
        kernels: kernels launched in one run (most common over the rounds); copies and fills are not among them.
    """

    us: float
    kernels: int


def kernel_times(calls: Mapping[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, KernelTime]:
    """Run the contenders in turn under the profiler, on the current CUDA device.

    Args:
        calls: enqueue the work on any stream; each has been called before.

    Raises:
        TraceError: the profiler lost or did not see kernels.
    """
    import torch

    rows, cols = _SWEEP
    buffer = torch.zeros(rows, cols, dtype=torch.int16, device="cuda")

    def sweep() -> None:
        torch.amax(buffer, 1)
        torch.cuda.synchronize()

    # A result is dropped as soon as the device is done with it: the next run then takes the same memory.
    def all_of(times: int) -> None:
        for _ in range(times):
            for call in calls.values():
                sweep()
                call()
                torch.cuda.synchronize()

    all_of(1)
    marks: set[str] = set()
    for _ in range(_TRIES):  # the first, short trace of a process may come out empty
        marks = {name for _, _, _, name in record(sweep)}
        if marks:
            break
    if len(marks) != 1:
        raise TraceError(f"the sweep of the L2 shows as {len(marks)} kernels in the profiler's trace, expected 1")
    return split(record(lambda: all_of(rounds)), marks.pop(), list(calls), rounds)


def split(spans: Sequence[Span], mark: str, names: Sequence[str], rounds: int) -> dict[str, KernelTime]:
    """Divide a trace at the sweeps, and sum the kernels up between them.

    Args:
        spans: in order of their beginnings.
        mark: name of the sweep's kernel.
        names: contenders in the order in which they ran, ``rounds`` times over, each after a sweep.

    Raises:
        TraceError: there are not as many sweeps as there were runs, or nothing between two of them.
    """
    runs: list[list[Span]] = []
    for span in spans:
        if span[3] == mark:
            runs.append([])
        elif runs:
            runs[-1].append(span)
    if len(runs) != rounds * len(names):
        raise TraceError(f"the trace holds {len(runs)} runs of {rounds * len(names)}")
    found: dict[str, KernelTime] = {}
    for k, name in enumerate(names):
        mine = runs[k :: len(names)]
        if not all(mine):
            raise TraceError(f"the trace holds no kernel of {name}")
        counts = Counter(sum(is_kernel for _, _, is_kernel, _ in run) for run in mine)
        found[name] = KernelTime(statistics.median(map(_busy, mine)), counts.most_common(1)[0][0])
    return found


def _busy(run: Sequence[Span]) -> float:
    """Time in which something ran: what overlaps counts once."""
    total, until = 0.0, float("-inf")
    for begin, end, _, _ in run:
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
