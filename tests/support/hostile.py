"""A database that somebody else wrote to: real workloads and schedules in SQLite, changed as an attacker would."""

from __future__ import annotations

import copy
import json
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from autotune.compiler.capture.recording import capture
from autotune.compiler.regions.find import find_regions
from autotune.device import identify
from autotune.store import Store
from autotune.task import Config, config_key
from autotune.workload import Workload
from tests.support.deployment import store_default


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def normalised(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[-1:]) * 2


def workload_of(fn: Callable[..., Any], *args: torch.Tensor) -> Workload:
    (region,) = [r for g in capture(fn, args) for r in find_regions(g.module)]
    assert region.workload is not None
    return region.workload


def overwriting(workload: Workload, path: Path) -> Workload:
    """The same workload by its fingerprint, with a program that maps a file and fills it with zeros first."""
    source: Any = copy.deepcopy(dict(workload.source))
    n = len(source["inputs"])

    def later(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: v + 2 if k == "node" and v >= n else later(v) for k, v in value.items()}
        return [later(v) for v in value] if isinstance(value, list) else value

    attack = [
        {"op": "aten.from_file.default", "args": [str(path), True, 128], "kwargs": {"dtype": {"dtype": "uint8"}}},
        {"op": "aten.fill_.Scalar", "args": [{"node": n}, 0]},
    ]
    source["calls"] = attack + later(source["calls"])
    source["result"] = later(source["result"])
    changed = replace(workload, source=source)
    assert changed.fingerprint == workload.fingerprint
    return changed


def missed(db: Path, *workloads: Workload) -> None:
    with Store.open(db) as store:
        device = store.put_device(identify("cpu"))
        for workload in workloads:
            assert store.add_miss(workload, device, "missed workload")


def tuned(db: Path, fn: Callable[..., Any], *args: torch.Tensor) -> tuple[Workload, Config]:
    """Store the default configuration of a function's only region as if a search had found it."""
    workload = workload_of(fn, *args)
    with Store.open(db) as store:
        config = store_default(store, workload).config
    assert config is not None
    return workload, config


def execute(db: Path, statement: str, values: Sequence[Any] = ()) -> None:
    """Change the database behind the store's back."""
    connection = sqlite3.connect(db)
    with connection:
        connection.execute(statement, values)
    connection.close()


def put_config(db: Path, workload: Workload, config: dict[str, Any]) -> None:
    """Make ``config`` the stored one of a workload's schedule, under the fingerprint that it has."""
    name = config_key(config)
    execute(db, "INSERT OR IGNORE INTO autotune_configs VALUES (?, ?)", (name, json.dumps(config)))
    execute(db, "UPDATE autotune_schedules SET config = ? WHERE workload = ?", (name, workload.fingerprint))
