"""The program's side of the process that searches (:mod:`autotune.in_program.searching`), and its progress.

The progress is one updated line on a terminal, or a line every ten seconds elsewhere.
"""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from autotune import numerics
from autotune.errors import UserError, first_line
from autotune.in_program.options import function_number
from autotune.in_program.turns import small, step_us, weights
from autotune.measure.child import Child, ChildDied, ChildSilent
from autotune.runtime.inductor.verdict import Lacking, Surveyed, lacking, occurrences
from autotune.task import SHARED_BUILDS
from autotune.words import microseconds
from autotune.workload import Workload

if TYPE_CHECKING:
    from rich.live import Live

    from autotune.tuner.result import Progress, Result

GRACE_S = 3.0
"""Seconds for the last region after the search's time. Then the process is killed, and the region keeps no result."""
_LOOK_S = 0.2  # between checks for an interrupt
_STOP_S = 10.0
"""Seconds for the current region after Ctrl-C."""
MODULE = "autotune.in_program.searching"
_FREE = 0.5
"""Share of a GPU's memory that must be free while the process waits for another graph, since the program runs."""
_LATE = "the last region did not end in time, and is left to Inductor"
_LATE_AGAIN = "the second search of a region did not end in time, and its first result stays"


class _Process(Child):
    """A child whose builds share a folder. It is killed, so its parent removes the folder."""

    def __init__(self, module: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="autotune-build-", ignore_cleanup_errors=True)
        super().__init__(module, {SHARED_BUILDS: self._folder.name})

    def kill(self) -> None:
        super().kill()
        self._folder.cleanup()


class Companion:
    """Context manager of a process that measures on one device, and begins while Inductor compiles.

    Args:
        module: of the process.
        device: "cpu" or "cuda:N".
        first: fields of the first message, in addition to the device and torch's settings.
    """

    def __init__(self, module: str, device: str, **first: Any) -> None:
        self.device = device
        self._module, self._first = module, first
        self._child: Child | None = None
        self._error = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._child.kill()

    def start(self) -> None:
        """Start the process, which starts others. Never raises. Linux ends it with the calling thread."""
        if self._child is None:
            try:
                self._child = self._opened()
                self._send({"device": self.device, "numerics": numerics.read(), **self._first})
            except Exception as error:
                self._error = (error.strerror if isinstance(error, OSError) else None) or first_line(error)

    def _opened(self) -> Child:
        return _Process(self._module)

    def _send(self, message: dict[str, Any]) -> None:
        if self._child is None:
            return
        try:
            self._child.send(message)
        except ChildDied as death:
            self._error = f"its process ended: {death}"
        except ChildSilent:
            self._error = "its process does not answer"


_resting: tuple[str, Child] | None = None
"""The process that waits for the next graph of a function, and its device."""


@dataclass
class _Step:
    """The graphs of one function so far, which a step runs together.

    Attributes:
        function: of :func:`autotune.in_program.options.function_number`.
        measured_us: microseconds of a step in the regions that searches have measured.
        weight: of the regions of the earlier graphs, by device, as of :func:`autotune.in_program.turns.weights`.
    """

    function: int
    measured_us: float = 0.0
    weight: dict[str, float] = field(default_factory=dict)


_last_step = _Step(-1)


def _step() -> _Step:
    """The step of the function whose graph is compiled."""
    global _last_step
    if _last_step.function != (number := function_number()):
        _last_step = _Step(number)
    return _last_step


def to_search(graphs: Sequence[Surveyed], *, last: bool = False) -> tuple[Lacking, set[str]]:
    """The regions of a Dynamo graph to search, and the fingerprints of those too small to matter for the step.

    Args:
        graphs: the post-grad graphs.
        last: no further one of this Dynamo graph follows. The next Dynamo graph may be of the same step.
    """
    missed, left = lacking(graphs), set[str]()
    for device, counted in occurrences(graphs).items():
        every = weights(counted, device)
        whole = _step().weight.get(device, 0.0) + sum(weight for weight in every.values() if weight < math.inf)
        left |= small({w.fingerprint: every[w.fingerprint] for w, _ in missed.get(device, ())}, whole)
        if last:
            _step().weight[device] = whole
    found = {device: [one for one in counted if one[0].fingerprint not in left] for device, counted in missed.items()}
    return {device: counted for device, counted in found.items() if counted}, left


def reset() -> None:
    """Forget the earlier graphs, which ``torch._dynamo.reset()`` has dropped."""
    global _last_step
    _last_step = _Step(-1)
    _end_resting()


def _end_resting() -> None:
    """End the process that waits for another graph."""
    global _resting
    resting, _resting = _resting, None
    if resting is not None:
        resting[1].kill()


