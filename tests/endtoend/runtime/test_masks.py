"""torch.compile(backend="autotune") of transformers' models with a tokenizer's masks, by the reference for CPUs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import autotune
from autotune.compiler.capture.attention import rules
from tests.support.compiler.padded_attention import REFERENCE

transformers = pytest.importorskip("transformers")

BATCH, TOKENS = 3, 12
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def bert() -> Any:
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, **dropout, attn_implementation="sdpa"))


def llama() -> Any:
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, head_dim=8, attn_implementation="sdpa")
    return transformers.LlamaForCausalLM(config)


def masks() -> dict[str, Tensor]:
    place, count = torch.arange(TOKENS)[None, :], torch.tensor([TOKENS, 7, 2])[:, None]
    ones = torch.ones(BATCH, TOKENS, dtype=torch.int64)
    empty, holes = ones.clone(), ones.clone()
    empty[1], holes[0, 3:6] = 0, 0
    right, left = (place < count).long(), (place >= TOKENS - count).long()
    return {"ones": ones, "right": right, "left": left, "empty": empty, "holes": holes}


@pytest.mark.parametrize(("make", "apart"), [(bert, 1e-9), (llama, 1e-5)])  # Llama's norms compute in fp32
def test_a_training_step_with_a_mask(make: Any, apart: float, db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "kernel_of", lambda *call: REFERENCE)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make().double().train()
    reference = copy.deepcopy(model)
    run = torch.compile(model, backend="autotune")
    ids = torch.arange(BATCH * TOKENS).reshape(BATCH, TOKENS) + 3
    for mask in masks().values():
        for one in (model, reference):
            one.zero_grad()
        ours = run(input_ids=ids, attention_mask=mask, labels=ids)
        theirs = reference(input_ids=ids, attention_mask=mask, labels=ids)
        torch.testing.assert_close(ours.logits, theirs.logits, rtol=apart, atol=apart)
        ours.loss.backward()
        theirs.loss.backward()
        for a, b in zip(model.parameters(), reference.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None)
            if a.grad is not None:
                torch.testing.assert_close(a.grad, b.grad, rtol=apart, atol=apart)
    assert autotune.counters().attention == 2
