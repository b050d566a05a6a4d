"""Comparison of a program's code before and after a search, in the program's own first steps.

Both are compiled. Steps run in blocks of alternating code, timed by device events, without synchronization before the
end of the last block. A step ends with the optimizer's step, or with the next call in a program without optimizer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from autotune.measure.outcome import spread

Compiled = Callable[..., Any]

WARM = 3
"""Warm-up steps of each code, not timed: allocations, Inductor's CUDA graphs."""
BLOCK = 6
"""Steps of a block; the first one, which follows the other code, is not timed."""
ROUNDS = 4
"""Blocks of each code."""


class Timer(Protocol):
    """Timestamps of a device."""

    def mark(self) -> Any: ...

    def between_us(self, begin: Any, end: Any) -> float: ...


class DeviceTimer:
    """Events of the current stream of a GPU; the host's clock on a CPU."""

    def __init__(self, device: str) -> None:
        self._cuda = device.startswith("cuda")

    def mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between_us(self, begin: Any, end: Any) -> float:
        if not self._cuda:
            return float(end - begin) * 1e6
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3


@dataclass(frozen=True)
class Outcome:
    """Times of a step in microseconds, medians over its blocks.

    Attributes:
        ratio: median over rounds of the time before over the time after.
        noise: interquartile range over median of the steps' times, the larger of both codes.
        kept: True to keep the code after the search.
    """

    before_us: float
    after_us: float
    ratio: float
    noise: float
    kept: bool


def judge(before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]) -> Outcome:
    """Compare the times of blocks of steps, with a block of each code in a round.

    Args:
        before, after: microseconds of the steps of every block, which may not be empty.
    """
    ratios = [statistics.median(b) / statistics.median(a) for b, a in zip(before, after, strict=True)]
    ratio = statistics.median(ratios)
    every = [[us for block in blocks for us in block] for blocks in (before, after)]
    middle = [statistics.median(times) for times in every]
    return Outcome(middle[0], middle[1], ratio, max(map(spread, every)), ratio >= 1.0)


class Frame:
    """The callable that Dynamo gets for one graph: runs the code before the search or after it.

    Attributes:
        before, after: both codes until the contest has ended, then the kept one.
    """

    def __init__(self, before: Compiled, after: Compiled, contest: Contest) -> None:
        self.before, self.after = before, after
        self._contest: Contest | None = contest
        contest.frames.append(self)

    def __call__(self, *args: Any) -> Any:
        if self._contest is not None:
            return self._contest.code_of(self)(*args)
        return self.after(*args)

    def settle(self, *, kept: bool) -> None:
        """Keep one code and release the other."""
        self._contest = None
        self.after = self.before = self.after if kept else self.before


@dataclass
class Contest:
    """The frames of a program with two codes, which all switch at the ends of steps.

    A step begins with the call of the first frame that was called.

    Attributes:
        timer: of the device; tests set their own.
        ended: called once with the outcome.
    """

    timer: Timer
    ended: Callable[[Outcome], object]
    frames: list[Frame] = field(default_factory=list)
    _leader: Frame | None = None
    _step: int = -1
    _optimized: bool | None = None
    """None before the first step of an optimizer; then True if it has run since the step began."""
    _hook: Any = None
    _marks: list[Any] = field(default_factory=list)

    def code_of(self, frame: Frame) -> Compiled:
        """The code that a call of ``frame`` runs."""
        if _capturing():  # replays repeat the captured code, and would include an event
            return frame.after
        if self._leader is None:
            self._leader = frame
            self._hook = register_optimizer_step_post_hook(self._optimizer_ran)
        if frame is self._leader and self._optimized is not False:
            self._optimized = None if self._optimized is None else False
            self._begin_step()
        if frame._contest is None:  # the last step has ended with this call
            return frame.after
        return frame.after if self._after(self._step) else frame.before

    def _optimizer_ran(self, *_: Any) -> None:
        self._optimized = True

    def _begin_step(self) -> None:
        self._step += 1
        if self._step >= 2 * WARM:
            self._marks.append(self.timer.mark())
        if len(self._marks) > 2 * BLOCK * ROUNDS:
            self._end()

    @staticmethod
    def _after(step: int) -> bool:
        """True for steps that run the code after the search."""
        return step >= WARM if step < 2 * WARM else (step - 2 * WARM) // BLOCK % 2 == 1

    def _end(self) -> None:
        self._hook.remove()
        times = [self.timer.between_us(a, b) for a, b in zip(self._marks, self._marks[1:], strict=False)]
        blocks = [times[k : k + BLOCK][1:] for k in range(0, len(times), BLOCK)]
        outcome = judge(blocks[0::2], blocks[1::2])
        for frame in self.frames:
            frame.settle(kept=outcome.kept)
        self._marks.clear()
        self.ended(outcome)

    @property
    def running(self) -> bool:
        """False once every frame has one code."""
        return not self.frames or any(frame._contest is not None for frame in self.frames)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


__all__ = ["BLOCK", "ROUNDS", "WARM", "Contest", "DeviceTimer", "Frame", "Outcome", "Timer", "judge"]
