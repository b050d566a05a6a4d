"""Timing: CUDA events round graph replays with a cold L2, ``perf_counter`` with swept caches on a CPU. Microseconds.

On a CPU :mod:`autotune.measure.timing.rotate` has the other way, for benches that have several copies of their inputs.

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

from autotune.measure.policy import Policy
from autotune.task import Runnable

T = TypeVar("T")
Samples = list[float]
MIN_SAMPLES = 3
_MIN_ROUNDS = 5
_SWEEP_BYTES = 1 << 20  # a thread sweeps at least so much
_SPIN_CYCLES = 100_000  # some 60 us, longer than a replay and its events take to be enqueued


class ColdCache:
    """A buffer whose sweeping drives everything else out of the caches.

    On a GPU it is only read, several times the L2's size: written lines would still have to go to memory while the
    contender runs (up to the whole L2, some 10 us on an H200), and all contenders would look more alike than they are.

    On a CPU every core sweeps its part, so that private caches are swept too, with threads of our own: torch's would go
    on spinning for milliseconds after the sweep, on the cores that the next sample needs.

    Args:
        size: in bytes; 0 makes :meth:`flush` leave the caches as they are. A GPU is kept busy all the same: what is
            enqueued next is to lie behind it when its time begins.
        device: "cpu" or "cuda" (the current one).
    """

    def __init__(self, size: int, device: str) -> None:
        self._buffer = torch.zeros(size // 4, dtype=torch.int32, device=device) if size >= 4 else None
        self._parts: list[Any] = []
        if self._buffer is not None and not self._buffer.is_cuda:
            threads = min(torch.get_num_threads(), max(1, size // _SWEEP_BYTES))
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
    np.add(part, 1, out=part)  # numpy lets go of the interpreter meanwhile


_cold: dict[tuple[int, str], ColdCache] = {}


def _cold_cache(policy: Policy, device: str) -> ColdCache:
    key = (policy.cold_bytes, device)
    if key not in _cold:
        _cold.clear()
        _cold[key] = ColdCache(policy.cold_bytes, device)
    return _cold[key]


def pin_cpu() -> int:
    """Keep this process on one hardware thread of each core it may use; returns how many that are.

    Moving between hardware threads of one core is the larger part of the jitter. Where that would leave a single one
    (a virtual machine that shows two hardware threads as its only core) nothing is narrowed. torch's pool is sized to
    match.
    """
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    cores: dict[str, int] = {}
    for cpu in allowed:
        try:
            with open(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") as f:
                siblings = f.read().strip()
        except OSError:
            siblings = str(cpu)
        cores.setdefault(siblings, cpu)
    chosen = sorted(cores.values()) if len(cores) > 1 else allowed
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, chosen)
    torch.set_num_threads(len(chosen))
    return len(chosen)


def time_cpu(
    fn: Runnable, policy: Policy, *, repeats: int, budget_s: float = math.inf, limit_us: float = math.inf
) -> Samples:
    """Time ``fn`` on the CPU.

    Each sample is one call after the caches were swept; work shorter than ``policy.min_sample_us`` is called several
    times a sample, so that the clock's own cost does not show.

    Args:
        repeats: samples to take.
        budget_s: stop after about this many seconds, with at least three samples.
        limit_us: a candidate whose warm-up is slower than this gets three samples.

    Returns:
        Microseconds a call.
    """
    estimate = _warm_cpu(fn, policy)
    if estimate > limit_us:
        repeats = MIN_SAMPLES
    cold = _cold_cache(policy, "cpu")
    inner = _inner(estimate, policy)
    return sampled(lambda: _sample_cpu(fn, cold, inner), repeats, budget_s)


def sampled(sample: Callable[[], float], repeats: int, budget_s: float) -> Samples:
    """``repeats`` samples, fewer (at least three) where ``budget_s`` runs out."""
    samples: Samples = []
    end = time.perf_counter() + budget_s
    while len(samples) < repeats and (len(samples) < MIN_SAMPLES or time.perf_counter() < end):
        samples.append(sample())
    return samples


def in_rounds(names: Sequence[str], policy: Policy, sample: Callable[[str], float]) -> dict[str, Samples]:
    """A sample of each contender a round, in an order that changes, until the policy ends it; see :func:`balanced`."""
    samples: dict[str, Samples] = {name: [] for name in names}
    end = time.perf_counter() + policy.final_s
    for done, order in zip(range(policy.final_rounds), balanced(names), strict=False):
        if done >= _MIN_ROUNDS and time.perf_counter() > end:
            break
        for name in order:
            samples[name].append(sample(name))
    return samples


def balanced(contenders: Sequence[T]) -> Iterator[list[T]]:
    """One order for each round, without end: each has every contender once.

    Over as many rounds as there are contenders (twice as many, where their number is odd) every contender has each
    place equally often, and follows every other one equally often within a round. What a contender leaves behind, such
    as a lower clock after a large GEMM, then meets all others alike. An order that only rotates leaves each contender
    behind the same other one. Orders are those of a Latin square after E. J. Williams, "Experimental designs balanced
    for the estimation of residual effects of treatments" (1949).
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


