"""Measurement policy. It is part of a measurement's key, so that latencies of different policies are never mixed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

from autotune.numerics import THREADS, Numerics
from autotune.workload import digest

MIB = 1 << 20

COPIES = "cpu-copies"
"""The method of a CPU's default policy."""

_OPERATIONAL = ("startup_s", "build_s", "load_s", "baseline_s", "lock_s", "quiet_s")
"""Time limits for the machine; they do not affect the meaning of a latency."""
_QUIET_SHARE = 0.05
"""Largest share of a workload's time for which its final comparison waits for a quiet CPU."""


@dataclass(frozen=True)
class Policy:
    """All settings that a latency depends on, apart from the candidate, the workload and the machine.

    Attributes:
        method: "cuda-graph" (events around graph replays with a cold L2). On a CPU, with ``perf_counter``, "cpu-copies"
            (cold data, warm code: copies of the inputs in turn, if the bench has them) or "cpu" (swept caches).
        version: increased when timing or verification changes, so that old latencies are not reused.
        warmup: calls before the first sample.
        wake_s: on a GPU, seconds of other work before the first sample, a verification just before included: an idle
            GPU clocks down while it waits for the next candidate, and takes milliseconds to recover.
        screen_repeats: samples of the first, cheap timing; fewer when one call is slow (see ``screen_s``).
        screen_s: a first timing stops after about this many seconds, with at least three samples.
        hopeless: a candidate slower than this many times the best known gets three samples and no more.
        repeat_repeats: samples when a near-best candidate is timed again.
        near_best: a candidate within this fraction of the best is near-best.
        repeat_top: at most this many near-best candidates are timed again.
        final_top: number of candidates in the final comparison with the baselines.
        final_rounds: rounds of the final comparison; every contender runs once a round, in an order that changes.
        final_s: the final comparison ends after about this many seconds, with at least five rounds, or three rounds of
            a second and more.
        cold_bytes: bytes swept between samples to evict the inputs from the caches; 0 leaves the caches warm. With
            copies of the inputs, the minimum size of all copies.
        min_sample_us: with swept caches on a CPU, a sample shorter than this is made of several calls (those after the
            first are warm).
        timeout_s: time limit for a candidate's verification and, again, for its timing, beyond the oracle's time.
        startup_s: time for the worker to start (importing torch, creating a CUDA context) and to make the inputs.
        build_s: time for a candidate to be compiled in the pool.
        load_s: time for a candidate to be loaded; CPU kernels are compiled then.
        baseline_s: time for one baseline to compile and warm up.
        lock_s: time to wait for another search that is timing on the same device.
        quiet_s: time to wait on a CPU until other processes leave it alone; a tenth of it for a first timing.
        threads: on a CPU, threads of torch's operators and of kernels; 0 for one on each usable core.
    """

    method: str
    version: int = 3
    warmup: int = 3
    wake_s: float = 0.03
    screen_repeats: int = 15
    screen_s: float = 0.5
    hopeless: float = 3.0
    repeat_repeats: int = 40
    near_best: float = 0.1
    repeat_top: int = 6
    final_top: int = 3
    final_rounds: int = 40
    final_s: float = 10.0
    cold_bytes: int = 256 * MIB
    min_sample_us: float = 5.0
    timeout_s: float = 10.0
    startup_s: float = 180.0
    build_s: float = 60.0
    load_s: float = 60.0
    baseline_s: float = 300.0
    lock_s: float = 600.0
    quiet_s: float = 5.0
    threads: int = 0

    @cached_property
    def key(self) -> str:
        """SHA-256 (64 hex digits) of every field that latencies depend on."""
        without = _OPERATIONAL if self.threads else (*_OPERATIONAL, "threads")  # keys are older than this field
        return digest({k: v for k, v in asdict(self).items() if k not in without})

    def within(self, seconds: float | None) -> Policy:
        """Return the policy of a search with so many seconds for a workload; None for no limit.

        A final comparison waits for a quiet CPU for 5% of them at most. The key is the same.
        """
        return self if seconds is None else replace(self, quiet_s=min(self.quiet_s, _QUIET_SHARE * seconds))

    def under(self, settings: Numerics) -> Policy:
        """Return the policy for a program with these settings of torch: as many threads as its CPU kernels have."""
        here = self.method in ("cpu", COPIES)
        return replace(self, threads=settings.get(THREADS, self.threads)) if here else self

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object from which :meth:`from_json` makes an equal policy."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Policy:
        """Rebuild a policy; fields unknown to this version are ignored."""
        known = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in data.items() if k in known})


CPU = Policy(method=COPIES, warmup=2, screen_repeats=9, repeat_repeats=21, final_rounds=25, cold_bytes=64 * MIB)
"""Default policy of a CPU. Samples take longer and caches are smaller, so it has fewer samples and sweeps fewer
bytes."""

CACHES = ("cold", "warm")
"""State of the caches when a sample begins: without the inputs, or as the previous sample leaves them."""


def default_policy(device: str, caches: str = "cold") -> Policy:
    """Return the default policy of a search on ``device`` ("cpu" or "cuda:N").

    Args:
        caches: one of :data:`CACHES`.
    """
    if caches == "warm":
        cold = default_policy(device)
        return replace(cold, method=cold.method if device.startswith("cuda") else "cpu", cold_bytes=0)
    if device.startswith("cuda"):
        return Policy(method="cuda-graph")
    return CPU
