"""The way to measure candidates. It is part of a measurement's key: numbers taken differently are never mixed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

from autotune.workload import digest

MIB = 1 << 20

COPIES = "cpu-copies"
"""The method of a CPU's default policy."""

_OPERATIONAL = ("startup_s", "build_s", "load_s", "baseline_s", "lock_s", "quiet_s")
"""Fields that say how long we are patient with the machine; they do not change what a number means."""


@dataclass(frozen=True)
class Policy:
    """Everything that a latency depends on besides the candidate, the workload and the machine.

    Attributes:
        method: "cuda-graph" (events round graph replays with a cold L2); on a CPU by ``perf_counter``, "cpu-copies"
            (cold data, warm code: copies of the inputs in turn, where the bench has them) or "cpu" (swept caches).
        version: bumped when the way of timing or of comparing results changes, so that old numbers are not reused.
        warmup: calls before the first sample.
        wake_s: on a GPU, seconds of other work before the first sample: an idle GPU clocks down while it waits for the
            next candidate, and takes milliseconds to come back.
        screen_repeats: samples of the first, cheap timing; fewer when one call is slow (see ``screen_s``).
        screen_s: a first timing stops after about this many seconds, with at least three samples.
        hopeless: a candidate slower than this many times the best known gets three samples and no more.
        repeat_repeats: samples when a near-best candidate is timed again.
        near_best: a candidate within this fraction of the best is near-best.
        repeat_top: at most this many near-best candidates are timed again.
        final_top: candidates that meet the baselines in the final comparison.
        final_rounds: rounds of the final comparison; every contender runs once a round, in an order that changes.
        final_s: the final comparison ends after about this many seconds, with at least five rounds.
        cold_bytes: bytes swept between samples so that caches hold nothing of the inputs; 0 leaves them warm. With
            copies of the inputs, what these hold at least.
        min_sample_us: with swept caches on a CPU, a sample shorter than this is made of several calls (those after the
            first are warm).
        timeout_s: a candidate's own time to verify and, again, to be timed, beyond what the oracle needs.
        startup_s: time for the worker to start (importing torch, creating a CUDA context) and to make the inputs.
        build_s: time for a candidate to be compiled in the pool.
        load_s: time for a candidate to be loaded; CPU kernels are compiled then.
        baseline_s: time for one baseline to compile and warm up.
        lock_s: time to wait for another search that is timing on the same device.
        quiet_s: time to wait on a CPU until other processes leave it alone; a tenth of it for a first timing.
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

    @cached_property
    def key(self) -> str:
        """SHA-256 (64 hex digits) of every field that numbers depend on."""
        return digest({k: v for k, v in asdict(self).items() if k not in _OPERATIONAL})

    def to_json(self) -> dict[str, Any]:
        """A JSON object from which :meth:`from_json` makes an equal policy."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Policy:
        """Rebuild a policy; fields unknown to this version are ignored."""
        known = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in data.items() if k in known})


CPU = Policy(method=COPIES, warmup=2, screen_repeats=9, repeat_repeats=21, final_rounds=25, cold_bytes=64 * MIB)
"""Samples are dearer on a CPU and caches smaller: there are fewer samples, and fewer bytes between them."""

CACHES = ("cold", "warm")
"""The contents of the caches when a sample begins: nothing of the inputs, or all that the sample before left there."""


def default_policy(device: str, caches: str = "cold") -> Policy:
    """The policy a search on ``device`` ("cpu" or "cuda:N") uses by default.

    Args:
        caches: one of :data:`CACHES`.
    """
    if caches == "warm":
        cold = default_policy(device)
        return replace(cold, method=cold.method if device.startswith("cuda") else "cpu", cold_bytes=0)
    if device.startswith("cuda"):
        return Policy(method="cuda-graph")
    return CPU
