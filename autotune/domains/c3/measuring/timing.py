"""Timing on several ranks at once: all ranks start together, and the slowest rank's time counts. Microseconds.

Every rank takes the same samples in the same order: ranks agree on the data that decides about the next sample.

On CUDA the ranks synchronise on their streams, not on their hosts: stream memory operations exchange a flag with every
peer, which aligns the ranks to within a microsecond or two. Before that the L2 is flushed and the device sleeps for
half a millisecond, while the host enqueues the timed work. The time between the two events is device time only.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from autotune.domains.c3.collectives.symmetric import DeviceBarrier, new_event, new_stream
from autotune.domains.c3.group import Group
from autotune.measure.policy import Policy
from autotune.measure.timer import ColdCache, balanced, calls_per_sample, sample_cpu, warm_cpu
from autotune.task import Runnable

Samples = list[float]
_LEAST = 3
_LEAST_ROUNDS = 5  # minimum rounds of a comparison
_COMPARED = 4  # factor on the warm-up time before a comparison
_MOST_TURNS = 500
_COLD = "autotune.domains.c3.measuring.timing.cold"
_AHEAD_CYCLES = 800_000
"""Device sleep before a sample: enqueueing a strategy call by call takes the host up to a few 100 us."""


def time_ranks(
    runs: Mapping[str, Runnable],
    group: Group,
    policy: Policy,
    *,
    rounds: int,
    budget_s: float,
    limit_us: float = math.inf,
    before: Callable[[str], None] | None = None,
) -> dict[str, Samples]:
    """Time one contender, or several interleaved in rounds, in an order that changes. A collective call.

    Args:
        runs: the same names in the same order on every rank.
        rounds: samples per contender.
        budget_s: stop after about this many seconds, with at least three samples, or five of each of several.
        limit_us: a single contender that is slower than this gets three samples.
        before: called with a contender's name before its warm-up and each of its turns, to attribute a hang.

    Returns:
        the samples of each contender: each is the maximum over ranks, hence the same on every rank.
    """
    names = list(runs)
    announce = before or (lambda name: None)
    taken: dict[str, Samples] = {name: [] for name in names}
    take = _sampler(runs, group, policy, announce)
    alone = len(names) == 1
    least = min(rounds, _LEAST if alone else _LEAST_ROUNDS)
    done, orders, begin = 0, balanced(names), time.perf_counter()
    while done < rounds and names:
        count = 1
        if alone and done == 0:
            count = least
        elif done >= least:
            # By the slowest rank's clock, since all ranks must stop after the same sample.
            spent = max(group.largest([time.perf_counter() - begin])[0], 1e-9)
            slow = alone and statistics.median(group.largest(taken[names[0]])) > limit_us
            if spent >= budget_s or slow:
                break
            if alone:
                count = min(rounds - done, max(1, int(done * (budget_s / spent - 1))))
        for name in next(orders):
            announce(name)
            taken[name] += take(name, count)
        done += count
    return {name: group.largest(samples) for name, samples in taken.items()}


def _sampler(
    runs: Mapping[str, Runnable], group: Group, policy: Policy, announce: Callable[[str], None]
) -> Callable[[str, int], Samples]:
    """Warm up all contenders; returns a function that takes samples of one contender on this rank."""
    if group.device.type == "cuda":
        for name, run in runs.items():
            announce(name)
            for _ in range(max(policy.warmup, 1)):
                run()
            torch.cuda.synchronize()
        _settle(runs, group, policy.wake_s * (1 if len(runs) == 1 else _COMPARED))
        return lambda name, count: sample_cuda(runs[name], group, policy, count)

    quickest = math.inf
    for name, run in runs.items():
        announce(name)
        group.barrier()
        quickest = min(quickest, group.largest([warm_cpu(run, policy)])[0])  # on the slowest rank
    inner = calls_per_sample(quickest, policy)
    # Each rank flushes its own cores' caches; together the ranks flush the shared caches.
    size = policy.cold_bytes // group.ranks
    cold = group.keep((_COLD, size), lambda: ColdCache(size, "cpu"))
    return lambda name, count: [sample_cpu(runs[name], cold, inner, group.barrier) for _ in range(count)]


def _settle(runs: Mapping[str, Runnable], group: Group, seconds: float) -> None:
    """Run all contenders in turn for about ``seconds``, so that GPU clocks settle for this work.

    An idle GPU has lowered its clocks, and may then exceed its power limit for a while: on an H200 a large GEMM runs
    10% faster in its first 50 ms than after 200.
    """

    def turn() -> None:
        for run in runs.values():
            run()

    begin = time.perf_counter()
    turn()
    torch.cuda.synchronize()
    spent = group.largest([time.perf_counter() - begin])[0]
    for _ in range(min(_MOST_TURNS, int(seconds / max(spent, 1e-6)))):
        turn()
    torch.cuda.synchronize()


def own_stream(group: Group) -> Any:
    """The stream for timed work; not the default stream, which does not support batched copies."""
    return group.keep("stream", lambda: new_stream(group.device))


def sample_cuda(run: Callable[[], object], group: Group, policy: Policy, n: int) -> list[float]:
    """``n`` samples of ``run`` on this rank in microseconds. A collective call; the caller takes the maximum."""
    barrier = group.keep("device barrier", lambda: DeviceBarrier(group))
    cold = group.keep("cold cache", lambda: ColdCache(policy.cold_bytes, "cuda"))
    cuda: Any = torch.cuda
    stream = own_stream(group)
    pairs: list[tuple[Any, Any]] = []
    with torch.cuda.stream(stream):
        for _ in range(n):
            begin, end = new_event(timing=True), new_event(timing=True)
            cold.flush()
            cuda._sleep(_AHEAD_CYCLES)
            barrier(stream.cuda_stream)
            begin.record(stream)
            run()
            end.record(stream)
            pairs.append((begin, end))
    torch.cuda.synchronize()
    return [1e3 * begin.elapsed_time(end) for begin, end in pairs]
