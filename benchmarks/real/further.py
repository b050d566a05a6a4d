"""More architectures of transformers and timm, in small versions only: :mod:`benchmarks.model_check` checks them after
the models that are measured."""

from __future__ import annotations

from typing import Any

from benchmarks.real.families import CAUSAL, DECODER, KINDS, MASKED, SEQ2SEQ, SMALL, TEXT, Family, Shape

_BOTH = {"train": Shape(2, 16), "infer": Shape(2, 16)}
_ALL = {**_BOTH, "decode": Shape(2, 16)}
_PAIR = {"train": Shape(2, 16, 8), "infer": Shape(2, 16, 8)}
_GPT = {"vocab_size": 211, "hidden_size": 64, "num_attention_heads": 4}
_T5 = {"vocab_size": 211, "d_model": 64, "d_ff": 96, "d_kv": 16, "num_heads": 4}
_BART = {"vocab_size": 211, "d_model": 64, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "max_position_embeddings": 64}  # fmt: skip
_VISION = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "image_size": 32, "patch_size": 16}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


def _masked(about: str, config: str, depth: tuple[str, ...] = TEXT, **fields: Any) -> Family:
    return Family(about, "mlm", 2, depth, config, MASKED, _BOTH, {}, fields)


def _causal(
    about: str, config: str, depth: tuple[str, ...] = TEXT, attention: str | None = None, **fields: Any
) -> Family:
    return Family(about, "causal", 2, depth, config, CAUSAL, _ALL, {}, fields, attention)


def _seq2seq(about: str, config: str, depth: tuple[str, ...], **fields: Any) -> Family:
    return Family(about, "seq2seq", 2, depth, config, SEQ2SEQ, _PAIR, {}, fields)


def _other(about: str, task: str, config: str, auto: str, depth: tuple[str, ...] = TEXT, **fields: Any) -> Family:
    return Family(about, task, 2, depth, config, auto, _PAIR, {}, fields)


def _timm(about: str, name: str, few: int = 2, **fields: Any) -> Family:
    return Family(about, "image", 2, (), name, "", _BOTH, {}, fields, few=few)


