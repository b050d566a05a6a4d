"""Device identities and environments; torch's properties of GPUs are faked."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from autotune import device
from autotune.device import (
    DeviceIdentity,
    Environment,
    environment,
    identify,
    resolve_device,
    resolve_devices,
)
from autotune.errors import UserError
from tests.support import ROOT


def run_python(code: str) -> list[str]:
    """Words printed by ``code`` in a separate process, which imports this copy of autotune."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env
    ).stdout.split()


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch's properties of a machine with two H200 (figures read from one)."""
    import torch

    props = SimpleNamespace(
        name="NVIDIA H200", multi_processor_count=132, total_memory=150_109_880_320, major=9, minor=0
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: props)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    device._identify.cache_clear()
    device._environment.cache_clear()
    yield
    device._identify.cache_clear()
    device._environment.cache_clear()


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_the_cpu_is_identified_the_same_in_another_process() -> None:
    here = identify("cpu")
    assert here.kind == "cpu"
    assert here.name
    assert 1 <= here.units <= here.threads <= (os.cpu_count() or 1)
    assert here.memory_mib % 4096 == 0
    assert (here.count, here.links) == (1, "")
    code = "from autotune.device import *; print(identify('cpu').fingerprint, environment('cpu').strict)"
    assert run_python(code) == [here.fingerprint, environment("cpu").strict]


def test_cpu_identity_counts_only_usable_processors() -> None:
    code = (
        "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
        "from autotune.device import identify; d = identify('cpu'); print(d.units, d.threads)"
    )
    assert run_python(code) == ["1", "1"]


def test_usable_processors_are_those_of_the_calling_thread() -> None:
    code = (
        "import os, threading; from autotune.device import identify, usable_processors; every = usable_processors()\n"
        "def pinned():\n"
        "    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
        "    print(usable_processors(), identify('cpu').threads == every)\n"
        "t = threading.Thread(target=pinned); t.start(); t.join(); print(usable_processors() == every)"
    )
    assert run_python(code) == ["1", "True", "True"]


def test_a_gpu_is_identified(two_gpus: None) -> None:
    d = identify("cuda:1")
    assert d == DeviceIdentity("cuda", "NVIDIA H200", 132, 140 * 1024, "9.0")
    assert d.label == "NVIDIA H200 (132 SMs, 140 GiB)"
    assert d.fingerprint == identify("cuda").fingerprint
    e = environment("cuda:0")
    assert (e.kind, e.cuda) == ("cuda", "13.0")


def test_identity_survives_json_and_differs_in_every_field() -> None:
    d = DeviceIdentity("cuda", "NVIDIA H200", 132, 143360, "9.0", 0, 8, "NV18")
    assert DeviceIdentity.from_json(json.loads(json.dumps(d.to_json()))) == d
    changes = {"kind": "cpu", "name": "x", "units": 1, "memory_mib": 1, "capability": "8.0", "threads": 1, "count": 4,
               "links": ""}  # fmt: skip
    assert changes.keys() == d.to_json().keys()
    prints = {dataclasses.replace(d, **{k: v}).fingerprint for k, v in changes.items()}
    assert len(prints | {d.fingerprint}) == len(changes) + 1


def test_environment_strict_and_loose() -> None:
    e = Environment("cuda", "2.11.0+cu130", "0.68.1", "0.30.4", "13.0", "580.159", "3.12", "Linux x86_64")
    assert Environment.from_json(json.loads(json.dumps(e.to_json()))) == e
    assert e.fingerprint == e.strict
    for name in e.to_json():
        assert dataclasses.replace(e, **{name: "other"}).strict != e.strict
    for same in ({"torch": "2.11.3"}, {"driver": "590.1"}, {"numba": "0.69"}, {"python": "3.11"}, {"cuda": "13.0.2"}):
        assert dataclasses.replace(e, **same).loose == e.loose
    for other in ({"torch": "2.12.0"}, {"cuda": "13.1"}, {"kind": "cpu"}):
        assert dataclasses.replace(e, **other).loose != e.loose


def test_the_cpus_environment_has_the_installed_packages() -> None:
    from importlib.metadata import version

    e = environment("cpu")
    assert (e.torch, e.numba) == (version("torch"), version("numba"))
    assert (e.cuda, e.driver, e.numba_cuda) == ("", "", "")
    assert e.python == f"{sys.version_info.major}.{sys.version_info.minor}"


def test_resolve_device_without_a_gpu(no_gpu: None) -> None:
    assert resolve_device("auto") == resolve_device("cpu") == resolve_device(" CPU ") == "cpu"
    for name in ("cuda", "cuda:0"):
        with pytest.raises(UserError, match="finds no CUDA device; use --device cpu"):
            resolve_device(name)


def test_resolve_device_with_gpus(two_gpus: None) -> None:
    assert [resolve_device(d) for d in ("auto", "cuda", "cuda:0", "CUDA:1", "cpu")] == [
        "cuda:0", "cuda:0", "cuda:0", "cuda:1", "cpu",
    ]  # fmt: skip
    with pytest.raises(UserError, match="cuda:0 to cuda:1"):
        resolve_device("cuda:2")


def test_several_devices(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_devices("auto") == resolve_devices("cuda") == ["cuda:0"]
    assert resolve_devices("cpu") == ["cpu"]
    assert resolve_devices("cuda:all") == resolve_devices(" CUDA:0, cuda:1") == ["cuda:0", "cuda:1"]
    assert resolve_devices("cuda:1,cuda:0") == resolve_devices(("cuda:1", "cuda:0")) == ["cuda:1", "cuda:0"]
    with pytest.raises(UserError, match="name a device"):
        resolve_devices([])
    for mistake, said in (
        ("cuda:0,cuda:2", "cuda:0 to cuda:1"),
        ("cuda,cuda:0", "names cuda:0 twice"),
        ("cuda:0,cpu", "a list of devices cannot include a CPU"),
        ("cuda:0,", "unknown device ''"),
        ("cuda:all,cuda:0", "'cuda:all' is a list of devices"),
    ):
        with pytest.raises(UserError, match=said):
            resolve_devices(mistake)
    for several in ("cuda:0,cuda:1", "cuda:all"):
        with pytest.raises(UserError, match="is a list of devices: only `autotune search fusion`"):
            resolve_device(several)
    one = identify("cuda:0")
    monkeypatch.setattr(device, "identify", lambda name: dataclasses.replace(one, units=int(name[-1])))
    with pytest.raises(UserError, match="one search takes equal devices"):
        resolve_devices("cuda:all")


def test_all_devices_of_a_machine_with_one(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_cuda_count", lambda: 1)
    assert resolve_devices("cuda:all") == ["cuda:0"]


def test_all_devices_of_a_machine_without_one(no_gpu: None) -> None:
    with pytest.raises(UserError, match="finds no CUDA device; use --device cpu"):
        resolve_devices("cuda:all")


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1:2", "cpu:0", "rocm"])
def test_unknown_devices(name: str) -> None:
    with pytest.raises(UserError, match="unknown device") as e:
        resolve_device(name)
    assert "\n" not in str(e.value)
