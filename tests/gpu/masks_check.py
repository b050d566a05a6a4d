"""Masks that come with the data, on a GPU: results, gradients and times.

    python tests/gpu/masks_check.py --part check     # results and gradients against fp64
    python tests/gpu/masks_check.py --part check --masks documents
    python tests/gpu/masks_check.py --part time      # microseconds of one attention, forward and backward
    python tests/gpu/masks_check.py --part step --models bert_large --lock FILE

Each function takes queries, keys, values and a mask of keys ``[B, S]``, or numbers of documents. Inductor compiles it
as it is written and after :func:`rewrite_attention`. A step is one of training: forward, backward and fused AdamW.
Nothing else is rewritten, and no stored kernel runs, so a ratio is what masks alone bring. Times are by replays of a
CUDA graph, and of steps launched from Python, in turn; ``--lock`` keeps several processes from timing at once.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
from torch import Tensor

from autotune.compiler.capture.attention import kernels, masks, rewrite_attention
from tests.gpu.command import keep

SHAPES: dict[str, tuple[int, int, int, int, int, bool, int]] = {
    "bert": (16, 16, 16, 512, 64, False, 0),
    "encoder 2048": (4, 14, 14, 2048, 64, False, 0),
    "llama": (4, 32, 8, 2048, 128, True, 0),
    "qwen": (4, 16, 8, 2048, 128, True, 0),
    "gpt": (16, 12, 12, 1024, 64, True, 0),
    "window": (4, 32, 8, 2048, 128, True, 512),
}
"""Batch, heads, heads of keys, length, head size, causal, window."""
PACKED: dict[str, tuple[int, int, int, int, int, bool, int]] = {
    "packed": (1, 32, 8, 4096, 64, True, 0),
    "packed, 128 wide": (1, 32, 8, 4096, 128, True, 0),
    "packed, 4 rows": (4, 14, 2, 2048, 64, True, 0),
    "packed encoder": (4, 16, 16, 2048, 64, False, 0),
}
SMALL: dict[str, tuple[int, int, int, int, int, bool, int]] = {
    "encoder": (4, 4, 4, 200, 64, False, 0),
    "encoder, groups": (4, 8, 2, 256, 128, False, 0),
    "encoder, 80 wide": (3, 4, 4, 131, 80, False, 0),
    "decoder": (4, 4, 4, 333, 64, True, 0),
    "decoder, groups": (4, 8, 2, 512, 128, True, 0),
    "window": (4, 8, 2, 512, 128, True, 100),
}
BANDS: dict[str, tuple[int, int, int, int, int, bool, int]] = {
    "window on both sides": (8, 12, 12, 1024, 64, False, 128),
    "window on both sides, 4096": (2, 12, 12, 4096, 64, False, 128),
}
SMALL_PACKED: dict[str, tuple[int, int, int, int, int, bool, int]] = {
    "packed decoder": (2, 4, 4, 333, 64, True, 0),
    "packed decoder, groups": (2, 8, 2, 512, 128, True, 0),
    "packed decoder, 80 wide": (1, 4, 4, 600, 80, True, 0),
    "packed encoder": (3, 8, 2, 400, 64, False, 0),
}


def valid_keys(kind: str, batch: int, length: int, device: str) -> Tensor:
    """int64 [B, S], 1 where a key is seen; 62% of them in a batch that is padded on one side."""
    share = torch.linspace(0.24, 1.0, batch, device=device)
    count = (share * length).round().long()[:, None]
    place = torch.arange(length, device=device)[None, :]
    made = torch.ones(batch, length, device=device, dtype=torch.int64)
    if kind == "right":
        made = (place < count).long()
    elif kind == "left":
        made = (place >= length - count).long()
    elif kind == "holes":
        made = (torch.rand(batch, length, device=device) < 0.6).long()
        made[0] = 1
    elif kind == "empty":
        made[0] = 0
    return made


def attention(q: Tensor, k: Tensor, v: Tensor, given: Tensor, causal: bool, window: int, p: float) -> Tensor:
    """As transformers 5 makes the mask under a compiler."""
    b, h, s, d = q.shape
    place = torch.arange(s, device=q.device)
    rows, cols = place[None, None, :, None], place[None, None, None, :]
    mask = given.bool()[torch.arange(b, device=q.device)[:, None, None, None], cols] & (rows >= 0)
    if causal:
        mask = mask & (cols <= rows)
    if window:
        mask = mask & (cols > rows - window)
    k, v = (x[:, :, None].expand(b, x.shape[1], h // x.shape[1], s, d).reshape(b, h, s, d) for x in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.expand(b, 1, s, s), dropout_p=p)
    return out.transpose(1, 2).contiguous()


def ways(changed: list[int]) -> dict[str, Any]:
    from torch._inductor.compile_fx import compile_fx

    def rewritten(gm: Any, examples: Sequence[Any]) -> Any:
        changed.append(rewrite_attention(gm))
        return compile_fx(gm, list(examples))

    def by_spans(gm: Any, examples: Sequence[Any]) -> Any:
        force = functools.partial(mock.patch.object, masks)
        with force("kernel_of", return_value=None), force("has_row_spans", return_value=True):
            return rewritten(gm, examples)

    return {"written": "inductor", "rewritten": rewritten, "spans": by_spans}


def inputs(shape: tuple[int, ...], device: str) -> list[Tensor]:
    b, h, few, s, d = shape[:5]
    made = (torch.randn(b, s, n, d, device=device, dtype=torch.bfloat16).transpose(1, 2) for n in (h, few, few))
    return [x.requires_grad_() for x in made]


def run(fn: Callable[..., Tensor], given: Sequence[Tensor], grad: Tensor, *rest: Any) -> list[Tensor]:
    out = fn(*given, *rest)
    return [out.detach(), *torch.autograd.grad(out, given, grad)]


def by_documents(q: Tensor, k: Tensor, v: Tensor, given: Tensor, causal: bool, window: int, p: float) -> Tensor:
    """The same for numbers of documents ``[B, S]``."""
    b, h, s, d = q.shape
    place = torch.arange(s, device=q.device)
    mask = (given[:, :, None] == given[:, None, :])[:, None]
    if causal:
        mask = mask & (place <= place[:, None])
    k, v = (x[:, :, None].expand(b, x.shape[1], h // x.shape[1], s, d).reshape(b, h, s, d) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p).transpose(1, 2).contiguous()


def by_windows(q: Tensor, k: Tensor, v: Tensor, given: Tensor, causal: bool, window: int, p: float) -> Tensor:
    """With keys of a window on both sides, and a mask of keys."""
    s = q.shape[2]
    place = torch.arange(s, device=q.device)
    mask = ((place - place[:, None]).abs() <= window // 2) & given.bool()[:, None, None, :]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p, enable_gqa=True)
    return out.transpose(1, 2).contiguous()


def documents(kind: str, batch: int, length: int, device: str) -> Tensor:
    """int64 [B, S], the number of each position's document."""
    place = torch.arange(length, device=device).expand(batch, length)
    ends = torch.tensor([0.17, 0.22, 0.56, 0.67, 0.76, 0.98], device=device) * length
    several = (place[..., None] >= ends).sum(-1)
    made = {
        "one text": torch.zeros_like(place),
        "7 texts": several,
        "short texts": place * 16 // length,
        "padded": torch.where(place >= 0.8 * length, -1, several),
        "apart": several % 3,
        "holes": place % 3,
    }
    return made[kind].contiguous()


