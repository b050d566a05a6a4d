"""FSDP2 in Llama's layers: stock, with its own prefetching, and after ``autotune.fsdp`` has searched in the loop.

    python -m benchmarks.fsdp --ranks 4 --model 8b 70b --tokens 2048 4096 8192 --out benchmarks/results/h100x4/fsdp.json

A case is a model and the tokens of a rank. Each case has two models with equal weights and data: stock FSDP2, and one
on which ``autotune.fsdp(model, steps=S)`` was called, timed after the search. ``prefetch`` is the stock model with
``set_modules_to_forward_prefetch``. The three train in turns, some steps each, without waiting for the devices between
them. A turn takes as long as on its slowest rank, and medians count. ``looked_up`` is the choice of a second handle,
which finds in the database what the first one stored. ``--profile`` adds what rank 0's device did in a step: the time
with computation, with communication alone, and with neither.

Losses have to agree with stock's, and gathered parameters have to be equal bit by bit, or the exit code is 1.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import ranks

COMPARED = 24
"""Losses, from the first step on, that are compared with stock's."""
MODELS = {
    "8b": {"hidden": 4096, "inner": 14336, "heads": 32, "kv_heads": 8},
    "70b": {"hidden": 8192, "inner": 28672, "heads": 64, "kv_heads": 8},
    "tiny": {"hidden": 48, "inner": 80, "heads": 4, "kv_heads": 2},
}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(allow_abbrev=False, description=(__doc__ or "").splitlines()[0])
    ranks.add_arguments(made, 2)
    made.add_argument("--model", nargs="+", default=["70b"], choices=MODELS)
    made.add_argument("--tokens", nargs="+", type=int, default=[2048], help="of a rank's batch")
    made.add_argument("--layers", type=int, default=8)
    made.add_argument("--turns", type=int, default=8, help="timed turns of each contender")
    made.add_argument("--steps", type=int, default=3, help="steps of a turn")
    made.add_argument("--reduce", choices=("f32", "bf16"), default="bf16", help="dtype of the reduced gradients")
    made.add_argument("--replicas", type=int, default=1, help="hybrid sharding: groups of ranks with all parameters")
    made.add_argument("--profile", action="store_true", help="profile a step of stock and of autotune")
    made.add_argument("--search", type=int, default=60, help="steps of the search")
    made.add_argument("--compile", action="store_true", help="compile each layer by torch.compile")
    return made


# ---- a rank ---------------------------------------------------------------------------------------------------------


