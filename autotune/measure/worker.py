"""The search's interface to the measuring worker: one process per device that may hang, crash or run out of memory."""

from __future__ import annotations

import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

from autotune import numerics
from autotune import task as tasks
from autotune.device import usable_processors
from autotune.measure.child import Child, ChildDied, ChildSilent, artifact_to_wire
from autotune.measure.outcome import Blame, Outcome
from autotune.measure.policy import Policy
from autotune.task import Artifact, Config, Status
from autotune.workload import Workload

_GRACE_S = 5.0  # added to the worker's deadline: its answer is better than a kill


STEPS = {
    "start": "starting the job",
    "load": "loading",
    "verify": "verification",
    "wait": "waiting for the device",
    "time": "timing",
    "baseline": "preparing a baseline",
}
"""Names of a job's steps in messages."""


class WorkerFault(Exception):
    """A fault of the machine, not of a candidate: the worker does not start, or the workload cannot be opened."""


class MachineFault(WorkerFault):
    """A fault that would affect other workloads too and that persisted at a second try.

    Examples are a full disk, lack of memory and processes killed from outside. It ends a search.
    """


@dataclass(frozen=True)
class Contender:
    """A candidate in the final comparison; the caller chooses ``name``."""

    name: str
    config: Config
    artifact: Artifact


class Measurer(Protocol):
    """Interface of a worker for the tuner."""

    restarts: int
    restart_s: float
    baseline_s: float
    bytes_moved: int
    others: float | None

    def open(self, workload: Workload) -> None: ...

    def measure(
        self, config: Config, artifact: Artifact, *, stage: str, seed: int, limit_us: float | None = None
    ) -> Outcome: ...

    def compare(self, contenders: Sequence[Contender], *, seed: int) -> dict[str, Outcome]: ...

    def close(self) -> None: ...


def measure_message(
    config: Config, artifact: Artifact, stage: str, seed: int, limit_us: float | None
) -> tuple[dict[str, Any], bytes]:
    """Return the frame of a :meth:`Measurer.measure` job, and its code."""
    head, blob = artifact_to_wire(artifact)
    message = {
        "job": "measure",
        "config": dict(config),
        "artifact": head,
        "stage": stage,
        "seed": seed,
        "limit_us": limit_us,
    }
    return message, blob


def compare_message(contenders: Sequence[Contender], without: Sequence[str], seed: int) -> tuple[dict[str, Any], bytes]:
    """Return the frame of a :meth:`Measurer.compare` job, and its code."""
    pairs = [(c, *artifact_to_wire(c.artifact)) for c in contenders]
    items = [{"name": c.name, "config": dict(c.config), "artifact": head} for c, head, _ in pairs]
    message = {"job": "compare", "candidates": items, "without": list(without), "seed": seed}
    return message, b"".join(blob for _, _, blob in pairs)


def step_limit_s(policy: Policy, phase: str, oracle_s: float | None, locks: int = 1) -> float:
    """Return the time limit of a job's step in seconds.

    Args:
        oracle_s: time of the oracle; None until a candidate has passed. Its factor allows for a loaded machine.
        locks: number of device locks that a step waits for, one after the other.
    """
    if phase == "verify":
        return policy.timeout_s + (4 * oracle_s if oracle_s is not None else policy.load_s)
    return {
        "start": 30.0,
        "load": policy.load_s,
        "baseline": policy.baseline_s,
        "wait": locks * policy.lock_s + policy.quiet_s + _GRACE_S,
        "time": policy.timeout_s + max(policy.screen_s, policy.final_s) + _GRACE_S,
    }.get(phase, policy.timeout_s)


Attempt = tuple[dict[str, Any], Outcome | None, str]
"""One comparison: its answer, or the failure and the contender to blame."""


def without_failing(
    contenders: Sequence[Contender], attempt: Callable[[Sequence[Contender], Sequence[str]], Attempt], others: int
) -> tuple[dict[str, Any], dict[str, Outcome]]:
    """Compare repeatedly, leaving out failing contenders, until a comparison succeeds.

    Args:
        attempt: runs one comparison of candidates, without the named baselines.
        others: maximum number of failing contenders that are not candidates.

    Returns:
        The answer, and the outcome of every contender, including those left out.

    Raises:
        WorkerFault: no contender is to blame, or no comparison succeeded without the failing ones.
    """
    left, without = list(contenders), list[str]()
    lost: dict[str, Outcome] = {}
    for _ in range(len(contenders) + others):
        answer, failure, who = attempt(left, without)
        if failure is not None and failure.fault:
            answer, failure, who = attempt(left, without)
        if failure is None:
            return answer, lost | {name: Outcome.from_json(o) for name, o in answer["outcomes"].items()}
        if not who or failure.fault in (Blame.MACHINE, Blame.USER):
            kind = MachineFault if failure.fault else WorkerFault
            raise kind(f"the final comparison failed: {failure.reason}")
        lost[who] = failure
        if any(c.name == who for c in left):
            left = [c for c in left if c.name != who]
        else:
            without.append(who)
    raise WorkerFault("the final comparison failed again and again")


