"""Progress of searches of workloads, and calibrations of devices."""

from __future__ import annotations

import pytest

from autotune.device import DeviceIdentity, Environment
from autotune.store import Calibration, Effort, Key, Store
from autotune.workload import Workload


@pytest.fixture
def key(url: str) -> Key:
    with Store.open(url) as store:
        return Key(
            store.put_workload(Workload("toy", {"n": 1})),
            store.put_device(DeviceIdentity("cpu", "test", 2, 4096)),
            store.put_environment(Environment("cpu", "2.13.0", "0.68")),
            "p" * 64,
        )


def test_efforts_add_up_and_the_last_word_counts(url: str, key: Key) -> None:
    with Store.open(url) as store:
        assert store.get_effort(key, "s") is None
        store.add_effort(Effort(key, "s", 3.0, 5.0, False, "the time is up"))
        store.add_effort(Effort(key, "s", 4.0, 2.0, True, "no gain"))
        found = store.get_effort(key, "s")
        assert found is not None
        assert (found.seconds, found.granted, found.settled, found.stop) == (7.0, 5.0, True, "no gain")
        assert found.when > 0
        assert store.get_effort(key, "another scope") is None


def test_a_calibration_replaces_the_one_before(url: str, key: Key) -> None:
    with Store.open(url) as store:
        assert store.get_calibration(key.device, "fusion") is None
        store.put_calibration(Calibration(key.device, "fusion", {"copy_gbs": 4100.0, "launch_us": 2.0}))
        store.put_calibration(Calibration(key.device, "fusion", {"copy_gbs": 4200.5}))
        found = store.get_calibration(key.device, "fusion")
        assert found is not None
        assert found.figures == {"copy_gbs": 4200.5}
        assert store.get_calibration(key.device, "c3") is None


def test_their_references_must_exist(url: str, key: Key) -> None:
    with Store.open(url) as store:
        with pytest.raises(ValueError, match="put the workload"):
            store.add_effort(Effort(Key("0" * 64, key.device, key.environment, key.policy), "s", 1.0, 0.0, True))
        with pytest.raises(ValueError, match="put the device"):
            store.put_calibration(Calibration("0" * 64, "fusion", {}))
