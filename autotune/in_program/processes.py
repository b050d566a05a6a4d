"""The processes of a search, started while Inductor compiles.

On a GPU they need half a minute before their first candidate: they import torch and Numba, make a CUDA context, and
compile for the first time. The first compiled graph names the workloads to begin with.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from autotune.runtime.inductor.survey import Surveyed, lacking

if TYPE_CHECKING:
    from autotune.measure.pool import CompilePool
    from autotune.measure.worker import Worker
    from autotune.workload import Workload

log = logging.getLogger("autotune")

_SEED = 0


class Processes:
    """A measuring worker and a compile pool on one device. A context manager, which ends them.

    Args:
        device: "cpu" or "cuda:N".

    Attributes:
        device: as given.
        worker, pool: None before :meth:`begin`, and where they could not be started.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self._thread: threading.Thread | None = None
        self.worker: Worker | None = None
        self.pool: CompilePool | None = None

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ready()
        for own in (self.pool, self.worker):
            if own is not None:
                own.close()
        self.pool = self.worker = None

    def begin(self, graph: Surveyed) -> None:
        """Start on the regions of a graph that lack a schedule; later graphs are let pass."""
        if self._thread is None and any(device == self.device for device, _ in graph.regions):
            self._thread = threading.Thread(target=self._start, args=(graph,), name="autotune-processes", daemon=True)
            self._thread.start()

    def ready(self) -> None:
        """Wait until both have done their first work."""
        if self._thread is not None:
            self._thread.join()

    def _start(self, graph: Surveyed) -> None:
        try:
            regions = lacking([graph]).get(self.device, ())
            if regions:
                self._first_work([workload for workload, _ in regions])
        except Exception as error:  # the search then starts processes itself, and reports a failure
            log.debug("the processes of a search were not started ahead: %s", error)

    def _first_work(self, workloads: Sequence[Workload]) -> None:
        from autotune.domain import open_task, policy_for
        from autotune.measure.pool import CompilePool
        from autotune.measure.worker import Worker

        first = workloads[0]
        policy = policy_for(first, self.device)
        self.worker = Worker(first, self.device, policy)
        self.pool = CompilePool(timeout_s=policy.build_s)
        # One build for each process; the search finds what was built.
        tasks = [open_task(workload, self.device) for workload in workloads[: self.pool.processes]]
        builds = [self.pool.submit(task.workload, self.device, task.default()) for task in tasks]
        for task, build in zip(tasks, builds, strict=True):
            artifact = build.result().artifact
            if artifact is not None:
                self.worker.open(task.workload)
                self.worker.measure(task.default(), artifact, stage="screen", seed=_SEED)
                break
        for task, build in zip(tasks, builds, strict=True):
            self.pool.keep(task.workload, self.device, task.default(), build)


__all__ = ["Processes"]
