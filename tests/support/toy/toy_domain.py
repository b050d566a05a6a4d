"""A small real domain for tests: sum the squares of the rows of a matrix on the CPU, and ways to do it badly.

``how`` picks the program; ``block`` is the rows a step takes. Candidates really run, and the bad ones are really bad.
The time that a candidate takes is a formula (:func:`takes_us`), which the worker's timers read from its clock.
The workload's spec may contain:

``slow_us`` (added to good candidates: once at block 8, twice at its neighbours), ``bad`` (are the bad ones in the
space), ``broken`` (a candidate's ``how`` to the machine's fault, see ``FAULTS``), ``once`` (a folder of marks, so that
a fault happens to each candidate once), ``eager_us`` (added to the baseline), ``least_us`` (a lower bound of all
candidates), ``reference`` (is one timed with the baselines), ``log`` (a file that gets a line for every candidate
loaded), ``hold`` (a file: while it exists, a worker waits after its second candidate), ``pause_s`` (that a worker
sleeps before each candidate), ``alike`` (its name by :meth:`Domain.alike`), ``never`` (the workload's inputs are never
made) and ``numerics`` (a file that gets the settings of torch's that candidates are loaded under).
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import signal
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune import numerics
from autotune.domain import Domain
from autotune.errors import BuildError, UserError
from autotune.space import Parameter, Space
from autotune.task import Artifact, Bench, Config, Kernel, Runnable, Task, Verdict
from autotune.workload import Workload, digest
from tests.support.clock import stuck, timed

KIND = "toy"
GOOD = ("vector", "rows")
BAD = ("hang", "segfault", "exit", "wrong", "memory", "raise", "build_error", "build_crash", "build_hang")
BLOCKS = (1, 2, 4, 8, 16, 32)
FAULTS = ("build_disk", "build_killed", "build_setting", "load_disk", "run_killed", "run_memory", "run_stopped")


def workload(rows: int = 64, columns: int = 256, **more: Any) -> Workload:
    spec = {"rows": rows, "columns": columns, "bad": False, "slow_us": 0, **more}
    family = digest({k: v for k, v in spec.items() if k != "rows"})
    return Workload(KIND, spec, family=family, extent=rows, label=f"toy {rows}x{columns}")


EAGER_US = 60.0


def takes_us(spec: Mapping[str, Any], config: Config) -> float:
    """Microseconds of a good candidate: least for vector, block 8, whose neighbours take twice ``slow_us``."""
    away = abs(BLOCKS.index(int(config["block"])) - 3)
    return (20.0 if config["how"] == "vector" else 30.0) + away + spec["slow_us"] * 2**away


def due(spec: Mapping[str, Any], config: Config, step: str) -> str:
    """The machine's fault for a candidate in this step."""
    fault: str = spec.get("broken", {}).get(config["how"], "")
    if not fault.startswith(step):
        return ""
    if spec.get("once"):
        try:
            Path(spec["once"], digest(config)).touch(exist_ok=False)
        except FileExistsError:
            return ""
    return fault


class ToyTask(Task):
    def __init__(self, workload: Workload, device: str) -> None:
        self.workload, self.device = workload, device

    def space(self, file: str | None = None) -> Space:
        how = GOOD + BAD if self.workload.spec["bad"] else GOOD
        space = Space((Parameter("how", how), Parameter("block", BLOCKS)), file or "toy.toml")
        for name, allowed in tomllib.loads(Path(file).read_text()).items() if file else ():
            space = space.restrict(name, allowed)
        return space

    def default(self) -> Config:
        return {"how": "rows", "block": 4}

    def seeds(self) -> Sequence[Config]:
        return self.workload.spec.get("seeds", ())

    def least_us(self) -> float | None:
        return self.workload.spec.get("least_us")

    def reject(self, config: Config) -> str | None:
        return "a block has more rows than the matrix" if config["block"] > self.workload.spec["rows"] else None

    def build(self, config: Config) -> Artifact:
        fault = due(self.workload.spec, config, "build")
        if fault == "build_disk":
            try:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                raise BuildError("it does not compile") from error
        if fault == "build_killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "build_setting":
            raise UserError("TOY_DIR: cannot write /nowhere; point it elsewhere")
        if config["how"] == "build_error":
            raise BuildError("needs 512 KiB of shared memory, the device has 227")
        if config["how"] == "build_crash":
            os._exit(7)
        while config["how"] == "build_hang":
            stuck()
            time.sleep(1)
        return Artifact("cpu", (Kernel("toy", b"", {"block": config["block"]}),), generator="toy")

    def normalize(self, config: Config) -> Config:
        return config

    def adapt(self, config: Config) -> Config | None:
        return config


