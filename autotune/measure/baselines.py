"""Prefetch of baselines, compiled in processes separate from the measuring worker.

Inductor takes a second or more for a region, in which the worker could measure a dozen candidates. These processes
compile the same code without running it. The worker then loads it from Inductor's disk cache.
"""

from __future__ import annotations

import math
import os
from typing import Any

from autotune import numerics
from autotune import task as tasks
from autotune.domain import domain_of
from autotune.measure.child import Link, artifact_to_wire, serve
from autotune.measure.outcome import one_line
from autotune.measure.pool import NICE, Built, CompilePool, default_processes
from autotune.task import Artifact
from autotune.workload import Workload

PROCESSES = 3
"""Maximum number of processes of a pool: each may take half a gigabyte of a GPU's memory."""
WAIT_S = 30.0
"""Seconds for which a comparison waits for baselines; if there is time left, the worker then compiles them itself."""
_NOTHING = Artifact("", ())


class BaselinePool(CompilePool):
    """Compiles the baselines of workloads; a job has no configuration, and its artifact no kernels.

    A context manager.

    Args:
        processes: their number; None for a few, by the processors of the host.
        timeout_s: for one workload.
    """

    module = __name__

    def __init__(self, processes: int | None = None, timeout_s: float = 300.0) -> None:
        super().__init__(processes or max(1, min(PROCESSES, default_processes() // 4)), timeout_s)

    def begin(self, workload: Workload, device: str) -> None:
        """Compile a workload's baselines when a process is free."""
        self.prefetch(workload, device, {})

    def wait(self, workload: Workload, device: str, seconds: float = math.inf) -> Built | None:
        """Wait for a workload's baselines; return None if they take longer than ``seconds`` or :data:`WAIT_S`."""
        future = self.submit(workload, device, {})
        try:
            return future.result(min(seconds, WAIT_S))
        except TimeoutError:
            return None
        finally:
            self.keep(workload, device, {}, future)


class Compiler:
    """Compile process of the pool."""

    def __init__(self) -> None:
        self._subject: tuple[Workload, str] | None = None

    def handle(self, link: Link, message: dict[str, Any], blob: bytes) -> None:
        try:
            if "workload" in message:
                workload = Workload.from_json(message["workload"])
                tasks.DOMAINS[workload.kind] = message["domain"]
                numerics.restore(message["numerics"])
                self._subject = workload, message["device"]
                link.send({"ok": True})
                return
            assert self._subject is not None
            workload, device = self._subject
            domain_of(workload.kind).compile_baselines(workload, device)
        except Exception as error:
            link.send({"ok": False, "reason": one_line(error) or type(error).__name__, "fault": ""})
            return
        head, code = artifact_to_wire(_NOTHING)
        link.send({"ok": True, "artifact": head}, code)


if __name__ == "__main__":
    os.nice(NICE)
    serve(Compiler().handle)
