"""The measuring worker's process: ``python -m autotune.measure.server``, driven by :mod:`autotune.measure.worker`.

Jobs arrive as frames. Before each step, the process sends a ``phase`` frame with the step and its contender. The parent
thus has a deadline for every step, and the contender to blame if the process dies.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autotune import numerics
from autotune import task as tasks
from autotune.domain import domain_of
from autotune.errors import BuildError, UserError
from autotune.measure.child import Link, artifact_from_wire, serve
from autotune.measure.outcome import Blame, Outcome, blame, one_line
from autotune.measure.policy import COPIES, Policy
from autotune.measure.quiet import device_lock
from autotune.task import Bench, Runnable, Status, Verdict
from autotune.workload import Workload

_STICKY = re.compile(
    r"illegal memory access|unspecified launch failure|device-side assert|misaligned address|illegal instruction"
    r"|hardware stack error|CUDA_ERROR_(ILLEGAL|LAUNCH_FAILED|ASSERT|MISALIGNED|HARDWARE)|invalid program counter",
    re.IGNORECASE,
)
"""Errors after which every call in a CUDA context returns the same error."""

_STILL_AWAKE_S = 0.005
"""Seconds after a verification within which a GPU has kept the clocks of a busy one."""

_MEMORY = re.compile(r"out of memory|OutOfMemory|CUDA_ERROR_OUT_OF_MEMORY|cannot allocate memory", re.IGNORECASE)


def classify(error: BaseException) -> tuple[Status, bool]:
    """Return the status for a candidate's exception, and True if the process has to be replaced."""
    text = f"{type(error).__name__}: {error}"
    if _STICKY.search(text):
        return Status.CRASHED, True
    if isinstance(error, MemoryError) or _MEMORY.search(text):
        return Status.LAUNCH_ERROR, True
    if isinstance(error, BuildError):
        return Status.COMPILE_ERROR, False
    return Status.LAUNCH_ERROR, False


def explain(error: BaseException) -> str:
    """Return an exception's message as one line."""
    text = str(error).strip()
    if isinstance(error, UserError):
        return one_line(text)
    return one_line(f"{type(error).__name__}: {text}" if text else type(error).__name__)


