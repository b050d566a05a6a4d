"""``--train``: the backward pass of a target whose inputs and parameters do not require gradients."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from autotune.domains.fusion.program_spec import workloads_of
from autotune.errors import UserError
from autotune.workload import Workload


def labels(found: Iterable[tuple[Workload, int]]) -> list[str]:
    return [workload.label.partition(" ")[0] for workload, _ in found]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.norm = nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(nn.functional.gelu(self.up(x)))
        return out


def test_parameters_require_grad_meanwhile_only() -> None:
    block = Block().requires_grad_(False)
    x = torch.randn(8, 32)
    assert not any("backward" in name for name in labels(workloads_of(block, (x,))))
    found = labels(workloads_of(block, (x,), train=True))
    assert any("layer_norm_backward" in name for name in found)
    assert not any(p.requires_grad for p in block.parameters())
    assert not x.requires_grad


def test_inputs_of_a_function_do() -> None:
    x, ids = torch.randn(8, 64), torch.zeros(8, dtype=torch.int64)
    found = labels(workloads_of(nn.functional.cross_entropy, (x, ids), train=True))
    assert any("nll_loss_backward" in name for name in found)
    assert not x.requires_grad


def test_the_way_without_autograd_is_left_out() -> None:
    block, x = Block(), torch.randn(8, 32)
    both, only = workloads_of(block, (x,)), workloads_of(block, (x,), train=True)
    assert {w for w, _ in only} < {w for w, _ in both}


def test_training_without_gradients_is_refused() -> None:
    with pytest.raises(UserError, match="cannot be trained: neither parameters nor inputs"):
        workloads_of(lambda x: x + 1, (torch.zeros(4, dtype=torch.int64),), train=True)
