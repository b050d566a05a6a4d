"""Built-in targets of ``autotune search fusion NAME``, with input sizes for CPUs and for GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autotune.workload import Workload

EPS = 1e-6


@dataclass(frozen=True)
class Size:
    """Shape of the main input, and the dtype of all float tensors."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        short = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}[self.dtype]
        return f"{short} {'x'.join(map(str, self.shape))}"


@dataclass(frozen=True)
class BuiltinTarget:
    """A named function or module.

    Attributes:
        about: one-line description for ``autotune workloads``.
        sizes: sizes by preset: "cpu" (a few MB) and "gpu" (the size for measurements on GPUs).
        make: makes the callable for a size and a device.
        inputs: makes its positional arguments for a size and a device; random, with fixed seeds.
    """

    about: str
    sizes: Mapping[str, Size]
    make: Callable[[Size, str], Callable[..., Any]]
    inputs: Callable[[Size, str], tuple[Tensor, ...]]

    def size(self, device: str) -> Size:
        """The preset for a device ("cpu", "cuda:0")."""
        return self.sizes["cpu" if device.startswith("cpu") else "gpu"]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return h.to(x.dtype) * weight


def softmax_mask(x: Tensor, mask: Tensor) -> Tensor:
    """Attention probabilities for head size 64; ``x`` is [B, S, T], ``mask`` [1, S, T]."""
    return torch.softmax(x * 0.125 + mask, -1)


