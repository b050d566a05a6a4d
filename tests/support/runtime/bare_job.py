"""Deploys CUDA schedules from a snapshot in a process that can import no compiler of ours, no search and no SQL.

    python -m tests.support.runtime.bare_job SNAPSHOT WORKLOAD.json

The driver is a fake one, which keeps what it is handed. Prints what happened as JSON; run by test_bare.py.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

FORBIDDEN = ("numba", "numba_cuda", "llvmlite", "optuna", "alembic", "sqlalchemy", "cuda", "rich", "psutil",
             "platformdirs", "scipy", "psycopg", "cryptography", "triton", "autotune.tuner", "autotune.bench",
             "autotune.api", "autotune.cli")  # fmt: skip


class Missing(importlib.abc.MetaPathFinder):
    """As if these were not installed, ``but`` some of them."""

    def __init__(self, but: Sequence[str] = ()) -> None:
        self._gone = [name for name in FORBIDDEN if name not in but]

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if any(name == gone or name.startswith(f"{gone}.") for gone in self._gone):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


class Driver:
    """A list of the calls of CUDA's driver."""

    def __init__(self) -> None:
        self.loaded: list[bytes] = []
        self.launched: list[dict[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: 0

    def cuModuleLoadData(self, module: Any, code: bytes) -> int:
        self.loaded.append(bytes(code))
        module._obj.value = len(self.loaded)
        return 0

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        function._obj.value = 4096 + len(self.launched)
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, params: Any, extra: Any) -> int:
        c = config._obj
        values = ctypes.cast(params[0], ctypes.POINTER(ctypes.c_uint64))
        self.launched.append({"grid": c.grid[0], "block": c.block[0], "shared": c.shared, "first": int(values[0])})
        return 0


def main() -> int:
    import torch

    import autotune
    from autotune.device import DeviceIdentity, Environment
    from autotune.ir.graph import Graph
    from autotune.runtime.launch import cuda as cuda_launch
    from autotune.runtime.launch import executor, prepared
    from autotune.runtime.match import match
    from autotune.workload import Workload

    snapshot = autotune.load(sys.argv[1])
    data = json.loads(Path(sys.argv[2]).read_text())
    workload, device = Workload.from_json(data["workload"]), DeviceIdentity.from_json(data["device"])
    environment = Environment.from_json({**data["environment"], "numba": "", "numba_cuda": ""})
    found = match(workload, snapshot, device, environment)
    answer: dict[str, Any] = {"level": str(found.level), "reason": found.reason}
    answer["differences"] = [d.field for d in found.differences]
    if found.schedule is not None:
        driver = Driver()
        cuda_launch.driver = lambda: driver  # type: ignore[assignment]
        cuda_launch._through_torch = lambda *a: None  # type: ignore[assignment]
        graph = Graph.from_json(workload.spec)
        specs = [
            prepared.TensorSpec((graph.input_numel(k),), (1,), getattr(torch, t)) for k, t in enumerate(graph.inputs)
        ]
        outs = [
            prepared.TensorSpec((graph.output_numel(k),), (1,), getattr(torch, o.dtype))
            for k, o in enumerate(graph.outputs)
        ]
        where = torch.device("cuda", 0)
        # A build of torch for CPUs has neither.
        torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice = lambda device: 7, lambda: 0
        ready = executor.load_executor(
            graph, found.schedule, prepared.RegionTensors(range(len(specs)), range(len(outs)), specs, outs), where
        )
        ready._device, ready._empty = torch.device("cpu"), None  # there is no GPU to allocate on
        x = [torch.empty(s.size, dtype=s.dtype) for s in specs]
        ready._run(x)
        answer["launched"] = driver.launched
        answer["loaded"] = [len(code) for code in driver.loaded]
        answer["first_input"] = x[0].data_ptr()
    if "scenario" in data:
        from autotune.domains.c3.match import match_scenario
        from autotune.domains.c3.scenario import Scenario

        scenario = Scenario.from_json(data["scenario"])
        many = DeviceIdentity.from_json(data["devices"])
        answer["c3"] = str(match_scenario(scenario, snapshot, many, environment).level)
    import autotune.runtime.backend
    import autotune.runtime.inductor.region_pass  # the hook itself

    answer["imported"] = sorted({n.partition(".")[0] for n in sys.modules} & set(FORBIDDEN))
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.meta_path.insert(0, Missing())
    sys.exit(main())
