"""Devices, environments, workloads and keys that tests of the database store."""

from __future__ import annotations

from autotune.device import DeviceIdentity, Environment
from autotune.store import Key, Store
from autotune.workload import Workload

GPU = DeviceIdentity("cuda", "NVIDIA Test", 132, 143360, "9.0")
OTHER_GPU = DeviceIdentity("cuda", "NVIDIA Other", 108, 81920, "8.0")
ENVIRONMENT = Environment(
    "cuda", torch="2.11.0+cu130", numba="0.68.1", numba_cuda="0.30.4", cuda="13.0", driver="580.1"
)
NEAR = Environment("cuda", torch="2.11.1+cu130", numba="0.68.1", numba_cuda="0.30.4", cuda="13.0", driver="580.2")
FAR = Environment("cuda", torch="2.13.0+cu130", numba="0.68.1", numba_cuda="0.30.4", cuda="13.0", driver="580.1")


def workload(rows: int = 64, *, family: str = "f" * 64) -> Workload:
    """A workload of one family; ``rows`` is its extent."""
    spec = {"rows": rows, "family": family[:4]}
    return Workload(
        "fusion", spec, family=family, extent=rows, label=f"layer_norm f32 {rows}x8", source={"calls": [rows]}
    )


def put_key(
    store: Store, w: Workload | None = None, device: DeviceIdentity = GPU, env: Environment = ENVIRONMENT
) -> Key:
    """Store what a key refers to, and make it."""
    w = w or workload()
    return Key(store.put_workload(w), store.put_device(device), store.put_environment(env), "p" * 64)
