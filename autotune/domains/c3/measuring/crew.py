"""The processes of one group of ranks: all of them start, receive jobs and are killed together."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.domains.c3.measuring.agents import Agents, RemoteChild
from autotune.measure import worker
from autotune.measure.child import Child, ChildDied, ChildSilent, ready
from autotune.measure.outcome import Outcome
from autotune.task import Status

MODULE = "autotune.domains.c3.measuring.rank_server"
_PEERS_S = 5.0  # seconds for the other ranks to finish after one rank failed

STEPS = {
    **worker.STEPS,
    "wait": "waiting for the devices",
    "close": "closing",
    "call": "a call",
    "open": "opening the scenario",
}


class Lost(Exception):
    """A job failed and the ranks are out of step: a rank died, hung, or failed where others did not.

    Attributes:
        outcome: the candidate's outcome.
        who: name of the affected contender, "" if there is only one.
        idle: a rank was already dead before it began the job, so the job is not to blame.
    """

    def __init__(self, outcome: Outcome, who: str, idle: bool = False) -> None:
        super().__init__(outcome.reason)
        self.outcome, self.who, self.idle = outcome, who, idle


@dataclass
class _Seat:
    """A rank's process, and its progress in the job."""

    child: Child | RemoteChild
    phase: str = "start"
    who: str = ""
    begin: float = 0.0
    check: dict[str, Any] | None = None
    result: dict[str, Any] | None = None

    @property
    def busy(self) -> bool:
        return self.check is None and self.result is None


