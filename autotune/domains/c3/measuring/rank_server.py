"""The process of one rank: ``python -m autotune.domains.c3.measuring.rank_server``.

:mod:`autotune.domains.c3.measuring.ranks` controls it. Every job is sent to all ranks. Before each step a ``phase``
frame has the step's name and its contender. After it a ``check`` frame has the result on this rank, and the answer the
result of all ranks: ranks continue together or not at all. They agree through the parent instead of a collective call,
since a failed rank may have left a collective call incomplete.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import torch

from autotune.domains.c3.group import Group, join, take_share
from autotune.domains.c3.measuring.bench import RankBench, Run
from autotune.domains.c3.measuring.timing import own_stream, time_ranks
from autotune.domains.c3.scenario import Scenario
from autotune.measure.child import Link, artifact_from_wire, serve
from autotune.measure.outcome import Outcome, blame
from autotune.measure.policy import Policy
from autotune.measure.quiet import Meter, device_lock, wait_for_quiet
from autotune.measure.server import classify, explain, judged
from autotune.task import REFERENCE, Status
from autotune.workload import Workload

T = TypeVar("T")
FINE: dict[str, Any] = {**Outcome(Status.OK).to_json(), "restart": False}
"""Result of a successful step."""


class RankServer:
    """One rank: its group, the bench, and the contenders loaded for a comparison."""

    def __init__(self) -> None:
        self._group: Group | None = None
        self._bench: RankBench | None = None
        self._policy = Policy(method="cpu")
        self._device = "cpu"

    def handle(self, link: Link, message: dict[str, Any], blob: bytes) -> None:
        jobs = {"join": self._join, "open": self._open, "measure": self._measure, "compare": self._compare,
                "call": self._call}  # fmt: skip
        link.send({"result": jobs[message["job"]](message, blob, Talk(link))})

    @property
    def group(self) -> Group:
        assert self._group is not None
        return self._group

    @property
    def bench(self) -> RankBench:
        assert self._bench is not None
        return self._bench

    def _join(self, message: Mapping[str, Any], blob: bytes, talk: Talk) -> dict[str, Any]:
        self._device = message["device"]
        if self._device == "cpu":
            take_share(message["rank"], message["ranks"])
        self._group = join(message["rank"], message["ranks"], self._device, message["init"], message["timeout_s"])
        if self._group.device.type == "cuda":
            torch.cuda.set_stream(own_stream(self._group))  # verified, warmed up and timed on the same stream
        return dict(FINE)

    def _open(self, message: Mapping[str, Any], blob: bytes, talk: Talk) -> dict[str, Any]:
        self._policy = Policy.from_json(message["policy"])
        if message["workload"] is None:
            return {**FINE, "bytes": 0}
        talk.phase("open")
        size, verdict = attempt(lambda: self._turn(Workload.from_json(message["workload"]), message["bench"]), talk)
        return {**verdict, "bytes": size}

    def _turn(self, workload: Workload, module: str) -> int:
        """Open the bench of another workload; returns its bytes to move."""
        if self._bench is not None:
            _close(self._bench)
        self._bench = None
        if self.group.device.type == "cuda":
            torch.cuda.empty_cache()  # symmetric memory does not come from torch's cache
        scenario = Scenario.from_json(workload.spec)
        self._bench = importlib.import_module(module).open_bench(scenario, self.group)
        return self.bench.bytes_moved()

    def _measure(self, message: Mapping[str, Any], blob: bytes, talk: Talk) -> dict[str, Any]:
        p, screen = self._policy, message["stage"] == "screen"
        run, verdict = self._prepare("", message, blob, message["seed"], talk)
        if run is None:
            return verdict if verdict["restart"] else {**verdict, "restart": self._finish({}, talk)}

        def take() -> list[float]:
            with self._alone(0.1 if screen else 1.0, talk):
                talk.phase("time")
                return time_ranks(
                    {"": run},
                    self.group,
                    p,
                    rounds=p.screen_repeats if screen else p.repeat_repeats,
                    budget_s=p.screen_s if screen else p.final_s,
                    limit_us=(message["limit_us"] or math.inf) if screen else math.inf,
                )[""]

        samples, timed = attempt(take, talk)
        restart = self._finish({"": run}, talk)
        if samples is None or not ok(timed):
            return {**timed, "error": verdict["error"], "restart": timed["restart"] or restart}
        return {**Outcome(Status.OK, tuple(samples), verdict["error"]).to_json(), "restart": restart}

    def _prepare(
        self, who: str, item: Mapping[str, Any], blob: bytes, seed: int, talk: Talk
    ) -> tuple[Run | None, dict[str, Any]]:
        """Load and verify a strategy. Returns its run, or None, and the verdict of all ranks."""
        talk.phase("load", who)
        run, verdict = attempt(
            lambda: self.bench.load(item["config"], artifact_from_wire(item["artifact"], blob)), talk
        )
        if run is None or not ok(verdict):
            return None, verdict
        talk.phase("verify", who)
        verdict = talk.agree(self._verify(run, seed))
        if not ok(verdict):
            if not verdict["restart"]:
                verdict = {**verdict, "restart": self._finish({who: run}, talk)}
            return None, verdict
        return run, verdict

    def _verify(self, run: Run, seed: int) -> dict[str, Any]:
        try:
            return judged(self.bench.verify(run, seed))
        except Exception as problem:
            return failed(problem)

    def _compare(self, message: Mapping[str, Any], blob: bytes, talk: Talk) -> dict[str, Any]:
        """Time candidates, baselines and references, interleaved; returns one outcome per name."""
        runs: dict[str, Run] = {}
        outcomes: dict[str, dict[str, Any]] = {}
        errors: dict[str, float | None] = {}
        at = 0
        for item in message["candidates"]:
            name, size = item["name"], sum(k["size"] for k in item["artifact"]["kernels"])
            code, at = blob[at : at + size], at + size
            run, verdict = self._prepare(name, item, code, message["seed"], talk)
            if run is None:
                outcomes[name] = verdict
            else:
                runs[name], errors[name] = run, verdict["error"]
        for name, factory in self._others():
            if name in message["without"]:
                continue
            talk.phase("baseline", name)
            other, verdict = attempt(partial(self._once, factory), talk)
            if other is None or not ok(verdict):
                outcomes[name] = verdict
            else:
                runs[name], errors[name] = other, None
        running, busy = "", None

        def before(name: str) -> None:
            nonlocal running
            running = name
            talk.phase("time", name)

        def take() -> dict[str, list[float]]:
            nonlocal busy
            p = self._policy
            with self._alone(1.0, talk):
                load = Load(self.group)
                samples = time_ranks(runs, self.group, p, rounds=p.final_rounds, budget_s=p.final_s, before=before)
                busy = load.others() if self._device == "cpu" else None
                return samples

        samples, timed = attempt(take, talk)
        restart = self._finish(runs, talk)
        if samples is None or not ok(timed):
            fault, restart = timed.get("fault", ""), timed["restart"] or restart
            return {"failed": timed["reason"], "who": running, "restart": restart, "fault": fault}
        for name, taken in samples.items():
            outcomes[name] = {**Outcome(Status.OK, tuple(taken), errors[name]).to_json(), "restart": False}
        restart = restart or any(o["restart"] for o in outcomes.values())
        return {"outcomes": outcomes, "others": busy, "restart": restart}

    def _others(self) -> Iterator[tuple[str, Callable[[], Run]]]:
        yield from self.bench.baselines().items()
        for name, factory in self.bench.references().items():
            yield REFERENCE + name, factory

    def _once(self, factory: Callable[[], Run]) -> Run:
        """Make a contender and run it once, to detect errors."""
        run = factory()
        run()
        if self.group.device.type == "cuda":
            torch.cuda.synchronize()
        return run

    def _call(self, message: Mapping[str, Any], blob: bytes, talk: Talk) -> dict[str, Any]:
        module, _, name = message["function"].partition(":")
        talk.phase("call", name)
        answer, verdict = attempt(
            lambda: (getattr(importlib.import_module(module), name)(self.group, **message["arguments"]),), talk
        )
        return {**verdict, "answer": answer[0] if answer and ok(verdict) else None}

    @contextlib.contextmanager
    def _alone(self, share: float, talk: Talk) -> Iterator[None]:
        """Lock the ranks' devices against other searches; on CPUs, wait for low load.

        Ranks lock their devices in the order of ranks, so that two searches cannot deadlock.
        """
        talk.phase("wait")
        cpu, group = self._device == "cpu", self.group
        with contextlib.ExitStack() as stack:
            for rank in range(1 if cpu else group.ranks):
                if rank == group.rank:
                    stack.enter_context(device_lock(self._device, self._policy.lock_s))
                    if cpu:
                        wait_for_quiet(share * self._policy.quiet_s)
                group.barrier()
            yield

    def _finish(self, runs: Mapping[str, Run], talk: Talk) -> bool:
        """Close the runs and the bench, including runs that never started; returns True if that failed.

        After a failure the ranks must be restarted.
        """
        try:
            for name, run in runs.items():
                talk.phase("close", name)
                _close(run)
            talk.phase("close")
            _close(self.bench)
        except Exception:
            return True
        return False


def _close(thing: object) -> None:
    """Close a run or a bench, if it has a ``close`` method."""
    close = getattr(thing, "close", None)
    if close is not None:
        close()


class Talk:
    """Messages of a rank to its parent during a job."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def phase(self, name: str, who: str = "") -> None:
        """Report the start of a step, and its contender."""
        self._link.send({"phase": name, "who": who})

    def agree(self, here: Mapping[str, Any]) -> dict[str, Any]:
        """Report a step's result on this rank; returns the verdict of all ranks."""
        self._link.send({"check": here})
        frame = self._link.receive()
        if frame is None:
            raise BrokenPipeError
        verdict: dict[str, Any] = frame[0]["verdict"]
        return verdict


