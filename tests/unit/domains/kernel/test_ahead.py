"""Triton kernels compiled ahead: by fakes of Triton, and by Triton itself if it is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.domains.kernel.kernel import Kernel
from autotune.domains.kernel.space import KernelSpace
from autotune.domains.kernel.triton import described, precompile
from autotune.space import Parameter, Space
from tests.support import ROOT


class Compiled:
    """The result of ``triton.jit``."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.runs: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def fn(self, x: Any, n: int, B: int = 1) -> None: ...

    def run(self, *args: Any, **kwargs: Any) -> None:
        self.runs.append((args, kwargs))
        if self.fails:
            raise RuntimeError("does not compile")


Compiled.__module__ = "triton.runtime.jit"


@dataclass
class Target:
    backend: str
    arch: int
    warp_size: int


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Triton's driver, in fakes of Triton's modules."""
    made = SimpleNamespace(active=SimpleNamespace(get_current_target=lambda: Target("cuda", 90, 32)))
    made.set_active = lambda active: setattr(made, "active", active)
    for name, held in {
        "triton": {},
        "triton.runtime": {},
        "triton.runtime.driver": {"driver": made},
        "triton.backends": {},
        "triton.backends.compiler": {"GPUTarget": Target},
    }.items():
        module = ModuleType(name)
        vars(module).update(held)
        monkeypatch.setitem(sys.modules, name, module)
    return made


def kernel(fn: Any, grid: Any = (1,)) -> Kernel:
    return Kernel(fn, KernelSpace(Space((Parameter("B", (1, 2)),)), {"B": 1}), name="k", grid=grid)


X = torch.zeros(64, dtype=torch.float16)


def test_triton_arguments_are_described_and_replaced_by_stand_ins(driver: Any) -> None:
    fn = Compiled()
    told = described(kernel(fn), (X,), {"n": 64})
    assert told == {
        "target": ["cuda", 90, 32],
        "args": [{"dtype": "float16", "off": X.data_ptr() % 16}],
        "kwargs": {"n": {"value": 64}},
    }
    precompile(kernel(fn), json.loads(json.dumps(told)), {"B": 2, "num_warps": 4})
    ((args, kwargs),) = fn.runs
    assert (args[0].dtype, args[0].data_ptr() % 16) == (torch.float16, X.data_ptr() % 16)
    assert kwargs == {"grid": None, "warmup": True, "n": 64, "B": 2, "num_warps": 4}
    assert driver.active.get_current_target() == Target("cuda", 90, 32)
    assert (driver.active.get_current_device(), driver.active.get_current_stream(0)) == (0, 0)


def test_an_unaligned_tensor_stays_one(driver: Any) -> None:
    told = described(kernel(Compiled()), (X[1:],), {})
    assert told is not None
    assert told["args"][0]["off"] == (X.data_ptr() + 2) % 16


def test_described_returns_none_for_other_arguments_and_kernels(driver: Any) -> None:
    assert described(kernel(Compiled()), (object(),), {}) is None
    assert described(kernel(lambda x: x), (X,), {}) is None
    assert described(kernel(Compiled(), None), (X,), {}) is None
    driver.active = SimpleNamespace()
    assert described(kernel(Compiled()), (X,), {}) is None


def test_precompile_ignores_a_kernel_that_does_not_compile(driver: Any) -> None:
    fn = Compiled(fails=True)
    precompile(kernel(fn), {"target": ["cuda", 90, 32], "args": [], "kwargs": {}}, {"B": 1})
    assert len(fn.runs) == 1


_PROGRAM = """
import json, os, torch
from autotune.domains.kernel.triton import _NoDevice, precompile, described
from examples.own_kernels.matmul import make_inputs, product
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

driver.set_active(_NoDevice(GPUTarget("cuda", 90, 32)))
kernel, given = product.kernel, make_inputs(64, 64, 64, "cpu")
config = dict(kernel.space.default)
told = described(kernel, (), given)
precompile(kernel, told, config)
ahead = sorted(os.listdir(os.environ["TRITON_CACHE_DIR"]))
kernel.fn.device_caches.clear()
kernel.fn.run(grid=None, warmup=True, **given, **config)
print("ANSWERS", json.dumps([ahead, sorted(os.listdir(os.environ["TRITON_CACHE_DIR"]))]))
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_triton_reuses_code_compiled_for_stand_ins(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "TRITON_CACHE_DIR": str(tmp_path)}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=False, env=env, timeout=550
    )
    assert done.returncode == 0, done.stderr
    ahead, after = json.loads(done.stdout.partition("ANSWERS")[2])
    assert ahead == after
    assert ahead
