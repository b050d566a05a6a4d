"""Programs that autotune was not developed with: each was measured before anything was changed for it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.user_programs.images import classified, timm_model
from benchmarks.user_programs.language import IGNORED, from_config, llama, trained
from benchmarks.user_programs.program import (
    Known,
    Program,
    Setup,
    batches,
    fitted,
    lengths,
    library,
    named,
    right_padded,
)

# Models of transformers


def _padded(setup: Setup, vocabulary: int, count: int, length: int, least: int) -> tuple[Tensor, Tensor]:
    """Texts of ``least`` tokens and more, padded on the right by zeros, and their mask; both [count, length]."""
    mask = right_padded(lengths(count, least, length), length, setup.device)
    return setup.tokens(vocabulary, count, length) * mask, mask


def deberta(setup: Setup) -> Program:
    """Classification of right-padded texts: attention with relative positions, written out."""
    width, layers, heads, inner, vocabulary = setup.size((768, 12, 12, 3072, 128100), (32, 2, 2, 64, 64))
    config = library("transformers").DebertaV2Config(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=inner,
        vocab_size=vocabulary, relative_attention=True, position_buckets=setup.size(256, 8),
        pos_att_type=["p2c", "c2p"], norm_rel_ebd="layer_norm", share_att_key=True, position_biased_input=False,
        type_vocab_size=0, num_labels=3, max_relative_positions=-1, max_position_embeddings=512,
    )  # fmt: skip
    model = from_config(setup, "AutoModelForSequenceClassification", config, torch.float32)
    count, length = setup.size((32, 256), (2, 16))

    def batch() -> dict[str, Tensor]:
        ids, mask = _padded(setup, vocabulary, count, length, length // 4)
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(0, 3, (count,), device=setup.device)}

    return trained(setup, model, batch, 2e-5, autocast=True)


def modernbert(setup: Setup) -> Program:
    """Masked language modelling: two of three layers attend to a window, rotary positions, gated GELU."""
    width, layers, heads, inner, vocabulary = setup.size((768, 22, 12, 1152, 50368), (32, 3, 2, 48, 64))
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1)
    config = library("transformers").ModernBertConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=inner,
        vocab_size=vocabulary, **(special if setup.tiny else {}),
    )  # fmt: skip
    model = from_config(setup, "AutoModelForMaskedLM", config, torch.float32)
    count, length = setup.size((8, 1024), (2, 16))

    def batch() -> dict[str, Tensor]:
        ids, mask = _padded(setup, vocabulary, count, length, length // 2)
        hidden = (torch.rand(ids.shape, device=setup.device) < 0.3) & mask.bool()
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(~hidden, IGNORED)}

    return trained(setup, model, batch, 1e-4, autocast=True)


def gemma3(setup: Setup) -> Program:
    """Pretraining of a Gemma 3 of 8 layers in bf16: windows, norms around each part, a head of 262 144 columns."""
    width, layers, heads, inner, vocabulary = setup.size((1152, 8, 4, 6912, 262144), (32, 2, 2, 64, 64))
    config = library("transformers").Gemma3TextConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=1,
        head_dim=setup.size(256, 16), intermediate_size=inner, vocab_size=vocabulary, sliding_window=setup.size(512, 8),
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = from_config(setup, "AutoModelForCausalLM", config, setup.half())
    model.config.use_cache = False
    count, length = setup.size((2, 2048), (2, 16))

    def batch() -> dict[str, Tensor]:
        ids = setup.tokens(vocabulary, count, length)
        return {"input_ids": ids, "labels": ids}

    return trained(setup, model, batch, 2e-4, autocast=False)


def wav2vec2(setup: Setup) -> Program:
    """Classification of ten seconds of sound: strided convolutions with a group norm, then an encoder."""
    width, layers, heads, inner = setup.size((768, 12, 12, 3072), (32, 2, 2, 64))
    small = {"conv_dim": (8, 8), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2}
    small |= {"num_conv_pos_embedding_groups": 2, "num_conv_pos_embeddings": 4, "classifier_proj_size": 8}
    config = library("transformers").Wav2Vec2Config(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=inner, num_labels=12,
        mask_time_prob=0.0, layerdrop=0.0, **(small if setup.tiny else {}),
    )  # fmt: skip
    model = from_config(setup, "AutoModelForAudioClassification", config, torch.float32)
    count, samples = setup.size((32, 160_000), (2, 400))

    def batch() -> dict[str, Tensor]:
        sound = torch.randn(count, samples, device=setup.device)
        return {"input_values": sound, "labels": torch.randint(0, 12, (count,), device=setup.device)}

    return trained(setup, model, batch, 3e-5, autocast=True)


def clip(setup: Setup) -> Program:
    """Contrastive training of a ViT-B/32 and a text encoder."""
    models = library("transformers")
    text = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "eos_token_id": 2}
    text |= {"num_attention_heads": 2, "max_position_embeddings": 16, "pad_token_id": 1, "bos_token_id": 0}
    image = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    image |= {"image_size": 32, "patch_size": 16}
    config = models.CLIPConfig(**({"text_config": text, "vision_config": image} if setup.tiny else {}))
    with torch.device(setup.device):
        model = models.CLIPModel(config)
    count, length, side = setup.size((256, 77, 224), (3, 8, 32))

    def batch() -> dict[str, Any]:
        ids = setup.tokens(config.text_config.vocab_size, count, length)
        images = torch.randn(count, 3, side, side, device=setup.device)
        mask = right_padded(lengths(count, 8 if setup.tiny else 10, length), length, setup.device)
        return {"input_ids": ids, "attention_mask": mask, "pixel_values": images, "return_loss": True}

    return trained(setup, model, batch, 1e-4, autocast=True)


class LowRank(nn.Module):
    """A frozen linear layer and a trained update of low rank."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        like = {"device": base.weight.device, "dtype": torch.float32}
        self.a = nn.Parameter(torch.randn(rank, base.in_features, **like) / math.sqrt(base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank, **like))
        self.dropout = nn.Dropout(0.05)

    def forward(self, x: Tensor) -> Tensor:
        update = F.linear(F.linear(self.dropout(x).to(self.a.dtype), self.a), self.b)
        found: Tensor = self.base(x) + 2.0 * update.to(x.dtype)
        return found


