"""The contenders of one program: processes that are started, take turns and are ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.form import ROOT
from benchmarks.user_programs.contender import Spec
from benchmarks.user_programs.host import Host
from benchmarks.user_programs.program import COLD, CONTENDERS, WARM

MODULE = "benchmarks.user_programs.contender"
_OURS = "autotune: "
_REST_S = 25.0
"""Seconds before the end at which a search that has not ended is given up, so that the others are measured."""
_LEAST_S = 5.0
"""Seconds under which no process is begun."""
_DROPPED = (
    *(f"AUTOTUNE_{name}" for name in ("BACKGROUND", "DB", "DB_READ", "PARENT", "SEARCH", "UNSEARCHED")),
    "TRITON_CACHE_DIR",
)
"""Variables that a contender does not inherit."""


def _field(contender: str) -> str:
    """The field of a case that has a contender's time."""
    return f"{contender.replace(' ', '_')}_ms"


class Failed(Exception):
    """A contender did not answer; ``str(error)`` has the reason."""


class Process:
    """A contender's process, which leads its own session.

    Args:
        spec: what it measures.
        place: a folder; the contender that a warm one continues has the same.
        until: time by ``time.monotonic()`` at which every wait ends; may be changed.
    """

    def __init__(self, spec: Spec, place: Path, until: float) -> None:
        place.mkdir(parents=True, exist_ok=True)
        self.spec, self.until, self._rest = spec, until, b""
        self._log = place / f"{spec.contender.replace(' ', '_')}.log"
        env = {k: v for k, v in os.environ.items() if k not in _DROPPED}
        env |= {
            "TORCHINDUCTOR_CACHE_DIR": str(place / "inductor"),
            "AUTOTUNE_DB": str(place / "schedules.db"),
            "AUTOTUNE_CACHE_DIR": str(place / "kernels"),
            "AUTOTUNE_PACKAGED": "refuse",
            "PYTHONUNBUFFERED": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE, spec.to_json()],
            cwd=ROOT,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._writer = threading.Thread(target=self._write_log, args=(time.monotonic(),), daemon=True)
        self._writer.start()

    def _write_log(self, begin: float) -> None:
        """Copy standard error into the log, each line behind its seconds since the start."""
        assert self._process.stderr is not None
        with self._log.open("wb", buffering=0) as log, self._process.stderr as lines:
            for line in lines:
                log.write(f"[{time.monotonic() - begin:6.1f}] ".encode() + line)

    def ask(self, line: str) -> dict[str, Any]:
        """Send a line and wait for the answer.

        Raises:
            Failed: the process ended, reported a failure, or took too long.
        """
        self.send(line)
        return self.answer()

    def send(self, line: str) -> None:
        """Send a line; the answer is :meth:`answer`'s.

        Raises:
            Failed: the process has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()
        except (OSError, ValueError):
            raise Failed(self._epitaph()) from None

    def answer(self) -> dict[str, Any]:
        """Wait for a line.

        Raises:
            Failed: the process ended, reported a failure, or took too long.
        """
        line = self._line()
        try:
            found: dict[str, Any] = json.loads(line)
        except ValueError:
            raise Failed(f"it answered {line[:80]!r}") from None
        if "failed" in found:
            raise Failed(found["failed"])
        return found

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        while b"\n" not in self._rest:
            left = self.until - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                raise Failed("the time was up")
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                raise Failed(self._epitaph())
            self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        return line

    def _epitaph(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        self._writer.join(timeout=1.0)
        last = [line for line in self.log().splitlines() if line.strip()][-1:]
        text = (last or [""])[0].partition("] ")[2]
        return f"the process ended with {self._process.poll()}: {text.strip()}"[:300]

    def log(self) -> str:
        """The text of its standard error so far, each line behind "[", seconds and "] "."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def told(self) -> list[str]:
        """Messages of autotune among it, those within warnings too; the last forty."""
        parts = [line.partition(_OURS) for line in self.log().splitlines()]
        return [text[:300] for _, ours, text in parts if ours][-40:]

    def end(self) -> None:
        """End the process and all that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._writer.join(timeout=1.0)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


@dataclass(frozen=True)
class Plan:
    """Settings of all measurements.

    Attributes:
        contenders: names.
        search_s: of the option "search".
        steps: of a block; ``rounds``: blocks of each contender in a comparison.
        together: the cold contenders start side by side, and then the warm ones.
        beside: other programs are measured at the same time, under one :class:`Host`.
        names: as of :class:`Spec`.
        graph: steps are also timed as CUDA graphs, where one can be made of them.
    """

    contenders: Sequence[str]
    device: str
    mode: str = "default"
    search_s: float = 90.0
    steps: int = 20
    rounds: int = 5
    tiny: bool = False
    together: bool = False
    beside: bool = False
    names: int = 12
    graph: bool = False


Tell = Callable[[str], object]


class Measured:
    """A program's measurements so far.

    Args:
        plan: of all programs.
        name: of the program.
        place: an empty folder.
        until: time by ``time.monotonic()`` at which its contenders are ended.
        tell: called with a line about each contender.
        host: that other programs are measured on as well.

    Attributes:
        case: as the result file has it.
    """

    def __init__(self, plan: Plan, name: str, place: Path, until: float, tell: Tell, host: Host | None = None) -> None:
        self._plan, self._place, self._until, self._tell = plan, place, until, tell
        self._host = host or Host()
        self._open: dict[str, Process] = {}
        self.case: dict[str, Any] = {
            "name": name,
            "mode": plan.mode,
            "search_s": plan.search_s,
            **{_field(name): None for name in CONTENDERS},
            "train": None,
            "ratios": {},
            "contenders": {},
            "missing": {},
        }

    def __enter__(self) -> Measured:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End all processes and begin no more; any thread may call it."""
        self._until = 0.0
        for process in list(self._open.values()):
            process.end()
        self._open.clear()

    def run(self) -> Iterator[dict[str, Any]]:
        """Measure one contender after the other; yields the case as far as it is known."""
        begin = time.monotonic()
        for names in self._waves(COLD):
            with self._host.beside():
                self._start([name for name in names if name not in self._open])
            with self._host.alone():
                for name in names:
                    if name != "compile":
                        self._compare(name)
                        self._close(name)
            yield self._now(begin)
        if "compile" in self._open:
            with self._host.alone():
                self._block_alone("compile")
                self._close("compile")
            yield self._now(begin)
        for names in self._waves(tuple(WARM)):
            for name in names:
                if self.case[_field(WARM[name])] is None:
                    self.case["missing"][name] = f"there is no process {WARM[name]!r} before it"
            with self._host.beside():
                self._start([name for name in names if name not in self.case["missing"]])
            with self._host.alone():
                for name in names:
                    self._block_alone(name)
                    self._close(name)
            yield self._now(begin)

    def _start(self, names: Sequence[str]) -> None:
        """Begin processes and wait until they are warm; "search" finds the memory free that others do not use."""
        if {"search", "unsearched"} & set(names):
            self._rest("compile")
        for name in names:
            self._begin(name)
        for name in names:
            self._first(name)
            if len(names) > 1 or self._plan.beside:
                self._rest(name)

    def _waves(self, kinds: Sequence[str]) -> list[list[str]]:
        """Contenders that start at a time."""
        there = [name for name in kinds if name in self._plan.contenders]
        if not self._plan.together:
            return [[name] for name in there]
        if self._plan.beside:
            return [there] if there else []
        alone = [[name] for name in there if name in ("search", "unsearched")]
        beside = [name for name in there if [name] not in alone]
        return [wave for wave in (beside, *alone) if wave]

    def _now(self, begin: float) -> dict[str, Any]:
        self.case["seconds"] = round(time.monotonic() - begin, 1)
        return self.case

    def _begin(self, name: str) -> None:
        plan = self._plan
        if self._until - time.monotonic() < _LEAST_S:
            self.case["missing"][name] = "the time was up"
            return
        spec = Spec(self.case["name"], name, plan.device, plan.mode, plan.search_s, plan.tiny)
        spec = replace(spec, beside=plan.beside, names=plan.names, capturable=plan.graph)
        place = self._place / WARM.get(name, name)
        until = self._until - (_REST_S if name == "search" and len(self._open) else 0.0)
        self._open[name] = Process(spec, place, until)

    def _first(self, name: str) -> None:
        """Wait for the first step and the warm-up of a contender that was begun."""
        process = self._open.get(name)
        if process is None:
            return
        try:
            first = process.answer()
            self.case["train"] = first["train"]
            self.case["contenders"][name] = {"first_s": first["first_s"], "block_ms": [], "told": []}
            self._tell(f"{self.case['name']}: {name}: first step after {first['first_s']:.1f} s")
            process.answer()
            process.until = self._until
        except Failed as error:
            self._lose(name, str(error))

    def _lose(self, name: str, why: str) -> None:
        process = self._open.pop(name, None)
        if process is None:
            return  # all were ended
        process.end()
        found = self.case["contenders"].setdefault(name, {"first_s": None, "block_ms": []})
        found |= {"told": process.told(), "log": process.log().splitlines()[-15:]}
        self.case["missing"][name] = why
        self._tell(f"{self.case['name']}: {name}: {why}")

    def _compare(self, name: str) -> None:
        """Blocks of torch.compile and of a contender in turn; the ratio of each round."""
        other = "compile"
        if name not in self._open:
            return
        if other not in self._open:
            self._block_alone(name)
            return
        ratios: list[float] = []
        self.case["ratios"][name] = ratios
        for k in range(self._plan.rounds):
            pair = {}
            for who in (name, other) if k % 2 else (other, name):  # neither always follows the other
                found = self._block(who)
                if found is None:
                    return
                pair[who] = found
            ratios.append(round(pair[other] / pair[name], 4))
        both = [self._ms(who) for who in (other, name)]
        self._tell(f"{self.case['name']}: {both[0]:.2f} ms, {name} {both[1]:.2f} ms, {statistics.median(ratios):.3f}x")

    def _block_alone(self, name: str) -> None:
        """One block of a contender that has none yet."""
        if name in self._open and not self.case["contenders"][name]["block_ms"]:
            self._block(name)

    def _block(self, name: str) -> float | None:
        """The median of a block's steps in ms, None where the contender failed."""
        try:
            times = self._open[name].ask(str(self._plan.steps))["ms"]
        except Failed as error:
            self._lose(name, str(error))
            return None
        middle = statistics.median(times)
        self.case["contenders"][name]["block_ms"].append(round(middle, 4))
        self._ms(name)
        return middle

    def _ms(self, name: str) -> float:
        middle = statistics.median(self.case["contenders"][name]["block_ms"])
        self.case[_field(name)] = round(middle, 4)
        return middle

    def _rest(self, name: str) -> None:
        """Have a contender release memory that it does not use, if it runs."""
        if name in self._open:
            try:
                self._open[name].ask("rest")
            except Failed as error:
                self._lose(name, str(error))

    def _close(self, name: str) -> None:
        """Get a contender's facts and kernels and end it."""
        process = self._open.get(name)
        if process is None:
            return
        found = self.case["contenders"][name]
        try:
            found |= process.ask("facts")
            found["told"] = process.told()
            if name in COLD:
                found |= process.ask("kernels")
                found |= process.ask(f"graph {self._plan.steps}") if self._plan.graph else {}
        except Failed as error:
            self._lose(name, str(error))
            return
        if found["loss"] is None:
            self.case["missing"][name] = "its last result is not finite"
        del self._open[name]
        process.end()


__all__ = ["Failed", "Measured", "Plan", "Process"]
