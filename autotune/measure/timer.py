"""Timing in microseconds: CUDA events around graph replays with a cold L2, ``perf_counter`` with swept CPU caches.

:mod:`autotune.measure.rotate` has the other CPU method, for benches with several copies of their inputs.

All functions here run in the measuring worker and import torch.
"""

from __future__ import annotations

import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch

from autotune.device import one_each_core
from autotune.measure.policy import Policy
from autotune.task import Runnable

T = TypeVar("T")
Samples = list[float]
MIN_SAMPLES = 3
_MIN_ROUNDS = 5
_LONG_ROUND_S = 1.0
"""A comparison whose rounds take longer ends with its time after :data:`MIN_SAMPLES` rounds, others after five: the
noise of a sample is a few milliseconds."""
_SWEEP_BYTES = 1 << 20  # minimum per thread
_SPIN_CYCLES = 100_000  # about 60 us, longer than enqueuing a replay and its events


class ColdCache:
    """A buffer whose sweep evicts all other data from the caches.

    On a GPU the sweep only reads several times the L2's size. Dirty lines of a written buffer would be written back
    while the contender runs: up to the whole L2, about 10 us on an H200. That would reduce the measured differences
    between contenders.

    On a CPU every core sweeps its part, so that private caches are swept too. The sweep has its own threads, since
    torch's threads would spin for milliseconds afterwards on the cores that the next sample needs.

    Args:
        size: in bytes; 0 makes :meth:`flush` leave the caches as they are. :meth:`flush` still keeps a GPU busy, so
            that the events and the replay are enqueued before they run.
        device: "cpu" or "cuda" (the current one).
    """

    def __init__(self, size: int, device: str) -> None:
        self._buffer = torch.zeros(size // 4, dtype=torch.int32, device=device) if size >= 4 else None
        self._parts: list[Any] = []
        if self._buffer is not None and not self._buffer.is_cuda:
            threads = min(len(one_each_core()), max(1, size // _SWEEP_BYTES))
            self._parts = [part.numpy() for part in self._buffer.chunk(threads)]
            self._pool = ThreadPoolExecutor(threads, thread_name_prefix="autotune-sweep")
        self._spins = self._buffer is None and device.startswith("cuda")

    def flush(self) -> None:
        """Sweep the whole buffer."""
        if self._parts:
            list(self._pool.map(_increment, self._parts))
        elif self._buffer is not None:
            torch.amax(self._buffer)
        elif self._spins:
            torch.cuda._sleep(_SPIN_CYCLES)  # type: ignore[no-untyped-call]


def _increment(part: Any) -> None:
    np.add(part, 1, out=part)  # numpy releases the GIL here


_cold: dict[tuple[int, str], ColdCache] = {}


def _cold_cache(policy: Policy, device: str) -> ColdCache:
    key = (policy.cold_bytes, device)
    if key not in _cold:
        _cold.clear()
        _cold[key] = ColdCache(policy.cold_bytes, device)
    return _cold[key]


def pin_cpu(threads: int = 0) -> int:
    """Pin this process to :func:`autotune.device.one_each_core`; return the number of these processors.

    Migration between hardware threads of one core causes most of the jitter.

    Args:
        threads: of torch's operators and of CPU kernels, on any of these processors; 0 for one on each.
    """
    chosen = one_each_core()
    os.sched_setaffinity(0, chosen)
    torch.set_num_threads(min(threads or len(chosen), len(chosen)))
    return len(chosen)


def time_cpu(
    fn: Runnable, policy: Policy, *, repeats: int, budget_s: float = math.inf, limit_us: float = math.inf
) -> Samples:
    """Time ``fn`` on the CPU.

    Each sample is one call after a sweep of the caches. Work shorter than ``policy.min_sample_us`` is called several
    times per sample, so that the clock's overhead is negligible.

    Args:
        repeats: samples to take.
        budget_s: stop after about this many seconds, with at least three samples.
        limit_us: a candidate whose warm-up is slower than this gets three samples.

    Returns:
        Microseconds per call.
    """
    estimate = warm_cpu(fn, policy)
    if estimate > limit_us:
        repeats = MIN_SAMPLES
    cold = _cold_cache(policy, "cpu")
    inner = calls_per_sample(estimate, policy)
    return sampled(lambda: sample_cpu(fn, cold, inner), repeats, budget_s)


def sampled(sample: Callable[[], float], repeats: int, budget_s: float) -> Samples:
    """Return ``repeats`` samples, fewer (at least three) if ``budget_s`` runs out."""
    samples: Samples = []
    end = time.perf_counter() + budget_s
    while len(samples) < repeats and (len(samples) < MIN_SAMPLES or time.perf_counter() < end):
        samples.append(sample())
    return samples


def in_rounds(names: Sequence[str], policy: Policy, sample: Callable[[str], float]) -> dict[str, Samples]:
    """Take one sample of each contender per round, in the orders of :func:`balanced`, until the policy's limits."""
    samples: dict[str, Samples] = {name: [] for name in names}
    begin = time.perf_counter()
    for done, order in zip(range(policy.final_rounds), balanced(names), strict=False):
        spent = time.perf_counter() - begin
        least = MIN_SAMPLES if spent > done * _LONG_ROUND_S else _MIN_ROUNDS
        if done >= least and spent > policy.final_s:
            break
        for name in order:
            samples[name].append(sample(name))
    return samples


def balanced(contenders: Sequence[T]) -> Iterator[list[T]]:
    """Yield an endless sequence of orders, one per round, each with every contender once.

    The orders are balanced over as many rounds as contenders, or twice as many for an odd number. Every contender then
    has each position equally often, and follows every other one equally often within a round. After-effects of a
    contender, such as a lower clock after a large GEMM, thus affect all others equally. A rotated order would always
    put each contender after the same other one. The orders form a Latin square after E. J. Williams, "Experimental
    designs balanced for the estimation of residual effects of treatments" (1949).
    """
    count = len(contenders)
    zigzag = [k // 2 if k % 2 == 0 else count - (k + 1) // 2 for k in range(count)]
    while True:
        for backwards in (False, True) if count % 2 else (False,):
            for shift in range(count):
                order = [contenders[(k + shift) % count] for k in zigzag]
                yield order[::-1] if backwards else order
        if not count:
            yield []


def warm_cpu(fn: Runnable, policy: Policy) -> float:
    """Warm up; return the time of the fastest call in microseconds."""
    best = math.inf
    for _ in range(max(policy.warmup, 1)):
        begin = time.perf_counter_ns()
        fn()
        best = min(best, (time.perf_counter_ns() - begin) / 1e3)
    return best


def calls_per_sample(estimate_us: float, policy: Policy) -> int:
    """Return the number of calls after which the clock's overhead is negligible."""
    return min(1000, max(1, math.ceil(policy.min_sample_us / max(estimate_us, 0.05))))


def sample_cpu(fn: Runnable, cold: ColdCache, inner: int, before: Callable[[], object] = lambda: None) -> float:
    """Return the mean time of ``inner`` calls in microseconds, after a sweep of the caches and then ``before``."""
    cold.flush()
    before()
    begin = time.perf_counter_ns()
    for _ in range(inner):
        fn()
    return (time.perf_counter_ns() - begin) / 1e3 / inner


def capture(fn: Runnable, pool: Any = None) -> Callable[[], object]:
    """Return the replay of a CUDA graph of ``fn``, or ``fn`` if it cannot be captured (it synchronises, for example).

    Call ``fn`` a few times before, so that lazily created state exists. The function is safe in a user's process: other
    threads may use the device during the capture, and the current stream does not change.

    Args:
        pool: memory pool shared by graphs (``torch.cuda.graph_pool_handle()``). Only one of these graphs may run at a
            time, and their results must not be kept. None gives the graph a private pool.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    stream = _capture_stream(torch.cuda.current_device())
    try:
        with (
            torch.cuda.stream(torch.cuda.current_stream()),  # after a refused capture, torch leaves its stream current
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            fn()
        graph.replay()
        torch.cuda.synchronize()
    except Exception:
        torch.cuda.synchronize()  # a sticky error, unlike a refused capture, is raised again here
        _forget_capture(torch.cuda.current_device())
        fn()
        torch.cuda.synchronize()
        return fn
    return graph.replay


def _forget_capture(device: int) -> None:
    """Reset the device's random generator after a refused capture.

    Torch 2.11 leaves the generator in the refused capture, and all later random numbers fail. A copy of its state,
    which is in no capture, replaces it. Torch 2.13 keeps one state per capture and does not need the reset.
    """
    generator = torch.cuda.default_generators[device]
    generator.graphsafe_set_state(generator.clone_state())


@functools.lru_cache(maxsize=16)
def _capture_stream(device: int) -> torch.cuda.Stream:
    """Return a capture stream of this device; torch's default belongs to the device of the first capture."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def time_cuda(
    fn: Runnable,
    policy: Policy,
    *,
    repeats: int,
    budget_s: float = math.inf,
    limit_us: float = math.inf,
    busy_s: float = 0.0,
) -> Samples:
    """Time ``fn``, which enqueues work on the current stream, on the current CUDA device.

    A CUDA graph captures the work, which removes launch overhead of Python. Before every replay the L2 is swept. The
    sweep also keeps the device busy while the events and the replay are enqueued.

    Args:
        repeats, budget_s, limit_us: as of :func:`time_cpu`, and the samples too.
        busy_s: seconds for which the device has been at work until now, such as for a verification. They count as
            ``policy.wake_s``.
    """
    for _ in range(max(policy.warmup, 1)):
        fn()
    run = capture(fn)
    cold = _cold_cache(policy, "cuda")
    _wake(cold, policy.wake_s - busy_s)
    estimate = _batch_cuda(run, cold, 1)[0]
    if estimate > limit_us:
        repeats = MIN_SAMPLES
    affordable = budget_s * 1e6 / max(estimate, 1.0)
    repeats = max(MIN_SAMPLES, int(min(repeats, affordable)))
    return _batch_cuda(run, cold, repeats)


def _wake(cold: ColdCache, seconds: float) -> None:
    """Keep the GPU busy for ``seconds``, so that it has the clocks of a busy GPU."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(16):
            cold.flush()
        torch.cuda.synchronize()


def keep_running(run: Callable[[], object], seconds: float) -> int:
    """Call ``run`` repeatedly for ``seconds`` on the current CUDA device; return the number of calls."""
    end, times = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        run()
        torch.cuda.synchronize()
        times += 1
    return times


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call, unused-ignore]


def _batch_cuda(run: Callable[[], object], cold: ColdCache, repeats: int) -> Samples:
    pairs: list[tuple[Any, Any]] = []
    for _ in range(repeats):
        begin, end = _event(), _event()
        cold.flush()
        begin.record()
        run()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1e3 for begin, end in pairs]


def _graph_pool() -> Any:
    return torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call, unused-ignore]


def interleave(
    fns: Mapping[str, Runnable],
    policy: Policy,
    device: str,
    before: Callable[[str], None] | None = None,
    *,
    one_memory: bool = False,
    plain: Collection[str] = (),
    lead_s: float = 0.0,
) -> dict[str, Samples]:
    """Time several contenders in rounds: each runs once a round, in an order that changes from round to round.

    Drifts during the comparison (clocks, temperature, other users) and after-effects of contenders thus affect all of
    them equally. Sample ``i`` of every contender is of the same round.

    Args:
        before: called with a contender's name before its warm-up, to identify it if it hangs.
        one_memory: True to share memory among captured graphs, so that all together take no more than the largest. A
            contender's results must not be kept then.
        plain: contenders that are called without capture, since they create CUDA graphs.
        lead_s: on a GPU, seconds for which a contender runs before each of its samples, which is then the mean of
            several runs. The clock of a GPU at its power cap depends on the last tenth of a second. Without a lead, a
            contender that takes more power than the previous one is timed at a clock that it cannot sustain.

    Returns:
        ``policy.final_rounds`` samples each in microseconds, fewer if ``policy.final_s`` ran out: at least five, or
        three of rounds of a second and more.
    """
    names = list(fns)
    runs: dict[str, Callable[[], object]] = {}
    inner = 1
    cuda = device.startswith("cuda")
    pool = _graph_pool() if cuda and one_memory else None
    for name in names:
        if before is not None:
            before(name)
        if cuda:
            for _ in range(max(policy.warmup, 1)):
                fns[name]()
            if name in plain:
                runs[name] = fns[name]
                continue
            runs[name] = capture(fns[name], pool)
            if pool is not None and runs[name] is fns[name]:
                pool = _graph_pool()  # a refused capture may have left the earlier pool open
        else:
            inner = max(inner, calls_per_sample(warm_cpu(fns[name], policy), policy))
            runs[name] = fns[name]
    cold = _cold_cache(policy, "cuda" if cuda else "cpu")
    if cuda:
        _wake(cold, policy.wake_s)

    def sample(name: str) -> float:
        if not cuda:
            return sample_cpu(runs[name], cold, inner)
        led = keep_running(runs[name], lead_s)
        return statistics.fmean(_batch_cuda(runs[name], cold, max(1, led // 4)))

    return in_rounds(names, policy, sample)
