"""Masks that come with the data at batches and lengths that are symbols, on a GPU: results, gradients and times.

    python tests/gpu/lengths_check.py --part check
    python tests/gpu/lengths_check.py --part step --models llama_1b qwen3_0.6b llama_packed

The part ``check`` compiles a function once, runs it at several batches and lengths, and compares with fp64. The part
``step`` trains a model on batches of 24 lengths, as a collator pads or packs them. In the first pass each length is
new, and kernels may be built for it. The way ``flash`` takes flash attention in place of
cuDNN's. The programs and masks are those of :mod:`tests.gpu.masks_check`.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from autotune.compiler.capture.attention import kernels, masks
from tests.gpu import masks_check
from tests.gpu.command import keep
from tests.gpu.masks_check import DOCUMENTS, KEYS, Family, apart, inputs, positions, reference, run, ways

SIZES = ((4, 333), (2, 512), (3, 2), (5, 129), (2, 1024), (3, 1), (4, 1025))
"""Batches and lengths in the order of the calls. Dynamo compiles a separate graph for a length of 1."""
SHAPES: dict[str, tuple[Family, tuple[int, int, int, bool, int]]] = {
    "encoder": (KEYS, (4, 4, 64, False, 0)),
    "decoder, groups": (KEYS, (8, 2, 128, True, 0)),
    "window": (KEYS, (8, 2, 128, True, 100)),
    "packed decoder, groups": (DOCUMENTS, (8, 2, 64, True, 0)),
    "packed encoder, 80 wide": (DOCUMENTS, (4, 4, 80, False, 0)),
}
"""Heads, heads of keys, head size, causal, window."""


def check(device: str, cases: str) -> Iterator[dict[str, Any]]:
    for name, (family, (heads, few, size, causal, window)) in SHAPES.items():
        if not name.startswith(cases):
            continue
        changed: list[int] = []
        torch._dynamo.reset()
        compiled = torch.compile(family.program, backend=ways(changed)["rewritten"])
        for batch, length in SIZES:
            shape = batch, heads, few, length, size, causal, window
            for kind in family.kinds:
                given, which = inputs(shape, device), family.make(kind, batch, length, device)
                grad = torch.randn(batch, length, heads, size, device=device, dtype=torch.bfloat16)
                if length > 1:
                    for tensor, axes in ((which, (0, 1)), *((x, (0, 2)) for x in given)):
                        for axis in axes:
                            torch._dynamo.mark_dynamic(tensor, axis)
                torch.full((1 << 26,), float("nan"), device=device)  # what the allocator hands out next
                want = reference(given, grad, family.seen(which), causal, window)
                with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                    written = apart(run(family.program, given, grad, which, causal, window, 0.0), want)
                error = apart(run(compiled, given, grad, which, causal, window, 0.0), want)
                right = error <= max(2 * written, 2.0**-6) and changed[0] == 1 and len(changed) <= 2
                yield {
                    "case": name, "mask": kind, "batch": batch, "length": length, "error": error,
                    "written": written, "changed": list(changed), "right": right,
                }  # fmt: skip


def step(name: str, device: str, passes: int) -> Iterator[dict[str, Any]]:
    make, batch, longest = masks_check.models()[name]
    packed = name.endswith("packed")
    lengths = [longest - 73 * n for n in range(24)]
    torch.manual_seed(0)
    with torch.device(device):
        model = make().to(torch.bfloat16).train()
    model.config.use_cache = model.config.use_cache and not packed
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True, capturable=True)
    batches = [of_length(length, batch, packed, device) for length in lengths]
    for way in ("written", "rewritten", *(() if packed else ("flash",))):
        changed: list[int] = []
        torch._dynamo.reset()
        backend = ways(changed)["written" if way == "written" else "rewritten"]
        compiled = torch.compile(model, backend=backend)

        def one(given: dict[str, Tensor], compiled: Callable[..., Any] = compiled) -> float:
            torch.cuda.synchronize()
            begin = time.perf_counter()
            optimizer.zero_grad(set_to_none=True)
            compiled(**given).loss.backward()
            optimizer.step()
            torch.cuda.synchronize()
            return (time.perf_counter() - begin) * 1e3

        longer = of_length(longest + 8, batch, packed, device)
        for tensor in longer.values():
            torch._dynamo.mark_dynamic(tensor, 1)
        force = functools.partial(mock.patch.object, masks, "kernel_of")
        with force(by_flash if way == "flash" else masks.kernel_of):
            begin = time.perf_counter()
            one(longer)
            seconds = time.perf_counter() - begin
        torch.cuda.reset_peak_memory_stats()
        taken = [[one(given) for given in batches] for _ in range(passes + 1)]
        later = [statistics.median(times) for times in zip(*taken[1:], strict=True)]
        yield {
            "model": name, "way": way, "changed": changed, "first_call_s": seconds, "first_pass_ms": sum(taken[0]),
            "pass_ms": sum(later), "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
            "by_length_ms": dict(zip(lengths, later, strict=True)),
        }  # fmt: skip


def by_flash(*call: Any) -> str | None:
    """Flash attention where the rule takes cuDNN's."""
    found = kernels.kernel_of(*call)
    return "flash" if found == "cudnn" else found


def of_length(length: int, batch: int, packed: bool, device: str) -> dict[str, Tensor]:
    ids = torch.randint(5, 30000, (batch, length), device=device)
    if packed:
        at = positions(masks_check.documents("7 texts", batch, length, device))
        return {"input_ids": ids, "position_ids": at, "labels": ids.clone()}
    seen = masks_check.valid_keys("right", batch, length, device)
    return {"input_ids": ids, "attention_mask": seen, "labels": torch.where(seen.bool(), ids, -100)}


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--part", choices=("check", "step"), default="check")
    parser.add_argument("--cases", default="", help="beginning of the names of the cases to check (default: all)")
    parser.add_argument("--models", nargs="+", default=["llama_1b", "qwen3_0.6b", "llama_packed"])
    parser.add_argument("--passes", type=int, default=3, help="passes over the lengths after the first one")
    args = parser.parse_args()
    torch.cuda.set_device(args.device)
    torch.manual_seed(0)
    if args.part == "check":
        kernels.LEAST_QUERIES = 0
        rows = check(args.device, args.cases)
    else:
        rows = (row for name in args.models for row in step(name, args.device, args.passes))
    found = []
    for row in rows:
        found.append(row)
        print(json.dumps(row), flush=True)
    keep(f"lengths_{args.part}", found)
    wrong = [row for row in found if not row.get("right", True)]
    print("wrong:", len(wrong), "of", len(found))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
