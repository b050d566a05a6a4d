"""torch.compile(backend="autotune") of transformers' models with a tokenizer's masks, by the reference for CPUs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import autotune
from autotune.compiler.capture.attention import masks as masks_of_data
from tests.support.compiler import spanned_attention  # noqa: F401
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


def masks(batch: int = BATCH, tokens: int = TOKENS) -> dict[str, Tensor]:
    place, row = torch.arange(tokens)[None, :], torch.arange(batch)[:, None]
    count = (tokens - 5 * row).clamp(min=2)
    ones = torch.ones(batch, tokens, dtype=torch.int64)
    empty, holes = ones.clone(), ones.clone()
    empty[1], holes[0, 3:6] = 0, 0
    right, left = (place < count).long(), (place >= tokens - count).long()
    return {"ones": ones, "right": right, "left": left, "empty": empty, "holes": holes}


@pytest.mark.parametrize(("make", "apart"), [(bert, 1e-9), (llama, 1e-5)])  # Llama's norms compute in fp32
def test_a_training_step_with_a_mask(make: Any, apart: float, db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks_of_data, "kernel_of", lambda *call: REFERENCE)
    agree(make(), [{"attention_mask": mask} for mask in masks().values()], apart)


def test_a_training_step_of_packed_documents(db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks_of_data, "has_spans", lambda *call: True)
    given = []
    for cuts in ([TOKENS], [5, 7], [1, 1, 8, 2], [1] * TOKENS):
        packed = torch.cat([torch.arange(count) for count in cuts])
        given.append({"position_ids": torch.stack([packed, torch.arange(TOKENS), packed.flip(0).sort().values])})
    model = llama()
    model.config.use_cache = False  # with a cache, transformers takes positions for those of one text
    agree(model, given, 1e-5)


@pytest.mark.parametrize("make", [bert, llama])
def test_steps_padded_to_the_longest_text(make: Any, db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a collator pads them, so that lengths and the last batch are symbols."""
    monkeypatch.setattr(masks_of_data, "kernel_of", lambda *call: REFERENCE)
    given = []
    for batch, tokens, name in ((3, 12, "right"), (3, 7, "left"), (2, 31, "holes"), (4, 3, "ones"), (2, 9, "empty")):
        given.append({"input_ids": words(batch, tokens), "attention_mask": masks(batch, tokens)[name]})
    agree(make(), given, 1e-5, (0, 1))


def test_steps_packed_from_texts_of_other_lengths(db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks_of_data, "has_spans", lambda *call: True)
    given = []
    for cuts in ([5, 9, 7], [12, 3, 8, 3], [30], [1, 1, 1], [1, 2]):
        packed = torch.cat([torch.arange(count) for count in cuts])[None]
        given.append({"input_ids": words(1, sum(cuts)), "position_ids": packed})
    model = llama()
    model.config.use_cache = False
    agree(model, given, 1e-5, (1,))


def words(batch: int, tokens: int) -> Tensor:
    return torch.arange(batch * tokens).reshape(batch, tokens) % 60 + 3


def agree(made: Any, given: list[dict[str, Tensor]], apart: float, symbols: tuple[int, ...] = ()) -> None:
    """Assert that two layers run by other kernels, with eager mode's results and gradients."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = made.double().train()
    reference = copy.deepcopy(model)
    run = torch.compile(model, backend="autotune")
    for more in given:
        more = {"input_ids": words(BATCH, TOKENS), **more}
        more["labels"] = more["input_ids"].clone()
        for axis in symbols:
            for tensor in more.values():
                torch._dynamo.maybe_mark_dynamic(tensor, axis)
        for one in (model, reference):
            one.zero_grad()
        ours, theirs = run(**more), reference(**more)
        torch.testing.assert_close(ours.logits, theirs.logits, rtol=apart, atol=apart)
        ours.loss.backward()
        theirs.loss.backward()
        for a, b in zip(model.parameters(), reference.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None)
            if a.grad is not None:
                torch.testing.assert_close(a.grad, b.grad, rtol=apart, atol=apart)
    assert autotune.counters().attention == 2
