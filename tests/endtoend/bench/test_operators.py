"""Inductor's graphs run operator by operator around our kernels."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import autotune
from autotune.compiler.capture.attention import rewrite_attention
from autotune.runtime.deployment import deployment
from benchmarks.real import operators
from benchmarks.real.operators import backend
from tests.support.deployment import tune_in


def chain(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x * 3, -1) @ x.T


@pytest.mark.parametrize("dynamic", [False, True])
def test_our_kernels_run_between_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dynamic: bool) -> None:
    db = str(tmp_path / "t.db")
    tune_in(db)(chain, (torch.randn(32, 48),))
    monkeypatch.setenv("AUTOTUNE_DB", db)
    deployment().reset_counters()
    run = torch.compile(chain, backend=backend)
    for rows in (32, 20) if dynamic else (32,):
        x = torch.randn(rows, 48)
        if dynamic:
            torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(run(x), chain(x))
    assert autotune.counters().hits == 1
    assert not autotune.counters().fallbacks


def test_without_ours_nothing_is_looked_up() -> None:
    deployment().reset_counters()
    x = torch.randn(32, 48)
    torch.testing.assert_close(torch.compile(chain, backend=functools.partial(backend, ours=False))(x), chain(x))
    assert not any(autotune.counters().values())


def test_attention_is_rewritten_as_in_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its mask is a region that no search has."""
    changed: list[int] = []

    def rewrite(gm: torch.fx.GraphModule) -> int:
        changed.append(rewrite_attention(gm))
        return changed[-1]

    def attend(x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[2])
        return scaled_dot_product_attention(x, x, x, attn_mask=(places <= places[:, None])[None, None])

    monkeypatch.setattr(operators, "rewrite_attention", rewrite)
    x = torch.randn(2, 4, 16, 8)
    for ours, expected in ((True, [1]), (False, [1])):
        torch._dynamo.reset()
        run = torch.compile(attend, backend=functools.partial(backend, ours=ours))
        torch.testing.assert_close(run(x), attend(x))
        assert changed == expected
