"""A bench for tests of the rank processes: every candidate adds up one number of each rank, and some do it badly.

``how`` selects the fault, ``rank`` its rank (-1: all), ``when`` its step. Bad ones are really bad: a
rank that is to die is killed by SIGKILL, and one that is to hang never comes back.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from autotune.domains.c3.group import Group
from autotune.domains.c3.scenario import Gemm, Scenario
from autotune.errors import Unsupported
from autotune.task import Artifact, Config, Verdict
from autotune.workload import Workload
from tests.support.clock import stuck
from tests.support.clock import timed as worker_clock

OPENED = 0  # benches that this process has opened


def workload(ranks: int = 2, nbytes: int = 4096) -> Workload:
    return Scenario(Gemm(64, 64, 64, "f32"), "all_reduce", nbytes, ranks, "f32").workload()


class Run:
    """One candidate on one rank."""

    def __init__(self, group: Group, config: Mapping[str, Any]) -> None:
        self.group = group
        self.config = dict(config)
        self.value = torch.zeros(1)
        self.steps = ""
        group.keep("toy", list).append(self)  # type: ignore[arg-type]
        self.step("load")

    def step(self, when: str) -> None:
        """Do what the candidate does badly, if it is its turn."""
        mine = self.config.get("rank", -1) in (-1, self.group.rank)
        how = self.config["how"]
        if when == "time":
            worker_clock().busy(20_000 if how == "slow" and mine else 100)
        if not mine or self.config.get("when", "verify") != when or how in ("good", "wrong", "slow"):
            return
        if how == "raise":
            raise RuntimeError(f"no luck on rank {self.group.rank}")
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(3)
        while how == "hang":
            stuck()
            time.sleep(1)

    def __call__(self) -> None:
        self.step(self.steps or "time")
        self.value.fill_(float(self.group.rank + 1))
        dist.all_reduce(self.value, group=self.group.data)

    def close(self) -> None:
        self.step("close")
        self.group.keep("toy", list).remove(self)  # type: ignore[arg-type]


class ToyBench:
    def __init__(self, scenario: Scenario, group: Group) -> None:
        global OPENED
        worker_clock()
        OPENED += 1
        self.scenario, self.group = scenario, group
        if scenario.nbytes == 4:
            raise Unsupported("four bytes are too few")

    def load(self, config: Config, artifact: Artifact) -> Run:
        return Run(self.group, config)

    def verify(self, run: Run, seed: int) -> Verdict:
        run.steps = "verify"
        run()
        run.steps = ""
        ranks = self.group.ranks
        right = run.value.item() == ranks * (ranks + 1) / 2
        if run.config["how"] == "wrong" and run.config.get("rank", -1) in (-1, self.group.rank):
            return Verdict(False, float(run.config.get("error", 2.0)), "a number is off")
        return Verdict(right, 0.25 * (self.group.rank + 1))

    def baselines(self) -> Mapping[str, Callable[[], Run]]:
        return {
            "sequential": lambda: Run(self.group, {"how": "slow"}),
            "naive": lambda: Run(self.group, {"how": "raise", "when": "time"}),
        }

    def references(self) -> Mapping[str, Callable[[], Run]]:
        return {
            "compute": lambda: Run(self.group, {"how": "good"}),
            "comm:toy": lambda: Run(self.group, {"how": "die", "rank": 1, "when": "time"}),
        }

    def close(self) -> None:
        for run in list(self.group.keep("toy", list)):  # type: ignore[var-annotated]
            run.close()

    def bytes_moved(self) -> int:
        return self.scenario.nbytes


def open_bench(scenario: Scenario, group: Group) -> ToyBench:
    return ToyBench(scenario, group)


def whoami(group: Group, word: str) -> dict[str, Any]:
    """For :meth:`Ranks.call`."""
    total = group.largest([float(group.rank)])[0]
    return {
        "word": word,
        "rank": group.rank,
        "largest": total,
        "opened": OPENED,
        "left": len(group.keep("toy", list)),
        "threads": torch.get_num_threads(),
    }


def fail(group: Group, rank: int) -> None:
    """For :meth:`Ranks.call`: one rank raises, the others wait for it."""
    if group.rank == rank:
        raise RuntimeError("no such thing")
    group.barrier()


def timed(group: Group, **options: Any) -> dict[str, list[float]]:
    """For :meth:`Ranks.call`: what timing makes of a rank that takes 20 ms and others that take none, by a clock."""
    from autotune.domains.c3.measuring.timing import time_ranks
    from autotune.measure.policy import Policy

    told: list[str] = []
    worker_clock()
    runs: dict[str, Callable[[], object]] = {
        "slow": lambda: worker_clock().busy(20_000 if group.rank == group.ranks - 1 else 0),
        "empty": lambda: None,
    }
    runs = {name: runs[name] for name in options.pop("names")}
    policy = Policy(method="cpu", warmup=1, cold_bytes=1 << 16, min_sample_us=0.0)
    taken: dict[str, Any] = time_ranks(runs, group, policy, before=told.append, **options)
    return {**taken, "told": told}  # type: ignore[dict-item]


def parent(group: Group) -> int:
    """For :meth:`Ranks.call`: the process that started this rank."""
    return os.getppid()