@dataclass(frozen=True)
class Family:
    """Masks of one kind: those that are checked and timed, the program, and a query's visible keys."""

    kinds: tuple[str, ...]
    timed: tuple[str, ...]
    make: Callable[[str, int, int, str], Tensor]
    program: Callable[..., Tensor]
    small: dict[str, tuple[int, int, int, int, int, bool, int]]
    shapes: dict[str, tuple[int, int, int, int, int, bool, int]]
    seen: Callable[[Tensor], Tensor]
    dropout: bool


KEYS = Family(
    ("ones", "right", "left", "holes", "empty"), ("ones", "right", "left", "holes"), valid_keys, attention, SMALL,
    SHAPES, lambda given: given.bool()[:, None, None, :], True,
)  # fmt: skip
DOCUMENTS = Family(
    ("one text", "7 texts", "short texts", "padded", "apart", "holes"),
    ("one text", "7 texts", "short texts", "apart", "holes"), documents, by_documents, SMALL_PACKED,
    PACKED, lambda given: (given[:, :, None] == given[:, None, :])[:, None], False,
)  # fmt: skip
WINDOWS = Family(("ones",), ("ones", "right", "holes"), valid_keys, by_windows, {}, BANDS, KEYS.seen, False)
FAMILIES = {"keys": KEYS, "documents": DOCUMENTS, "windows": WINDOWS}


