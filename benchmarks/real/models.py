"""Models of transformers and timm, made from the libraries' own configuration classes with random weights.

Nothing is downloaded. Architectures are the published ones; where a model is cut in depth because its weights, their
gradients and what it keeps for the backward pass do not fit beside each other, ``cut`` says so. On a GPU parameters,
inputs and arithmetic are bf16 throughout, without autocast and without fp32 copies of the weights; on a CPU, fp32.

Sequences are whole: there is no padding and no attention mask. (Launched from Python, transformers 5 then tells SDPA
that attention is causal; in a graph, be it Dynamo's or CUDA's, it hands it a mask.) Models are as their libraries have
them: under Dynamo GPT-2's loss breaks the graph once, BART's layer drop at every layer.

A step of training is the model's own loss for given labels and the gradients of all parameters, dropout as the
configuration has it; one of inference is the logits, for a causal language model those of the last position; one of
decoding is the logits of one more token a sequence, with a ``StaticCache`` that is half full.

A model may be searched by hand as well, as a factory::

    autotune search fusion 'benchmarks.real.models:module("gpt2_medium_train")' \\
        --inputs 'benchmarks.real.models:inputs("gpt2_medium_train")' --train
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

KINDS = ("train", "infer", "decode")
IGNORED = -100
"""The label that the losses of transformers leave out."""


@dataclass(frozen=True)
class Shape:
    """What a step is given: sequences (or images) and tokens of each; ``target``: tokens of a decoder's."""

    batch: int
    length: int = 0
    target: int = 0

    def __str__(self) -> str:
        length = f" x {self.length}" if self.length else ""
        return f"{self.batch}{length}{f', {self.target} out' if self.target else ''}"


@dataclass(frozen=True)
class Family:
    """A model.

    Attributes:
        about: what it is, in a few words.
        task: what its inputs are: "mlm", "causal", "seq2seq", "clip" or "image".
        layers: as published; of an encoder and a decoder, of each.
        depth: fields of the configuration that are the number of layers ("part.field" for one within a part); of a timm
            model, its argument that is the layers of each stage, or its module that holds all of them.
        config: name of the configuration's class in transformers (``auto``: of the class that makes the model); of a
            timm model, its name there.
        fields: the configuration's, where not its defaults; ``tiny``: those of a version for tests, and of its input.
        shapes: of a step, by kind.
        attention: implementation of it in transformers, where not its default.
        cut: layers that fit, where fewer than published; ``why``: what does not fit.
    """

    about: str
    task: str
    layers: int
    depth: tuple[str, ...]
    config: str
    auto: str
    shapes: Mapping[str, Shape]
    fields: Mapping[str, Any] = field(default_factory=dict)
    tiny: Mapping[str, Any] = field(default_factory=dict)
    attention: str | None = None
    cut: int | None = None
    why: str = ""

    @property
    def library(self) -> str:
        return "transformers" if self.auto else "timm"


_ROPE = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "high_freq_factor": 4.0,
         "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}  # fmt: skip
