"""Predicted schedules without a search, tried while the program compiles as with ``torch.compile``.

The first post-grad graph has the regions without schedules. From then on another process
(:mod:`autotune.in_program.predicted`) tries their candidates. If a candidate won, the graph is compiled a second time
after Inductor has finished. The program's first steps select one of both codes, as after a search.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from torch import fx

from autotune.errors import UserError, first_line
from autotune.in_program import search, verdicts
from autotune.in_program.contest import Frame
from autotune.in_program.ranks import rank_turn
from autotune.in_program.searcher import Companion, notify
from autotune.in_program.traced import Traced
from autotune.measure.child import ChildDied, ChildSilent
from autotune.runtime.deployment import deployment
from autotune.runtime.inductor.code import device_of, name_of
from autotune.runtime.inductor.verdict import UNSEARCHED, Surveyed, lacking, stored_verdict
from autotune.runtime.ladder import Level
from autotune.runtime.match import look_up
from autotune.words import plural
from autotune.workload import Workload

log = logging.getLogger("autotune")

_RECORD = {"budget_s": 0.0, "command": UNSEARCHED}
_WAIT_SHARE, _WAIT_LEAST_S = 0.25, 10.0
"""Wait for trials after Inductor has finished: a share of its time, and a minimum."""
_MOST_S = 60.0
"""Maximum wait of all graphs of a process, in seconds."""
_waited_s = 0.0


def lacks(device: str) -> str:
    """The compiler that is missing for kernels of a device, or ""."""
    needed = ("numba", "numba_cuda", "cuda.core") if device.startswith("cuda") else ("numba",)
    return next((name for name in needed if not _found(name)), "")


def _found(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def compiled(gm: fx.GraphModule, inputs: Sequence[Any], mode: str, compile_once: search.Compile) -> Any:
    """Compile a graph, and compile it again if predicted schedules of its regions won.

    A failure warns once and leaves the code of the first compilation.

    Args:
        mode: of :func:`autotune.runtime.inductor.verdict.base_mode`.
    """
    global _waited_s
    device = device_of(inputs)
    if device is None or _waited_s >= _MOST_S or not search.can_store():
        return compile_once(gm, inputs)
    if missing := lacks(device):
        deployment().warn_once(UNSEARCHED, f"autotune: no schedule is predicted: {missing} is not installed")
        return compile_once(gm, inputs)
    name = name_of(gm, device)
    if _was_tried(name, device, mode):
        return search.compile_decided(gm, inputs, compile_once, name, device, mode)
    with Trying(device) as trying, rank_turn(name) as turn:
        if not turn.searches:
            turn.wait()
            return compile_once(gm, inputs)
        if len(gm.graph.nodes) >= search.LARGE:
            trying.start()
        begin = time.monotonic()
        traced = Traced()
        one = search.compile_surveyed(
            gm, inputs, compile_once, trying.add, traced, name, device, mode, alone=turn.alone
        )
        compile_s = time.monotonic() - begin
        try:
            turn.begin(granted := min(max(_WAIT_LEAST_S, _WAIT_SHARE * compile_s), _MOST_S - _waited_s))
            won = trying.end(granted)
            _waited_s += time.monotonic() - begin - compile_s
            log.debug("Inductor took %.1f s, trials %.1f s more", compile_s, time.monotonic() - begin - compile_s)
            if one.graphs and not trying.left:  # the next process tries the others; ranks may have looked at no graph
                verdicts.note_verdicts([one], {**_RECORD, "tries": 0, "cut": True}, after=won or not turn.alone)
            turn.end()
            if not won and turn.alone:
                deployment().count_again(one.apart)
                for of, missed in lacking(one.graphs).items():  # the compilation that recorded nothing stays
                    deployment().record_misses([(workload, "not searched") for workload, _ in missed], of)
                return one.before
            with deployment().counting_apart() as second:
                after = search.compile_again(gm, inputs, compile_once, traced, one.after_name)
            deployment().count_again(second)
            if not trying.left:
                verdicts.note_code([one], 0.0, after=True)
        except Exception as error:
            why = str(error) if isinstance(error, UserError) else first_line(error)
            deployment().warn_once(UNSEARCHED, f"autotune: schedules were not predicted: {why}")
            log.debug("the prediction that failed", exc_info=True)
            deployment().count_again(one.apart)
            return one.before
    return Frame(one.before, after, search.join_contest(one, second, _RECORD)) if turn.alone else after


def _was_tried(name: str, device: str, mode: str) -> bool:
    try:
        return stored_verdict(name, device, mode) is not None
    except Exception as error:
        deployment().warn_once("verdict", f"autotune: verdicts on steps are not looked up: {first_line(error)}")
        return True


class Trying(Companion):
    """A process that tries predicted schedules on one device.

    Args:
        device: "cpu" or "cuda:N".

    Attributes:
        left: number of workloads not tried in time.
    """

    def __init__(self, device: str) -> None:
        super().__init__("autotune.in_program.predicted", device)
        self.left = 0
        self._asked: set[str] = set()

    def add(self, graph: Surveyed) -> None:
        """Queue the regions of a graph without schedules. Never raises."""
        from autotune.api import time_weights

        try:
            every = lacking([graph]).get(self.device, ())
            every = [(w, n) for w, n in every if w.kind == "fusion"]  # a product's default is Inductor's own choice
            counted = [(w, n) for w, n in every if w.fingerprint not in self._asked and not self._was_tried(w)]
            if not counted or self._error:
                return
            weights = time_weights(counted)
            counted.sort(key=lambda one: -weights[one[0].fingerprint])
            self._asked |= set(weights)
            self.start()
            self._send({"workloads": [workload.to_json() for workload, _ in counted]})
        except Exception as error:
            self._error = first_line(error)

    def _was_tried(self, workload: Workload) -> bool:
        return look_up(workload, self.device, packaged=False).level is Level.HEURISTIC

    def end(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for the added graphs; True if a predicted schedule won.

        Raises:
            UserError: nothing could be tried.
        """
        if self._child is None or not self._asked:
            if self._error:
                raise UserError(self._error)
            return False
        try:
            self._child.send({"end": seconds})
            answer, _ = self._child.receive(time.monotonic() + seconds + _WAIT_LEAST_S)
        except ChildSilent:
            raise UserError("the process that tries them did not answer in time") from None
        except ChildDied as death:
            raise UserError(f"the process that tries them ended: {death}") from None
        found, error = answer["found"], answer["error"] or self._error
        if error and not found:
            raise UserError(error)
        own = deployment()
        won = sum(one["won"] for one in found)
        wrong = sum(not one["won"] and one["inductor_us"] is not None for one in found)
        own.count("predicted", won)
        own.count("predicted_wrong", wrong)
        for one in found:
            log.debug("predicted %s", one)
        self.left = int(answer["left"])
        left = f", {self.left} not tried in time" if self.left else ""
        notify(
            f"{won} of {plural(len(self._asked), 'region')} without a search have a predicted schedule now"
            f" ({wrong} predictions brought no gain{left})"
        )
        return bool(won)
