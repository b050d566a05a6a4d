"""What :mod:`tests.endtoend.in_program.test_ranks` runs on every rank."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import autotune
from autotune.in_program import budget
from autotune.in_program.backend import dynamo_backend
from autotune.in_program.processes import Processes
from autotune.runtime.deployment import deployment
from autotune.store import Store
from autotune.tuner.result import Result
from autotune.workload import Workload
from tests.support.deployment import store_default
from tests.support.runtime.agreement_checks import softmax
from tests.support.runtime.models import Block


def step(rank: int, db: str, together: bool) -> dict[str, Any]:
    """A step whose regions are searched: of a distributed model, or of a graph with a collective.

    Returns:
        The workloads that this rank searched, its regions with a kernel, and its gradients or results.
    """
    os.environ["AUTOTUNE_DB"] = db
    torch._dynamo.reset()
    deployment().reset_counters()
    searched: list[str] = []

    def tune(
        workloads: Sequence[Workload], device: str, store: Store, *, trials: int | None = None, **options: Any
    ) -> list[Result]:
        if trials is None:
            return []
        searched.extend(w.fingerprint for w in workloads)
        for w in workloads:
            store_default(store, w, device)
        return [Result(w.fingerprint, w.label, w.kind, device, "stub", winner="autotune") for w in workloads]

    budget._spent_s = 0.0
    with mock.patch("autotune.api.tune_workloads", tune), mock.patch.object(Processes, "begin"):
        found = _collective() if together else _distributed(rank)
    return {"searched": searched, "hits": autotune.counters().hits, "found": found}


def _distributed(rank: int) -> list[float]:
    torch.manual_seed(0)
    model, inputs = Block(), [torch.randn(32, 48) for _ in range(2)]
    run = torch.compile(DistributedDataParallel(model), backend=dynamo_backend, options={"search": 300})
    for _ in range(2):
        model.zero_grad()
        run(inputs[rank]).square().sum().backward()
    return [float(nn.utils.parameters_to_vector(p.grad for p in model.parameters() if p.grad is not None).norm())]


def _collective() -> list[float]:
    group = dist.group.WORLD
    assert group is not None

    def fn(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(softmax(x), "sum", group)

    x = torch.randn(32, 48, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        got = torch.compile(fn, backend=dynamo_backend, options={"search": 300})(x)
    assert torch.allclose(got, 2 * softmax(x), atol=1e-5)
    return [float(got.norm())]
