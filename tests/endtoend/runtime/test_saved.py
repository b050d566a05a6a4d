"""Tensors that a forward pass saves have the same strides with and without kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._inductor import config
from torch.nn import functional as F

import autotune
from autotune.runtime.inductor import region_pass
from tests.support.deployment import Tune

ROWS, WORDS = 2048, 16


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of a language model of transformers: the labels have one more column, which the backward pass reads."""
    following = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.float().view(-1, WORDS), following.view(-1))


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Strides of the padded labels in compiled backward passes."""
    found: list[tuple[int, ...]] = []
    keep = region_pass.keep_strides

    def seen(facts: region_pass.GraphFacts, regions: list[region_pass.Region]) -> None:
        inputs = [n.meta["val"] for n in facts.nodes if n.op == "placeholder"]
        found.extend(value.stride() for value in inputs if value.shape == (2, ROWS + 1))
        keep(facts, regions)

    monkeypatch.setattr(region_pass, "keep_strides", seen)
    return found


@config.patch(disable_padding_cpu=False)
def test_labels_of_a_language_model(tune: Tune, saved: list[tuple[int, ...]]) -> None:
    """Inductor would save their rows with 2064 numbers, and the largest region of the step would miss its kernel."""
    logits = torch.randn(2, ROWS, WORDS, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, WORDS, (2, ROWS))
    torch.compile(loss, backend="autotune")(logits, labels).backward()
    assert saved == [(ROWS + 1, 1)]
    assert len(tune(loss, (logits, labels))) == 2
    torch._dynamo.reset()
    torch.compile(loss, backend="autotune")(logits, labels).backward()
    assert saved == [(ROWS + 1, 1)] * 2
    assert autotune.counters().hits == 2
