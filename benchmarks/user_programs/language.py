"""Language models: a small repository's GPT, encoders, fine-tuning, speech, decoding."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.user_programs.program import (
    Known,
    Program,
    Setup,
    batches,
    decayed,
    lengths,
    library,
    named,
    right_padded,
)

IGNORED = -100
"""The label that losses leave out."""

# A GPT in plain torch


class Block(nn.Module):
    """A layer of GPT-2's kind, without biases or dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [B, T, C]."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).split(width, dim=2)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """A decoder with learned positions, whose head shares the embedding's weight."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """``ids``, ``targets`` [B, T]."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


def _gpt(setup: Setup) -> tuple[GPT, Callable[[], tuple[Tensor, Tensor]]]:
    """A model with fp32 weights, and a function that makes the next batch: tokens and those that follow them."""
    batch, length, vocabulary = setup.size((16, 1024, 50304), (2, 16, 64))
    with torch.device(setup.device):
        model = GPT(vocabulary, length, *setup.size((768, 12, 12), (32, 2, 2)))
    texts = batches(lambda: setup.tokens(vocabulary, batch, length + 1))

    def following() -> tuple[Tensor, Tensor]:
        ids = texts()
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    return model, following


def gpt(setup: Setup) -> Program:
    """fp32 weights, bf16 autocast, fused AdamW, gradient clipping."""
    model, following = _gpt(setup)
    optimizer = torch.optim.AdamW(decayed(model), lr=3e-4, betas=(0.9, 0.95), fused=True, capturable=setup.capturable)
    scaler = torch.amp.GradScaler(setup.kind, enabled=False)
    compiled = setup.compile(model)

    def step() -> Tensor:
        with setup.autocast():
            _, loss = compiled(*following())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return Program(True, step)


def gpt_and_optimizer(setup: Setup) -> Program:
    """The same, whose user compiles the optimizer's step as well."""
    model, following = _gpt(setup)
    optimizer = torch.optim.AdamW(decayed(model), lr=3e-4, betas=(0.9, 0.95), capturable=setup.capturable)
    compiled, update = setup.compile(model), setup.compile(optimizer.step)

    def step() -> Tensor:
        with setup.autocast():
            _, loss = compiled(*following())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return Program(True, step)


# Models of transformers


def from_config(setup: Setup, auto: str, config: Any, dtype: torch.dtype) -> Any:
    with torch.device(setup.device):
        return getattr(library("transformers"), auto).from_config(config, dtype=dtype)


