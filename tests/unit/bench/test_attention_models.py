"""benchmarks.attention_models: its counts of a model, and its report of results that differ from eager mode's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import attention_models


class Model(nn.Module):
    """One call of attention that sees all, one that sees what is not later, one under the user's mask."""

    def forward(self, ids: Tensor) -> Tensor:
        place = torch.arange(ids.shape[1])
        q = torch.sin(ids[:, None, :, None] * torch.arange(1.0, 5.0)).expand(-1, 2, -1, -1).contiguous()
        seen = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool)
        for mask in (seen, place[None, :] <= place[:, None], (ids > 2)[:, None, None, :]):
            q = scaled_dot_product_attention(q, q, q, attn_mask=mask).contiguous()
        return q


def made(*args: Any, **options: Any) -> Any:
    ids = torch.arange(16).remainder(7).reshape(2, 8) + 1
    return SimpleNamespace(module=Model(), inputs={"ids": ids}, train=False)


@pytest.mark.parametrize(("dynamic", "graphs"), [(True, 1), (False, 2)])
def test_calls_are_counted_by_kind_of_mask(dynamic: bool, graphs: int) -> None:
    changed, masks, apart = attention_models.checked(made(), dynamic)
    assert changed == 2 * graphs
    assert masks == {"without a mask": graphs, "causal": graphs, "masked": graphs}
    assert apart < 1e-6


def test_a_wrong_result_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def careless(gm: fx.GraphModule) -> int:
        for node in gm.graph.nodes:
            if node.target is scaled_dot_product_attention:
                node.kwargs = {}
        gm.recompile()
        return 3

    monkeypatch.setattr(attention_models, "make", made)
    assert attention_models.main(["--models", "a_train,b_decode"]) == 0
    monkeypatch.setattr(attention_models, "rewrite_attention", careless)
    assert attention_models.main(["--models", "a_train"]) == 1
    out = capsys.readouterr().out
    assert "rewritten in 1 steps; wrong in 1" in out
    assert "b_decode" not in out
    monkeypatch.setattr(attention_models, "make", lambda *args, **options: 1 / 0)
    assert attention_models.main(["--models", "a_train"]) == 0
    assert "a_train                        not checked: ZeroDivisionError" in capsys.readouterr().out