class ToyBench(Bench):
    def __init__(self, workload: Workload) -> None:
        import torch

        self.spec, self.torch, self.clock, self.loads = workload.spec, torch, timed(), 0
        while self.spec.get("never"):
            stuck()
            time.sleep(1)
        self.x = torch.rand(self.spec["rows"], self.spec["columns"], dtype=torch.float32)
        self.out = torch.zeros(self.spec["rows"])

    def load(self, config: Config, artifact: Artifact) -> Runnable:
        if self.spec.get("log"):
            with open(self.spec["log"], "a") as f:
                f.write(digest(config) + "\n")
        if self.spec.get("numerics"):
            Path(self.spec["numerics"]).write_text(json.dumps(numerics.read()))
        self.loads += 1
        time.sleep(self.spec.get("pause_s", 0.0))
        while self.spec.get("hold") and self.loads > 2 and Path(self.spec["hold"]).exists():
            time.sleep(0.02)
        if due(self.spec, config, "load"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        run: Runnable = getattr(self, "_" + str(config["how"]))(config)
        fault = due(self.spec, config, "run")
        if fault == "run_memory":
            return lambda: bytearray(1 << 62)
        if fault:
            number = signal.SIGKILL if fault == "run_killed" else signal.SIGSTOP
            return lambda: os.kill(os.getpid(), number)
        return run

    def _rows(self, config: Config) -> Runnable:
        took, block = takes_us(self.spec, config), int(config["block"])

        def run() -> None:
            self.clock.busy(took)
            for i in range(0, len(self.x), block):
                self.out[i : i + block] = (self.x[i : i + block] ** 2).sum(1)

        return run

    def _vector(self, config: Config) -> Runnable:
        took = takes_us(self.spec, config)

        def run() -> None:
            self.clock.busy(took)
            self.torch.sum(self.x * self.x, 1, out=self.out)

        return run

    def _hang(self, config: Config) -> Runnable:
        def run() -> None:
            stuck()
            while True:
                pass

        return run

    def _segfault(self, config: Config) -> Runnable:
        return lambda: ctypes.memset(self.out.data_ptr() - (1 << 40), 1, 64)

    def _exit(self, config: Config) -> Runnable:
        return lambda: os._exit(3)

    def _wrong(self, config: Config) -> Runnable:
        return lambda: self.out.copy_((self.x * self.x).sum(1) * 1.01)

    def _memory(self, config: Config) -> Runnable:
        with open("/proc/self/statm") as f:
            used = int(f.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), resource.RLIM_INFINITY))
        return lambda: bytearray(1 << 40)

    def _raise(self, config: Config) -> Runnable:
        raise RuntimeError("too many resources requested\nfor launch")

    def verify(self, run: Runnable, seed: int) -> Verdict:
        from autotune.measure.verify import compare

        self.x.copy_(self.torch.rand(self.x.shape, generator=self.torch.Generator().manual_seed(seed)))
        self.out.fill_(float("nan"))
        run()
        return compare(self.out, (self.x.double() ** 2).sum(1), "float32", self.spec["columns"])

    def baselines(self) -> Mapping[str, Callable[[], Runnable]]:
        def eager() -> Runnable:
            took = EAGER_US + self.spec.get("eager_us", 0)
            return lambda: (self.torch.pow(self.x, 2).sum(1), self.clock.busy(took))  # type: ignore[func-returns-value]

        def inductor() -> Runnable:
            raise RuntimeError("no C++ compiler")

        def crashing() -> Runnable:
            return lambda: os._exit(9)

        out: dict[str, Callable[[], Runnable]] = {"eager": eager, "inductor": inductor}
        if self.spec.get("reference"):
            out["=nothing"] = lambda: lambda: self.clock.busy(1.0)
        return {**out, "crashing": crashing} if self.spec["bad"] else out

    def bytes_moved(self) -> int:
        return self.x.numel() * 4 + self.out.numel() * 4


class Toy(Domain):
    """See ``autotune.domain.Domain``."""

    def open_task(self, workload: Workload, device: str) -> ToyTask:
        return ToyTask(workload, device)

    def open_bench(self, workload: Workload, device: str) -> ToyBench:
        return ToyBench(workload)

    def alike(self, workload: Workload) -> str:
        name: str = workload.spec.get("alike", workload.fingerprint)
        return name


DOMAIN = Toy()