def _taken(device: str) -> Child | None:
    """The process that waits for a graph on this device, if it still runs."""
    global _resting
    if _resting is None or _resting[0] != device or not _resting[1].alive:
        _end_resting()
        return None
    (_, child), _resting = _resting, None
    return child


def _may_rest(device: str) -> bool:
    """True if the program can run its first graphs while the process keeps its memory."""
    import torch

    if not device.startswith("cuda"):
        return False  # its pools have ended
    free, every = torch.cuda.mem_get_info(device)
    return free >= _FREE * every


class Searcher(Companion):
    """A search on one device.

    Args:
        device: "cpu" or "cuda:N".
        seconds: that the search will probably have after Inductor has finished.
        more: another graph of the same function follows. Its search takes over the processes of this one on a GPU: a
            worker and the first build take 18 s.
    """

    def __init__(self, device: str, seconds: float, *, more: bool = False) -> None:
        super().__init__(MODULE, device, seconds=seconds, measured_us=_step().measured_us, more=more)
        self._more = more
        self._begun: float | None = None
        self._done = False

    def __exit__(self, *raised: object) -> None:
        global _resting
        if not self._more:
            _end_resting()
        if self._child is not None and self._more and self._done and raised[0] is None and _may_rest(self.device):
            with contextlib.suppress(ChildDied, ChildSilent):
                self._child.send({"rest": True})
                _end_resting()  # of another thread's search
                _resting = self.device, self._child
                return
        super().__exit__(*raised)

    def _opened(self) -> Child:
        return _taken(self.device) or super()._opened()

    @property
    def searched_s(self) -> float:
        """Seconds since it began to measure."""
        return 0.0 if self._begun is None or self._error else time.monotonic() - self._begun

    def add(self, graph: Surveyed) -> None:
        """Search the regions of a graph that lack a schedule. Never raises."""
        try:
            if counted := to_search([graph])[0].get(self.device, ()):
                self.start()
                quiet = _measures()
                self._send({"workloads": _listed(counted), "quiet": quiet})
                if self._begun is None and self.device != "cpu" and not quiet:
                    self._begun = time.monotonic()
        except Exception as error:
            self._error = self._error or first_line(error)

    def end(
        self, counted: Sequence[tuple[Workload, int]], seconds: float, report: Callable[[Progress], object]
    ) -> list[Result]:
        """Search for ``seconds`` more, and :data:`GRACE_S` at most after that.

        Args:
            counted: all regions to search, with their numbers of occurrences.
            report: callback for progress.

        Returns:
            A result of each turn; the last one is interrupted if the user interrupted the search, and the program's own
            handler of SIGINT returned.

        Raises:
            UserError: the search failed before any region had a kernel.
            KeyboardInterrupt: the user interrupted it, and the program has no handler of its own.
        """
        from autotune.tuner.result import Progress, Result
        from autotune.tuner.threads import Interrupt

        self.start()
        results: list[Result] = []
        last = time.monotonic() + seconds + GRACE_S
        error, stopped = "", False
        with Interrupt() as interrupt:
            try:
                self._send({"workloads": _listed(counted), "end": seconds})
                while self._child is not None and not self._error:
                    if interrupt.requested and not stopped:
                        stopped = True
                        self._send({"stop": True})
                        last = min(last, time.monotonic() + _STOP_S)
                    try:
                        message, _ = self._child.receive(min(last, time.monotonic() + _LOOK_S))
                    except ChildSilent:
                        if time.monotonic() >= last:
                            first = {w.fingerprint for w, _ in counted} - {r.workload for r in results if r.winner}
                            notify(_LATE if first else _LATE_AGAIN)
                            break
                        continue
                    if "progress" in message:
                        report(Progress(**message["progress"]))
                    elif "result" in message:
                        results.append(Result(**message["result"]))
                    else:
                        error = message["done"]
                        self._done = not (error or interrupt.requested)
                        break
            except (ChildDied, ValueError) as death:
                error = f"its process ended: {death}"
        error = error or self._error
        _step().measured_us += step_us({workload.fingerprint: count for workload, count in counted}, results)
        if interrupt.requested:
            signal.raise_signal(signal.SIGINT)  # for the handler that the program had before
        if error and not any(result.winner == "autotune" for result in results):
            raise UserError(error)
        if error:
            notify(f"the search ended early: {error}")
        return results


def _listed(counted: Sequence[tuple[Workload, int]]) -> list[tuple[dict[str, Any], int]]:
    return [(workload.to_json(), count) for workload, count in counted]


def _measures() -> bool:
    """True if Inductor measures on the device while it compiles."""
    from torch._inductor import config

    names = ("max_autotune", "max_autotune_gemm", "max_autotune_pointwise", "coordinate_descent_tuning")
    return any(getattr(config, name, False) for name in names)


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

    def __exit__(self, *_: object) -> None:
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
