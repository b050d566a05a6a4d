"""Functions of :mod:`tests.endtoend.in_program.test_ranks` for every rank."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import autotune
from autotune.in_program import options, search
from autotune.in_program.backend import dynamo_backend
from autotune.runtime.deployment import deployment
from tests.support.runtime.agreement_checks import softmax
from tests.support.runtime.models import Block
from tests.support.runtime.searches import Searches


def step(rank: int, db: str, together: bool) -> dict[str, Any]:
    """A step whose regions are searched: of a distributed model, or of a graph with a collective.

    Returns:
        The workloads that this rank searched, its regions with a kernel, and its gradients or results.
    """
    os.environ["AUTOTUNE_DB"] = db
    torch._dynamo.reset()
    deployment().reset_counters()
    searches = Searches()
    options._spent_s = 0.0
    with mock.patch.object(search, "Searcher", searches):
        found = _collective() if together else _distributed(rank)
    return {"searched": searches.fingerprints, "hits": autotune.counters().hits, "found": found}


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
