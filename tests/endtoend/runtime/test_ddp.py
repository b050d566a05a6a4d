"""DistributedDataParallel on two ranks: its buckets cut the graph, and gradients are reduced while kernels run."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.support.deployment import Tune
from tests.support.runtime.models import Block
from tests.support.runtime.ranks import Ranks


def test_gradients_are_the_mean_of_both_ranks(tune: Tune, db: str, tmp_path: Path) -> None:
    stored = tune(Block(), (torch.randn(32, 48),))
    with Ranks(tmp_path) as ranks:
        for static in (False, True):
            for found in ranks.run("tests.support.runtime.ddp_checks", "step", db, static):
                assert found["off"] < 1e-4
                assert found["counters"]["hits"] >= len(stored) - 1 > 1
                assert "fallbacks" not in found["counters"]
