"""The processes of a search, started while Inductor compiles.

On a GPU they need half a minute before their first candidate: they import torch and Numba, create a CUDA context, and
compile for the first time. They begin with the workloads of the first compiled graph.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from autotune.runtime.inductor.survey import Surveyed, lacking

if TYPE_CHECKING:
    from autotune.measure.baselines import BaselinePool
    from autotune.measure.pool import CompilePool
    from autotune.measure.worker import Worker
    from autotune.task import Task
    from autotune.workload import Workload

log = logging.getLogger("autotune")

_SEED = 0
_KIND = "fusion"
"""Kind of the workloads of a program; its domain has the policy. Products use the same."""
_SUGGESTED, _SEEDS = 4, 3
"""Number of a graph's workloads whose heuristic candidates are compiled too, and of candidates of each."""


class Processes:
    """Context manager of a measuring worker, a compile pool and a pool for baselines on one device.

    Args:
        device: "cpu" or "cuda:N".

    Attributes:
        device: as given.
        worker, pool, baselines: None before :meth:`begin`, and if they could not be started.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self._graphs: queue.Queue[Surveyed | None] = queue.Queue()
        self._worked = False
        self._thread: threading.Thread | None = None
        self.worker: Worker | None = None
        self.pool: CompilePool | None = None
        self.baselines: BaselinePool | None = None

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._graphs.put(None)
            self._thread.join()
        for own in (self.pool, self.baselines, self.worker):
            if own is not None:
                own.close()
        self.pool = self.baselines = self.worker = None

    def start(self) -> None:
        """Start the processes, which import what they need while AOTAutograd traces and Inductor compiles."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="autotune-processes", daemon=True)
            self._thread.start()

    def begin(self, graph: Surveyed) -> None:
        """Begin to compile for the regions of a graph without schedules."""
        if any(device == self.device for device, _ in graph.regions):
            self.start()
            self._graphs.put(graph)

    def ready(self) -> None:
        """Wait until all processes have finished their first work."""
        self._graphs.join()

    def _run(self) -> None:
        """Handle each graph. The thread must live as long as the worker, which Linux kills with it."""
        try:
            self._start()
        except Exception as error:  # the search then starts its own processes, and reports a failure
            log.debug("the processes of a search were not started ahead: %s", error)
        while (graph := self._graphs.get()) is not None:
            try:
                if regions := lacking([graph]).get(self.device, ()):
                    self._first_work(regions)
            except Exception as error:  # the search does this work again, and reports a failure
                log.debug("the first work of a search failed: %s", error)
            self._graphs.task_done()

    def _first_work(self, counted: Sequence[tuple[Workload, int]]) -> None:
        """Queue the workloads of a graph in the order of the search; measure the first one that has a kernel.

        Opening all tasks takes seconds beside Inductor, so that the first one is queued before the others are opened.
        """
        from autotune.domain import open_task

        if self.worker is None or self.pool is None:
            return
        weights = shares(counted)
        tasks = []
        # Regions before products, which need less of what the worker imports.
        for workload in sorted((w for w, _ in counted), key=lambda w: (w.kind != _KIND, -weights[w.fingerprint])):
            task = open_task(workload, self.device)
            tasks.append(task)
            self.pool.ahead(workload, self.device, task.normalize(task.default()))
            if self.baselines is not None:
                self.baselines.begin(workload, self.device)
        for task in tasks[:_SUGGESTED] if self.baselines is not None else ():
            for config in task.seeds()[:_SEEDS]:
                self.pool.ahead(task.workload, self.device, task.normalize(config))
        for task in tasks if not self._worked else ():
            self._worked = True
            if self._measured(task):
                break

    def _start(self) -> None:
        from autotune.domain import domain_of
        from autotune.measure.baselines import BaselinePool
        from autotune.measure.pool import CompilePool
        from autotune.measure.worker import Worker

        policy = domain_of(_KIND).policy(self.device)
        self.worker = Worker(None, self.device, policy)
        self.pool = CompilePool(timeout_s=policy.build_s)
        self.pool.start()
        if self.device.startswith("cuda"):  # on a CPU, compiling disturbs measurements
            self.baselines = BaselinePool(timeout_s=policy.baseline_s)
            self.baselines.start()

    def _measured(self, task: Task) -> bool:
        """Measure a default, on a GPU with its baselines, so that the worker finishes all of its imports."""
        from autotune.measure.worker import Contender

        assert self.pool is not None
        assert self.worker is not None
        config = task.normalize(task.default())
        build = self.pool.submit(task.workload, self.device, config)
        artifact = build.result().artifact
        self.pool.keep(task.workload, self.device, config, build)
        if artifact is None:
            return False
        self.worker.open(task.workload)
        self.worker.measure(config, artifact, stage="screen", seed=_SEED)
        if self.baselines is not None:
            self.baselines.wait(task.workload, self.device)
            self.worker.compare([Contender("default", config, artifact)], seed=_SEED)
        return True


def shares(counted: Sequence[tuple[Workload, int]]) -> dict[str, float]:
    """Each workload's weight in a step by fingerprint: the mebibytes whose time it may save, times its occurrences.

    The first pass measures a fixed number of candidates of each, so the weight determines their order, not their time.
    """
    from autotune.domain import domain_of

    def saved(workload: Workload) -> float:
        return max(0.1, domain_of(workload.kind).bytes_saved(workload) / 2**20)

    return {workload.fingerprint: count * saved(workload) for workload, count in counted}


__all__ = ["Processes", "shares"]
