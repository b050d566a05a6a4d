"""Databases filled by hand with real kernels, as if searches had found them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch._inductor.config

from autotune.compiler.capture.recording import capture
from autotune.compiler.regions.find import Region, find_regions
from autotune.device import environment, identify
from autotune.store import Store
from autotune.store.records import Key, Schedule
from autotune.task import Config, open_task
from autotune.workload import Workload

Tune = Callable[..., list[Workload]]


def regions_of(fn: Callable[..., Any], args: Sequence[Any]) -> list[Region]:
    return [r for g in capture(fn, args).graphs for r in find_regions(g.module)]


def tune_in(db: str) -> Tune:
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