_SMALL = {"vocab_size": 211, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
_DECODER = {**_SMALL, "num_key_value_heads": 2, "head_dim": 16}
_TEXT = ("num_hidden_layers",)
_CAUSAL, _MASKED, _SEQ2SEQ = "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM"

FAMILIES: dict[str, Family] = {
    "bert_large": Family(
        "BERT-large, masked language modelling", "mlm", 24, _TEXT, "BertConfig", _MASKED,
        {"train": Shape(32, 512), "infer": Shape(64, 512)},
        {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096},
        _SMALL,
    ),
    "roberta_base": Family(
        "RoBERTa-base, masked language modelling", "mlm", 12, _TEXT, "RobertaConfig", _MASKED,
        {"train": Shape(64, 512), "infer": Shape(128, 512)},
        {"max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5},
        _SMALL,
    ),
    "gpt2_medium": Family(
        "GPT-2 medium", "causal", 24, ("n_layer",), "GPT2Config", _CAUSAL,
        {"train": Shape(16, 1024), "infer": Shape(32, 1024), "decode": Shape(64, 1024)},
        {"n_embd": 1024, "n_head": 16},
        {"vocab_size": 211, "n_embd": 64, "n_head": 4, "n_positions": 64},
    ),
    "llama32_1b": Family(
        "Llama 3.2 1B", "causal", 16, _TEXT, "LlamaConfig", _CAUSAL,
        {"train": Shape(4, 2048), "infer": Shape(8, 2048), "decode": Shape(32, 2048)},
        {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
         "tie_word_embeddings": True, "rope_parameters": _ROPE, "bos_token_id": 128000, "eos_token_id": 128001},
        _DECODER,
    ),
    "qwen3_17b": Family(
        "Qwen3 1.7B", "causal", 28, _TEXT, "Qwen3Config", _CAUSAL,
        {"train": Shape(4, 2048), "infer": Shape(8, 2048), "decode": Shape(32, 2048)},
        {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16, "num_key_value_heads": 8,
         "head_dim": 128, "max_position_embeddings": 40960, "tie_word_embeddings": True,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
        _DECODER,
    ),
    "mistral_7b": Family(
        "Mistral-7B-shaped", "causal", 32, _TEXT, "MistralConfig", _CAUSAL,
        {"train": Shape(2, 2048), "infer": Shape(4, 2048), "decode": Shape(16, 2048)},
        {"sliding_window": None, "max_position_embeddings": 32768,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
        _DECODER,
    ),
    "gemma2_2b": Family(
        "Gemma-2-2B-shaped", "causal", 26, _TEXT, "Gemma2Config", _CAUSAL,
        {"train": Shape(2, 2048), "infer": Shape(4, 2048)},  # its sliding cache counts in Python: no two steps alike
        {},
        {**_DECODER, "query_pre_attn_scalar": 16},
        attention="eager",  # as transformers asks for: the others leave out the cap of the scores
    ),
    "t5_base": Family(
        "T5-base", "seq2seq", 12, ("num_layers", "num_decoder_layers"), "T5Config", _SEQ2SEQ,
        {"train": Shape(32, 512, 128), "infer": Shape(64, 512, 128)},
        {"d_model": 768, "d_ff": 3072, "num_heads": 12, "decoder_start_token_id": 0},
        {"vocab_size": 211, "d_model": 64, "d_ff": 96, "d_kv": 16, "num_heads": 4},
    ),
    "bart_large": Family(
        "BART-large", "seq2seq", 12, ("encoder_layers", "decoder_layers"), "BartConfig", _SEQ2SEQ,
        {"train": Shape(32, 512, 128), "infer": Shape(64, 512, 128)},
        {},
        {"vocab_size": 211, "d_model": 64, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "max_position_embeddings": 64},
    ),
    "mixtral_8x7b": Family(
        "Mixtral-8x7B-shaped mixture of experts", "causal", 32, _TEXT, "MixtralConfig", _CAUSAL,
        {"train": Shape(2, 2048), "infer": Shape(4, 2048), "decode": Shape(16, 2048)},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
        {**_DECODER, "num_local_experts": 4},
        cut=8, why="weights take 2.9 GB a layer, their gradients as much",
    ),
    "clip_vit_b32": Family(
        "CLIP ViT-B/32, contrastive", "clip", 12, ("text_config.num_hidden_layers", "vision_config.num_hidden_layers"),
        "CLIPConfig", "AutoModel",
        {"train": Shape(512, 77), "infer": Shape(512, 77)},
        {},
        {"projection_dim": 32,
         "text_config": {**_SMALL, "max_position_embeddings": 16, "projection_dim": 32, "eos_token_id": 2},
         "vision_config": {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "image_size": 32,
                           "patch_size": 16, "projection_dim": 32}},
    ),
    "vit_base": Family(
        "ViT-B/16", "image", 12, ("blocks",), "vit_base_patch16_224", "",
        {"train": Shape(256), "infer": Shape(512)},
        {}, {"img_size": 32, "embed_dim": 64, "num_heads": 4},
    ),
    "convnext_base": Family(
        "ConvNeXt-B", "image", 36, ("depths",), "convnext_base", "",
        {"train": Shape(128), "infer": Shape(256)},
        {}, {"dims": (8, 16, 32, 64)},
    ),
    "mixer_base": Family(
        "MLP-Mixer-B/16", "image", 12, ("blocks",), "mixer_b16_224", "",
        {"train": Shape(256), "infer": Shape(512)},
        {}, {"img_size": 32},
    ),
    "resnet50": Family(
        "ResNet-50", "image", 16, ("layers",), "resnet50", "",
        {"train": Shape(256), "infer": Shape(512)},
    ),
}  # fmt: skip
_STAGES = {"depths": (3, 3, 27, 3), "layers": (3, 4, 6, 3)}
_TINY_LAYERS, _IMAGE = 2, 224

DEFAULT = (
    "bert_large_train", "roberta_base_train", "gpt2_medium_train", "llama32_1b_train", "qwen3_17b_train",
    "mistral_7b_train", "gemma2_2b_train", "t5_base_train", "bart_large_train", "mixtral_8x7b_train", "vit_base_train",
    "convnext_base_train", "resnet50_train", "clip_vit_b32_infer", "mixer_base_infer", "bert_large_infer",
    "llama32_1b_decode", "qwen3_17b_decode",
)  # fmt: skip
"""What is measured where no model is named; every family is in it."""

NAMES = tuple(f"{family}_{kind}" for family, f in FAMILIES.items() for kind in KINDS if kind in f.shapes)


@dataclass(frozen=True)
class Made:
    """A model with its inputs on a device.

    Attributes:
        module: ``module(**inputs)`` is the forward pass of a step: the loss, or the logits.
        layers: as made; ``published``: of the model.
        shape: of the inputs; ``parameters``: numbers in the weights, shared ones once.
    """

    name: str
    kind: str
    family: Family
    module: nn.Module
    inputs: dict[str, Tensor]
    layers: int
    shape: Shape
    dtype: torch.dtype
    parameters: int

    @property
    def train(self) -> bool:
        return self.kind == "train"


def make(
    name: str, device: str, *, tiny: bool = False, layers: int | None = None, batch: int | None = None, seed: int = 0
) -> Made:
    """Build a model and its inputs; weights and inputs are random and always the same.

    Args:
        name: one of :data:`NAMES`.
        device: "cpu" or "cuda:N".
        tiny: a small version for tests, two layers deep and with small widths.
        layers: at most so many; of a model in stages, of each stage.
        batch: sequences or images, where not the family's.

    Raises:
        ValueError: an unknown name.
        ImportError: the model's library is not installed.
    """
    if name not in NAMES:
        raise ValueError(f"unknown model {name!r}; there are {', '.join(NAMES)}")
    known, _, kind = name.rpartition("_")
    family = FAMILIES[known]
    depth = min(x for x in (family.layers, family.cut, layers, _TINY_LAYERS if tiny else None) if x is not None)
    shape = family.shapes[kind]
    if tiny:
        shape = Shape(2, shape.length and 16, shape.target and 8)
    if batch is not None:
        shape = replace(shape, batch=batch)
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    with _random(seed, device):
        model, made = _transformer(family, device, dtype, depth, tiny, kind) if family.auto else _timm(
            family, device, dtype, depth, tiny
        )  # fmt: skip
        module = _step(model, family, kind, shape, device, dtype)
        inputs = _inputs(model, family, kind, shape, device, dtype, 32 if tiny else _IMAGE)
    module.requires_grad_(kind == "train").train(kind == "train")
    count = sum(p.numel() for p in module.parameters())
    return Made(name, kind, family, module, inputs, made, shape, dtype, count)


def module(name: str, device: str = "auto", **options: Any) -> nn.Module:
    """The module of :func:`make`, for ``autotune search``; on the first GPU, if there is one."""
    return make(name, _device(device), **options).module


def inputs(name: str, device: str = "auto", **options: Any) -> dict[str, Tensor]:
    """The inputs of :func:`make`."""
    return make(name, _device(device), **options).inputs


def _device(name: str) -> str:
    from autotune.device import resolve_device

    return resolve_device(name)


@contextlib.contextmanager
def _random(seed: int, device: str) -> Iterator[None]:
    """Random numbers begin at ``seed``; those of the caller go on as if nothing had been."""
    with torch.random.fork_rng(devices=[torch.device(device)] if device.startswith("cuda") else []):
        torch.manual_seed(seed)
        yield


# Models


def _transformer(
    family: Family, device: str, dtype: torch.dtype, depth: int, tiny: bool, kind: str
) -> tuple[nn.Module, int]:
    import transformers

    fields = copy.deepcopy({**family.fields, **(family.tiny if tiny else {})})
    for name in family.depth:
        part, _, last = name.rpartition(".")
        (fields.setdefault(part, {}) if part else fields)[last] = depth
    config = getattr(transformers, family.config)(**fields)
    config.use_cache = kind == "decode"
    with torch.device(device):
        auto = getattr(transformers, family.auto)
        return auto.from_config(config, dtype=dtype, attn_implementation=family.attention), depth


def _timm(family: Family, device: str, dtype: torch.dtype, depth: int, tiny: bool) -> tuple[nn.Module, int]:
    import timm

    fields = dict(family.tiny) if tiny else {}
    (name,) = family.depth
    stages = _STAGES.get(name)
    if stages:
        fields[name] = stages = tuple(min(depth, n) for n in stages)
    with torch.device(device):
        model = timm.create_model(family.config, pretrained=False, **fields).to(dtype)
    _no_zeros(model)
    if stages:
        return model, sum(stages)
    setattr(model, name, getattr(model, name)[:depth])
    return model, depth


@torch.no_grad()
def _no_zeros(model: nn.Module) -> None:
    """Weights that begin at zero, of heads and of the last norm of a residual, would make results or gradients zero."""
    for name, weight in model.named_parameters():
        if name.endswith("weight") and not weight.any():
            weight.normal_(std=0.02) if weight.dim() > 1 else weight.fill_(1.0)


class Loss(nn.Module):
    """The loss that a model of transformers has for the labels it is given."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__()
        self.model, self.options = model, options

    def forward(self, **inputs: Tensor) -> Tensor:
        loss: Tensor = self.model(**inputs, **self.options).loss
        return loss


class Logits(nn.Module):
    """The logits of a model of transformers."""

    def __init__(self, model: nn.Module, name: str = "logits", **options: Any) -> None:
        super().__init__()
        self.model, self.name, self.options = model, name, options

    def forward(self, **inputs: Tensor) -> Tensor:
        found: Tensor = getattr(self.model(**inputs, **self.options), self.name)
        return found


class Decode(nn.Module):
    """The logits of one more token a sequence. The cache counts its tokens itself; the count is put back afterwards, so
    that every step is the same.
    """

    def __init__(self, model: nn.Module, cache: Any) -> None:
        super().__init__()
        self.model, self.cache = model, cache

    def forward(self, input_ids: Tensor) -> Tensor:
        """``input_ids`` [B, 1]."""
        first: Tensor = self.model(input_ids=input_ids, past_key_values=self.cache, use_cache=True).logits
        for layer in self.cache.layers:
            layer.cumulative_length.sub_(input_ids.shape[1])
        return first


class Classification(nn.Module):
    """The cross-entropy of a classifier's logits, in fp32 as is usual."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """``x`` [B, 3, H, W], ``labels`` [B]."""
        return nn.functional.cross_entropy(self.model(x).float(), labels)


def _step(model: nn.Module, family: Family, kind: str, shape: Shape, device: str, dtype: torch.dtype) -> nn.Module:
    if not family.auto:
        return Classification(model) if kind == "train" else model
    if kind == "train":
        return Loss(model, return_loss=True) if family.task == "clip" else Loss(model)
    if kind == "infer":
        if family.task == "clip":
            return Logits(model, "logits_per_image")
        return Logits(model, logits_to_keep=1) if family.task == "causal" else Logits(model)
    return Decode(model, _cache(model, shape, device, dtype))


def _cache(model: nn.Module, shape: Shape, device: str, dtype: torch.dtype) -> Any:
    """A static cache of ``shape.length`` tokens a sequence, half full of random keys and values."""
    from transformers import StaticCache

    config: Any = model.config
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = StaticCache(config=config, max_cache_len=shape.length)
    cache.early_initialization(shape.batch, heads, width, dtype, torch.device(device))
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
        layer.cumulative_length.fill_(shape.length // 2)
    return cache


# Inputs


def _inputs(
    model: nn.Module, family: Family, kind: str, shape: Shape, device: str, dtype: torch.dtype, image: int
) -> dict[str, Tensor]:
    def tokens(*size: int, config: Any = None) -> Tensor:
        # The first few are special tokens, padding among them; the last is CLIP's end of text.
        return torch.randint(4, (config or model.config).vocab_size - 1, size, device=device)

    def pixels() -> Tensor:
        return torch.randn(shape.batch, 3, image, image, device=device).to(dtype)

    train = kind == "train"
    if family.task == "image":
        x = pixels()
        return {"x": x, "labels": torch.randint(0, 1000, (shape.batch,), device=device)} if train else {"x": x}
    if family.task == "clip":
        text: Any = model.config.text_config
        ids = tokens(shape.batch, text.max_position_embeddings, config=text)
        ids[:, -1] = text.eos_token_id
        return {"input_ids": ids, "pixel_values": pixels()}
    if kind == "decode":
        return {"input_ids": tokens(shape.batch, 1)}
    ids = tokens(shape.batch, shape.length)
    if family.task == "seq2seq":
        targets = tokens(shape.batch, shape.target)
        return {"input_ids": ids, "labels": targets} if train else {"input_ids": ids, "decoder_input_ids": targets}
    if not train:
        return {"input_ids": ids}
    if family.task == "mlm":
        masked = torch.rand(ids.shape, device=device) < 0.15
        return {"input_ids": ids, "labels": ids.masked_fill(~masked, IGNORED)}
    return {"input_ids": ids, "labels": ids.clone()}
