"""Shared part of the scripts that time candidates on a GPU: one is verified, then timed."""

from __future__ import annotations

import statistics

from autotune.domains.fusion.bench import FusionBench
from autotune.errors import first_line
from autotune.measure.policy import default_policy
from autotune.measure.timer import time_cuda
from autotune.task import Artifact, Config, Runnable


def timed(
    bench: FusionBench, config: Config, artifact: Artifact, seed: int, device: str, repeats: int
) -> tuple[Runnable, float] | None:
    """A candidate, loaded, and the median of its microseconds; None for one with wrong results, which is printed.

    Raises:
        RuntimeError: it failed on the device, which nothing can run on from then on; the candidate is printed. Each one
            is waited for, so it is the one to blame.
    """
    try:
        run = bench.load(config, artifact)
        verdict = bench.verify(run, seed)
        if not verdict.ok:
            print(f"BAD {verdict.detail} {config}", flush=True)
            return None
        return run, statistics.median(time_cuda(run, default_policy(device), repeats=repeats))
    except Exception as error:
        print(f"FAILED {first_line(error)} {config}", flush=True)
        raise
