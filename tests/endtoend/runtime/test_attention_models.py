"""The attention of transformers' models is rewritten, in whichever version of it is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.registry import lookup_backend
from torch.nn.functional import scaled_dot_product_attention

from autotune.compiler.capture.attention import rewrite_attention

transformers = pytest.importorskip("transformers")

TOKENS = 10
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def tokens() -> Tensor:
    return torch.arange(2 * TOKENS).reshape(2, TOKENS) + 3


def both_sides() -> dict[str, Any]:
    return {"input_ids": tokens(), "decoder_input_ids": tokens().flip(1), "use_cache": False}


def bert() -> tuple[nn.Module, dict[str, Any]]:
    return transformers.BertModel(transformers.BertConfig(**SIZES), add_pooling_layer=False), {"input_ids": tokens()}


def vit() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.ViTConfig(**{**SIZES, "image_size": 16, "patch_size": 4})
    return transformers.ViTModel(config, add_pooling_layer=False), {"pixel_values": torch.randn(2, 3, 16, 16)}


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, **SPECIAL)
    return transformers.GPT2Model(config), {"input_ids": tokens(), "use_cache": False}


def grouped(name: str) -> Callable[[], tuple[nn.Module, dict[str, Any]]]:
    def make() -> tuple[nn.Module, dict[str, Any]]:
        config = getattr(transformers, f"{name}Config")(**SIZES, **SPECIAL, num_key_value_heads=2, head_dim=8)
        return getattr(transformers, f"{name}Model")(config), {"input_ids": tokens(), "use_cache": False}

    return make


def bart() -> tuple[nn.Module, dict[str, Any]]:
    sides = {f"{side}_{what}": n for side in ("encoder", "decoder")
             for what, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))}  # fmt: skip
    config = transformers.BartConfig(vocab_size=64, d_model=32, decoder_start_token_id=1, **sides, **SPECIAL)
    return transformers.BartModel(config), both_sides()


def t5() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5Model(config), both_sides()


NOTHING, LATER, BIAS = "sees all", "sees what is not later", "has a bias"
MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, dict[str, Any]]], list[str]]] = {
    "BERT": (bert, [NOTHING] * 2),
    "ViT": (vit, [NOTHING] * 2),
    "GPT-2": (gpt2, [LATER] * 2),
    "Llama": (grouped("Llama"), [LATER] * 2),
    "Qwen3": (grouped("Qwen3"), [LATER] * 2),
    "Mistral": (grouped("Mistral"), [LATER] * 2),
    "BART": (bart, [NOTHING] * 2 + [LATER, NOTHING] * 2),
    "T5": (t5, [BIAS] * 2 + [BIAS, NOTHING] * 2),
}


def told(call: fx.Node) -> str:
    if call.kwargs.get("attn_mask") is not None:
        return BIAS
    return LATER if call.kwargs.get("is_causal") else NOTHING


def step(run: Callable[..., Any], model: nn.Module, inputs: dict[str, Any], train: bool) -> list[Tensor | None]:
    """The result and, in training, the gradients."""
    with torch.set_grad_enabled(train):
        out = run(**inputs)[0]
    weights = list(model.parameters()) if train else []
    return [out, *(torch.autograd.grad(out.square().sum(), weights, allow_unused=True) if train else ())]


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_masks_that_are_known_are_left_out(name: str, train: bool) -> None:
    make, expected = MODELS[name]
    model, inputs = make()
    model.eval()  # no dropout
    calls: list[str] = []

    def backend(gm: fx.GraphModule, given: Sequence[Any]) -> Any:
        rewrite_attention(gm)
        calls.extend(told(n) for n in gm.graph.nodes if n.target is scaled_dot_product_attention)
        return lookup_backend("aot_eager")(gm, list(given))

    want = step(model, model, inputs, train)
    got = step(torch.compile(model, backend=backend, dynamic=False), model, inputs, train)
    assert calls == expected
    assert [t is None for t in got] == [t is None for t in want]
    for a, b in zip(got, want, strict=True):
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