def _model(args: argparse.Namespace, name: str, tokens: int, device: Any) -> tuple[Any, Any]:
    """A stack of sharded layers, and its optimizer."""
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from examples.models.llama import Block, Config, RMSNorm

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    sizes = Config(batch=1, length=tokens, layers=args.layers, dtype=dtype, **MODELS[name])
    options: dict[str, Any] = {}
    if args.reduce == "f32":
        options["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    if args.replicas > 1:
        shape = args.replicas, args.ranks // args.replicas
        options["mesh"] = init_device_mesh(device.type, shape, mesh_dim_names=("replicas", "shards"))

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList()
            for layer in range(args.layers):
                torch.manual_seed(layer)
                with device:
                    block = Block(sizes).to(dtype)
                fully_shard(block, **options)  # at once: whole layers would not fit together
                self.blocks.append(block)
            self.norm = RMSNorm(sizes.hidden).to(device, dtype)
            size = sizes.hidden // sizes.heads
            rates = 500000.0 ** (-torch.arange(0, size, 2, device=device) / size)
            angles = (torch.arange(tokens, device=device)[:, None] * rates).repeat(1, 2)[:, None, :]
            self.register_buffer("cos", angles.cos().to(dtype))
            self.register_buffer("sin", angles.sin().to(dtype))

        def forward(self, x: Any, wanted: Any) -> Any:
            for block in self.blocks:
                x = block(x, self.cos, self.sin)
            return F.mse_loss(self.norm(x).float(), wanted.float())

    stack = Stack()
    fully_shard(stack, **options)
    if args.compile:
        for block in stack.blocks:
            block.compile()
    return stack, torch.optim.AdamW(stack.parameters(), lr=1e-4, fused=True)


def _step(model: Any, optimizer: Any, x: Any, wanted: Any) -> Any:
    """A step; returns the loss as a tensor, since a number would wait for the device."""
    loss = model(x, wanted)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _prefetch(model: Any, wanted: bool) -> None:
    for block, after in itertools.pairwise(model.blocks):
        block.set_modules_to_forward_prefetch([after] if wanted else [])


def _case(args: argparse.Namespace, group: Any, case: tuple[int, str]) -> dict[str, Any]:
    import torch

    import autotune

    tokens, name = case
    cuda = group.device.type == "cuda"
    stock, ours = (_model(args, name, tokens, group.device) for _ in range(2))
    generator = torch.Generator(group.device)
    shape = (2, 1, tokens, MODELS[name]["hidden"])
    dtype = torch.bfloat16 if cuda else torch.float32

    def data(step: int) -> Any:
        generator.manual_seed(step * group.ranks + group.rank)
        return torch.randn(shape, generator=generator, device=group.device, dtype=dtype)

    def settle() -> None:
        if cuda:
            torch.cuda.synchronize()
        group.barrier()

    handle = autotune.fsdp(ours[0], steps=args.search)
    losses: dict[str, list[Any]] = {"stock": [], "autotune": []}
    begin = time.perf_counter()
    for step in range(args.search + 2):
        losses["autotune"].append(_step(*ours, *data(step)))
        if handle.found is not None:
            break
    settle()
    searched_s = time.perf_counter() - begin
    losses["stock"] = [_step(*stock, *data(step)) for step in range(min(COMPARED, len(losses["autotune"])))]
    times: dict[str, list[float]] = {"stock": [], "prefetch": [], "autotune": []}
    peaks: dict[str, int] = {}
    given = data(args.search + 2)
    for turn in range(args.turns + 1):
        for contender in [*times][turn % 3 :] + [*times][: turn % 3]:
            trained = ours if contender == "autotune" else stock
            _prefetch(stock[0], contender == "prefetch")
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            settle()
            begin = time.perf_counter()
            for _ in range(args.steps):
                _step(*trained, *given)
            if cuda:
                torch.cuda.synchronize()
            took = group.largest([(time.perf_counter() - begin) * 1e3 / args.steps])[0]
            if turn:
                times[contender].append(took)
                peaks[contender] = torch.cuda.max_memory_allocated() if cuda else 0
    _prefetch(stock[0], False)
    seen = {}
    if args.profile and cuda:
        seen["stock"] = _profiled(group, lambda: _step(*stock, *given))
        seen["autotune"] = _profiled(group, lambda: _step(*ours, *given))
    again = autotune.fsdp(stock[0])
    for step in range(2):
        _step(*stock, *data(step))
    looked_up = again.chosen == handle.chosen
    right = _exact(ours[0])
    bound = 5e-3 if cuda else 1e-4
    pairs = [(float(a), float(b)) for a, b in zip(losses["autotune"], losses["stock"], strict=False)]
    agree = all(abs(a - b) <= bound * abs(b) for a, b in pairs)
    found = handle.found
    result = {
        "name": _label(args, name, tokens), "layers": args.layers, "tokens": tokens,
        "choice": repr(handle), "looked_up": looked_up, "search_steps": len(losses["autotune"]),
        "search_s": searched_s, "tried": len(found.tried) if found else 0,
        "agree": all(group.gather(agree)), "exact": all(group.gather(right)),
        **{f"{contender}_us": statistics.median(ms) * 1e3 for contender, ms in times.items()},
        "rounds": times, "peak_bytes": peaks, **({"profile": seen} if seen else {}),
        "tries": [[{f"{k.op} {k.numel}": c for k, c in plan.items()}, ms] for plan, ms in found.tried] if found else [],
    }  # fmt: skip
    handle.close()
    again.close()
    return result


def _label(args: argparse.Namespace, model: str, tokens: int) -> str:
    shards = f" {args.replicas}x{args.ranks // args.replicas}" if args.replicas > 1 else ""
    reduced = " f32 gradients" if args.reduce == "f32" else ""
    return f"{model} {tokens}{shards}{' compiled' if args.compile else ''}{reduced}"


def _profiled(group: Any, step: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of rank 0's device in two steps, by activity; the other ranks take the same steps."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from benchmarks.c3 import timeline

    torch.cuda.synchronize()
    group.barrier()
    if group.rank:
        for _ in range(2):
            step()
        torch.cuda.synchronize()
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) as taken:
        for _ in range(2):
            step()
        torch.cuda.synchronize()
    return timeline.shares(timeline.events_of(taken))


def _exact(model: Any) -> bool:
    """Return True if every layer gathers its parameters bitwise."""
    import torch
    from torch.distributed.tensor import DTensor

    same = True
    for block in model.blocks:
        expected = [p.full_tensor() for p in block.parameters() if isinstance(p, DTensor)]
        block.unshard()
        same &= all(torch.equal(p, e) for p, e in zip(block.parameters(), expected, strict=True))
        block.reshard()
    return same


# ---- the table ------------------------------------------------------------------------------------------------------


def markdown(data: Mapping[str, Any]) -> str:
    """The table of a result file: a case a row, milliseconds of a step on the slowest rank."""
    head = ["model, tokens a rank", "stock", "prefetch", "autotune", "over stock", "peak GiB", "search", "choice"]
    lines = [f"| {' | '.join(head)} |", "|---|" + "---:|" * 6 + "---|"]
    for case in data["cases"]:
        stock, prefetch, ours = (case[f"{name}_us"] / 1e3 for name in ("stock", "prefetch", "autotune"))
        peaks = [case["peak_bytes"][name] / 2**30 for name in ("stock", "autotune")]
        large = [
            part
            for part in case["choice"].removeprefix("Sharded(").removesuffix(")").split(", ")
            if " 0.0 MiB" not in part
        ]
        cells = [
            case["name"], f"{stock:.1f}", f"{prefetch:.1f}", f"{ours:.1f}", f"{stock / ours:.3f}x",
            f"{peaks[0]:.1f} -> {peaks[1]:.1f}", f"{case['search_steps']} steps", "; ".join(large),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    made = f"measured {data['when'][:10]} by `{data['command']}`"
    layers = data["cases"][0]["layers"]
    note = f"{data['device']}, torch {data['versions']['torch']}, {layers} layers of Llama in bf16, AdamW; {made}."
    return "\n".join([*lines, "", note]) + "\n"


# ---- the command ----------------------------------------------------------------------------------------------------


def show(case: dict[str, Any]) -> None:
    gain = case["stock_us"] / case["autotune_us"]
    best = min(case["stock_us"], case["prefetch_us"]) / case["autotune_us"]
    print(
        f"{case['name']:>12}  stock {case['stock_us'] / 1e3:8.2f} ms, prefetch {case['prefetch_us'] / 1e3:8.2f}, "
        f"autotune {case['autotune_us'] / 1e3:8.2f}: {gain:.3f}x, {best:.3f}x over the best stock setting; "
        f"{case['choice']}{'' if case['agree'] and case['exact'] else '; WRONG'}",
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if ranks.is_rank():
        ranks.run_cases(args, itertools.product(args.tokens, args.model), functools.partial(_case, args), show)
        return 0
    from benchmarks import form

    code, found = ranks.start("benchmarks.fsdp", args, argv)
    cases = found["cases"]
    if args.out and cases:
        extra = {"suite": "fsdp", "ranks": args.ranks, "compiled": args.compile, "reduce": args.reduce}
        form.write(args.out, f"{args.ranks} x {found['device']}", cases, extra=extra)
    return 0 if code == 0 and cases and all(c["agree"] and c["exact"] for c in cases) else 1


if __name__ == "__main__":
    sys.exit(main())
