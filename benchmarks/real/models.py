"""Models of transformers and timm, made from the libraries' own configuration classes with random weights.

Nothing is downloaded. Architectures are the published ones; where a model is cut in depth because its weights, their
gradients and the tensors kept for the backward pass exceed the memory, ``cut`` has the reason. On a GPU parameters,
inputs and arithmetic are bf16 throughout, without autocast and without fp32 copies of the weights; on a CPU, fp32.

Sequences are whole, without padding and attention mask. (Launched from Python, transformers 5 then passes ``is_causal``
to SDPA; in a graph of Dynamo or CUDA it passes a mask.) Models are unchanged:
under Dynamo GPT-2's loss breaks the graph once, BART's layer drop at every layer.

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
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.real.families import FAMILIES, NAMES, Family, Shape
from benchmarks.real.further import FURTHER, FURTHER_NAMES
from benchmarks.real.vision import declare_operators

IGNORED = -100
"""The label that the losses of transformers leave out."""
_STAGES = {"depths": (3, 3, 27, 3), "layers": (3, 4, 6, 3)}
_TINY_LAYERS, _IMAGE = 2, 224
_WITHOUT_LOSS = ("audio", "speech", "pixels")
"""Tasks whose own losses want targets that random ones do not stand for."""


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
        name: one of :data:`NAMES`, or of :data:`FURTHER_NAMES`, which are always small.
        device: "cpu" or "cuda:N".
        tiny: a small version for tests, two layers deep and with small widths.
        layers: at most so many; of a model in stages, of each stage.
        batch: sequences or images, where not the family's.

    Raises:
        ValueError: an unknown name.
        ImportError: the model's library is not installed.
    """
    if name not in NAMES and name not in FURTHER_NAMES:
        raise ValueError(f"unknown model {name!r}; there are {', '.join((*NAMES, *FURTHER_NAMES))}")
    known, _, kind = name.rpartition("_")
    family = FAMILIES[known] if name in NAMES else FURTHER[known]
    tiny = tiny or name in FURTHER_NAMES
    depth = min(x for x in (family.layers, family.cut, layers, _TINY_LAYERS if tiny else None) if x is not None)
    shape = family.shapes[kind]
    if tiny:
        shape = Shape(family.few, shape.length and 16, shape.target and 8)
    if batch is not None:
        shape = replace(shape, batch=batch)
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    declare_operators()
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
    name = next(iter(family.depth), "")
    stages = _STAGES.get(name)
    if stages:
        fields[name] = stages = tuple(min(depth, n) for n in stages)
    with torch.device(device):
        model = timm.create_model(family.config, pretrained=False, **fields).to(dtype)
    _no_zeros(model)
    if not name or stages:
        return model, sum(stages or (depth,))
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


class Outputs(nn.Module):
    """A model's first result (logits, or hidden states), and for training its mean squared distance from a ramp."""

    def __init__(self, model: nn.Module, *, train: bool) -> None:
        super().__init__()
        self.model, self.train_it = model, train

    def forward(self, **inputs: Tensor) -> Tensor:
        found = self.model(**inputs)
        made: Tensor = found.logits if "logits" in found else found[0]
        if not self.train_it:
            return made
        ramp = torch.linspace(-1.0, 1.0, made.shape[-1], device=made.device, dtype=made.dtype)
        return (made - ramp).square().mean()


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
    if family.task in _WITHOUT_LOSS:
        return Outputs(model, train=kind == "train")
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
    if family.task == "pixels":
        return {"pixel_values": pixels()}
    if family.task == "audio":
        return {"input_values": torch.randn(shape.batch, 100 * shape.length, device=device).to(dtype)}
    if family.task == "speech":
        config: Any = model.config
        sound = torch.randn(shape.batch, config.num_mel_bins, 2 * config.max_source_positions, device=device)
        return {"input_features": sound.to(dtype), "decoder_input_ids": tokens(shape.batch, shape.target)}
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