class Load:
    """Load on the processors from processes other than the ranks."""

    def __init__(self, group: Group) -> None:
        self._group, self._meter = group, Meter()
        self._wall, self._own_s = time.monotonic(), _processor_time()

    def others(self) -> float:
        """Mean number of processors used by other processes since construction; a collective call."""
        wall = max(time.monotonic() - self._wall, 1e-9)
        ours = self._group.gather((_processor_time() - self._own_s) / wall)
        return max(0.0, self._meter.others() - float(sum(ours)) + float(ours[self._group.rank]))


def _processor_time() -> float:
    own = os.times()
    return own.user + own.system


def attempt(step: Callable[[], T], talk: Talk) -> tuple[T | None, dict[str, Any]]:
    """Run a step. Returns its result on this rank, None if it failed, and the verdict of all ranks."""
    value: T | None = None
    here = FINE
    try:
        value = step()
    except Exception as problem:
        here = failed(problem)
    return value, talk.agree(here)


def ok(verdict: Mapping[str, Any]) -> bool:
    return bool(verdict["status"] == Status.OK)


def failed(problem: BaseException) -> dict[str, Any]:
    status, restart = classify(problem)
    fault, culprit = blame(problem)
    return {**Outcome(status, reason=explain(culprit), fault=fault).to_json(), "restart": restart}


if __name__ == "__main__":
    serve(RankServer().handle)