def _warm_cpu(fn: Runnable, policy: Policy) -> float:
    """Warm up and return the fastest of the calls, in microseconds."""
    best = math.inf
    for _ in range(max(policy.warmup, 1)):
        begin = time.perf_counter_ns()
        fn()
        best = min(best, (time.perf_counter_ns() - begin) / 1e3)
    return best


def _inner(estimate_us: float, policy: Policy) -> int:
    return min(1000, max(1, math.ceil(policy.min_sample_us / max(estimate_us, 0.05))))


def _sample_cpu(fn: Runnable, cold: ColdCache, inner: int) -> float:
    cold.flush()
    begin = time.perf_counter_ns()
    for _ in range(inner):
        fn()
    return (time.perf_counter_ns() - begin) / 1e3 / inner


def capture(fn: Runnable, pool: Any = None) -> Callable[[], object]:
    """``fn`` as a CUDA graph's replay; ``fn`` itself where it cannot be captured (it synchronises, say).

    Call ``fn`` a few times before, so that what is made lazily exists. The process may be a user's: his other threads
    may go on using the device, and the current stream stays as it is.

    Args:
        pool: memory that graphs share (``torch.cuda.graph_pool_handle()``): those whose results nobody keeps, and of
            which one runs at a time. None gives the graph memory of its own.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    stream = _capture_stream(torch.cuda.current_device())
    try:
        with (
            torch.cuda.stream(torch.cuda.current_stream()),  # where a capture is refused, torch leaves its own current
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
    """Torch 2.11 leaves the generator of a refused capture in it, and every random number after that fails: put a copy
    of its state, which is in no capture, in its place. (2.13 keeps a state for each capture, and needs no help.)
    """
    generator = torch.cuda.default_generators[device]
    generator.graphsafe_set_state(generator.clone_state())


@functools.lru_cache(maxsize=16)
def _capture_stream(device: int) -> torch.cuda.Stream:
    """One of this device: torch's default is of the device that was current when it first captured."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def time_cuda(
    fn: Runnable, policy: Policy, *, repeats: int, budget_s: float = math.inf, limit_us: float = math.inf
) -> Samples:
    """Time ``fn``, which enqueues work on the current stream, on the current CUDA device.

    The work is captured in a CUDA graph, so that launches from Python do not show; the L2 is swept before every replay,
    which also keeps the device busy while the events and the replay are enqueued behind it.

    Args and returns: as for :func:`time_cpu`.
    """
    for _ in range(max(policy.warmup, 1)):
        fn()
    run = capture(fn)
    cold = _cold_cache(policy, "cuda")
    _wake(cold, policy.wake_s)
    estimate = _batch_cuda(run, cold, 1)[0]
    if estimate > limit_us:
        repeats = MIN_SAMPLES
    affordable = budget_s * 1e6 / max(estimate, 1.0)
    repeats = max(MIN_SAMPLES, int(min(repeats, affordable)))
    return _batch_cuda(run, cold, repeats)


def _wake(cold: ColdCache, seconds: float) -> None:
    """Keep the GPU busy for ``seconds``, so that its clocks are those of a GPU at work."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(16):
            cold.flush()
        torch.cuda.synchronize()


def keep_running(run: Callable[[], object], seconds: float) -> int:
    """Run on the current CUDA device for ``seconds``, one after the other, and return how often that was."""
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

    What drifts during the comparison (clocks, temperature, other users) then meets all of them alike, as does what one
    contender leaves behind for the next, and sample ``i`` of every contender belongs to the same moment.

    Args:
        before: called with a contender's name ahead of its warm-up (so that a hang can be blamed).
        one_memory: captured graphs share their memory, so that all take no more than the one that takes most. What a
            contender returns must not be kept then.
        plain: contenders that are called as they are, not captured: they make CUDA graphs of their own.
        lead_s: on a GPU, seconds for which a contender runs before each of its samples, which is then the mean of
            several runs. A GPU at its power cap clocks as the last tenth of a second left it. Without a lead, a
            contender that takes more power than the one before is timed at a clock that it cannot hold.

    Returns:
        ``policy.final_rounds`` samples each in microseconds, fewer (at least five) where ``policy.final_s`` ran out.
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
                pool = _graph_pool()  # a refused capture may have left the other one open
        else:
            inner = max(inner, _inner(_warm_cpu(fns[name], policy), policy))
            runs[name] = fns[name]
    cold = _cold_cache(policy, "cuda" if cuda else "cpu")
    if cuda:
        _wake(cold, policy.wake_s)

    def sample(name: str) -> float:
        if not cuda:
            return _sample_cpu(runs[name], cold, inner)
        led = keep_running(runs[name], lead_s)
        return statistics.fmean(_batch_cuda(runs[name], cold, max(1, led // 4)))

    return in_rounds(names, policy, sample)
