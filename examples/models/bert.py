"""BERT-base: pre-training step (masked tokens and next sentence) and inference (pooled output).

32 sequences of 128 tokens, the first phase of the original's pre-training; 20 masked tokens a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.models.family import Family, lengths, tokens


@dataclass(frozen=True)
class Config:
    batch: int = 32
    length: int = 128
    masked: int = 20
    layers: int = 12
    hidden: int = 768
    heads: int = 12
    vocabulary: int = 30522
    dropout: float = 0.1
    dtype: torch.dtype = torch.bfloat16


class Layer(nn.Module):
    """Attention, then feed-forward, each with a residual and a layer norm after it."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads, self.p = c.heads, c.dropout
        self.qkv = nn.Linear(c.hidden, 3 * c.hidden)
        self.attention_out = nn.Linear(c.hidden, c.hidden)
        self.attention_norm = nn.LayerNorm(c.hidden, eps=1e-12)
        self.up = nn.Linear(c.hidden, 4 * c.hidden)
        self.down = nn.Linear(4 * c.hidden, c.hidden)
        self.norm = nn.LayerNorm(c.hidden, eps=1e-12)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """``x`` is [B, S, hidden]; ``mask`` [B, 1, 1, S] is 0 for tokens and very negative for padding."""
        b, s, hidden = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.heads, hidden // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=self.p if self.training else 0.0)
        attended = attended.transpose(1, 2).reshape(b, s, hidden)
        x = self.attention_norm(x + self.dropout(self.attention_out(attended)))
        out: Tensor = self.norm(x + self.dropout(self.down(F.gelu(self.up(x)))))
        return out


class Encoder(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.word = nn.Embedding(c.vocabulary, c.hidden)
        self.position = nn.Embedding(c.length, c.hidden)
        self.segment = nn.Embedding(2, c.hidden)
        self.norm = nn.LayerNorm(c.hidden, eps=1e-12)
        self.dropout = nn.Dropout(c.dropout)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.layers))
        self.pooler = nn.Linear(c.hidden, c.hidden)

    def forward(self, ids: Tensor, segments: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """``ids`` and ``segments`` [B, S]; ``valid`` [B, S] is 1 for tokens and 0 for padding.

        Returns:
            The last layer's output, [B, S, hidden], and the pooled first token, [B, hidden].
        """
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.dropout(self.norm(self.word(ids) + self.position(positions) + self.segment(segments)))
        mask = (1.0 - valid[:, None, None, :].to(x.dtype)) * -10000.0
        mask = mask.expand(-1, 1, ids.shape[1], -1)
        for layer in self.layers:
            x = layer(x, mask)
        return x, torch.tanh(self.pooler(x[:, 0]))


class Pretraining(nn.Module):
    """The loss of masked tokens plus that of the next sentence."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.encoder = Encoder(c)
        self.transform = nn.Linear(c.hidden, c.hidden)
        self.norm = nn.LayerNorm(c.hidden, eps=1e-12)
        self.decoder = nn.Linear(c.hidden, c.vocabulary)
        self.decoder.weight = self.encoder.word.weight
        self.next_sentence = nn.Linear(c.hidden, 2)

    def forward(
        self, ids: Tensor, segments: Tensor, valid: Tensor, where: Tensor, labels: Tensor, follows: Tensor
    ) -> Tensor:
        """``where`` [M] are the masked tokens' places in the flattened batch, ``labels`` [M] what they were."""
        x, pooled = self.encoder(ids, segments, valid)
        masked = x.flatten(0, 1).index_select(0, where)
        logits = self.decoder(self.norm(F.gelu(self.transform(masked))))
        return F.cross_entropy(logits.float(), labels) + F.cross_entropy(self.next_sentence(pooled).float(), follows)


def build(c: Config, train: bool) -> nn.Module:
    return Pretraining(c) if train else Encoder(c)


def batch(c: Config, train: bool, device: str) -> tuple[Tensor, ...]:
    ids = tokens(device, (c.batch, c.length), c.vocabulary)
    place = torch.arange(c.length, device=device)
    segments = (place >= c.length // 2).long().expand(c.batch, -1).contiguous()
    valid = (place < lengths(device, c.batch, c.length)[:, None]).long()
    if not train:
        return ids, segments, valid
    first = torch.arange(c.batch, device=device)[:, None] * c.length
    step = c.length // (2 * c.masked)
    where = (first + torch.arange(c.masked, device=device) * step).flatten()
    labels = tokens(device, (c.batch * c.masked,), c.vocabulary, seed=1)
    return ids, segments, valid, where, labels, tokens(device, (c.batch,), 2, seed=2, low=0)


FAMILY = Family(
    {
        "gpu": Config(),
        "cpu": Config(batch=2, length=16, masked=2, layers=2, hidden=48, heads=4, vocabulary=211, dtype=torch.float32),
    },
    build,
    batch,
    ("train", "infer"),
)
__getattr__ = FAMILY.target
