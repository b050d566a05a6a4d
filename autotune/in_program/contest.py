"""Comparison of a program's code before and after a search, in the program's own first steps.

Both are compiled. Steps run in blocks of alternating code, timed by device events, without synchronization between the
first block and the end of the last one. A step ends with the optimizer's step, or with the next call in a program
without optimizer. In a program without gradients only the calls are timed, not the work between them.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch._dynamo.eval_frame import innermost_fn
from torch.optim.optimizer import register_optimizer_step_post_hook

from autotune.measure.outcome import spread

Compiled = Callable[..., Any]

WARM = 3
"""Warm-up steps of each code, not in the comparison: allocations, Inductor's CUDA graphs."""
BLOCK = 4
"""Steps of a block; the first one, which follows the other code, is not timed."""
ROUNDS = 8
"""Blocks of each code. A round has one of each; every second round begins with the code after the search."""
LEAST_US, MOST_STEPS = 10_000.0, 8
"""Shorter steps are timed together, at most so many: the host's noise is a few milliseconds."""
MOST_CALLS = 64
"""Calls of a generation's steps beside one of its prompt are more, of a model's layers fewer."""
_OTHERS = 1
"""The code after the search is given up if it is slower in all rounds but so many, as 4% of equal codes would be."""


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
        kept: True to keep the code after the search: it is as fast, or not slower beyond the noise.
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
    slower = ratio < 1.0 and sum(one < 1.0 for one in ratios) >= len(ratios) - _OTHERS
    return Outcome(middle[0], middle[1], ratio, max(map(spread, every)), not slower)


class Frame:
    """The callable that Dynamo gets for one graph: runs the code before the search or after it.

    torch disables Dynamo around each code, and Dynamo disables itself around the frame. The former is taken off, as
    Dynamo takes it off the code of other backends: it would cost a microsecond of each call.

    Attributes:
        before, after: both codes until the contest has ended, then the kept one.
    """

    def __init__(self, before: Compiled, after: Compiled, contest: Contest) -> None:
        self.before, self.after = innermost_fn(before), innermost_fn(after)
        self._contest: Contest | None = contest
        contest.add(self)

    def __call__(self, *args: Any) -> Any:
        if self._contest is not None:
            return self._contest.run(self, args)
        return self.after(*args)

    def settle(self, *, kept: bool) -> None:
        """Keep one code and release the other."""
        self._contest = None
        self.after = self.before = self.after if kept else self.before