def lora(setup: Setup) -> Program:
    """Fine-tuning of a frozen Llama of 1.2B by updates of rank 16, with checkpoints of all layers."""
    model = llama(setup)
    model.config.use_cache = False
    model.requires_grad_(False)
    for layer in model.model.layers:
        attention = layer.self_attn
        for name in ("q_proj", "v_proj"):
            setattr(attention, name, LowRank(getattr(attention, name), setup.size(16, 2)))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    count, length = setup.size((4, 2048), (2, 16))

    def batch() -> dict[str, Tensor]:
        ids, mask = _padded(setup, model.config.vocab_size, count, length, length // 4)
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORED)}

    return trained(setup, model, batch, 1e-4, autocast=True)


# Convolutions


def resnet(setup: Setup) -> Program:
    """ResNet-50, bf16, channels last."""
    model = timm_model(setup, "resnet50", "resnet10t")
    return classified(setup, model, *setup.size((128, 224), (2, 64)), scaled=False, last=True)


def decoder(setup: Setup) -> Program:
    """The decoder of Stable Diffusion's autoencoder: four images of 512 pixels, fp16."""
    small = {"block_out_channels": (16, 32), "norm_num_groups": 8, "layers_per_block": 1}
    full = {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2}
    fields: dict[str, Any] = setup.size(full, small)
    stages = len(fields["block_out_channels"])
    with torch.device(setup.device):
        model = library("diffusers").AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * stages, up_block_types=("UpDecoderBlock2D",) * stages,
            latent_channels=4, **fields,
        )  # fmt: skip
    half = setup.half(torch.float16)
    model = model.eval().requires_grad_(False).to(half)
    compiled = setup.compile(model.decode, fullgraph=True)
    count, side = setup.size((4, 64), (1, 8))
    following = batches(lambda: torch.randn(count, 4, side, side, device=setup.device, dtype=half))

    def step() -> Tensor:
        with torch.no_grad():
            found: Tensor = compiled(following(), return_dict=False)[0]
        return found

    return Program(False, step)


class Stack(nn.Module):
    """Dilated convolutions with a residual, as in HiFi-GAN's third kind of fusion."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()

        def make(d: int) -> nn.Module:
            made: nn.Module = nn.Conv1d(width, width, size, dilation=d, padding=d * (size - 1) // 2)
            return nn.utils.parametrizations.weight_norm(made)

        self.first, self.second = (nn.ModuleList(make(d) for d in dilations) for dilations in ((1, 3, 5), (1, 1, 1)))

    def forward(self, x: Tensor) -> Tensor:
        for first, second in zip(self.first, self.second, strict=True):
            x = x + second(F.leaky_relu(first(F.leaky_relu(x, 0.1)), 0.1))
        return x


class Vocoder(nn.Module):
    """Sound from spectra: transposed convolutions, each with three stacks whose mean goes on."""

    def __init__(self, width: int, rates: tuple[int, ...]) -> None:
        super().__init__()
        self.into = nn.Conv1d(80, width, 7, padding=3)
        self.up, self.stacks = nn.ModuleList(), nn.ModuleList()
        for k, rate in enumerate(rates):
            made = width >> (k + 1)
            self.up.append(nn.ConvTranspose1d(2 * made, made, 2 * rate, rate, padding=rate // 2))
            self.stacks.append(nn.ModuleList(Stack(made, size) for size in (3, 7, 11)))
        self.out = nn.Conv1d(width >> len(rates), 1, 7, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [B, 80, T]; returns [B, 1, T * product of the rates]."""
        x = self.into(x)
        for up, stacks in zip(self.up, self.stacks, strict=True):
            x = up(F.leaky_relu(x, 0.1))
            x = torch.stack([part(x) for part in stacks]).mean(0)  # type: ignore[attr-defined]
        found: Tensor = torch.tanh(self.out(F.leaky_relu(x)))
        return found


