"""A database as searches leave one, written without searching: candidates, failures, schedules, steps, scenarios."""

from __future__ import annotations

import random
import time

from autotune.device import DeviceIdentity, Environment
from autotune.domains.c3.scenario import Gemm, Scenario
from autotune.ir.canonical import canonicalize, to_workload
from autotune.ir.graph import Graph, Output, Value
from autotune.store import Key, Measurement, Schedule, Store
from autotune.store.codec import measurement_values
from autotune.store.models import ConfigRow, MeasurementRow
from autotune.store.records import Calibration, Verdict
from autotune.task import Config, Status, config_key
from autotune.workload import Workload

CPU = DeviceIdentity("cpu", "Test CPU", 2, 24576, "x86_64", threads=2)
ENVIRONMENT = Environment("cpu", torch="2.13.0", numba="0.68.1")
POLICY = "p" * 64
FAILURES = (
    (Status.TIMEOUT, "no answer in 10 s"),
    (Status.COMPILE_ERROR, "spills 128 bytes"),
    (Status.WRONG_RESULT, "3 elements beyond the tolerance"),
)


def region(rows: int, columns: int = 64, label: str = "") -> Workload:
    """The mean of each row, taken from it."""
    values = (
        Value("load", axes=(0, 1), slot=0, strides=(columns, 1)),
        Value("sum", (0,), (0,), over=(1,)),
        Value("const", number=1.0 / columns),
        Value("mul", (1, 2), (0,)),
        Value("sub", (0, 3), (0, 1)),
    )
    graph = Graph((rows, columns), values, ("float32",), (Output(4, (0, 1), (columns, 1), "float32"),))
    return to_workload(canonicalize(graph)[0], label or f"center f32 {rows}x{columns}")


def searched(store: Store, workload: Workload, *, candidates: int = 40, failing: float = 0.2, seed: int = 0) -> Key:
    """Store ``candidates`` of a workload and its schedule. More threads are faster; the rest hardly matters."""
    chance = random.Random(seed)
    key = Key(store.put_workload(workload), store.put_device(CPU), store.put_environment(ENVIRONMENT), POLICY)
    best: tuple[float, Config] | None = None
    found: list[Measurement] = []
    for n in range(candidates):
        config: Config = {
            "plan": "",
            "threads": chance.choice([1, 2]),
            "row_block": chance.choice([1, 2, 4, 8, 16, 32]),
            "stream": chance.choice([True, False]),
            "fetch": n,
        }
        if n and chance.random() < failing:
            status, reason = chance.choice(FAILURES)
            found.append(Measurement(key, config, status, reason=reason, run="r"))
            continue
        us = 200.0 / int(config["threads"]) + 4 * abs(int(config["row_block"]) - 8) + 10 * chance.random()
        found.append(Measurement(key, config, Status.OK, latency_us=us, samples=(us,) * 5, noise=0.01, run="r"))
        best = min(best or (us, config), (us, config), key=lambda b: b[0])
    assert best is not None
    named = [(config_key(m.config), m) for m in found]
    configs = [{"fingerprint": name, "params": m.config} for name, m in named]
    with store.writing() as c:  # all at once: a transaction for each takes milliseconds
        c.execute(store.insert(ConfigRow).on_conflict_do_nothing(), configs)
        c.execute(store.insert(MeasurementRow), [measurement_values(m, name, time.time()) for name, m in named])
    baselines = {"eager": 2.5 * best[0], "inductor": 1.4 * best[0]}
    store.put_schedule(
        Schedule(key, {**best[1]}, best[0], baselines, family=workload.family, extent=workload.extent, others=0.0)
    )
    return key


def scenario(store: Store) -> Key:
    """A scenario of C3 with its references, as a search stores it."""
    workload = Scenario(Gemm(256, 256, 256, "f32"), "all_gather", 1 << 20, 2, "f32").workload()
    devices = DeviceIdentity("cpu", "Test CPU", 2, 24576, "x86_64", threads=2, count=2, links="")
    key = Key(store.put_workload(workload), store.put_device(devices), store.put_environment(ENVIRONMENT), POLICY)
    config: Config = {"order": "comm_first", "engine": "copy", "threads": 0, "copies": 1}
    store.add_measurement(Measurement(key, config, Status.OK, latency_us=1500.0))
    baselines = {"sequential": 2600.0, "naive": 2000.0, "=compute": 1400.0, "=comm:gloo": 1300.0, "=comm:copy": 1100.0}
    store.put_schedule(Schedule(key, config, 1500.0, baselines, others=0.0))
    return key


def step(store: Store, keys: list[Key], labels: list[str], target: str = "models.mine:Block") -> None:
    """A verdict on a step in which these workloads occur; the last is left to Inductor."""
    families = [
        {"workload": key.workload, "label": label, "count": 2, "gain_us": 40.0 - 25.0 * n, "gain_of": "alone",
         "kept": n + 1 < len(keys)} for n, (key, label) in enumerate(zip(keys, labels, strict=True))
    ]  # fmt: skip
    record = {
        "target": target, "inputs": "", "train": True, "mode": "default", "compile_us": 1000.0, "all_us": 940.0,
        "autotune_us": 900.0, "ratio": 1.11, "noise": 0.02, "tries": 1, "families": families,
        "command": f"autotune search fusion {target} --train",
    }  # fmt: skip
    verdict = Verdict(
        "a" * 64, keys[0].device, keys[0].environment, "default", (keys[-1].workload,), record, time.time()
    )
    store.put_verdicts([verdict])


def calibrated(store: Store) -> None:
    """The stored results of `autotune calibrate fusion`."""
    store.put_calibration(Calibration(store.put_device(CPU), "fusion", {"copy_gbs": 20.0}))