class Server:
    """Server that owns the device, the bench, and the loaded candidates and baselines."""

    def __init__(self) -> None:
        self.bench: Bench | None = None
        self.policy = Policy(method="cpu")
        self.device = "cpu"
        self.moved = 0  # bytes of the bench's inputs and results
        self.sets: Sequence[Any] | None = None  # copies of the bench's inputs, made for the first timing
        self._verified = (0.0, 0.0)  # begin and end of the last verification

    def handle(self, link: Link, message: dict[str, Any], blob: bytes) -> None:
        def phase(name: str, who: str = "") -> None:
            link.send({"phase": name, "who": who})

        job = message["job"]
        if job == "warm":
            self._warm(message)
            return
        if job == "open":
            answer = self._open(message)
        elif job == "measure":
            answer = self._measure(message, blob, phase)
        elif job == "compare":
            answer = self._compare(message, blob, phase)
        else:
            raise ValueError(f"unknown job {job!r}")
        link.send({"result": answer})

    def _warm(self, message: Mapping[str, Any]) -> None:
        """Compile a workload's baselines, and give no answer. A failure repeats in the next job, which reports it."""
        workload = _workload(message)
        with contextlib.suppress(Exception):
            domain_of(workload.kind).compile_baselines(workload, message["device"])

    def _open(self, message: Mapping[str, Any]) -> dict[str, Any]:
        workload = _workload(message)
        self.policy = Policy.from_json(message["policy"])
        if self.bench is None:  # a bench may import the user's module, which may change the settings
            numerics.restore(message["numerics"])
        self.device, self.sets = message["device"], None
        if self.device.startswith("cuda"):
            import torch

            torch.cuda.set_device(self.device)
        else:
            from autotune.measure.timer import pin_cpu

            pin_cpu(self.policy.threads)
        try:
            self.bench = domain_of(workload.kind).open_bench(workload, self.device)
            self.moved = self.bench.bytes_moved()
            return {"ok": True, "bytes": self.moved}
        except Exception as error:
            fault, culprit = blame(error)
            return {"ok": False, "reason": explain(culprit), "fault": str(fault)}

    def _measure(self, message: Mapping[str, Any], blob: bytes, phase: Callable[..., None]) -> dict[str, Any]:
        run, verdict = self._prepare("", message["config"], message["artifact"], blob, message["seed"], phase)
        if run is None:
            return verdict
        error = verdict["error"]
        try:
            phase("wait")
            self._copy_inputs()
            with device_lock(self.device, self.policy.lock_s):
                self._quiet(0.1 if message["stage"] == "screen" else 1.0)
                phase("time")
                samples = self._time(run, message["stage"], message["limit_us"])
            outcome = self._measured(run, samples, error)
        except Exception as problem:
            return _failed(problem, error)
        return {**outcome.to_json(), "restart": False}

    def _measured(self, run: Runnable, samples: Sequence[float], error: float | None) -> Outcome:
        outcome = Outcome(Status.OK, tuple(samples), error)
        assert self.bench is not None
        return replace(outcome, metrics=self.bench.metrics(run, outcome.latency_us or 0.0))

    @property
    def _figure(self) -> Callable[[Runnable], float] | None:
        return self.bench.figure() if self.bench is not None else None

    def _quiet(self, share: float) -> None:
        if self.device == "cpu":
            from autotune.measure.quiet import wait_for_quiet

            wait_for_quiet(share * self.policy.quiet_s)

    def _copy_inputs(self) -> None:
        """Copy the inputs if the policy rotates them and the bench supports copies."""
        if self.sets is None and self.bench is not None and self.policy.method == COPIES and self._figure is None:
            from autotune.measure.rotate import set_count

            self.sets = self.bench.input_sets(set_count(self.moved, self.policy))

    def _interleave(self, runs: Mapping[str, Any], before: Callable[[str], None]) -> dict[str, list[float]]:
        from autotune.measure import rotate, timer

        if (figure := self._figure) is not None:

            def sample(name: str) -> float:
                before(name)
                return figure(runs[name])

            return timer.in_rounds(list(runs), self.policy, sample)
        if self.sets is not None:
            return rotate.rotate(runs, self.sets, self.policy, before)
        return timer.interleave(runs, self.policy, self.device, before)

    def _time(self, run: Runnable, stage: str, limit_us: float | None) -> list[float]:
        from autotune.measure import rotate, timer

        p = self.policy
        if (figure := self._figure) is not None:
            screens = stage == "screen"
            repeats, budget_s = (p.screen_repeats, p.screen_s) if screens else (p.repeat_repeats, p.final_s)
            return timer.sampled(lambda: figure(run), repeats, budget_s)
        timed: Callable[..., list[float]] = timer.time_cpu
        if self.device.startswith("cuda"):
            begin, end = self._verified
            busy_s = end - begin if time.monotonic() - end < _STILL_AWAKE_S else 0.0
            timed = functools.partial(timer.time_cuda, busy_s=busy_s)
        if self.sets is not None:
            timed = functools.partial(rotate.time_rotating, self.sets)
        if stage == "screen":
            return timed(run, p, repeats=p.screen_repeats, budget_s=p.screen_s, limit_us=limit_us or math.inf)
        return timed(run, p, repeats=p.repeat_repeats, budget_s=p.final_s)

    def _prepare(
        self, who: str, config: Any, head: Any, blob: bytes, seed: int, phase: Callable[..., None]
    ) -> tuple[Runnable | None, dict[str, Any]]:
        """Load and verify a candidate; return its runnable, None if that failed, and the outcome."""
        assert self.bench is not None
        try:
            phase("load", who)
            run = self.bench.load(config, artifact_from_wire(head, blob))
            phase("verify", who)
            begin = time.monotonic()
            outcome = judged(self.bench.verify(run, seed))
            self._verified = begin, time.monotonic()
        except Exception as problem:
            return None, _failed(problem)
        return (run if outcome["status"] == Status.OK else None), outcome

    def _compare(self, message: Mapping[str, Any], blob: bytes, phase: Callable[..., None]) -> dict[str, Any]:
        from autotune.measure.quiet import Meter

        assert self.bench is not None
        runs: dict[str, Runnable] = {}
        outcomes: dict[str, dict[str, Any]] = {}
        errors: dict[str, float | None] = {}
        at = 0
        for item in message["candidates"]:
            name, size = item["name"], sum(k["size"] for k in item["artifact"]["kernels"])
            code, at = blob[at : at + size], at + size
            run, verdict = self._prepare(name, item["config"], item["artifact"], code, message["seed"], phase)
            if run is None:
                outcomes[name] = verdict
            else:
                runs[name], errors[name] = run, verdict["error"]
        for name, run in self._baselines(message["without"], phase, outcomes).items():
            runs[name], errors[name] = run, None
        running = ""

        def before(name: str) -> None:
            nonlocal running
            running = name
            phase("time", name)

        try:
            phase("wait")
            self._copy_inputs()
            with device_lock(self.device, self.policy.lock_s):
                self._quiet(1.0)
                meter = Meter()
                samples = self._interleave(runs, before)
                others = meter.others() if self.device == "cpu" else None
            for name, taken in samples.items():
                running = name
                outcomes[name] = {**self._measured(runs[name], taken, errors[name]).to_json(), "restart": False}
        except Exception as problem:
            fault, culprit = blame(problem)
            restart = classify(problem)[1]
            return {"failed": explain(culprit), "who": running, "restart": restart, "fault": str(fault)}
        return {"outcomes": outcomes, "others": others, "restart": any(o.get("restart") for o in outcomes.values())}

    def _baselines(
        self, without: Sequence[str], phase: Callable[..., None], outcomes: dict[str, dict[str, Any]]
    ) -> dict[str, Runnable]:
        assert self.bench is not None
        runs: dict[str, Runnable] = {}
        for name, factory in self.bench.baselines().items():
            if name in without:
                continue
            phase("baseline", name)
            try:
                run = factory()
                run()
                runs[name] = run
            except Exception as problem:
                outcomes[name] = _failed(problem)
        return runs


def _workload(message: Mapping[str, Any]) -> Workload:
    workload = Workload.from_json(message["workload"])
    tasks.DOMAINS[workload.kind] = message["domain"]
    return workload


def judged(verdict: Verdict) -> dict[str, Any]:
    """Return the message on a verification.

    After a large error, the candidate may have written anywhere, including the inputs and the oracle's results.
    """
    if verdict.ok:
        return {**Outcome(Status.OK, error=verdict.error).to_json(), "restart": False}
    outcome = Outcome(Status.WRONG_RESULT, error=verdict.error, reason=one_line(verdict.detail or "wrong result"))
    return {**outcome.to_json(), "restart": not verdict.error < 100}


def _failed(problem: BaseException, error: float | None = None) -> dict[str, Any]:
    status, restart = classify(problem)
    fault, culprit = blame(problem)
    outcome = Outcome(status, error=error, reason=explain(culprit), fault=fault)
    return {**outcome.to_json(), "restart": restart or fault is Blame.LACK}


if __name__ == "__main__":
    serve(Server().handle)
