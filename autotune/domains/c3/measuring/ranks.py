"""The search's side of the rank processes: all ranks measure a strategy together, with one outcome."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autotune.domains.c3.measuring.agents import Agents, torchrun_agents
from autotune.domains.c3.measuring.crew import Crew, Lost
from autotune.errors import UserError
from autotune.measure.outcome import Outcome
from autotune.measure.policy import Policy
from autotune.measure.worker import Contender, Supervisor, WorkerFault, step_limit_s, without_failing
from autotune.task import REFERENCE, Status
from autotune.workload import Workload

BENCH = "autotune.domains.c3.measuring.bench"
_CALL_S = 600.0  # timeout of collective calls among ranks, longer than every other deadline here


class Ranks(Supervisor):
    """One process per rank, each with its own device; implements :class:`autotune.measure.worker.Measurer`.

    A failure of any rank, including a crash or a hang, is the candidate's; all processes are then killed and restarted.
    Under torchrun each rank's process belongs to the torchrun process of that RANK; see
    :mod:`autotune.domains.c3.measuring.agents`. A context manager.

    Args:
        workload: the scenario to measure; None if only :meth:`call` will be used.
        device: "cpu", or "cuda:N" for rank 0; rank r uses ``cuda:(N + r)``.
        ranks: number of ranks; None for that of the scenario.
        bench: the module whose ``open_bench(scenario, group)`` makes each rank's bench.

    Attributes:
        ranks: number of processes.
        references: isolated times of the last comparison in microseconds, which cannot be deployed.

    Raises:
        UserError: torchrun started fewer processes than there are ranks.
    """

    def __init__(
        self, workload: Workload | None, device: str, policy: Policy, *, ranks: int | None = None, bench: str = BENCH
    ) -> None:
        if ranks is None:
            if workload is None:
                raise ValueError("a number of ranks is needed where there is no workload")
            ranks = int(workload.spec["ranks"])
        super().__init__(workload, device, policy)
        self._bench = bench
        self._agents: Agents | None = torchrun_agents()
        self.ranks = self._admit(ranks)
        self._crew: Crew | None = None
        self.references: dict[str, float] = {}
        self._spawn()  # the processes import modules while the caller compiles

    def open(self, workload: Workload) -> None:
        """Switch to another scenario, with new processes if its number of ranks differs. Takes effect at the next
        job."""
        if workload == self._workload:
            return
        ranks = self._admit(int(workload.spec["ranks"]))
        self._workload, self._oracle_s = workload, None
        if self._crew is not None:
            self._crew.opened = False
        if ranks != self.ranks:
            self.close()
            self.ranks = ranks

    def compare(self, contenders: Sequence[Contender], *, seed: int) -> dict[str, Outcome]:
        """Time strategies, baselines and references, interleaved in rounds.

        A contender that fails, hangs or kills a rank is reported with its status, and the others are compared without
        it. Names of references start with :data:`autotune.task.REFERENCE`.

        Raises:
            WorkerFault: as :meth:`Supervisor.measure`; or no comparison succeeded without the failing contenders.
        """
        answer, outcomes = without_failing(contenders, lambda left, without: self._comparison(left, without, seed), 9)
        self.others = answer["others"]
        self.references = {n.removeprefix(REFERENCE): o.latency_us for n, o in outcomes.items()
                           if n.startswith(REFERENCE) and o.latency_us is not None}  # fmt: skip
        return outcomes

    def call(self, function: str, arguments: Mapping[str, Any], timeout_s: float) -> list[Any]:
        """Run a function on every rank, as ``fn(group, **arguments)``; returns its JSON answers in the order of ranks.

        Args:
            function: "package.module:name".

        Raises:
            WorkerFault: a rank died, hung or raised. The processes are replaced.
        """
        message = {"job": "call", "function": function, "arguments": dict(arguments)}
        try:
            answers = self._ask(message, b"", lambda phase: timeout_s)
        except Lost as lost:
            raise WorkerFault(f"{function} failed: {lost}") from None
        if answers[0]["status"] != Status.OK:
            self._restart()
            raise WorkerFault(f"{function} failed: {answers[0]['reason']}")
        return [answer["answer"] for answer in answers]

    def close(self) -> None:
        if self._crew is not None:
            self._crew.kill()
            self._crew = None

    def _call(self, message: dict[str, Any], blob: bytes) -> tuple[dict[str, Any] | None, Outcome | None, str]:
        try:
            return self._ask(message, blob)[0], None, ""
        except Lost as lost:
            return None, lost.outcome, lost.who

    def _ask(
        self,
        message: Mapping[str, Any],
        blob: bytes,
        limit: Callable[[str], float] | None = None,
        again: bool = False,
    ) -> list[dict[str, Any]]:
        """Run one job; returns the answers of all ranks, which are equal except in calls.

        Replaces the processes if they are in an unknown state.

        Raises:
            Lost: the job failed.
        """

        def passed(phase: str, seconds: float) -> None:
            if phase == "verify":  # mostly the oracle's time
                self._oracle_s = max(self._oracle_s or 0.0, seconds)

        try:
            answers = self._ready().ask(message, blob, limit or self._limit, passed)
        except Lost as lost:
            self._restart()
            if lost.idle and not again:  # a rank was killed since the last job
                return self._ask(message, blob, limit, again=True)
            raise
        if any(answer["restart"] for answer in answers):
            self._restart()
        return answers

    def _limit(self, phase: str) -> float:
        return step_limit_s(self._policy, phase, self._oracle_s, locks=2)  # ranks lock their devices in turn

    def _admit(self, ranks: int) -> int:
        if self._agents is not None and ranks > self._agents.ranks:
            raise UserError(
                f"torchrun started {self._agents.ranks} ranks, and the scenario has {ranks}: use"
                f" --nproc-per-node {ranks}, or start without torchrun"
            )
        return ranks

    def _spawn(self) -> None:
        self._crew = Crew(self.ranks, self._device, self._agents, 2 * self._policy.lock_s + _CALL_S)

    def _ready(self) -> Crew:
        """Return ranks with the scenario open, started if necessary; no candidate is charged for the start."""
        problem = ""
        for _ in range(3):
            if self._crew is None or not self._crew.alive:
                self.close()
                self._spawn()
            assert self._crew is not None
            if self._crew.opened:
                return self._crew
            begin = time.monotonic()
            try:
                self._crew.joined(begin + self._policy.startup_s)
                self._open(self._crew, begin + self._policy.startup_s)
                return self._crew
            except Lost as lost:
                problem = lost.outcome.reason
            finally:
                self.restart_s += time.monotonic() - begin
            self.close()
        raise WorkerFault(f"{self.ranks} ranks on {self._device} do not start: {problem}")

    def _open(self, crew: Crew, deadline: float) -> None:
        message = {
            "job": "open",
            "workload": self._workload.to_json() if self._workload else None,
            "bench": self._bench,
            "policy": self._policy.to_json(),
        }
        left = deadline - time.monotonic()
        answers = crew.ask(message, b"", lambda phase: left)
        if answers[0]["status"] != Status.OK:
            self.close()
            where = f"on {self.ranks} ranks of {self._device}"
            raise WorkerFault(f"the workload cannot be opened {where}: {answers[0]['reason']}")
        self.bytes_moved = int(answers[0]["bytes"])
        crew.opened = True
