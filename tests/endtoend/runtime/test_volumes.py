"""Three-dimensional convolutions, laid out channels last as on a GPU, through Inductor's code."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autotune.compiler.capture import convolutions
from autotune.in_program.backend import dynamo_backend
from tests.support.node_strides import strides_apart


def test_a_training_step_of_volumes_is_that_of_eager_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    converted: list[int] = []

    def converts(volumes: object) -> bool:
        converted.append(1)
        return True

    monkeypatch.setattr(convolutions, "cudnn_converts", converts)
    torch.manual_seed(0)
    inner = (nn.Conv3d(1, 4, 3, padding=1), nn.InstanceNorm3d(4, affine=True), nn.LeakyReLU(), nn.Conv3d(4, 6, 2, 2))
    module = nn.Sequential(*inner, nn.ConvTranspose3d(6, 2, 2, 2)).double()
    x = torch.randn(2, 1, 4, 6, 8, dtype=torch.float64)

    def step(run: nn.Module) -> list[Tensor]:
        module.zero_grad()
        result = run(x)
        result.square().mean().backward()
        return [result.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]

    eager = step(module)
    torch._dynamo.reset()
    for ours, theirs in zip(step(torch.compile(module, backend=dynamo_backend)), eager, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
        assert not strides_apart(ours, theirs)
    assert converted