def reference(given: Sequence[Tensor], grad: Tensor, seen: Tensor, causal: bool, window: int) -> list[Tensor]:
    """In fp64; a query that sees no key gets zeros."""
    q, k, v = (x.detach().double().requires_grad_() for x in given)
    s = q.shape[2]
    back = torch.arange(s, device=q.device)[:, None] - torch.arange(s, device=q.device)[None, :]
    seen = seen & ((back >= 0) | (not causal)) & ((back < window) | (not window))
    few = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    k_, v_ = few
    scores = (q @ k_.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~seen, -1e30)
    out = ((scores.softmax(-1) * seen.any(-1, keepdim=True)) @ v_).transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad.double())]


def apart(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """The largest error of a result over its largest element, of the worst of the results; of zeros, the error itself.

    The scores of a single key have no gradient.
    """
    most = ((a, b, float(b.abs().max())) for a, b in zip(got, want, strict=True))
    return max(float(((a.double() - b).abs().max() / (top or 1.0)).nan_to_num(1e9)) for a, b, top in most)


def check(device: str, family: Family) -> list[dict[str, Any]]:
    found = []
    for name, shape in family.small.items():
        causal, window = shape[5:]
        given = inputs(shape, device)
        grad = torch.randn(shape[0], shape[3], shape[1], shape[4], device=device, dtype=torch.bfloat16)
        changed: list[int] = []
        torch._dynamo.reset()
        compiled = torch.compile(family.program, backend=ways(changed)["rewritten"], dynamic=False)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
            few = {kind: family.make(kind, shape[0], shape[3], device) for kind in family.kinds}
            written = {kind: run(family.program, given, grad, few[kind], causal, window, 0.0) for kind in family.kinds}
        for kind in family.kinds:
            torch.full((1 << 26,), float("nan"), device=device)  # what the allocator hands out next
            want = reference(given, grad, family.seen(few[kind]), causal, window)
            ours, theirs = (
                apart(x, want) for x in (run(compiled, given, grad, few[kind], causal, window, 0.0), written[kind])
            )
            right = ours <= max(2 * theirs, 2.0**-6) and changed == [1]
            found.append(
                {"case": name, "mask": kind, "error": ours, "written": theirs, "changed": changed, "right": right}
            )
            print("ok   " if right else "WRONG", found[-1], flush=True)
        if family.dropout:
            found.append(dropped(name, shape, device))
            print("ok   " if found[-1]["right"] else "WRONG", found[-1], flush=True)
    if not family.small:
        return found
    found.append(deployed(device, family))
    print("ok   " if found[-1]["right"] else "WRONG", found[-1], flush=True)
    return found


def deployed(device: str, family: Family) -> dict[str, Any]:
    """By ``backend="autotune"``: a layer whose regions surround attention."""
    import autotune

    shape, kind = list(family.small.values())[1], family.kinds[1]
    causal = shape[5]
    given, mask = inputs(shape, device), family.make(kind, shape[0], shape[3], device)
    grad = torch.randn(shape[0], shape[3], shape[1], shape[4], device=device, dtype=torch.bfloat16)

    def layer(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.silu(family.program(F.silu(q), k * 2, v + 1, mask, causal, 0, 0.0))

    torch._dynamo.reset()
    before = autotune.counters().attention
    wide = [x.detach().double().requires_grad_() for x in given]
    want = [x.detach() for x in run(layer, wide, grad.double(), mask)]
    ours = run(torch.compile(layer, backend="autotune", dynamic=False), given, grad, mask)
    changed, error = autotune.counters().attention - before, apart(ours, want)
    return {
        "case": "deployed",
        "mask": kind,
        "error": error,
        "changed": changed,
        "right": error < 0.05 and changed == 1,
    }


def dropped(name: str, shape: tuple[Any, ...], device: str) -> dict[str, Any]:
    """With dropout: the output is linear in the values, so that output and gradient agree if both drop the same."""
    causal, window = shape[5:]
    torch._dynamo.reset()
    compiled = torch.compile(attention, backend=ways([])["rewritten"], dynamic=False)
    worst, means = 0.0, []
    for kind in KEYS.kinds:
        given, mask = inputs(shape, device), valid_keys(kind, shape[0], shape[3], device)
        grad = torch.randn(shape[0], shape[3], shape[1], shape[4], device=device, dtype=torch.bfloat16)
        out, _, _, dv = run(compiled, given, grad, mask, causal, window, 0.25)
        left, right = (out.double() * grad.double()).sum(), (dv.double() * given[2].double()).sum()
        worst = max(worst, float((left - right).abs() / (out.double() * grad.double()).square().sum().sqrt()))
        ones = [*given[:2], torch.ones_like(given[2]).requires_grad_()]
        sums = run(compiled, ones, grad, mask, causal, window, 0.25)[0].double().mean(-1)
        seen = reference(ones, grad, KEYS.seen(mask), causal, window)[0].mean(-1) > 0
        means.append(float(sums[seen].mean()))
    right = worst < 0.1 and all(abs(m - 1) < 0.02 for m in means)
    return {"case": name, "mask": "dropout", "apart": worst, "means": means, "right": right}


def graph_of(call: Callable[[], Any], calls: int = 1) -> Callable[[], None]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return graph.replay


def in_turn(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The median milliseconds of each, on the device from its first kernel to its last."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            taken[name].append(begin.elapsed_time(end))
    return {name: statistics.median(times) for name, times in taken.items()}


def to_launch(call: Callable[[], Any]) -> float:
    """The median milliseconds until a call returns, which the device may not have finished by then."""
    taken = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        taken.append((time.perf_counter() - begin) * 1e3)
    torch.cuda.synchronize()
    return statistics.median(taken)


def timed(device: str, family: Family, only: Sequence[str] | None, lock: str | None) -> list[dict[str, Any]]:
    found = []
    for name in only or family.shapes:
        shape = family.shapes[name]
        causal, window = shape[5:]
        for p in (0.0, 0.1) if name == "bert" else (0.0,):
            given = inputs(shape, device)
            grad = torch.randn(shape[0], shape[3], shape[1], shape[4], device=device, dtype=torch.bfloat16)
            compiled = {}
            for way, backend in ways([]).items():
                if way == "spans" and (family is not KEYS or p):
                    continue
                torch._dynamo.reset()
                compiled[way] = torch.compile(family.program, backend=backend, dynamic=False)
                mask = family.make(family.kinds[0], shape[0], shape[3], device)
                with locked(lock, fcntl.LOCK_SH):
                    run(compiled[way], given, grad, mask, causal, window, p)
            rest = mask, causal, window, p
            with locked(lock, fcntl.LOCK_EX):
                replays = {w: graph_of(functools.partial(run, fn, given, grad, *rest), 5) for w, fn in compiled.items()}
                for kind in family.timed:
                    mask.copy_(family.make(kind, shape[0], shape[3], device))
                    us = {way: ms * 200 for way, ms in in_turn(replays, 7).items()}
                    ratio = us["written"] / us["rewritten"]
                    found.append({"case": name, "dropout": p, "mask": kind, **us, "ratio": ratio})
                    print({k: round(v, 2) if isinstance(v, float) else v for k, v in found[-1].items()}, flush=True)
    return found


def models() -> dict[str, tuple[Callable[[], torch.nn.Module], int, int]]:
    import transformers as t

    bert = t.BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    llama = t.LlamaConfig(
        hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, head_dim=64,
        intermediate_size=8192, vocab_size=128256, tie_word_embeddings=True,
    )  # fmt: skip
    qwen = t.Qwen3Config(
        hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
        intermediate_size=3072, vocab_size=151936, tie_word_embeddings=True,
    )  # fmt: skip
    return {
        "bert_large": (lambda: t.BertForMaskedLM(bert), 16, 512),
        "llama_1b": (lambda: t.LlamaForCausalLM(llama), 4, 2048),
        "qwen3_0.6b": (lambda: t.Qwen3ForCausalLM(qwen), 4, 2048),
        "llama_packed": (lambda: t.LlamaForCausalLM(llama), 1, 4096),
        "qwen3_packed": (lambda: t.Qwen3ForCausalLM(qwen), 1, 4096),
    }


@contextlib.contextmanager
def locked(path: str | None, how: int) -> Iterator[None]:
    """Hold a file: with others, to compile, or alone, to time."""
    if path is None:
        yield
        return
    with open(path, "w") as file:
        fcntl.flock(file, how)
        yield


def positions(which: Tensor) -> Tensor:
    """Positions that begin at 0 with each document."""
    begins = torch.diff(which, prepend=which[:, :1] - 1) != 0
    place = torch.arange(which.shape[1], device=which.device).expand_as(which)
    return place - torch.where(begins, place, 0).cummax(-1).values


def step(name: str, device: str, lock: str | None) -> list[dict[str, Any]]:
    make, batch, length = models()[name]
    torch.manual_seed(0)
    with torch.device(device):
        model = make().to(torch.bfloat16).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True, capturable=True)
    ids = torch.randint(5, 30000, (batch, length), device=device)
    packed = name.endswith("packed")
    model.config.use_cache = model.config.use_cache and not packed
    if packed:
        family, kinds = DOCUMENTS, ("one text", "7 texts", "short texts")
        masks = {kind: positions(documents(kind, batch, length, device)) for kind in kinds}
    else:
        family, kinds = KEYS, ("ones", "right", "left")
        masks = {kind: valid_keys(kind, batch, length, device) for kind in kinds}
    mask, labels = masks[kinds[0]].clone(), ids.clone()

    def fill(kind: str) -> None:
        mask.copy_(masks[kind])
        if family is KEYS:
            labels.copy_(torch.where(mask.bool(), ids, -100))

    changed: list[int] = []
    steps, peaks = {}, {}
    for way in ("written", "rewritten"):
        backend = ways(changed)[way]
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=backend, dynamic=False)

        def one(compiled: Any = compiled) -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            given = {"position_ids": mask} if packed else {"attention_mask": mask}
            loss = compiled(input_ids=ids, labels=labels, **given).loss
            loss.backward()
            optimizer.step()
            return loss.detach()

        begin = time.perf_counter()
        with locked(lock, fcntl.LOCK_SH):
            one()
            torch.cuda.synchronize()
        print(f"{name} {way}: compiled in {time.perf_counter() - begin:.0f} s", flush=True)
        torch.cuda.reset_peak_memory_stats()
        one()
        peaks[way] = torch.cuda.max_memory_allocated() / 2**30
        steps[way] = one
    found = []
    with locked(lock, fcntl.LOCK_EX):
        launched, host = {}, {}
        for kind in masks:
            fill(kind)
            in_turn(steps, 2)
            launched[kind] = in_turn(steps, 9)
            host[kind] = {way: to_launch(one) for way, one in steps.items()}
        replayed: dict[str, dict[str, float]] = {}
        for way, one in steps.items():  # one after the other: each graph allocates its own memory
            torch.cuda.empty_cache()
            try:
                replay = graph_of(one)
            except Exception as error:
                print(f"{name} {way}: not captured: {repr(error)[:200]}", flush=True)
                continue
            for kind in masks:
                fill(kind)
                replayed.setdefault(kind, {})[way] = in_turn({way: replay}, 9)[way]
            del replay
    for kind in masks:
        row = {"model": name, "mask": kind, "changed": changed, "peak_gib": peaks, "launched_ms": launched[kind]}
        row["host_ms"] = host[kind]
        row["launched_ratio"] = launched[kind]["written"] / launched[kind]["rewritten"]
        if len(replayed.get(kind, {})) == 2:
            row["graph_ms"] = replayed[kind]
            row["graph_ratio"] = replayed[kind]["written"] / replayed[kind]["rewritten"]
        found.append(row)
        print(json.dumps(row), flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--part", choices=("check", "time", "step"), default="check")
    parser.add_argument("--masks", choices=list(FAMILIES), default="keys", help="of the parts check and time")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="cases of the part time")
    parser.add_argument("--least", type=int, default=kernels.LEAST_QUERIES, help="least queries by lengths in a step")
    parser.add_argument("--models", nargs="+", default=["bert_large", "llama_1b", "qwen3_0.6b"])
    parser.add_argument("--lock", help="a file that only one process holds while it times")
    args = parser.parse_args()
    torch.cuda.set_device(args.device)
    torch.manual_seed(0)
    kernels.LEAST_QUERIES = args.least
    if args.part == "step":
        found = [row for name in args.models for row in step(name, args.device, args.lock)]
        keep("masks_" + "_".join(args.models), found)
        return 0
    kernels.LEAST_QUERIES = 0  # also where a step launched from Python gains nothing
    family = FAMILIES[args.masks]
    if args.part == "check":
        with locked(args.lock, fcntl.LOCK_SH):
            found = check(args.device, family)
    else:
        found = timed(args.device, family, args.only, args.lock)
    keep(f"masks_{args.part}_{args.masks}", found)
    print("wrong:", sum(not one.get("right", True) for one in found), "of", len(found))
    return 0 if all(one.get("right", True) for one in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