class Crew:
    """One process per rank. Each process joins the group as soon as it has started.

    Args:
        device: "cpu", or "cuda:N" for rank 0; rank r uses ``cuda:(N + r)``.
        agents: under torchrun, start the processes of ranks above 0; None starts all of them here.
        timeout_s: timeout of collective calls among the ranks.
    """

    def __init__(self, ranks: int, device: str, agents: Agents | None, timeout_s: float) -> None:
        self.opened = False
        self._joined = False
        self._folder = tempfile.mkdtemp(prefix="autotune-ranks-")
        self._seats: list[_Seat] = []
        self._failed: Lost | None = None
        env = _environment(ranks)
        try:
            for rank in range(ranks):
                self._seats.append(_Seat(agents.child(rank, MODULE, env) if agents and rank else Child(MODULE, env)))
            for rank, seat in enumerate(self._seats):
                seat.child.send(
                    {
                        "job": "join",
                        "rank": rank,
                        "ranks": ranks,
                        "device": "cpu" if device == "cpu" else f"cuda:{_index(device) + rank}",
                        "init": f"file://{self._folder}/store",
                        "timeout_s": timeout_s,
                    }
                )
        except (ChildDied, ChildSilent) as problem:  # raised later, in joined
            reason = f"rank {min(len(self._seats), ranks - 1)} {str(problem) or 'does not take its job'}"
            self._failed = Lost(Outcome(Status.CRASHED, reason=reason), "")
        except BaseException:
            self.kill()
            raise

    @property
    def alive(self) -> bool:
        return self._failed is None and all(seat.child.alive for seat in self._seats)

    def joined(self, deadline: float) -> None:
        """Wait until all ranks have joined.

        Raises:
            Lost: they have not joined by ``deadline`` (of ``time.monotonic``).
        """
        if self._failed is not None:
            raise self._failed
        if not self._joined:
            self._begin()
            self._hear(lambda phase: deadline - self._seats[0].begin, lambda phase, seconds: None)
            self._joined = True

    def ask(
        self,
        message: Mapping[str, Any],
        blob: bytes,
        limit: Callable[[str], float],
        passed: Callable[[str, float], None] = lambda phase, seconds: None,
    ) -> list[dict[str, Any]]:
        """Send every rank the same job; returns their answers in the order of ranks.

        Args:
            limit: returns the time limit in seconds of a step, by its name.
            passed: called for every step that succeeded on all ranks, with the seconds of the slowest rank.

        Raises:
            Lost: these processes cannot run further jobs; :meth:`kill` them.
        """
        self._begin()
        for rank, seat in enumerate(self._seats):
            try:
                seat.child.send(message, blob)
            except ChildDied as death:
                raise self._dead(rank, death) from None
            except ChildSilent:
                raise Lost(Outcome(Status.TIMEOUT, reason=f"rank {rank} does not take its job"), "") from None
        return self._hear(limit, passed)

    def kill(self) -> None:
        """Kill all processes and their descendants. Never fails."""
        for seat in self._seats:
            seat.child.terminate()  # signal all of them first: each takes a while to exit
        for seat in self._seats:
            seat.child.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _begin(self) -> None:
        for seat in self._seats:
            seat.phase, seat.who, seat.begin, seat.check, seat.result = "start", "", time.monotonic(), None, None

    def _hear(self, limit: Callable[[str], float], passed: Callable[[str, float], None]) -> list[dict[str, Any]]:
        """Read from all ranks until all have answered, and send a verdict after every step."""
        seats = self._seats
        failed: tuple[float, Lost] | None = None  # the first rank's failure, and the deadline of its peers
        while not all(seat.result is not None for seat in seats):
            if not any(seat.busy for seat in seats):
                self._settle(passed)
                failed = None
                continue
            now = time.monotonic()
            late = next((seat for seat in seats if seat.busy and now > seat.begin + limit(seat.phase)), None)
            if failed and (late or now > failed[0]):
                raise failed[1]
            if late:
                # Not by the deadline alone: ranks that wait for a hanging rank exceed theirs moments later.
                raise self._silent([r for r, seat in enumerate(seats) if seat.busy and seat.phase == late.phase], limit)
            ends = [seat.begin + limit(seat.phase) for seat in seats if seat.busy] + ([failed[0]] if failed else [])
            heard = ready([seat.child for seat in seats], max(0.0, min(ends) - now) + 0.001)
            for rank, seat in enumerate(seats):
                if seat.child in heard:
                    self._read(rank, seat)
                if failed is None and seat.check is not None and seat.check["status"] != Status.OK:
                    failed = time.monotonic() + _PEERS_S, _failure(rank, seat)
        return [seat.result or {} for seat in seats]

    def _read(self, rank: int, seat: _Seat) -> None:
        try:
            while (frame := seat.child.poll()) is not None:
                message = frame[0]
                if "result" in message:
                    seat.result = message["result"]
                elif "check" in message:
                    seat.check = message["check"]
                else:
                    seat.phase, seat.who, seat.begin = message["phase"], message["who"], time.monotonic()
        except ChildDied as death:
            raise self._dead(rank, death) from None
        except (ValueError, KeyError) as nonsense:
            raise Lost(Outcome(Status.CRASHED, reason=f"rank {rank}: {nonsense}"), seat.who) from None

    def _settle(self, passed: Callable[[str, float], None]) -> None:
        """Send the common verdict after all ranks have reported a step's result.

        Raises:
            Lost: some ranks failed or ended, so that they are no longer at the same step as the others.
        """
        seats = self._seats
        checks = [seat.check for seat in seats if seat.check is not None]
        if len(checks) < len(seats):
            raise Lost(Outcome(Status.CRASHED, reason="the ranks have gone different ways"), seats[0].who)
        bad = [rank for rank, check in enumerate(checks) if check["status"] != Status.OK]
        stuck = [rank for rank in bad if checks[rank]["status"] != Status.WRONG_RESULT]
        if stuck and len(bad) < len(seats):
            raise _failure(stuck[0], seats[stuck[0]])
        verdict = merge(checks)
        if not bad:
            passed(seats[0].phase, time.monotonic() - min(seat.begin for seat in seats))
        for rank, seat in enumerate(seats):
            seat.check, seat.begin = None, time.monotonic()
            try:
                seat.child.send({"verdict": verdict})
            except ChildDied as death:
                raise self._dead(rank, death) from None
            except ChildSilent:
                raise self._silent([rank], lambda phase: 60.0) from None

    def _dead(self, rank: int, death: ChildDied) -> Lost:
        """The error for a dead rank. Others may die within moments; the first that did not abort is to blame."""
        dead = {rank: death}
        time.sleep(0.02)
        for other, seat in enumerate(self._seats):
            if other not in dead and not seat.child.alive:
                try:
                    while seat.child.poll() is not None:
                        pass
                except ChildDied as too:
                    dead[other] = too
                except ValueError:
                    continue
        how = {r: str(death) for r, death in dead.items()}
        first = min(how, key=lambda r: (not how[r].startswith("killed by") or "SIGABRT" in how[r], r))
        seat = self._seats[first]
        step = STEPS.get(seat.phase, seat.phase)
        outcome = Outcome(Status.CRASHED, reason=f"rank {first} {how[first]} in {step}", fault=dead[first].fault)
        return Lost(outcome, seat.who, idle=seat.phase == "start")

    def _silent(self, late: Sequence[int], limit: Callable[[str], float]) -> Lost:
        seat = self._seats[late[0]]
        who = "" if len(late) == len(self._seats) else f" of rank {', '.join(map(str, late))}"
        reason = f"no answer{who} after {limit(seat.phase):.0f} s in {STEPS.get(seat.phase, seat.phase)}"
        return Lost(Outcome(Status.TIMEOUT, reason=reason), seat.who)


def merge(checks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the ranks' results to one verdict: the first failure if there is one, and the largest error."""
    bad = next((rank for rank, check in enumerate(checks) if check["status"] != Status.OK), None)
    errors = [check["error"] for check in checks if check["error"] is not None]
    verdict = dict(checks[bad or 0])
    verdict["error"] = max(errors, default=None)
    verdict["restart"] = any(check["restart"] for check in checks)
    if bad is not None:
        verdict["reason"] = f"rank {bad}: {verdict['reason']}"
    return verdict


def _failure(rank: int, seat: _Seat) -> Lost:
    assert seat.check is not None
    return Lost(Outcome.from_json({**seat.check, "reason": f"rank {rank}: {seat.check['reason']}"}), seat.who)


def _index(device: str) -> int:
    return int(device.partition(":")[2] or 0)


def _environment(ranks: int) -> dict[str, str]:
    """Numba's thread count by the rank's share of the processors; the rank itself sets torch's."""
    env = {}
    with contextlib.suppress(AttributeError):
        share = max(1, len(os.sched_getaffinity(0)) // ranks)
        env["NUMBA_NUM_THREADS"] = os.environ.get("NUMBA_NUM_THREADS", str(share))
    return env
