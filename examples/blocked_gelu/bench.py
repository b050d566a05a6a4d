"""Execution, verification and timing of candidates of the example's domain."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from autotune.task import Artifact, Bench, Config, Runnable, Verdict
from autotune.workload import Workload

Array = np.ndarray[Any, Any]


class GeluBench(Bench):
    """See ``autotune.task.Bench``."""

    def __init__(self, workload: Workload) -> None:
        self.x = np.random.default_rng(0).standard_normal(int(workload.spec["elements"]), dtype=np.float32)
        self.out = np.empty_like(self.x)

    def load(self, config: Config, artifact: Artifact) -> Runnable:
        return Gelu(self.x, self.out, config)

    def verify(self, run: Runnable, seed: int) -> Verdict:
        np.random.default_rng(seed).standard_normal(dtype=np.float32, out=self.x)
        self.out.fill(np.nan)
        run()
        want = gelu(self.x.astype(np.float64))
        error = float(np.max(np.abs(self.out - want) / (1e-5 * (1 + np.abs(want)))))
        return Verdict(error <= 1, error, "" if error <= 1 else "wrong elements")

    def baselines(self) -> Mapping[str, Callable[[], Runnable]]:
        return {"numpy": lambda: lambda: gelu(self.x)}

    def bytes_moved(self) -> int:
        return 2 * self.x.nbytes


def gelu(x: Array) -> Array:
    """x times the logistic function of 1.702 x, as it is written."""
    return x / (1 + np.exp(-1.702 * x))


class Gelu:
    """GELU of ``x`` into ``out`` by a configuration; a call may be repeated."""

    def __init__(self, x: Array, out: Array, config: Config) -> None:
        self.x, self.out, self.block = x, out, int(config["block"]) or len(x)
        self.kept = threading.local()
        self.pool = ThreadPoolExecutor(int(config["threads"])) if config["threads"] != 1 else None

    def __call__(self) -> None:
        firsts = range(0, len(self.x), self.block)
        list(self.pool.map(self.run, firsts) if self.pool else map(self.run, firsts))

    def run(self, first: int) -> None:
        x, out = (a[first : first + self.block] for a in (self.x, self.out))
        buffer = getattr(self.kept, "buffer", None)
        if buffer is None:
            buffer = self.kept.buffer = np.empty(self.block, self.x.dtype)
        t = np.multiply(x, -1.702, out=buffer[: len(x)])
        np.exp(t, out=t)
        t += 1
        np.divide(x, t, out=out)
