"""Baselines that a process parallel to the measuring worker compiles ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autotune.compiler.regions.programs import compile_cached
from autotune.domains.fusion.bench import FusionBench
from autotune.measure.policy import Policy
from autotune.measure.pool import BaselinePool
from autotune.tuner.context import Context
from autotune.workload import Workload
from tests.support.hostile import workload_of


def normalized(x: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x, (96,)) * w


def test_inductor_s_cache_has_the_code_compiled_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("autotune.measure.pool.WAIT_S", 600.0)
    workload = workload_of(normalized, torch.randn(80, 96), torch.randn(96))
    with BaselinePool(1) as pool:
        pool.begin(workload, "cpu")
        built = pool.wait(workload, "cpu")
        assert built is not None
        assert built.artifact is not None, built.reason
    assert any(tmp_path.glob("fxgraph/*/*/*")), "Inductor passes its cache by where there is no ShapeEnv"
    bench = FusionBench(workload, "cpu")
    run = compile_cached(bench._module(), bench.given.views)
    torch.testing.assert_close(run(*bench.given.views)[0], bench._module().forward(*bench.given.views)[0])


def context(device: str, worker: Any = None) -> Context:
    store: Any = None
    return Context(store, device, Policy(method="cpu"), lent=(worker,), _worker=worker)


def test_a_pool_is_for_a_gpu_whose_worker_is_the_search_s_own() -> None:
    """Compiling disturbs a CPU's measurements; a caller's worker may be no process at all."""
    fusion, toy = Workload("fusion", {}), Workload("kernel", {})
    gpu = context("cuda:0")
    pool = gpu.baselines(fusion)
    assert isinstance(pool, BaselinePool)
    assert gpu.baselines(fusion) is pool
    gpu.close()
    assert context("cuda:0").baselines(toy) is None, "its baselines are not compiled ahead"
    assert context("cpu").baselines(fusion) is None
    assert context("cuda:0", worker=object()).baselines(fusion) is None