class Supervisor(ABC):
    """Base of workers whose processes are replaced after a failure. A context manager.

    Attributes:
        restarts: number of times that the processes were replaced.
        restart_s: seconds spent waiting for processes to start.
        baseline_s: seconds spent preparing baselines, mostly compilation by torch.
        others: processors that other processes kept busy during the last comparison; None before one, and on a GPU.
        bytes_moved: bytes that a perfect implementation of the open workload moves; 0 until the first job.
    """

    def __init__(self, workload: Workload | None, device: str, policy: Policy) -> None:
        self._workload = workload
        self._device = device
        self._policy = policy
        self._oracle_s: float | None = None
        self.restarts = 0
        self.restart_s = 0.0
        self.baseline_s = 0.0
        self.bytes_moved = 0
        self.others: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def measure(
        self, config: Config, artifact: Artifact, *, stage: str, seed: int, limit_us: float | None = None
    ) -> Outcome:
        """Load, verify and time one candidate.

        Args:
            stage: "screen" (cheap) or "repeat" (more samples).
            seed: of the random inputs for verification.
            limit_us: for "screen": candidates slower than this get three samples only.

        Raises:
            WorkerFault: the processes cannot be started, or cannot open the workload.
        """
        message, blob = measure_message(config, artifact, stage, seed, limit_us)
        self._ready()
        begin = time.monotonic()
        answer, failure, _ = self._call(message, blob)
        seconds = time.monotonic() - begin
        if failure is not None:
            return replace(failure, seconds=seconds)
        assert answer is not None
        return Outcome.from_json(answer, seconds)

    @abstractmethod
    def close(self) -> None:
        """End the processes and their descendants."""

    def _comparison(self, left: Sequence[Contender], without: Sequence[str], seed: int) -> Attempt:
        answer, failure, who = self._call(*compare_message(left, without, seed))
        if answer is None:
            return {}, failure, who
        if "failed" in answer:
            fault = Blame(answer["fault"])
            return {}, Outcome(Status.LAUNCH_ERROR, reason=answer["failed"], fault=fault), answer.get("who", "")
        return answer, None, ""

    @abstractmethod
    def _call(self, message: dict[str, Any], blob: bytes) -> tuple[dict[str, Any] | None, Outcome | None, str]:
        """Run one job; return its answer, or the failure and the contender to blame."""

    def _restart(self) -> None:
        self.close()
        self.restarts += 1
        self._spawn()

    @abstractmethod
    def _spawn(self) -> None:
        """Start the processes. A failure is reported by the next job, which needs them."""

    @abstractmethod
    def _ready(self) -> object:
        """Start the processes and open the workload if necessary, outside any candidate's time."""


