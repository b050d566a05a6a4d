"""Attention rewritten, on a GPU: results and gradients, and which kernels run.

    python tests/gpu/attention_check.py [--device cuda:0]

Each case is compiled by Inductor as it is written and after :func:`rewrite_attention`, in bf16, and compared with the
same formula in fp32 on the bf16 inputs. A case fails where the rewritten one is farther from that than twice what the
written one is, and than bf16 rounds. (Fused kernels round probabilities to bf16, the products in fp32 do not.) Prints
microseconds of forward and backward, and the kernel of attention.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
from torch import Tensor

from autotune.bench.kernels import is_library
from tests.gpu.command import keep

Case = tuple[Callable[..., Tensor], tuple[Tensor, ...]]
_ROUNDING = 2.0**-7


def heads(x: Tensor, times: int) -> Tensor:
    """Each head of ``x`` [B, H, S, D] ``times`` over, as transformers repeats keys and values."""
    b, h, s, d = x.shape
    return x[:, :, None].expand(b, h, times, s, d).reshape(b, h * times, s, d)


def ones(q: Tensor, keys: int) -> Tensor:
    """A mask that hides nothing, as transformers 5 makes it under a compiler: its last stride is 0."""
    b, _, s, _ = q.shape
    return (torch.arange(s, device=q.device)[None, None, :, None] >= 0).expand(b, -1, s, keys)


def later(q: Tensor) -> Tensor:
    b, _, s, _ = q.shape
    place = torch.arange(s, device=q.device)
    return (place[None, None, None, :] <= place[None, None, :, None]).expand(b, -1, s, s)


def encoder(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=ones(q, k.shape[2])).transpose(1, 2).contiguous()


def decoder(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    times = q.shape[1] // k.shape[1]
    k, v = (heads(x, times) if times > 1 else x for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=later(q)).transpose(1, 2).contiguous()


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    mask = torch.where(ones(q, k.shape[2]), bias.permute(2, 0, 1)[None], torch.finfo(q.dtype).min)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0).transpose(1, 2).contiguous()


def given(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    whole = mask[:, None, :, None].expand(-1, 1, -1, k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=whole).transpose(1, 2).contiguous()


def one_token(q: Tensor, k: Tensor, v: Tensor, count: Tensor) -> Tensor:
    seen = (torch.arange(k.shape[2], device=q.device) < count)[None, None, None, :].expand(q.shape[0], 1, 1, -1)
    times = q.shape[1] // k.shape[1]
    out = F.scaled_dot_product_attention(q, heads(k, times), heads(v, times), attn_mask=seen)
    return out.transpose(1, 2).contiguous()


def cases(device: str) -> dict[str, Case]:
    def qkv(b: int, h: int, few: int, s: int, keys: int, d: int) -> tuple[Tensor, ...]:
        def made(heads: int, length: int) -> Tensor:
            return torch.randn(b, length, heads, d, device=device, dtype=torch.bfloat16).transpose(1, 2)

        return made(h, s), made(few, keys), made(few, keys)

    def bias(s: int, h: int) -> Tensor:
        return torch.randn(s, s, h, device=device, dtype=torch.bfloat16)

    count, padding = torch.tensor(700, device=device), torch.ones(8, 256, dtype=torch.bool, device=device)
    return {
        "encoder": (encoder, qkv(8, 12, 12, 512, 512, 64)),
        "cross": (encoder, qkv(8, 12, 12, 128, 512, 64)),
        "odd lengths": (encoder, qkv(8, 4, 4, 77, 131, 64)),
        "decoder": (decoder, qkv(4, 16, 16, 1024, 1024, 64)),
        "decoder, groups of 4": (decoder, qkv(4, 32, 8, 1024, 1024, 64)),
        "decoder, groups of 2, 128 wide": (decoder, qkv(4, 16, 8, 1024, 1024, 128)),
        "decoder, groups, 256 wide": (decoder, qkv(2, 8, 4, 512, 512, 256)),
        "decoder, 77 long": (decoder, qkv(32, 8, 8, 77, 77, 64)),
        "bias": (biased, (*qkv(8, 12, 12, 512, 512, 64), bias(512, 12))),
        "bias, 100 long": (biased, (*qkv(8, 12, 12, 100, 100, 64), bias(100, 12))),
        "mask given": (given, (*qkv(8, 12, 12, 256, 256, 64), padding)),
        "one token": (one_token, (*qkv(16, 32, 8, 1, 1024, 64), count)),
        "one token, 128 wide": (one_token, (*qkv(16, 16, 8, 1, 1000, 128), count)),
    }


def results(run: Callable[..., Tensor], inputs: Sequence[Tensor], train: bool) -> list[Tensor]:
    """The result, and where ``train`` its gradients by every input of numbers, for gradients that are a ramp."""
    found = run(*inputs)
    if not train:
        return [found.detach()]
    leaves = [x for x in inputs if x.requires_grad]
    ramp = torch.linspace(-1, 1, found.numel(), device=found.device, dtype=found.dtype).view(found.shape)
    return [found.detach(), *torch.autograd.grad(found, leaves, ramp)]


def error(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """The root mean square of a result's errors over that of the result itself, of the worst of the results."""
    pairs = zip(got, want, strict=True)
    return max(float(((a.float() - b).square().mean() / b.square().mean()).sqrt()) for a, b in pairs)


def time_us(call: Callable[[], Any]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    taken = []
    for _ in range(8):
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end) * 1e3)
    return sorted(taken)[4]


def kernels(call: Callable[[], Any]) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as traced:
        call()
        torch.cuda.synchronize()
    return sorted({e.key[:60] for e in traced.key_averages() if is_library(e.key)})


def check(name: str, case: Case) -> dict[str, Any]:
    from torch._inductor.compile_fx import compile_fx

    from autotune.compiler.capture.attention import rewrite_attention

    fn, inputs = case
    train = "token" not in name
    changed: list[int] = []

    def rewritten(gm: Any, examples: Sequence[Any]) -> Any:
        changed.append(rewrite_attention(gm))
        return compile_fx(gm, list(examples))

    if train:
        inputs = tuple(x.detach().requires_grad_(x.is_floating_point()) for x in inputs)
    wide = tuple(x.detach().float().requires_grad_(train) if x.is_floating_point() else x for x in inputs)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        want = results(fn, wide, train)
    found: dict[str, Any] = {"case": name}
    for way, backend in (("written", "inductor"), ("rewritten", rewritten)):
        torch._dynamo.reset()
        run = torch.compile(fn, backend=backend, dynamic=False)
        found[f"{way}_error"] = error(results(run, inputs, train), want)
        found[f"{way}_us"] = time_us(lambda run=run: results(run, inputs, train))  # type: ignore[misc]
        found[f"{way}_kernels"] = kernels(lambda run=run: results(run, inputs, train))  # type: ignore[misc]
    found["changed"] = changed
    found["right"] = found["rewritten_error"] <= max(2 * found["written_error"], _ROUNDING) and changed == [1]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda:0")
    args = parser.parse_args()
    torch.cuda.set_device(args.device)
    torch.manual_seed(0)
    found = []
    for name, case in cases(args.device).items():
        try:
            one = check(name, case)
        except Exception as failure:
            one = {"case": name, "right": False, "failed": repr(failure)[:300]}
        found.append(one)
        print("ok   " if one["right"] else "WRONG", {k: v for k, v in one.items() if k != "right"}, flush=True)
    keep("attention_check", found)
    return 0 if all(one["right"] for one in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
