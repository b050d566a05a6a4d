"""Schedules that are found while the program's first code is compiled, which must not have them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from autotune.device import environment, identify
from autotune.store import Store
from autotune.store.records import Key, Schedule
from autotune.store.store import HeldStore
from autotune.workload import Workload


def test_a_schedule_is_stored_when_the_first_code_is_there(tmp_path: Path) -> None:
    file = tmp_path / "tuned.db"
    workload = Workload("toy", {"rows": 1})
    with HeldStore.open(file) as held, Store.open(file) as other:
        assert isinstance(held, HeldStore)
        place = held.put_device(identify("cpu")), held.put_environment(environment("cpu"))
        key = Key(held.put_workload(workload), *place, "policy")
        slow = Schedule(key, {"block": 1}, 9.0, {"eager": 12.0}, winner="autotune")
        fast = replace(slow, config={"block": 2}, latency_us=7.0)
        for schedule in (slow, fast):
            assert held.put_schedule(schedule, replace=True)
        assert other.schedule_of(key) is None
        kept = held.schedule_of(key)
        assert kept is not None
        assert kept.config == {"block": 2}, "the search itself has it"
        held.publish()
        stored = other.schedule_of(key)
        assert stored is not None
        assert (stored.config, stored.latency_us) == ({"block": 2}, 7.0)
        held.put_schedule(replace(fast, latency_us=5.0), replace=True)
        stored = other.schedule_of(key)
        assert stored is not None
        assert stored.latency_us == 5.0, "later ones are stored at once"
