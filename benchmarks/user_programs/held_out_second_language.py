"""Language models of the second set of programs that autotune was not developed with."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F

from benchmarks.user_programs.language import IGNORED, from_config
from benchmarks.user_programs.program import Program, Setup, batches, decayed, lengths, library, right_padded

# A mixture of experts


class Experts(nn.Module):
    """Perceptrons whose weights share two tensors."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, width, 4 * width) * 0.02)
        self.down = nn.Parameter(torch.randn(experts, 4 * width, width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [experts, N, C]."""
        return torch.bmm(F.gelu(torch.bmm(x, self.up)), self.down)


class Mixture(nn.Module):
    """Two of several experts a token; an expert drops tokens beyond its capacity."""

    def __init__(self, width: int, experts: int, chosen: int = 2, factor: float = 1.25) -> None:
        super().__init__()
        self.count, self.chosen, self.factor = experts, chosen, factor
        self.router, self.experts = nn.Linear(width, experts, bias=False), Experts(experts, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``x`` [B, T, C]; returns the same shape, and the loss of the router."""
        batch, length, width = x.shape
        capacity = int(self.factor * self.chosen * length / self.count)
        with torch.autocast(x.device.type, enabled=False):
            logits = self.router(x.float())
        shares = logits.softmax(dim=-1)
        weights, index = shares.topk(self.chosen, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        mask = F.one_hot(index, self.count)  # [B, T, chosen, experts]

        # First choices of all tokens take places before second choices.
        ordered = mask.transpose(1, 2).reshape(batch, self.chosen * length, self.count)
        places = (ordered.cumsum(dim=1) - 1).view(batch, self.chosen, length, self.count).transpose(1, 2)
        kept = mask * (places < capacity)
        slots = F.one_hot((places * kept).sum(dim=-1), capacity)
        combine = (weights[..., None, None] * kept[..., None] * slots[..., None, :]).sum(dim=2)
        dispatch = (combine > 0).to(x.dtype)

        given = torch.einsum("btec,btd->ebcd", dispatch, x).reshape(self.count, batch * capacity, width)
        made = self.experts(given).view(self.count, batch, capacity, width)
        found = torch.einsum("btec,ebcd->btd", combine.to(made.dtype), made)
        balance = self.count * (mask[:, :, 0].float().mean(dim=1) * shares.mean(dim=1)).sum(dim=-1).mean()
        return found, 0.01 * balance + 0.001 * logits.logsumexp(dim=-1).square().mean()


class SparseBlock(nn.Module):
    """A layer of GPT-2's kind with a mixture of experts."""

    def __init__(self, width: int, heads: int, experts: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mixture = Mixture(width, experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``x`` [B, T, C]; returns the same shape, and the loss of the router."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).split(width, dim=2)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        mixed, loss = self.mixture(self.norm_2(x))
        return x + mixed, loss


class SparseGPT(nn.Module):
    """A decoder of such layers; the head shares the embedding's weight."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, layers: int, experts: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(SparseBlock(width, heads, experts) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """``ids``, ``targets`` [B, T]; returns logits and loss."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        routed = x.new_zeros((), dtype=torch.float32)
        for block in self.blocks:
            x, loss = block(x)
            routed = routed + loss
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1) + routed


def moe(setup: Setup) -> Program:
    """Pretraining: fp32 weights, bf16 autocast, fused AdamW, clipping."""
    count, length, vocabulary = setup.size((8, 1024, 50304), (2, 16, 64))
    with torch.device(setup.device):
        model = SparseGPT(vocabulary, length, *setup.size((768, 12, 12, 8), (32, 2, 2, 4)))
    optimizer = torch.optim.AdamW(decayed(model), lr=3e-4, betas=(0.9, 0.95), fused=True, capturable=setup.capturable)
    compiled = setup.compile(model)
    following = batches(lambda: setup.tokens(vocabulary, count, length + 1))

    def step() -> Tensor:
        ids = following()
        with setup.autocast():
            _, loss = compiled(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found: Tensor = loss
        return found

    return Program(True, step)


# Preferences


def log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    """Sums over the tokens that have labels; ``logits`` [B, T, V], ``labels`` [B, T], returns [B]."""
    logits, labels = logits[:, :-1], labels[:, 1:]
    mask = labels != IGNORED
    each = logits.float().log_softmax(dim=-1).gather(2, labels.masked_fill(~mask, 0).unsqueeze(2)).squeeze(2)
    return (each * mask).sum(dim=-1)


def dpo(setup: Setup) -> Program:
    """Direct preference optimization of a Llama of 0.5B in bf16: chosen texts, then rejected ones, in one batch."""
    width, layers, heads, groups, inner, vocabulary = setup.size((1024, 24, 16, 8, 4096, 128256), (32, 2, 4, 2, 64, 64))
    config = library("transformers").LlamaConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=groups,
        intermediate_size=inner, vocab_size=vocabulary, max_position_embeddings=setup.size(8192, 256),
        tie_word_embeddings=True, use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = from_config(setup, "AutoModelForCausalLM", config, setup.half()).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-7, fused=True, capturable=setup.capturable)
    compiled, scored = setup.compile(model), setup.compile(log_probabilities)
    pairs, length = setup.size((4, 1024), (2, 16))
    beta = 0.1

    def batch() -> tuple[Tensor, ...]:
        prompts = lengths(pairs, length // 8, length // 4) * 2
        given = lengths(pairs, length // 2, length) + lengths(pairs, length // 2, length)
        mask, asked = (right_padded(part, length, setup.device) for part in (given, prompts))
        ids = setup.tokens(vocabulary, 2 * pairs, length) * mask
        ids[pairs:] = torch.where(asked[pairs:] == 1, ids[:pairs], ids[pairs:])
        labels = ids.masked_fill((mask == 0) | (asked == 1), IGNORED)
        counted = (labels != IGNORED).sum(dim=1)
        return ids, mask, labels, torch.randn(2 * pairs, device=setup.device) - math.log(vocabulary) * counted

    following = batches(batch)

    def step() -> Tensor:
        ids, mask, labels, reference = following()
        scores = scored(compiled(input_ids=ids, attention_mask=mask).logits, labels)
        chosen, rejected = (scores - reference).chunk(2)
        loss: Any = -F.logsigmoid(beta * (chosen - rejected)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found: Tensor = loss
        return found

    return Program(True, step)


# A Llama in plain torch


def rotary(length: int, width: int, theta: float = 10_000.0) -> Tensor:
    """Complex numbers [length, width / 2] that rotate queries and keys."""
    angles = torch.outer(torch.arange(length).float(), theta ** -(torch.arange(0, width, 2).float() / width))
    return torch.polar(torch.ones_like(angles), angles)


def rotated(x: Tensor, rotations: Tensor) -> Tensor:
    """``x`` [B, T, heads, width], ``rotations`` [T, width / 2]."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotations[None, : x.shape[1], None]).flatten(3).type_as(x)


class RotaryBlock(nn.Module):
    """A layer of Llama's kind."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.w1, self.w3 = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, rotations: Tensor) -> Tensor:
        """``x`` [B, T, C]."""
        h = self.norm_1(x)
        q, k, v = (part(h).view(*x.shape[:2], self.heads, -1) for part in (self.wq, self.wk, self.wv))
        q, k = rotated(q, rotations), rotated(k, rotations)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(attended.transpose(1, 2).contiguous().view(x.shape))
        h = self.norm_2(x)
        found: Tensor = x + self.w2(F.silu(self.w1(h)) * self.w3(h))
        return found


class Decoder(nn.Module):
    """A decoder of such layers."""

    rotations: Tensor

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, inner: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.register_buffer("rotations", rotary(length, width // heads), persistent=False)
        self.layers = nn.ModuleList(RotaryBlock(width, heads, inner) for _ in range(layers))
        self.norm, self.output = nn.RMSNorm(width, eps=1e-5), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """``ids`` [B, T]."""
        h = self.tokens(ids)
        for layer in self.layers:
            h = layer(h, self.rotations)
        found: Tensor = self.output(self.norm(h))
        return found


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over all tokens, in float32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


def titan(setup: Setup) -> Program:
    """Pretraining as by torchtitan: layers and loss compiled one by one, every second layer recomputed."""
    count, length, vocabulary = setup.size((4, 2048, 32_000), (2, 16, 64))
    with torch.device(setup.device):
        model = Decoder(vocabulary, length, *setup.size((1024, 16, 2816, 16), (32, 2, 64, 4)))
    for name, layer in list(model.layers.named_children()):
        wrapped = checkpoint_wrapper(layer, preserve_rng_state=False) if int(name) % 2 == 0 else layer
        model.layers.register_module(name, setup.compile(wrapped, fullgraph=True))
    loss_of = setup.compile(cross_entropy)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=8e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True, capturable=setup.capturable
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 200))
    following = batches(lambda: setup.tokens(vocabulary, count, length + 1))

    def step() -> Tensor:
        ids = following()
        optimizer.zero_grad()
        with setup.autocast():
            loss = loss_of(model(ids[:, :-1]), ids[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        schedule.step()
        found: Tensor = loss
        return found

    return Program(True, step)
