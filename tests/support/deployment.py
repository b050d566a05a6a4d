"""Databases filled by hand with real kernels, as if searches had found them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from autotune.device import environment, identify
from autotune.domain import open_task
from autotune.store import Store
from autotune.store.records import Key, Schedule
from autotune.task import Config
from autotune.workload import Workload
from tests.support.capture_helpers import regions_of

Tune = Callable[..., list[Workload]]


def store_default(
    store: Store,
    workload: Workload,
    device: str = "cpu",
    *,
    config: Callable[[Config], Config] = lambda c: c,
    edit: Callable[[Schedule], Schedule] = lambda s: s,
) -> Schedule:
    """Build the default configuration of a workload and store it as if a search had found it; gives what is stored.

    ``config`` may change the configuration before it is built, ``edit`` the schedule before it is stored.
    """
    task = open_task(workload, device)
    chosen = config(task.default())
    artifact = task.build(chosen)
    place, env = store.put_device(identify(device)), store.put_environment(environment(device))
    schedule = Schedule(
        Key(store.put_workload(workload), place, env, "by hand"),
        chosen,
        10.0,
        {"eager": 20.0, "inductor": 15.0},
        artifact,
        family=workload.family,
        extent=workload.extent,
    )
    stored = edit(schedule)
    store.put_schedule(stored)
    return stored


def tune_in(db: str) -> Tune:
    """``tune(fn, args, select=...)`` stores the default configuration of every region as if a search had found it.

    ``edit`` may change a schedule before it is stored; ``select`` chooses the workloads to store.
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
            for region in regions_of(fn, *args):
                workload = region.workload
                if workload is None or not select(workload):
                    continue
                store_default(store, workload, config=config, edit=edit)
                stored.append(workload)
        torch._dynamo.reset()
        return stored

    return store_all


def baseline(winner: str) -> Callable[[Schedule], Schedule]:
    """An edit: the named baseline won."""
    return lambda s: replace(s, config=None, artifact=None, winner=winner)
