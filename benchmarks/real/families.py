"""The models that :mod:`benchmarks.real_models` measures, as data: configurations, and the shapes of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

KINDS = ("train", "infer", "decode")
WAYS = COMPILE, AUTOTUNE = "compile", "autotune"
"""What compiles a step in :mod:`benchmarks.model_check`."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a step: sequences (or images) and tokens of each; ``target``: tokens of a decoder's."""

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
        few: sequences or images of the small version: eight where a batch norm has one value of each image. Of two
            values it leaves their signs, and gradients of nothing but rounding.
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
    few: int = 2

    @property
    def library(self) -> str:
        return "transformers" if self.auto else "timm"


ROPE = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "high_freq_factor": 4.0,
         "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}  # fmt: skip
SMALL = {"vocab_size": 211, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
DECODER = {**SMALL, "num_key_value_heads": 2, "head_dim": 16}
TEXT = ("num_hidden_layers",)
CAUSAL, MASKED, SEQ2SEQ = "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM"

FAMILIES: dict[str, Family] = {
    "bert_large": Family(
        "BERT-large, masked language modelling", "mlm", 24, TEXT, "BertConfig", MASKED,
        {"train": Shape(32, 512), "infer": Shape(64, 512)},
        {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096},
        SMALL,
    ),
    "roberta_base": Family(
        "RoBERTa-base, masked language modelling", "mlm", 12, TEXT, "RobertaConfig", MASKED,
        {"train": Shape(64, 512), "infer": Shape(128, 512)},
        {"max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5},
        SMALL,
    ),
    "gpt2_medium": Family(
        "GPT-2 medium", "causal", 24, ("n_layer",), "GPT2Config", CAUSAL,
        {"train": Shape(16, 1024), "infer": Shape(32, 1024), "decode": Shape(64, 1024)},
        {"n_embd": 1024, "n_head": 16},
        {"vocab_size": 211, "n_embd": 64, "n_head": 4, "n_positions": 64},
    ),
    "llama32_1b": Family(
        "Llama 3.2 1B", "causal", 16, TEXT, "LlamaConfig", CAUSAL,
        {"train": Shape(4, 2048), "infer": Shape(8, 2048), "decode": Shape(32, 2048)},
        {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
         "tie_word_embeddings": True, "rope_parameters": ROPE, "bos_token_id": 128000, "eos_token_id": 128001},
        DECODER,
    ),
    "qwen3_17b": Family(
        "Qwen3 1.7B", "causal", 28, TEXT, "Qwen3Config", CAUSAL,
        {"train": Shape(4, 2048), "infer": Shape(8, 2048), "decode": Shape(32, 2048)},
        {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16, "num_key_value_heads": 8,
         "head_dim": 128, "max_position_embeddings": 40960, "tie_word_embeddings": True,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
        DECODER,
    ),
    "mistral_7b": Family(
        "Mistral-7B-shaped", "causal", 32, TEXT, "MistralConfig", CAUSAL,
        {"train": Shape(2, 2048), "infer": Shape(4, 2048), "decode": Shape(16, 2048)},
        {"sliding_window": None, "max_position_embeddings": 32768,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
        DECODER,
    ),
    "gemma2_2b": Family(
        "Gemma-2-2B-shaped", "causal", 26, TEXT, "Gemma2Config", CAUSAL,
        {"train": Shape(2, 2048), "infer": Shape(4, 2048)},  # its sliding cache counts in Python: no two steps alike
        {},
        {**DECODER, "query_pre_attn_scalar": 16},
        attention="eager",  # transformers' own default: the others leave out the cap of the scores
    ),
    "t5_base": Family(
        "T5-base", "seq2seq", 12, ("num_layers", "num_decoder_layers"), "T5Config", SEQ2SEQ,
        {"train": Shape(32, 512, 128), "infer": Shape(64, 512, 128)},
        {"d_model": 768, "d_ff": 3072, "num_heads": 12, "decoder_start_token_id": 0},
        {"vocab_size": 211, "d_model": 64, "d_ff": 96, "d_kv": 16, "num_heads": 4},
    ),
    "bart_large": Family(
        "BART-large", "seq2seq", 12, ("encoder_layers", "decoder_layers"), "BartConfig", SEQ2SEQ,
        {"train": Shape(32, 512, 128), "infer": Shape(64, 512, 128)},
        {},
        {"vocab_size": 211, "d_model": 64, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "max_position_embeddings": 64},
    ),
    "mixtral_8x7b": Family(
        "Mixtral-8x7B-shaped mixture of experts", "causal", 32, TEXT, "MixtralConfig", CAUSAL,
        {"train": Shape(2, 2048), "infer": Shape(4, 2048), "decode": Shape(16, 2048)},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
        {**DECODER, "num_local_experts": 4},
        cut=8, why="weights take 2.9 GB a layer, their gradients as much",
    ),
    "clip_vit_b32": Family(
        "CLIP ViT-B/32, contrastive", "clip", 12, ("text_config.num_hidden_layers", "vision_config.num_hidden_layers"),
        "CLIPConfig", "AutoModel",
        {"train": Shape(512, 77), "infer": Shape(512, 77)},
        {},
        {"projection_dim": 32,
         "text_config": {**SMALL, "max_position_embeddings": 16, "projection_dim": 32, "eos_token_id": 2},
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
        {}, {"channels": (16, 24, 32, 48)}, few=8,
    ),
}  # fmt: skip

DEFAULT = (
    "bert_large_train", "roberta_base_train", "gpt2_medium_train", "llama32_1b_train", "qwen3_17b_train",
    "mistral_7b_train", "gemma2_2b_train", "t5_base_train", "bart_large_train", "mixtral_8x7b_train", "vit_base_train",
    "convnext_base_train", "resnet50_train", "clip_vit_b32_infer", "mixer_base_infer", "bert_large_infer",
    "llama32_1b_decode", "qwen3_17b_decode",
)  # fmt: skip
"""What is measured where no model is named; every family is in it."""

NAMES = tuple(f"{family}_{kind}" for family, f in FAMILIES.items() for kind in KINDS if kind in f.shapes)
