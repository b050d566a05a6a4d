"""Functions of :mod:`test_agreement` for every rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import autotune
from autotune.runtime.backend import deploy_backend
from autotune.runtime.deployment import Deployment, deployment, use
from autotune.store import opening as packaging


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x * 3, -1)


def deploy(rank: int, dbs: list[str], together: bool, packaged: list[str] | None = None) -> dict[str, Any]:
    """A region with a collective, or alone; its counters, and whether the result is right.

    Args:
        packaged: each rank's folder of snapshots that replaces the package's.
    """
    os.environ["AUTOTUNE_DB"] = dbs[rank]
    if packaged is not None:
        packaging.FOLDER = Path(packaged[rank])
        use(Deployment())
    torch._dynamo.reset()
    deployment().reset_counters()

    group = dist.group.WORLD
    assert group is not None

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = softmax(x)
        return functional.all_reduce(y, "sum", group) if together else y

    x = torch.randn(32, 48, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        got = torch.compile(fn, backend=deploy_backend)(x)
    right = torch.allclose(got, softmax(x) * (len(dbs) if together else 1), atol=1e-5)
    return {"right": right, "hits": autotune.counters().hits}