def bias_gelu_residual_layer_norm(x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
    return F.layer_norm(F.gelu(x + bias) + residual, x.shape[-1:], weight, shift)


def swiglu_rms_norm(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(F.silu(gate) * up, weight)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Loss per row, [N], in float32."""
    x = logits.float()
    loss: Tensor = torch.logsumexp(x, -1) - x.gather(1, target[:, None])[:, 0]
    return loss


class BertLayer(nn.Module):
    """One encoder layer of BERT-base: attention, then feed-forward, each followed by a residual and a layer norm."""

    def __init__(self, hidden: int = 768, heads: int = 12) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.attention_out = nn.Linear(hidden, hidden)
        self.attention_norm = nn.LayerNorm(hidden, eps=1e-12)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)
        self.norm = nn.LayerNorm(hidden, eps=1e-12)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        """``x`` is [B, S, hidden]; ``attention_mask`` [B, S] holds 1 for tokens and 0 for padding."""
        batch, length, hidden = x.shape
        mask = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        q, k, v = (
            f(x).view(batch, length, self.heads, hidden // self.heads).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        attended = attended.transpose(1, 2).reshape(batch, length, hidden)
        x = self.attention_norm(x + self.dropout(self.attention_out(attended)))
        out: Tensor = self.norm(x + self.dropout(self.down(F.gelu(self.up(x)))))
        return out


def _randn(seed: int, device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    rng = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(shape, generator=rng, device=device, dtype=torch.float32).to(dtype)


def _fn(fn: Callable[..., Tensor]) -> Callable[[Size, str], Callable[..., Any]]:
    return lambda size, device: fn


def _random(*shapes: str) -> Callable[[Size, str], tuple[Tensor, ...]]:
    """Random tensors, one per name: "full" (the main shape), "row" (its last extent) and "one" (first extent 1)."""

    def make(size: Size, device: str) -> tuple[Tensor, ...]:
        of = {"full": size.shape, "row": size.shape[-1:], "one": (1, *size.shape[1:])}
        return tuple(_randn(k, device, size.dtype, *of[s]) for k, s in enumerate(shapes))

    return make


def _cross_entropy_inputs(size: Size, device: str) -> tuple[Tensor, ...]:
    rng = torch.Generator(device=device).manual_seed(1)
    target = torch.randint(0, size.shape[1], size.shape[:1], generator=rng, device=device)
    return _randn(0, device, size.dtype, *size.shape), target


def _bert(size: Size, device: str) -> nn.Module:
    # The weights are random but fixed; the caller's random state is preserved.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = BertLayer(size.shape[-1])
    return layer.to(device=device, dtype=size.dtype).eval().requires_grad_(False)


def _bert_inputs(size: Size, device: str) -> tuple[Tensor, ...]:
    batch, length, _ = size.shape
    lengths = length - torch.arange(batch, device=device) * (length // (2 * batch))
    mask = (torch.arange(length, device=device)[None] < lengths[:, None]).to(torch.int64)
    return _randn(0, device, size.dtype, *size.shape), mask


def _sizes(cpu: tuple[int, ...], gpu: tuple[int, ...], dtype: torch.dtype) -> dict[str, Size]:
    return {"cpu": Size(cpu, torch.float32), "gpu": Size(gpu, dtype)}


_F32, _BF16 = torch.float32, torch.bfloat16
_BGRL = ("full", "row", "full", "row", "row")

BUILTIN: Mapping[str, BuiltinTarget] = {
    "layer_norm": BuiltinTarget(
        "layer normalisation with weight and bias",
        _sizes((2048, 1024), (16384, 1024), _F32),
        _fn(layer_norm),
        _random("full", "row", "row"),
    ),
    "rms_norm": BuiltinTarget(
        "root mean square normalisation, computed in float32",
        _sizes((1024, 2048), (8192, 8192), _BF16),
        _fn(rms_norm),
        _random("full", "row"),
    ),
    "softmax_mask": BuiltinTarget(
        "softmax(scale * x + mask), the mask shared by all of the batch",
        _sizes((12, 256, 256), (384, 512, 512), _F32),
        _fn(softmax_mask),
        _random("full", "one"),
    ),
    "bias_gelu_residual_layer_norm": BuiltinTarget(
        "layer_norm(gelu(x + bias) + residual)",
        _sizes((1024, 1024), (8192, 4096), _BF16),
        _fn(bias_gelu_residual_layer_norm),
        _random(*_BGRL),
    ),
    "bias_gelu_residual_layer_norm_f32": BuiltinTarget(
        "the same in float32 with rows of 768",
        _sizes((1024, 768), (8192, 768), _F32),
        _fn(bias_gelu_residual_layer_norm),
        _random(*_BGRL),
    ),
    "swiglu_rms_norm": BuiltinTarget(
        "rms_norm(silu(gate) * up)",
        _sizes((512, 3584), (4096, 14336), _BF16),
        _fn(swiglu_rms_norm),
        _random("full", "full", "row"),
    ),
    "cross_entropy": BuiltinTarget(
        "cross entropy of every row against a target index",
        _sizes((128, 16032), (2048, 128256), _BF16),
        _fn(cross_entropy),
        _cross_entropy_inputs,
    ),
    "bert_layer": BuiltinTarget(
        "all memory-intensive regions of one BERT-base encoder layer, inference",
        _sizes((8, 128, 768), (32, 512, 768), _BF16),
        _bert,
        _bert_inputs,
    ),
}


_SAMPLE_COLUMNS = 256


def sample_region(rows: int) -> Workload:
    """``x * x.sum(-1, keepdim=True)`` of ``rows`` rows of fp32 numbers, with its program.

    The processes of a search in a program import what they need by it, before the program's first region.
    """
    shape, strides, dtype = [rows, _SAMPLE_COLUMNS], [_SAMPLE_COLUMNS, 1], "float32"
    whole = {"dtype": dtype, "axes": [0, 1]}
    spec = {
        "extents": shape,
        "values": [
            {"op": "load", **whole, "strides": strides, "slot": 0},
            {"op": "sum", "dtype": dtype, "args": [0], "axes": [0], "over": [1]},
            {"op": "mul", **whole, "args": [0, 1]},
        ],
        "inputs": [dtype],
        "outputs": [{"value": 2, **whole, "strides": strides, "offset": 0}],
    }
    calls: list[dict[str, Any]] = [
        {"op": "aten.sum.dim_IntList", "args": [{"node": 0}, [-1], True]},
        {"op": "aten.mul.Tensor", "args": [{"node": 0}, {"node": 1}]},
    ]
    source = {
        "format": 1,
        "inputs": [{"shape": shape, "strides": strides, "dtype": dtype, "device": "cuda"}],
        "calls": [{**call, "of": call["op"]} for call in calls],
        "result": [{"node": 2}],
        "slots": [0],
    }
    return Workload("fusion", spec, label=f"sample of {rows} rows", source=source)