class Worker(Supervisor):
    """One spawned process that owns a device. A context manager.

    A job that exceeds its deadline, crashes, runs out of memory or leaves the device in an error state returns the
    matching status. The process and its descendants are then replaced.

    Args:
        workload: the first workload, or None; :meth:`open` switches to another without a new process.
        device: "cpu" or "cuda:N".
        policy: the measurement policy; its deadlines apply to each step of a job.
        without: baselines that no comparison needs.
    """

    def __init__(self, workload: Workload | None, device: str, policy: Policy, *, without: Sequence[str] = ()) -> None:
        super().__init__(workload, device, policy)
        self._without = tuple(without)
        self._child: Child | None = None
        self._opened = False
        self._opening: dict[str, Any] | None = None
        self._unborn = ""
        self._spawn()

    def open(self, workload: Workload) -> None:
        """Switch to another workload, with effect from the next job."""
        if workload != self._workload:
            self._workload, self._opened, self._oracle_s = workload, False, None

    def compare(self, contenders: Sequence[Contender], *, seed: int, without: Sequence[str] = ()) -> dict[str, Outcome]:
        """Time candidates and baselines against each other, interleaved round by round.

        A contender or baseline that fails, hangs or crashes is reported with its status, and the others are compared
        without it. The bench defines the names of the baselines ("eager", "inductor", ...).

        Args:
            without: baselines to leave out.

        Raises:
            WorkerFault: see :meth:`Supervisor.measure`; or no comparison succeeded without the failing contenders.
        """
        answer, outcomes = without_failing(
            contenders, lambda left, failed: self._comparison(left, [*self._without, *without, *failed], seed), 6
        )
        self.others = answer["others"]
        return outcomes

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None

    def _call(self, message: dict[str, Any], blob: bytes) -> tuple[dict[str, Any] | None, Outcome | None, str]:
        child = self._ready()
        phase, who, begin = "start", "", time.monotonic()
        try:
            child.send(message, blob)
            while True:
                frame, _ = child.receive(begin + self._deadline(phase))
                if phase == "verify" and frame.get("phase") in ("wait", "load", "baseline"):
                    spent = time.monotonic() - begin  # a verified candidate: mostly the oracle's time
                    self._oracle_s = max(self._oracle_s or 0.0, spent)
                if phase == "baseline":
                    self.baseline_s += time.monotonic() - begin
                if "result" in frame:
                    if frame["result"].get("restart"):
                        self._restart()
                    return frame["result"], None, ""
                phase, who, begin = frame["phase"], frame["who"], time.monotonic()
        except ChildSilent:
            reason = f"no answer after {self._deadline(phase):.0f} s in {STEPS.get(phase, phase)}"
            failure = Outcome(Status.TIMEOUT, reason=reason)
        except ChildDied as death:
            failure = Outcome(Status.CRASHED, reason=f"{death} in {STEPS.get(phase, phase)}", fault=death.fault)
        except ValueError as nonsense:
            failure = Outcome(Status.CRASHED, reason=str(nonsense))
        self._restart()
        return None, failure, who

    def _deadline(self, phase: str) -> float:
        return step_limit_s(self._policy, phase, self._oracle_s)

    def _spawn(self) -> None:
        # The worker pins itself to one thread per core, but a candidate may use all threads.
        env = {"NUMBA_NUM_THREADS": os.environ.get("NUMBA_NUM_THREADS", str(usable_processors()))}
        self._opened, self._opening = False, None
        try:
            self._child = Child("autotune.measure.server", env)
        except OSError as error:  # the next job, which needs the child, reports it
            self._unborn = error.strerror or str(error)
            return
        if self._workload is not None:  # its imports and inputs overlap with the caller's compilation
            with contextlib.suppress(ChildDied, ChildSilent):  # the next job reports it
                self._begin_open(self._child, self._workload)

    def _ready(self) -> Child:
        problem = ""
        for _ in range(3):
            changed = self._opening is not None and self._opening["numerics"] != numerics.read()
            if self._child is None or not self._child.alive or changed:
                self.close()
                self._spawn()
            if self._child is None:
                raise MachineFault(f"the measuring worker on {self._device} cannot be started: {self._unborn}")
            if self._opened:
                return self._child
            begin = time.monotonic()
            try:
                self._open(self._child, begin + self._policy.startup_s)
                return self._child
            except ChildSilent:
                problem = f"no answer after {self._policy.startup_s:.0f} s"
            except (ChildDied, ValueError) as death:
                problem = str(death)
            finally:
                self.restart_s += time.monotonic() - begin
            self.close()
        raise WorkerFault(f"the measuring worker on {self._device} does not start: {problem}")

    def warm(self, workload: Workload) -> None:
        """Compile a small workload's baselines by torch, whose first compilation takes seconds. Waits for nothing."""
        if self._child is not None:
            self._child.send({**self._open_message(workload), "job": "warm"})

    def _open_message(self, workload: Workload) -> dict[str, Any]:
        return {
            "job": "open",
            "workload": workload.to_json(),
            "domain": tasks.module_of(workload.kind),
            "device": self._device,
            "policy": self._policy.to_json(),
            "numerics": numerics.read(),
        }

    def _begin_open(self, child: Child, workload: Workload) -> None:
        message = self._open_message(workload)
        child.send(message)
        self._opening = message

    def _open(self, child: Child, deadline: float) -> None:
        assert self._workload is not None, "a job needs a workload"
        if self._opening is not None and self._opening != self._open_message(self._workload):
            child.receive(deadline)  # another workload's answer
            self._opening = None
        if self._opening is None:
            self._begin_open(child, self._workload)
        frame, _ = child.receive(deadline)
        self._opening, answer = None, frame["result"]
        if not answer["ok"]:
            # Only this workload may need too much memory: other workloads are still tried.
            kind = MachineFault if Blame(answer["fault"]) in (Blame.MACHINE, Blame.USER) else WorkerFault
            raise kind(f"the workload cannot be opened on {self._device}: {answer['reason']}")
        self.bytes_moved = int(answer["bytes"])
        self._opened = True
