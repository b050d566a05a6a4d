"""Functions of :mod:`test_ddp` for every rank."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import autotune
from autotune.runtime.backend import deploy_backend
from autotune.runtime.deployment import deployment
from tests.support.runtime.models import Block


def step(rank: int, db: str, static: bool) -> dict[str, Any]:
    """A training step of a compiled model on each rank's own data; how far its gradients are off the mean of both."""
    os.environ["AUTOTUNE_DB"] = db
    torch._dynamo.reset()
    deployment().reset_counters()
    torch.manual_seed(0)
    model, inputs = Block(), [torch.randn(32, 48) for _ in range(2)]
    alone = copy.deepcopy(model)
    parallel = DistributedDataParallel(model, static_graph=static)
    run = torch.compile(parallel, backend=deploy_backend)
    for _ in range(2):
        model.zero_grad()
        run(inputs[rank]).square().sum().backward()
    (sum(alone(x).square().sum() for x in inputs) / 2).backward()  # type: ignore[union-attr]
    off = max(
        float((a.grad - b.grad).abs().max())  # type: ignore[operator]
        for a, b in zip(model.parameters(), alone.parameters(), strict=True)
    )
    return {"off": off, "counters": {k: v for k, v in autotune.counters().items() if v}}
