"""The process that tries predicted schedules while the program compiles: ``python -m autotune.in_program.predicting``.

The cost models run in Python for a second a region. In another process they do not delay Inductor, and a failure only
costs the predictions. The process receives frames of :mod:`autotune.measure.child`. ``workloads`` are tried in the
background. The answer to ``end`` follows when all were tried, or after a number of seconds.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from autotune.device import identify, usable_processors
from autotune.measure.child import Link, serve
from autotune.measure.outcome import one_line
from autotune.workload import Workload

if TYPE_CHECKING:
    from autotune.in_program.predicted import Prediction, Trials

_WORKERS = 3
"""Maximum number of measuring processes. Compiling a region by Inductor takes seconds, timing it tenths of a second."""
_ROOM, _OVER_HELD = 0.5, 10
"""Share of the device's memory for all of them, and the factor of a process's memory over the bytes of its region's
tensors: the oracle computes in fp64, and keeps intermediate values."""


class Predictor:
    """Trials of workloads, in a thread for each measuring process."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Workload | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._found: list[Prediction] = []
        self._asked = 0
        self._changed = threading.Condition()
        self._trials: Trials | None = None
        self._room, self._taken = 0, 0  # bytes
        self._error = ""

    def handle(self, link: Link, message: dict[str, Any], blob: bytes) -> None:
        """Handle a frame."""
        if "workloads" in message:
            self._begin([Workload.from_json(w) for w in message["workloads"]], message["device"], message["numerics"])
        else:
            link.send(self._end(float(message["end"])))

    def _begin(self, workloads: Sequence[Workload], device: str, settings: dict[str, Any]) -> None:
        self._asked += len(workloads)
        for workload in workloads:
            self._jobs.put(workload)
        if self._threads or not workloads:
            return
        count = 1 if device == "cpu" else max(1, min(_WORKERS, usable_processors() // 4))
        try:
            self._prepare(workloads[0], device, settings)
        except Exception as error:
            with self._changed:
                self._error = one_line(error)
                self._changed.notify_all()
            return
        for _ in range(count):
            thread = threading.Thread(target=self._run, args=(workloads[0], device), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _prepare(self, first: Workload, device: str, settings: dict[str, Any]) -> None:
        from autotune import numerics
        from autotune.domain import policy_for
        from autotune.in_program.predicted import Trials
        from autotune.measure.pool import CompilePool
        from autotune.store import Store

        numerics.restore(settings)
        self._room = int(_ROOM * (identify(device).memory_mib << 20))
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a worker's baselines are one or two kernels
        pool = CompilePool(timeout_s=policy_for(first, device).build_s)
        self._trials = Trials(Store.open(None), device, pool, uuid.uuid4().hex)

    def _run(self, first: Workload, device: str) -> None:
        from autotune.domain import domain_of, policy_for
        from autotune.in_program.predicted import failed
        from autotune.measure.worker import MachineFault, Worker

        assert self._trials is not None
        with Worker(first, device, policy_for(first, device)) as worker:
            while (workload := self._jobs.get()) is not None:
                try:
                    with self._holding(_OVER_HELD * domain_of(workload.kind).bytes_held(workload)):
                        found = self._trials.run(workload, worker)
                except Exception as error:
                    found = failed(workload, one_line(error))
                    if isinstance(error, MachineFault):
                        self._error = found.why
                with self._changed:
                    self._found.append(found)
                    self._changed.notify_all()

    @contextlib.contextmanager
    def _holding(self, need: int) -> Iterator[None]:
        """Reserve ``need`` bytes; waits until the regions of other threads leave enough."""
        with self._changed:
            while self._taken and self._taken + need > self._room:
                self._changed.wait()
            self._taken += need
        try:
            yield
        finally:
            with self._changed:
                self._taken -= need
                self._changed.notify_all()

    def _end(self, seconds: float) -> dict[str, Any]:
        end = time.monotonic() + seconds
        with self._changed:
            while len(self._found) < self._asked and not self._error and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
            found, error = list(self._found), self._error
        if self._trials is not None:
            self._trials.store()
        return {"found": [one.to_json() for one in found], "left": self._asked - len(found), "error": error}


if __name__ == "__main__":
    serve(Predictor().handle)
