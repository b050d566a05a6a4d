"""Databases filled by hand with real kernels, and a process that forgets between tests what it compiled and opened."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch._dynamo.backends import registry
from torch._functorch import config as aot_config

from autotune.compiler.capture.recording import capture
from autotune.compiler.regions.find import Region, find_regions
from autotune.device import environment, identify
from autotune.runtime.backend import dynamo_backend
from autotune.runtime.counters import reset_counters
from autotune.runtime.database import forget_stores
from autotune.runtime.region_call import forget_calls
from autotune.store import Store
from autotune.store.records import Key, Schedule
from autotune.task import Config, open_task
from autotune.workload import Workload

Tune = Callable[..., list[Workload]]


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """CPU kernels are compiled once for all tests here, and none come from the user's cache."""
    patch = pytest.MonkeyPatch()
    patch.setenv("AUTOTUNE_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
    yield
    patch.undo()


@pytest.fixture(scope="session", autouse=True)
def registered() -> None:
    """The entry point of an installed package does this; a checkout on sys.path has none."""
    if "autotune" not in registry.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(dynamo_backend, name="autotune")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Every graph is compiled anew: a cached one is not looked up again, and what is counted here would not be."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    reset_counters()
    with torch._inductor.config.patch(fx_graph_cache=False), aot_config.patch(enable_autograd_cache=False):
        yield
    forget_stores()
    forget_calls()
    torch._dynamo.reset()


@pytest.fixture
def db(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The file that $AUTOTUNE_DB names; not there yet."""
    path = str(tmp_path / "tuned.db")
    monkeypatch.setenv("AUTOTUNE_DB", path)
    return path


def regions_of(fn: Callable[..., Any], args: Sequence[Any]) -> list[Region]:
    return [r for g in capture(fn, args).graphs for r in find_regions(g.module)]


@pytest.fixture
def tune(db: str) -> Tune:
    """``tune(fn, args, select=...)`` stores the default configuration of every region as if a search had found it.

    ``edit`` may change a schedule before it is stored; ``select`` says which workloads to store.
    """

    def store_all(
        fn: Callable[..., Any],
        args: Sequence[Any],
        *,
        select: Callable[[Workload], bool] = lambda w: True,
        edit: Callable[[Schedule], Schedule] = lambda s: s,
        config: Callable[[Config], Config] = lambda c: c,
    ) -> list[Workload]:
        stored = []
        with Store.open(db) as store:
            device, env = store.put_device(identify("cpu")), store.put_environment(environment("cpu"))
            for region in regions_of(fn, args):
                workload = region.workload
                if workload is None or not select(workload):
                    continue
                task = open_task(workload, "cpu")
                chosen = config(task.default())
                schedule = Schedule(
                    Key(store.put_workload(workload), device, env, "by hand"),
                    chosen,
                    10.0,
                    {"eager": 20.0, "inductor": 15.0},
                    task.build(chosen),
                    family=workload.family,
                    extent=workload.extent,
                )
                store.put_schedule(edit(schedule))
                stored.append(workload)
        torch._dynamo.reset()
        return stored

    return store_all


def baseline(winner: str) -> Callable[[Schedule], Schedule]:
    """An edit: the named baseline won."""
    return lambda s: replace(s, config=None, artifact=None, winner=winner)
