"""One layer's attention as transformers hands it to torch under a compiler, and as autotune rewrites it.

    python -m benchmarks.attention --device cuda:0 --out benchmarks/results/h200/attention.json

A GPU in half precision. ``written_us`` is the call with the mask (or bias, or repeated keys) as it is traced, torch
choosing the kernel; ``chosen_us`` the call as rewritten, torch choosing; the others name the kernel that is asked for,
and are null where torch has none for that call. Training times are of forward and backward, without Inductor. Decoding
times are of the call alone, after a sweep that leaves the L2 cold. Medians of events, in microseconds.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as attention

from benchmarks import form

KERNELS = {
    "flash_us": SDPBackend.FLASH_ATTENTION,
    "cudnn_us": SDPBackend.CUDNN_ATTENTION,
    "efficient_us": SDPBackend.EFFICIENT_ATTENTION,
}
_SWEEP = 1 << 27
"""Numbers written between samples of decoding, several times what an L2 holds."""


@dataclass(frozen=True)
class Layer:
    """Attention of one layer.

    Attributes:
        hides: what the mask that is handed over hides: "nothing", "later", or "bias" for a learned bias behind one that
            hides nothing; "" for none.
        few: heads of the keys, each repeated for a group of queries; 0 for as many as of the queries.
    """

    batch: int
    heads: int
    queries: int
    keys: int
    width: int
    hides: str = "nothing"
    dropout: float = 0.0
    scale: float | None = None
    few: int = 0

    @property
    def decodes(self) -> bool:
        return self.queries == 1


LAYERS = {
    "bert_large_train": Layer(32, 16, 512, 512, 64, dropout=0.1),
    "bert_large_infer": Layer(64, 16, 512, 512, 64),
    "roberta_base_train": Layer(64, 12, 512, 512, 64, dropout=0.1),
    "gpt2_medium_train": Layer(16, 16, 1024, 1024, 64, "later", 0.1),
    "llama32_1b_train": Layer(4, 32, 2048, 2048, 64, "later"),
    "qwen3_17b_train": Layer(4, 16, 2048, 2048, 128, "later"),
    "mistral_7b_train": Layer(2, 32, 2048, 2048, 128, "later"),
    "t5_base_encoder": Layer(32, 12, 512, 512, 64, "bias", 0.1, 1.0),
    "t5_base_cross": Layer(32, 12, 128, 512, 64, dropout=0.1, scale=1.0),
    "clip_text": Layer(512, 8, 77, 77, 64, "later"),
    "vit_base": Layer(128, 12, 197, 197, 64, ""),
    "llama32_1b_decode": Layer(32, 32, 1, 2048, 64, few=8),
    "qwen3_17b_decode": Layer(32, 16, 1, 2048, 128, few=8),
    "mistral_7b_decode": Layer(16, 32, 1, 2048, 128, few=8),
    "mistral_7b_decode_long": Layer(1, 32, 1, 8192, 128, few=8),
}


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--only", nargs="+", default=list(LAYERS), choices=list(LAYERS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    from autotune.device import identify

    label = identify(args.device).label
    torch.cuda.set_device(args.device)
    torch.manual_seed(0)
    found = []
    for name in args.only:
        found.append({"name": name, **measured(LAYERS[name], args.device, args.rounds)})
        print(found[-1], flush=True)
    if args.out:
        form.write(args.out, label, found, extra={"suite": "attention"})
    return 0


def measured(layer: Layer, device: str, rounds: int) -> Mapping[str, float | None]:
    """Microseconds by way, :data:`KERNELS` and torch's own choices among them."""
    ways = decoding(layer, device) if layer.decodes else training(layer, device)
    found = {}
    for way, (call, kernel) in ways.items():
        try:
            with contextless(kernel), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found[way] = time_us(call, rounds, cold=layer.decodes)
        except RuntimeError:  # there is no such kernel for the call
            found[way] = None
        torch.cuda.empty_cache()
    return found


Ways = dict[str, tuple[Callable[[], object], SDPBackend | None]]


def contextless(kernel: SDPBackend | None) -> Any:
    every = [*KERNELS.values(), SDPBackend.MATH]
    return sdpa_kernel(every if kernel is None else [kernel])


def training(layer: Layer, device: str) -> Ways:
    q, k, v = (tensor(layer, layer.heads, n, device) for n in (layer.queries, layer.keys, layer.keys))
    gradient = torch.ones_like(q)
    bias = torch.randn(layer.queries, layer.keys, layer.heads, device=device, dtype=q.dtype, requires_grad=True)

    def step(mask: Callable[[], Tensor | None], causal: bool = False) -> Callable[[], object]:
        options = {"dropout_p": layer.dropout, "scale": layer.scale, "is_causal": causal}
        leaves = (q, k, v, bias) if layer.hides == "bias" else (q, k, v)
        return lambda: torch.autograd.grad(attention(q, k, v, attn_mask=mask(), **options), leaves, gradient)  # type: ignore[arg-type]

    place = torch.arange(layer.queries, device=device)
    written = {
        "": lambda: None,
        "nothing": lambda: (place[:, None] >= 0)[None, None].expand(layer.batch, 1, -1, layer.keys),
        "later": lambda: (place <= place[:, None])[None, None].expand(layer.batch, 1, -1, -1),
        "bias": lambda: bias.permute(2, 0, 1)[None].expand(layer.batch, -1, -1, -1),
    }[layer.hides]
    told = step((lambda: bias.permute(2, 0, 1).contiguous()[None]) if layer.hides == "bias" else lambda: None,
                causal=layer.hides == "later")  # fmt: skip
    kernels: Ways = {way: (told, kernel) for way, kernel in KERNELS.items()}
    return {"written_us": (step(written), None), "chosen_us": (told, None), **kernels}


def decoding(layer: Layer, device: str) -> Ways:
    group = layer.heads // layer.few
    q = tensor(layer, layer.heads, 1, device)
    k, v = (tensor(layer, layer.few, layer.keys, device).contiguous() for _ in range(2))
    seen = (torch.arange(layer.keys, device=device) < layer.keys // 2)[None, None, None].expand(layer.batch, 1, 1, -1)

    def repeated() -> object:
        many = [x[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2) for x in (k, v)]
        return attention(q, *many, attn_mask=seen)

    def positions() -> object:
        return attention(q.reshape(layer.batch, layer.few, group, -1), k, v, attn_mask=seen.expand(-1, -1, group, -1))

    def groups() -> object:
        return attention(q, k, v, attn_mask=seen, enable_gqa=True)

    calls = {"written_us": repeated, "positions_us": positions, "chosen_us": groups}
    ways: Ways = {way: (torch.no_grad()(call), None) for way, call in calls.items()}
    for way, kernel in KERNELS.items():
        ways[f"positions_{way}"] = (torch.no_grad()(positions), kernel)
        ways[way] = (torch.no_grad()(groups), kernel)
    return ways


def tensor(layer: Layer, heads: int, length: int, device: str) -> Tensor:
    made = torch.randn(layer.batch, length, heads, layer.width, device=device, dtype=torch.bfloat16)
    return made.transpose(1, 2).requires_grad_(not layer.decodes)


def time_us(call: Callable[[], object], rounds: int, cold: bool) -> float:
    sweep = torch.empty(_SWEEP if cold else 1, device="cuda")
    taken = []
    for _ in range(rounds + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        sweep.zero_()
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end) * 1e3)
    return round(statistics.median(taken[3:]), 1)


if __name__ == "__main__":
    raise SystemExit(main())