@dataclass
class Contest:
    """The frames of a program with two codes, which all switch at the ends of steps.

    One frame leads: a step begins with its call, or with its first call after the optimizer's step. It is the first
    frame that was called. That call may be the only one, of a first batch with other sizes or of a check before the
    training. So in a program with an optimizer, each frame that computes gradients may take the lead. In a program
    without gradients, a frame takes it after :data:`MOST_CALLS` calls of other frames than the leader.

    Attributes:
        timer: of the device; tests set their own.
        ended: called once with the outcome.
    """

    timer: Timer
    ended: Callable[[Outcome], object]
    frames: list[Frame] = field(default_factory=list)
    kept: bool | None = None
    """The outcome's, after the end."""
    _leader: Frame | None = None
    _others: int = 0
    """Calls of other frames since the leader's last call."""
    _optimized: bool | None = None
    """None before the first step of an optimizer; then True if it has run since the step began."""
    _trains: bool = False
    """True after the first step of an optimizer."""
    _hook: Any = None
    _begun: Any = None
    """The mark at the begin of the current step; None in a program without gradients."""
    _calls: list[tuple[Any, Any]] = field(default_factory=list)
    """Begin and end of the current step's calls, in a program without gradients."""
    _steps: list[list[tuple[Any, Any]]] = field(default_factory=list)
    """Begins and ends of what is timed of each step that has ended."""
    _together: int = 1
    """Steps that are timed as one."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while the steps are read or changed: several threads may call the model."""

    def add(self, frame: Frame) -> None:
        """Add a frame. If another thread has ended the contest, the frame keeps the code that won."""
        with self._lock:
            self.frames.append(frame)
            if self.kept is not None:
                frame.settle(kept=self.kept)

    def run(self, frame: Frame, args: Sequence[Any]) -> Any:
        """Run the current step's code for a call of ``frame``."""
        if _capturing():  # replays repeat the captured code, and would include an event
            return frame.after(*args)
        begin = None
        with self._lock:
            if self._hook is None:
                self._hook = register_optimizer_step_post_hook(self._optimizer_ran)
            if frame._contest is not None and self._begins_step(frame):
                self._optimized = None if self._optimized is None else False
                begin = self.timer.mark()
                self._end_step(begin)
            ended = frame._contest is None  # by this call, or in another thread
            code = frame.after if ended or self._after() else frame.before
            is_timed = not ended and self._begun is None
        if not is_timed:
            return code(*args)
        begin = self.timer.mark() if begin is None else begin
        found = code(*args)
        self._calls.append((begin, self.timer.mark()))
        return found

    def _begins_step(self, frame: Frame) -> bool:
        """True if a call of ``frame`` begins a step, after a change of the lead."""
        gradients = torch.is_grad_enabled()
        if self._optimized and not self._trains:
            self._trains = True
            if self._steps or self._begun is None:
                self._restart()  # the calls before the first step of the optimizer were no whole steps
        self._others = 0 if frame is self._leader else self._others + 1
        if self._leader is None or (self._optimized and gradients):
            self._leader = frame
        elif self._optimized is None and not gradients and self._others > MOST_CALLS:
            self._leader = frame
            self._restart()
        return frame is self._leader and self._optimized is not False

    def _optimizer_ran(self, *_: Any) -> None:
        self._optimized = True  # no more: Dynamo traces this in a compiled optimizer, and guards what it reads

    def _restart(self) -> None:
        """Forget the steps until now, which were others than those that follow."""
        self._steps.clear()
        self._calls, self._begun = [], None

    def _end_step(self, now: Any) -> None:
        """End the current step, if there is one, and begin the next one."""
        marks = self._calls if self._begun is None else [(self._begun, now)]
        if marks:
            self._add(marks)
        self._begun, self._calls = now if torch.is_grad_enabled() else None, []

    def _after(self) -> bool:
        """True if the current step runs the code after the search."""
        step = len(self._steps)
        if step < 2 * WARM:
            return step >= WARM
        return (step - 2 * WARM) // (BLOCK * self._together) % 4 in (1, 2)

    def _add(self, marks: list[tuple[Any, Any]]) -> None:
        """Add a step that has ended; the last one ends the contest."""
        self._steps.append(marks)
        if len(self._steps) == 2 * WARM:
            self._together = min(max(math.ceil(LEAST_US / max(self._us(marks), 1.0)), 1), MOST_STEPS)
        if len(self._steps) == 2 * (WARM + BLOCK * ROUNDS * self._together):
            self._end()

    def _us(self, marks: Sequence[tuple[Any, Any]]) -> float:
        return sum(self.timer.between_us(begin, end) for begin, end in marks)

    def _end(self) -> None:
        self._hook.remove()
        size = self._together
        times = list(map(self._us, self._steps[2 * WARM :]))
        steps = [sum(times[k : k + size]) / size for k in range(0, len(times), size)]
        blocks = [steps[k : k + BLOCK][1:] for k in range(0, len(steps), BLOCK)]
        pairs = [blocks[k : k + 2][:: -1 if k % 4 else 1] for k in range(0, len(blocks), 2)]
        outcome = judge([before for before, _ in pairs], [after for _, after in pairs])
        self.kept = outcome.kept
        for frame in self.frames:
            frame.settle(kept=outcome.kept)
        self._steps.clear()
        self.ended(outcome)

    def cancel(self) -> None:
        """End the comparison without an outcome: each frame keeps the code after the search and releases the other."""
        with self._lock:
            if self._hook is not None:
                self._hook.remove()
            for frame in self.frames:
                frame.settle(kept=True)
            self.frames.clear()
            self._restart()

    @property
    def running(self) -> bool:
        """False once every frame has one code."""
        return not self.frames or any(frame._contest is not None for frame in self.frames)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
