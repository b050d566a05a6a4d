"""The toy and the pair domain, measured by a formula in the lane's own process: fast, and the same on every device.

A workload's spec may hold ``log`` (a file that gets a line for every candidate measured: the process and the
candidate), ``pause_s`` (of each), ``meet`` (a folder: measurements wait until two processes have one there),
``wait`` (a file of process numbers, which wait until another process measures), ``fatal`` (a file: while it
exists, the process kills itself) and ``numerics`` (a folder for the settings of torch's in force, by process).
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autotune import numerics
from autotune.domain import Domain
from autotune.measure.outcome import Outcome
from autotune.measure.policy import Policy
from autotune.measure.worker import Contender
from autotune.task import Artifact, Config, Status, Task, config_key
from autotune.workload import Workload
from tests.support.toy import pair_domain, toy_domain

KINDS = {toy_domain.KIND: __name__, pair_domain.KIND: __name__}


def latency(config: Config) -> float:
    """Microseconds; least for vector, block 8."""
    blocks = [value for name, value in config.items() if name.endswith("block")]
    slow = [value for name, value in config.items() if name.endswith("how") and value != "vector"]
    return 100.0 * len(blocks) + 10 * len(slow) + sum(abs(toy_domain.BLOCKS.index(int(b)) - 3) for b in blocks)


def meet(folder: Path) -> None:
    """Wait until another process does."""
    folder.mkdir(exist_ok=True)
    (folder / str(os.getpid())).touch()
    while len(list(folder.iterdir())) < 2:
        time.sleep(0.01)


def wait_for_another(waiting: Path) -> None:
    """Wait where this process is among those of a file, until another has removed it."""
    while True:
        try:
            if str(os.getpid()) not in waiting.read_text().split():
                waiting.unlink()
        except FileNotFoundError:
            return
        time.sleep(0.02)


class Formula:
    """Measures without a worker; see :class:`autotune.measure.worker.Measurer`."""

    def __init__(self, workload: Workload) -> None:
        self.restarts, self.restart_s, self.baseline_s, self.bytes_moved, self.others = 0, 0.0, 0.0, 0, None
        self.open(workload)

    def open(self, workload: Workload) -> None:
        self._workload = workload

    def measure(
        self, config: Config, artifact: Artifact, *, stage: str, seed: int, limit_us: float | None = None
    ) -> Outcome:
        spec = self._workload.spec
        if spec.get("numerics"):
            Path(spec["numerics"], str(os.getpid())).write_text(json.dumps(numerics.read()))
        if spec.get("meet"):
            meet(Path(spec["meet"]))
        if spec.get("wait"):
            wait_for_another(Path(spec["wait"]))
        if spec.get("fatal") and Path(spec["fatal"]).exists():
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(spec.get("pause_s", 0.0))
        if spec.get("log") and stage == "screen":
            with open(spec["log"], "a") as f:
                f.write(f"{os.getpid()} {self._workload.fingerprint} {config_key(config)}\n")
        return Outcome(Status.OK, (latency(config),) * 3)

    def compare(self, contenders: Sequence[Contender], *, seed: int) -> dict[str, Outcome]:
        found = {c.name: Outcome(Status.OK, (latency(c.config),) * 3) for c in contenders}
        return {**found, "eager": Outcome(Status.OK, (1000.0,) * 3)}

    def close(self) -> None:
        pass


class ByFormula(Domain):
    """See ``autotune.domain.Domain``."""

    def open_task(self, workload: Workload, device: str) -> Task:
        kind = pair_domain if workload.kind == pair_domain.KIND else toy_domain
        return kind.DOMAIN.open_task(workload, device)

    def open_measurer(self, workload: Workload, device: str, policy: Policy) -> Any:
        return Formula(workload)


DOMAIN = ByFormula()
