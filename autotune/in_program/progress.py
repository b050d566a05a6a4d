"""Progress of a search in a program: one updated line on a terminal, or a line every ten seconds elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from autotune.words import microseconds

if TYPE_CHECKING:
    from rich.live import Live

    from autotune.tuner.result import Progress

_PLAIN_S, _REDRAWN_S = 10.0, 0.2
_PHASES = {"search": "candidates", "repeat": "candidates again", "final": "against Inductor", "done": "done"}


def notify(text: str) -> None:
    """Print a line on stderr, if the program has one that accepts it. Never raises."""
    if sys.stderr is not None:
        with contextlib.suppress(Exception):
            print(f"autotune: {text}", file=sys.stderr, flush=True)


def _is_terminal(stream: Any) -> bool:
    """True for a terminal. A program may have replaced stderr by an object with ``write`` alone, or closed it."""
    try:
        return bool(stream.isatty())
    except Exception:
        return False


class ProgressLine:
    """Context manager that shows a search's progress, and removes the line from a terminal at the end.

    Args:
        regions: labels with their numbers of occurrences in a step.
        seconds: limit of the search.
    """

    def __init__(self, regions: Sequence[tuple[str, int]], seconds: float) -> None:
        self._regions, self._occurs, self._seconds = len(regions), dict(regions), seconds
        self._begun: dict[str, float] = {}
        self._start = self._last = time.monotonic()
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if _is_terminal(sys.stderr):
            from rich.console import Console
            from rich.live import Live

            self._live = Live(
                console=Console(stderr=True),
                transient=True,
                auto_refresh=False,
                redirect_stdout=False,  # leave the program's output alone
                redirect_stderr=False,
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            with contextlib.suppress(OSError, ValueError):
                self._live.stop()

    def __call__(self, progress: Progress) -> None:
        """Record a state, and show it if the last line is old enough."""
        saved = self._occurs.get(progress.workload, 0) * progress.saved_us
        self._begun[progress.workload] = max(saved, self._begun.get(progress.workload, 0.0))
        now = time.monotonic()
        if now - self._last < (_REDRAWN_S if self._live else _PLAIN_S):
            return
        self._last = now
        line = self.line(progress, now - self._start)
        if self._live is None:
            notify(line)
        else:
            from rich.text import Text

            with contextlib.suppress(OSError, ValueError):  # the terminal is gone
                self._live.update(Text(f"autotune: {line}", no_wrap=True, overflow="ellipsis"), refresh=True)

    def line(self, progress: Progress, elapsed_s: float) -> str:
        """A state as text, ``elapsed_s`` seconds after the search began."""
        done = min(len(self._begun), self._regions)
        won = microseconds(sum(self._begun.values()))
        left = max(0.0, self._seconds - elapsed_s)
        phase = _PHASES.get(progress.phase, progress.phase)
        return f"region {done} of {self._regions} ({phase}), {won} of the step won, at most {left:.0f} s left"