_STAGED = ("encoder_layers", "decoder_layers")
FURTHER: dict[str, Family] = {
    "deberta_v2": _masked(
        "DeBERTa-v2",
        "DebertaV2Config",
        **SMALL,
        relative_attention=True,
        position_buckets=8,
        pos_att_type=["p2c", "c2p"],
        share_att_key=True,
        norm_rel_ebd="layer_norm",
        type_vocab_size=0,
    ),
    "albert": _masked("ALBERT", "AlbertConfig", **SMALL, embedding_size=32),
    "electra": _masked("ELECTRA", "ElectraConfig", **SMALL, embedding_size=32),
    "distilbert": _masked(
        "DistilBERT", "DistilBertConfig", ("n_layers",), vocab_size=211, dim=64, hidden_dim=96, n_heads=4
    ),
    "mpnet": _masked("MPNet", "MPNetConfig", **SMALL),
    "modernbert": _masked(
        "ModernBERT",
        "ModernBertConfig",
        **SMALL,
        local_attention=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    ),
    "fnet": _masked(
        "FNet: Fourier transforms in place of attention",
        "FNetConfig",
        vocab_size=211,
        hidden_size=64,
        intermediate_size=96,
    ),
    "gpt_neox": _causal("GPT-NeoX", "GPTNeoXConfig", **_GPT, intermediate_size=96),
    "gpt_neo": _causal(
        "GPT-Neo",
        "GPTNeoConfig",
        ("num_layers",),
        vocab_size=211,
        hidden_size=64,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=8,
    ),
    "gptj": _causal(
        "GPT-J", "GPTJConfig", ("n_layer",), vocab_size=211, n_embd=64, n_head=4, rotary_dim=8, n_positions=64
    ),
    "opt": _causal(
        "OPT", "OPTConfig", **_GPT, ffn_dim=96, word_embed_proj_dim=64, max_position_embeddings=64, pad_token_id=1
    ),
    "bloom": _causal("Bloom", "BloomConfig", ("n_layer",), vocab_size=211, hidden_size=64, n_head=4),
    "falcon": _causal("Falcon", "FalconConfig", **_GPT, multi_query=False),
    "phi": _causal("Phi", "PhiConfig", **_GPT, intermediate_size=96),
    "phi3": _causal("Phi-3", "Phi3Config", **SMALL, pad_token_id=0),
    "qwen2": _causal("Qwen2", "Qwen2Config", **SMALL, num_key_value_heads=2),
    "gemma3": Family(
        "Gemma 3",
        "causal",
        2,
        TEXT,
        "Gemma3TextConfig",
        CAUSAL,
        _BOTH,
        {},
        {**DECODER, "query_pre_attn_scalar": 16, "sliding_window": 8},
    ),
    "olmo2": _causal("OLMo 2", "Olmo2Config", **SMALL),
    "stablelm": _causal("StableLM", "StableLmConfig", **SMALL, num_key_value_heads=2),
    "cohere": _causal("Cohere", "CohereConfig", **SMALL),
    "granite": _causal("Granite", "GraniteConfig", **SMALL, residual_multiplier=0.5, logits_scaling=2.0),
    "qwen3_moe": _causal("Qwen3, mixture of experts", "Qwen3MoeConfig", **DECODER, **_EXPERTS),
    "olmoe": _causal("OLMoE", "OlmoeConfig", **SMALL, num_experts=4, num_experts_per_tok=2),
    "mamba": Family(
        "Mamba",
        "causal",
        2,
        TEXT,
        "MambaConfig",
        CAUSAL,
        _BOTH,
        {},
        {"vocab_size": 211, "hidden_size": 64, "state_size": 8},
    ),
    "mamba2": Family(
        "Mamba-2",
        "causal",
        2,
        TEXT,
        "Mamba2Config",
        CAUSAL,
        _BOTH,
        {},
        {
            "vocab_size": 211,
            "hidden_size": 64,
            "state_size": 8,
            "num_heads": 4,
            "head_dim": 32,
            "n_groups": 1,
            "chunk_size": 8,
        },
    ),
    "mt5": _seq2seq("mT5", "MT5Config", ("num_layers", "num_decoder_layers"), **_T5, decoder_start_token_id=0),
    "pegasus": _seq2seq("Pegasus", "PegasusConfig", _STAGED, **_BART),
    "marian": _seq2seq("Marian", "MarianConfig", _STAGED, **_BART, pad_token_id=0, decoder_start_token_id=0),
    "wav2vec2": _other(
        "Wav2Vec2",
        "audio",
        "Wav2Vec2Config",
        "AutoModelForCTC",
        **SMALL,
        conv_dim=(16, 16),
        conv_stride=(5, 4),
        conv_kernel=(10, 8),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        apply_spec_augment=False,
        pad_token_id=0,
    ),
    "whisper": _other(
        "Whisper",
        "speech",
        "WhisperConfig",
        "AutoModelForSpeechSeq2Seq",
        _STAGED,
        vocab_size=211,
        d_model=64,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        num_mel_bins=16,
        max_source_positions=16,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    ),
    "vit": _other("ViT of transformers", "pixels", "ViTConfig", "AutoModelForImageClassification", **_VISION),
    "dinov2": _other("DINOv2", "pixels", "Dinov2Config", "AutoModel", **_VISION),
    "siglip": _other("SigLIP's image tower", "pixels", "SiglipVisionConfig", "AutoModel", **_VISION),
    "swin": _other(
        "Swin of transformers",
        "pixels",
        "SwinConfig",
        "AutoModelForImageClassification",
        (),
        image_size=32,
        embed_dim=16,
        depths=[1, 2],
        num_heads=[2, 4],
        window_size=4,
        patch_size=2,
    ),
    "segformer": _other(
        "SegFormer",
        "pixels",
        "SegformerConfig",
        "AutoModelForSemanticSegmentation",
        (),
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=32,
    ),
    "detr": _other(
        "DETR",
        "pixels",
        "DetrConfig",
        "AutoModelForObjectDetection",
        _STAGED,
        d_model=32,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        num_queries=5,
        backbone_config={
            "model_type": "resnet",
            "embedding_size": 8,
            "hidden_sizes": [8, 16, 24, 32],
            "depths": [1, 1, 1, 1],
            "out_features": ["stage4"],
        },
    ),
    "deit_timm": _timm("DeiT", "deit_tiny_patch16_224", img_size=32, embed_dim=48, depth=2, num_heads=4),
    "swin_timm": _timm(
        "Swin",
        "swin_tiny_patch4_window7_224",
        img_size=32,
        embed_dim=16,
        depths=(2, 2),
        num_heads=(2, 4),
        window_size=4,
    ),
    "efficientnet": _timm("EfficientNet-B0", "efficientnet_b0", few=8),
    "regnet": _timm("RegNetY", "regnety_002", few=8, depth=6, w0=16, wa=12.0, wm=1.8, stem_width=8),
    "mobilenetv3": _timm("MobileNetV3", "mobilenetv3_small_050", few=8),
    "mobilevit": _timm("MobileViT", "mobilevit_xxs", few=8),
    "poolformer": _timm("PoolFormer", "poolformer_s12"),
}
"""By name; each is as small as its library lets it be."""

FURTHER_NAMES = tuple(f"{family}_{kind}" for family, f in FURTHER.items() for kind in KINDS if kind in f.shapes)