def vocoder(setup: Setup) -> Program:
    """Training of a generator of sound on the distance of samples, bf16."""
    with torch.device(setup.device):
        model = Vocoder(*setup.size((512, (8, 8, 2, 2)), (16, (2, 2))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, betas=(0.8, 0.99), capturable=setup.capturable)
    compiled = setup.compile(model)
    count, frames, rate = setup.size((32, 32, 256), (2, 8, 4))

    def batch() -> tuple[Tensor, Tensor]:
        spectra = torch.randn(count, 80, frames, device=setup.device)
        return spectra, torch.rand(count, 1, frames * rate, device=setup.device)

    def loss_of(spectra: Tensor, wanted: Tensor) -> Tensor:
        with setup.autocast():
            return F.l1_loss(compiled(spectra), wanted)

    return fitted(loss_of, batches(batch), optimizer)


# Tables, points and rays in plain torch


class Recommender(nn.Module):
    """DLRM: embeddings of categories, products of all pairs, perceptrons before and behind them."""

    def __init__(self, tables: int, rows: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.dense = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(
            nn.Linear(width + pairs, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1)
        )
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1))

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        """``dense`` [B, 13], ``categories`` [B, tables]; returns [B]."""
        x = self.dense(dense)
        every = torch.stack([x, *(table(categories[:, k]) for k, table in enumerate(self.tables))], dim=1)
        products = torch.bmm(every, every.transpose(1, 2))
        at: Any = self.pairs
        found: Tensor = self.top(torch.cat([x, products[:, at[0], at[1]]], dim=1)).squeeze(1)
        return found


def recommender(setup: Setup) -> Program:
    """Clicks by DLRM in fp32 with TF32, 26 tables of 20 000 rows, SGD."""
    torch.set_float32_matmul_precision("high")
    tables, rows, width, count = setup.size((26, 20_000, 64, 16_384), (3, 20, 8, 8))
    with torch.device(setup.device):
        model = Recommender(tables, rows, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    compiled = setup.compile(model)

    def batch() -> tuple[Tensor, ...]:
        dense = torch.rand(count, 13, device=setup.device)
        clicks = torch.rand(count, device=setup.device).round()
        return dense, torch.randint(0, rows, (count, tables), device=setup.device), clicks

    def loss_of(dense: Tensor, categories: Tensor, clicks: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(compiled(dense, categories), clicks)

    return fitted(loss_of, batches(batch), optimizer)


class Points(nn.Module):
    """PointNet: layers shared by all points, batch norms, the maximum over points."""

    def __init__(self, widths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        given = 3
        for made in widths:
            parts += [nn.Conv1d(given, made, 1), nn.BatchNorm1d(made), nn.ReLU()]
            given = made
        self.shared = nn.Sequential(*parts)
        self.head = nn.Sequential(
            nn.Linear(given, given // 2), nn.BatchNorm1d(given // 2), nn.ReLU(), nn.Dropout(0.3),
            nn.Linear(given // 2, classes),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [B, 3, points]."""
        found: Tensor = self.head(self.shared(x).amax(dim=2))
        return found


def points(setup: Setup) -> Program:
    """Classification of 64 clouds of 4096 points, fp32 with TF32, Adam."""
    torch.set_float32_matmul_precision("high")
    with torch.device(setup.device):
        model = Points(*setup.size(((64, 64, 128, 256, 1024), 40), ((8, 16), 4)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True, capturable=setup.capturable)
    compiled = setup.compile(model)
    count, size, classes = setup.size((64, 4096, 40), (4, 32, 4))

    def batch() -> tuple[Tensor, Tensor]:
        labels = torch.randint(0, classes, (count,), device=setup.device)
        return torch.randn(count, 3, size, device=setup.device), labels

    def loss_of(clouds: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(compiled(clouds), labels, label_smoothing=0.2)

    return fitted(loss_of, batches(batch), optimizer)


HELD_OUT = named(
    [
        Known("deberta_train", "DeBERTa-v3 base, bf16 autocast, right-padded, 32 x 256", deberta, "transformers"),
        Known("modernbert_train", "ModernBERT base MLM, right-padded, 8 x 1024", modernbert, "transformers"),
        Known("gemma3_train", "Gemma 3 of 8 layers, bf16, 2 x 2048", gemma3, "transformers"),
        Known("wav2vec2_train", "wav2vec 2.0 base, 32 x 10 s of sound", wav2vec2, "transformers"),
        Known("clip_train", "CLIP ViT-B/32, 256 pairs", clip, "transformers"),
        Known("lora_train", "Llama of 1.2B, updates of rank 16, checkpoints, 4 x 2048", lora, "transformers"),
        Known("resnet_train", "ResNet-50, bf16, channels last, 128 images", resnet, "timm"),
        Known("decoder_infer", "decoder of Stable Diffusion's autoencoder, fp16, 4 x 512 pixels", decoder, "diffusers"),
        Known("vocoder_train", "HiFi-GAN's generator, bf16, 32 x 8192 samples", vocoder),
        Known("dlrm_train", "DLRM of 26 tables, TF32, 16 384 samples", recommender),
        Known("pointnet_train", "PointNet, TF32, 64 x 4096 points", points),
    ]
)
"""Programs by name."""
