"""The processes of one group of ranks: started together, spoken to together, and killed together."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.domains.c3.measuring.agents import Agents, RemoteChild
from autotune.measure.child import Child, ChildDied, ChildSilent
from autotune.measure.outcome import Outcome
from autotune.task import Status

MODULE = "autotune.domains.c3.measuring.rank_server"
_PEERS_S = 5.0  # after one rank failed, for the others to come to an end of their own

STEPS = {
    "start": "starting the job",
    "load": "loading",
    "verify": "verification",
    "wait": "waiting for the devices",
    "time": "timing",
    "baseline": "preparing a baseline",
    "close": "closing",
    "call": "a call",
    "open": "opening the scenario",
}


class Lost(Exception):
    """A job failed in a way that leaves the ranks apart: a rank died, fell silent, or failed where others did not.

    Attributes:
        outcome: what it means for the candidate.
        who: the contender it happened to, "" if it is not one of several.
        idle: a rank was found dead before it had begun with the job, which is not to blame.
    """

    def __init__(self, outcome: Outcome, who: str, idle: bool = False) -> None:
        super().__init__(outcome.reason)
        self.outcome, self.who, self.idle = outcome, who, idle


@dataclass
class _Seat:
    """A rank's process, and how far it is with the job."""

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
    """One process a rank. All are told to find each other as soon as they have started.

    Args:
        device: "cpu", or "cuda:N" for rank 0; rank r takes ``cuda:(N + r)``.
        agents: who starts the processes of ranks above 0, under torchrun; None starts all of them here.
        timeout_s: after which a collective call among the ranks gives up.
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
        except (ChildDied, ChildSilent) as problem:  # told when all have been waited for
            reason = f"rank {min(len(self._seats), ranks - 1)} {str(problem) or 'does not take its job'}"
            self._failed = Lost(Outcome(Status.CRASHED, reason=reason), "")
        except BaseException:
            self.kill()
            raise

    @property
    def alive(self) -> bool:
        return self._failed is None and all(seat.child.alive for seat in self._seats)

    def joined(self, deadline: float) -> None:
        """Wait until all ranks have found each other.

        Raises:
            Lost: they did not, by ``deadline`` (of ``time.monotonic``).
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
        """Give every rank the same job; returns their answers in the order of ranks.

        Args:
            limit: seconds that a step, by its name, may take.
            passed: told of every step that went well on all ranks, and the seconds that the slowest took.

        Raises:
            Lost: no more can be asked of these processes; :meth:`kill` them.
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
        """End all processes and everything they started. Never fails."""
        for seat in self._seats:
            seat.child.terminate()  # all of them first: each takes a while to go
        for seat in self._seats:
            seat.child.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _begin(self) -> None:
        for seat in self._seats:
            seat.phase, seat.who, seat.begin, seat.check, seat.result = "start", "", time.monotonic(), None, None

    def _hear(self, limit: Callable[[str], float], passed: Callable[[str, float], None]) -> list[dict[str, Any]]:
        """Listen to all ranks until all have answered, and give a verdict after every step."""
        seats = self._seats
        failed: tuple[float, Lost] | None = None  # the first rank's failure, and when its peers must have ended
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
                # Not by the clock alone: whoever waits for a rank that hangs is late within moments of it.
                raise self._silent([r for r, seat in enumerate(seats) if seat.busy and seat.phase == late.phase], limit)
            ends = [seat.begin + limit(seat.phase) for seat in seats if seat.busy] + ([failed[0]] if failed else [])
            ready, _, _ = select.select([seat.child for seat in seats], [], [], max(0.0, min(ends) - now) + 0.001)
            for rank, seat in enumerate(seats):
                if seat.child in ready:
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
        """Every rank has told how a step went, or some are through: give the verdict of all.

        Raises:
            Lost: some ranks failed, so that they are no longer where the others are.
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
        """A rank died. Others may follow it within moments; of several the one that did not abort is to blame."""
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
    """One verdict for all ranks: the first that failed speaks for all; of errors the largest counts."""
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
    """Numba's threads by rank's share of the processors; torch's are set by the rank itself."""
    env = {}
    with contextlib.suppress(AttributeError):
        share = max(1, len(os.sched_getaffinity(0)) // ranks)
        env["NUMBA_NUM_THREADS"] = os.environ.get("NUMBA_NUM_THREADS", str(share))
    return env