def trained(setup: Setup, model: Any, batch: Any, lr: float, *, autocast: bool) -> Program:
    """The loop of a trainer: forward pass with labels, backward pass, clipping, AdamW, a schedule of the rate."""
    model.train()
    optimizer = torch.optim.AdamW(decayed(model, 0.01), lr=lr, fused=True, capturable=setup.capturable)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 100))
    compiled = setup.compile(model)
    following = batches(batch)

    def step() -> Tensor:
        inputs = following()
        if autocast:
            with setup.autocast():
                loss = compiled(**inputs).loss
        else:
            loss = compiled(**inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        found: Tensor = loss
        return found

    return Program(True, step)


def _bert(setup: Setup, *, padded: bool) -> Program:
    sizes = setup.size((1024, 24, 16, 4096, 30522), (32, 2, 2, 64, 64))
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    config = library("transformers").BertConfig(**dict(zip(names, sizes, strict=True)))
    model = from_config(setup, "AutoModelForMaskedLM", config, torch.float32)
    count, length = setup.size((16, 512), (2, 16))

    def batch() -> dict[str, Tensor]:
        ids = setup.tokens(config.vocab_size, count, length)
        mask = torch.ones_like(ids)
        if padded:
            mask = right_padded(lengths(count, length // 4, length), length, setup.device)
            ids = ids * mask
        hidden = (torch.rand(ids.shape, device=setup.device) < 0.15) & mask.bool()
        labels = ids.masked_fill(~hidden, IGNORED)
        return {"input_ids": ids.masked_fill(hidden, 3), "attention_mask": mask, "labels": labels}

    return trained(setup, model, batch, 5e-5, autocast=True)


def bert_ones(setup: Setup) -> Program:
    """Masked language modelling by a tokenizer's batches of full length: a mask of ones."""
    return _bert(setup, padded=False)


def bert_padded(setup: Setup) -> Program:
    """The same of texts of several lengths, padded on the right."""
    return _bert(setup, padded=True)


def t5(setup: Setup) -> Program:
    """Sequence to sequence: padded sources with their mask, padded targets with labels of -100."""
    width, layers, heads, inner, vocabulary = setup.size((768, 12, 12, 3072, 32128), (32, 2, 2, 64, 64))
    config = library("transformers").T5Config(
        d_model=width, num_layers=layers, num_heads=heads, d_ff=inner, vocab_size=vocabulary, d_kv=width // heads,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = from_config(setup, "AutoModelForSeq2SeqLM", config, torch.float32)
    count, source, target = setup.size((16, 512, 128), (2, 16, 8))

    def batch() -> dict[str, Tensor]:
        mask = right_padded(lengths(count, source // 4, source), source, setup.device)
        ends = right_padded(lengths(count, target // 4, target), target, setup.device)
        labels = setup.tokens(vocabulary, count, target).masked_fill(ends == 0, IGNORED)
        ids = setup.tokens(vocabulary, count, source) * mask
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    return trained(setup, model, batch, 1e-4, autocast=True)


def llama(setup: Setup) -> Any:
    """A Llama of 1.2 billion parameters in bf16, with grouped heads and a tied head."""
    width, layers, heads, groups, inner, vocabulary = setup.size((2048, 16, 32, 8, 8192, 128256), (32, 2, 4, 2, 64, 64))
    config = library("transformers").LlamaConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=groups,
        intermediate_size=inner, vocab_size=vocabulary, max_position_embeddings=setup.size(8192, 256),
        tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return from_config(setup, "AutoModelForCausalLM", config, setup.half())


def _qwen(setup: Setup) -> Any:
    """A Qwen 3 of 0.6 billion parameters in bf16, with norms of queries and keys."""
    width, layers, heads, groups, inner, vocabulary = setup.size((1024, 28, 16, 8, 3072, 151936), (32, 2, 4, 2, 64, 64))
    config = library("transformers").Qwen3Config(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=groups,
        head_dim=setup.size(128, 8), intermediate_size=inner, vocab_size=vocabulary,
        max_position_embeddings=setup.size(8192, 256), tie_word_embeddings=True, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    return from_config(setup, "AutoModelForCausalLM", config, setup.half())


def _fine_tuned(setup: Setup, model: Any, count: int, length: int) -> Program:
    model.config.use_cache = False

    def batch() -> dict[str, Tensor]:
        given = lengths(count, length // 4, length)
        mask = right_padded(given, length, setup.device)
        asked = right_padded([n // 3 for n in given], length, setup.device)
        ids = setup.tokens(model.config.vocab_size, count, length) * mask
        labels = ids.masked_fill((mask == 0) | (asked == 1), IGNORED)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    return trained(setup, model, batch, 2e-5, autocast=False)


def llama_tuned(setup: Setup) -> Program:
    """Supervised fine-tuning: padded on the right, prompts and padding without loss."""
    return _fine_tuned(setup, llama(setup), *setup.size((2, 2048), (2, 16)))


def qwen_tuned(setup: Setup) -> Program:
    """The same of another family."""
    return _fine_tuned(setup, _qwen(setup), *setup.size((4, 1024), (2, 16)))


def lfm2_tuned(setup: Setup) -> Program:
    """The same of a hybrid of 0.35 billion parameters in bf16: ten layers of 16 have a short convolution."""
    width, layers, heads, groups, inner, vocabulary = setup.size((1024, 16, 16, 8, 6656, 65536), (32, 3, 4, 2, 64, 64))
    config = library("transformers").Lfm2Config(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=groups,
        intermediate_size=inner, vocab_size=vocabulary, block_multiple_of=setup.size(256, 8),
        layer_types=["full_attention" if k in (2, 5, 8, 10, 12, 14) else "conv" for k in range(layers)],
    )  # fmt: skip
    model = from_config(setup, "AutoModelForCausalLM", config, setup.half())
    return _fine_tuned(setup, model, *setup.size((4, 2048), (2, 16)))


def llama_packed(setup: Setup) -> Program:
    """Texts packed into one row: positions begin again at each, and no mask is given."""
    model = llama(setup)
    model.config.use_cache = False
    length, texts = setup.size((4096, 8), (32, 3))

    def batch() -> dict[str, Tensor]:
        ids = setup.tokens(model.config.vocab_size, 1, length)
        cuts = [0, *sorted((torch.randperm(length - 2)[: texts - 1] + 1).tolist()), length]
        each = [torch.arange(end - begin) for begin, end in itertools.pairwise(cuts)]
        labels = ids.clone()
        labels[0, cuts[:-1]] = IGNORED
        return {"input_ids": ids, "position_ids": torch.cat(each)[None].to(setup.device), "labels": labels}

    return trained(setup, model, batch, 2e-5, autocast=False)


def whisper(setup: Setup) -> Program:
    """Speech to text: 30 seconds of sound a sample, labels padded by -100."""
    width, layers, heads, inner, vocabulary = setup.size((768, 12, 12, 3072, 51865), (32, 2, 2, 64, 64))
    special = {} if not setup.tiny else dict.fromkeys(
        ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 1
    ) | {"max_source_positions": 16, "max_target_positions": 16}  # fmt: skip
    config = library("transformers").WhisperConfig(
        d_model=width, encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=heads,
        decoder_attention_heads=heads, encoder_ffn_dim=inner, decoder_ffn_dim=inner, vocab_size=vocabulary, **special,
    )  # fmt: skip
    model = from_config(setup, "AutoModelForSpeechSeq2Seq", config, torch.float32)
    model.config.use_cache = False
    count, target = setup.size((8, 128), (2, 8))

    def batch() -> dict[str, Tensor]:
        sound = torch.randn(count, config.num_mel_bins, 2 * config.max_source_positions, device=setup.device)
        ends = right_padded(lengths(count, target // 4, target), target, setup.device)
        labels = setup.tokens(vocabulary, count, target).masked_fill(ends == 0, IGNORED)
        return {"input_features": sound, "labels": labels}

    return trained(setup, model, batch, 1e-5, autocast=True)


def llama_generate(setup: Setup) -> Program:
    """Greedy decoding by ``generate`` with a static cache: prompts padded on the left, the decoding step compiled."""
    model = llama(setup).eval()
    count, prompt, new = setup.size((8, 128, 32), (2, 8, 4))
    options: dict[str, Any] = {"disable_compile": True}
    if setup.compile.contender != "eager":
        arguments = setup.compile.arguments(mode="reduce-overhead")  # what transformers compiles by
        options = {"compile_config": library("transformers").CompileConfig(**{"mode": None, **arguments})}
        options["compile_config"]._compile_all_devices = True

    def batch() -> dict[str, Tensor]:
        mask = right_padded(lengths(count, prompt // 2, prompt), prompt, setup.device).flip(1)
        return {"input_ids": setup.tokens(model.config.vocab_size, count, prompt) * mask, "attention_mask": mask}

    following = batches(batch)

    def step() -> Tensor:
        with torch.no_grad():
            found: Tensor = model.generate(
                **following(), do_sample=False, max_new_tokens=new, min_new_tokens=new,
                cache_implementation="static", **options,
            )  # fmt: skip
        return found

    return Program(False, step)


LANGUAGE = named(
    [
        Known("gpt_train", "GPT of 124M in plain torch, bf16 autocast, 16 x 1024", gpt),
        Known("gpt_optimizer_train", "GPT of 124M, its optimizer's step compiled as well", gpt_and_optimizer),
        Known("bert_ones_train", "BERT-large MLM, mask of ones, 16 x 512", bert_ones, "transformers"),
        Known("bert_padded_train", "BERT-large MLM, right-padded, 16 x 512", bert_padded, "transformers"),
        Known("t5_train", "T5 base, right-padded, 16 x 512 to 128", t5, "transformers"),
        Known("llama_sft", "Llama of 1.2B, fine-tuning, right-padded, 2 x 2048", llama_tuned, "transformers"),
        Known("qwen_sft", "Qwen 3 of 0.6B, fine-tuning, right-padded, 4 x 1024", qwen_tuned, "transformers"),
        Known("llama_packed", "Llama of 1.2B, fine-tuning, packed, 1 x 4096", llama_packed, "transformers"),
        Known("whisper_train", "Whisper small, 8 x 30 s", whisper, "transformers"),
        Known("lfm2_sft", "LFM2 of 0.35B, short convolutions, fine-tuning, 4 x 2048", lfm2_tuned, "transformers"),
        Known("llama_generate", "Llama of 1.2B, generate, static cache, 8 x 32 tokens", llama_generate, "transformers"),
    ]
)
"""Programs by name."""
