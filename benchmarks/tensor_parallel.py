"""Tensor-parallel projections of Llama with sequence parallelism: NCCL in sequence, torch's async TP, autotune.

    python -m benchmarks.tensor_parallel --ranks 4 --model 8b 70b --tokens 2048 4096 8192 16384 --out FILE

A case is a model, a part of its layer ("mlp" or "attention") and the tokens of all ranks. Its program gathers the rows
of all ranks, multiplies, applies the operators between the two products, multiplies and scatters the sum; then the
backward pass. Attention itself is left out. The contenders have the same weights and data:

- ``nccl``: collectives, then products, and products, then collectives;
- ``async``: the operators that Inductor's ``_micro_pipeline_tp`` inserts, on symmetric memory;
- ``autotune``: ``all_gather_matmul`` and ``matmul_reduce_scatter`` after a search with graphs of the step.

The gate of the MLP is compiled by Inductor for all of them. Each contender is launched from Python and by a
CUDA graph, in turns; its faster way counts. A step takes as long as on its slowest rank, and medians count.

``ideal`` is the sum, over the four products that a collective joins, of the longer of products and traffic, each alone,
and the operators between. Traffic is the faster of NCCL and copy engines. ``share`` is the part of the ideal's gain
over ``nccl`` that autotune has. Results and gradients have to agree with those of ``nccl``, or the exit code is 1.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import ranks

MODELS = {
    "8b": {"hidden": 4096, "inner": 14336, "heads": 32, "kv_heads": 8},
    "70b": {"hidden": 8192, "inner": 28672, "heads": 64, "kv_heads": 8},
    "tiny": {"hidden": 64, "inner": 96, "heads": 8, "kv_heads": 4},
}
CONTENDERS = ("nccl", "async", "autotune")
Run = Callable[[], Any]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(allow_abbrev=False, description=(__doc__ or "").splitlines()[0])
    ranks.add_arguments(made, 4)
    made.add_argument("--model", nargs="+", default=["8b"], choices=MODELS)
    made.add_argument("--part", nargs="+", default=["mlp", "attention"], choices=("mlp", "attention"))
    made.add_argument("--tokens", nargs="+", type=int, default=[4096], help="of all ranks together")
    made.add_argument("--rounds", type=int, default=7, help="timed rounds of each contender")
    made.add_argument("--search", type=int, default=40, help="plans that the search times")
    made.add_argument("--without", nargs="*", default=[], choices=("async",), help="contenders to leave out")
    return made


# ---- the program ----------------------------------------------------------------------------------------------------


def _ways(group: Any) -> dict[str, tuple[Any, Any]]:
    """For each contender, ``gather(x, weight)`` and ``scatter(x, weight)``, with gradients."""
    import torch

    import autotune
    from autotune.domains.c3.collectives.host import all_gather, reduce_scatter

    process_group, name = group.data, group.data.group_name
    symmetric: Any = torch.ops.symm_mem

    def gathered(x: Any) -> Any:
        full = x.new_empty(x.shape[0] * group.ranks, x.shape[1])
        all_gather(full, x.contiguous(), group=process_group)
        return full

    def scattered(x: Any) -> Any:
        part = x.new_empty(x.shape[0] // group.ranks, x.shape[1])
        reduce_scatter(part, x, group=process_group)
        return part

    class GatherFirst(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            full = gathered(x)
            ctx.save_for_backward(full, weight)
            return full @ weight.t()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            full, weight = ctx.saved_tensors
            return scattered(grads[0] @ weight), grads[0].t() @ full

    class ScatterLast(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            ctx.save_for_backward(x, weight)
            return scattered(x @ weight.t())

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            x, weight = ctx.saved_tensors
            full = gathered(grads[0])
            return full @ weight, full.t() @ x

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            full, (out,) = symmetric.fused_all_gather_matmul(x, [weight.t()], 0, name)
            ctx.save_for_backward(full, weight)
            return out

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            full, weight = ctx.saved_tensors
            return symmetric.fused_matmul_reduce_scatter(grads[0], weight, "sum", 0, name), grads[0].t() @ full

    class Scatter(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            ctx.save_for_backward(x, weight)
            return symmetric.fused_matmul_reduce_scatter(x, weight.t(), "sum", 0, name)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            x, weight = ctx.saved_tensors
            full, (out,) = symmetric.fused_all_gather_matmul(grads[0].contiguous(), [weight], 0, name)
            return out, full.t() @ x

    return {
        "nccl": (GatherFirst.apply, ScatterLast.apply),
        "async": (Gather.apply, Scatter.apply),
        "autotune": (
            lambda x, weight: autotune.all_gather_matmul(x, [weight], process_group)[0],
            lambda x, weight: autotune.matmul_reduce_scatter(x, weight, process_group),
        ),
    }


def _gated(x: Any) -> Any:
    from torch.nn import functional as F

    gate, up = x.chunk(2, 1)
    return F.silu(gate) * up


@functools.cache
def _compiled() -> Any:
    """The gate, compiled once for all sizes."""
    import torch

    return torch.compile(_gated, dynamic=True)


def _between(part: str, sizes: Mapping[str, int], ranks: int, compiled: bool) -> tuple[Any, int, int]:
    """The operators between the products, and the rank's columns before and after them."""
    if part == "mlp":
        inner = sizes["inner"] // ranks
        return (_compiled() if compiled else _gated), 2 * inner, inner
    own = sizes["hidden"] // ranks
    kept = own * sizes["kv_heads"] // sizes["heads"]
    return (lambda x: x[:, :own].contiguous()), own + 2 * kept, own  # the queries; attention is left out


class Case:
    """A part of a layer on one rank: its tensors, and a step of each contender."""

    def __init__(self, args: argparse.Namespace, group: Any, model: str, part: str, tokens: int) -> None:
        import torch

        cuda = group.device.type == "cuda"
        self.group, self.tokens, self.rows = group, tokens, tokens // group.ranks
        dtype = torch.bfloat16 if cuda else torch.float32
        self.between, wide, narrow = _between(part, MODELS[model], group.ranks, cuda)
        self.hidden, self.wide, self.narrow = MODELS[model]["hidden"], wide, narrow
        generator = torch.Generator(group.device).manual_seed(group.rank)

        def random(*shape: int, scale: float = 1.0) -> Any:
            return torch.randn(shape, generator=generator, device=group.device, dtype=dtype) * scale

        self.x, self.grad = random(self.rows, self.hidden), random(self.rows, self.hidden)
        self.up = random(wide, self.hidden, scale=self.hidden**-0.5)
        self.down = random(self.hidden, narrow, scale=narrow**-0.5)
        for tensor in (self.x, self.up, self.down):
            tensor.requires_grad_()
        self.whole, self.middle = random(tokens, self.hidden), random(tokens, wide)
        self.ways = _ways(group)
        self.copies: Any = None

    def module(self, contender: str) -> Any:
        """The program of a contender."""
        from torch import nn

        gather, scatter = self.ways[contender]
        case = self

        class Part(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.up, self.down = nn.Parameter(case.up.detach()), nn.Parameter(case.down.detach())

            def forward(self, x: Any) -> Any:
                return scatter(case.between(gather(x, self.up)), self.down)

        return Part()

    def step(self, module: Any) -> Run:
        """Forward and backward: the result, and the gradients of the input and the weights."""
        import torch

        def run() -> Any:
            out = module(self.x)
            return out.detach(), *torch.autograd.grad(out, (self.x, module.up, module.down), self.grad)

        return run

    def alone(self) -> tuple[list[Run], Run]:
        """The products of the four sites without a collective, and the operators between, forward and backward."""
        import torch

        whole, middle, up, down = self.whole, self.middle, self.up.detach(), self.down.detach()
        inside = self.between(middle).detach()
        narrow_grad = inside.clone()
        middle = middle.clone().requires_grad_()

        def between() -> Any:
            return torch.autograd.grad(self.between(middle), middle, narrow_grad)

        return [
            lambda: whole @ up.t(),
            lambda: inside @ down.t(),
            lambda: (whole @ down, whole.t() @ inside),
            lambda: (middle.detach() @ up, middle.detach().t() @ whole),
        ], between

    def traffic(self) -> list[list[Run]]:
        """Ways to move the rows of a gather, and of a scatter."""
        import torch

        from autotune.domains.c3.collectives.host import all_gather, reduce_scatter
        from autotune.domains.c3.collectives.nccl import Spec, open_collective
        from autotune.domains.c3.strategy import Strategy

        part = torch.empty_like(self.x)
        full = torch.empty_like(self.whole)
        gathers: list[Run] = [lambda: all_gather(full, part, group=self.group.data)]
        scatters: list[Run] = [lambda: reduce_scatter(part, full, group=self.group.data)]
        if self.group.device.type == "cuda":
            spec = Spec("all_gather", full.numel(), "bf16")
            self.copies = open_collective(spec, self.group, Strategy("gemm_first", "copy", "comm").config())
            gathers.append(self.copies.enqueue)
            scatters.append(self.copies.enqueue)
        return [gathers, scatters]

    def close(self) -> None:
        """Free the buffers. A collective call."""
        if self.copies is not None:
            self.copies.close()


# ---- a rank ---------------------------------------------------------------------------------------------------------


class Clock:
    """Microseconds of a call on the slowest rank."""

    def __init__(self, group: Any) -> None:
        self.group, self.cuda = group, group.device.type == "cuda"
        self._barrier: Any = None
        if self.cuda:
            from autotune.domains.c3.collectives.symmetric import DeviceBarrier

            self._barrier = DeviceBarrier(group)

    def graph(self, run: Run, calls: int) -> Run | None:
        """``calls`` calls as one CUDA graph; None if it cannot be captured."""
        import torch

        if not self.cuda:
            return None
        for _ in range(2):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                for _ in range(calls):
                    run()
        except RuntimeError as error:
            print(f"no graph: {str(error).splitlines()[0]}", file=sys.stderr)
            return None
        return graph.replay

    def __call__(self, run: Run, calls: int) -> float:
        """The time of one of ``calls`` calls that ``run`` makes."""
        import torch

        if not self.cuda:
            self.group.barrier()
            begin = time.perf_counter()
            run()
            return self.group.largest([(time.perf_counter() - begin) * 1e6 / calls])[0]
        cuda: Any = torch.cuda
        begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        self.group.barrier()
        self._barrier(torch.cuda.current_stream().cuda_stream)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return self.group.largest([begin.elapsed_time(end) * 1e3 / calls])[0]


CALLS = 4


def _repeated(run: Run) -> Run:
    def several() -> None:
        for _ in range(CALLS):
            run()

    return several


def _contest(clock: Clock, steps: Mapping[str, Run], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Rounds of each contender in turn, launched and by graph."""
    ways: dict[tuple[str, str], Run] = {}
    for name, step in steps.items():
        ways[name, "launched"] = _repeated(step)
        graph = clock.graph(step, CALLS)
        if graph is not None:
            ways[name, "graph"] = graph
    times: dict[str, dict[str, list[float]]] = {name: {} for name in steps}
    order = list(ways)
    for turn in range(rounds + 1):
        for key in order[turn % len(order) :] + order[: turn % len(order)]:
            took = clock(ways[key], CALLS)
            if turn:
                times[key[0]].setdefault(key[1], []).append(took)
    return times


def _ideal(case: Case, clock: Clock) -> tuple[float, dict[str, list[float]]]:
    """Microseconds of the ideal step, and its parts."""

    def best(run: Run) -> float:
        ready = clock.graph(run, CALLS) or _repeated(run)
        return statistics.median([clock(ready, CALLS) for _ in range(4)][1:])

    products, between = case.alone()
    alone = [best(run) for run in products]
    gather, scatter = (min(best(run) for run in runs) for runs in case.traffic())
    moved = [gather, scatter, gather, scatter]
    rest = best(between)
    whole = sum(max(a, b) for a, b in zip(alone, moved, strict=True)) + rest
    return whole, {"products": alone, "traffic": moved, "between": [rest]}


def _distance(found: Sequence[Any], wanted: Sequence[Any]) -> float:
    """The largest relative distance of two lists of tensors."""
    pairs = zip(found, wanted, strict=True)
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)


def _measure(args: argparse.Namespace, group: Any, chosen: tuple[int, str, str]) -> dict[str, Any]:
    import torch

    import autotune

    tokens, model, part = chosen
    clock = group.keep("benchmark clock", lambda: Clock(group))
    case = Case(args, group, model, part, tokens)
    cuda = group.device.type == "cuda"
    names = [name for name in CONTENDERS if name not in args.without and (cuda or name != "async")]
    modules = {name: case.module(name) for name in names}
    steps = {name: case.step(module) for name, module in modules.items()}
    wanted = steps["nccl"]()
    handle = autotune.tensor_parallel(modules["autotune"])
    begin = time.perf_counter()
    handle.search(steps["autotune"], args.search)
    searched_s = time.perf_counter() - begin
    distances = {name: max(group.largest([_distance(step(), wanted)])) for name, step in steps.items()}
    repeats = [steps["autotune"]() for _ in range(2)]
    same = all(torch.equal(a, b) for a, b in zip(*repeats, strict=True))
    times = _contest(clock, steps, args.rounds)
    ideal, parts = _ideal(case, clock)
    medians = {name: {way: statistics.median(us) for way, us in ways.items()} for name, ways in times.items()}
    result: dict[str, Any] = {
        "name": f"{model} {part} {tokens}", "model": model, "part": part, "tokens": tokens,
        "choice": repr(handle), "search_s": searched_s,
        "tries": [[_plain(plan), ms] for plan, ms in handle.found.tried] if handle.found else [],
        "distance": distances, "repeats": all(group.gather(same)),
        "agree": all(distance < (2e-2 if cuda else 1e-4) for distance in distances.values()),
        "ideal_us": ideal, "parts": parts, "medians": medians, "rounds": times,
        **{f"{name}_us": min(ways.values()) for name, ways in medians.items()},
    }  # fmt: skip
    handle.close()
    case.close()
    return result


def _plain(plan: Mapping[Any, Any]) -> dict[str, Any]:
    return {
        f"{site.op} {site.width}x{site.inner}": [c["order"], c["chunks"]] if c and "chunks" in c else None
        for site, c in plan.items()
    }


# ---- the table ------------------------------------------------------------------------------------------------------


def share(case: Mapping[str, Any]) -> float:
    """The part of the ideal's gain over NCCL in sequence; 1 if the ideal gains nothing."""
    possible = case["nccl_us"] / case["ideal_us"] - 1
    return (case["nccl_us"] / case["autotune_us"] - 1) / possible if possible > 0 else 1.0


def gain(cases: Sequence[Mapping[str, Any]], over: str, way: str = "") -> float:
    """The geometric mean of the gains over a contender: of the faster way of each, or of one way."""
    ratios = [_us(case, over, way) / _us(case, "autotune", way) for case in cases if f"{over}_us" in case]
    return math.exp(statistics.fmean(map(math.log, ratios))) if ratios else math.nan


def _us(case: Mapping[str, Any], contender: str, way: str) -> float:
    return float(case["medians"][contender][way] if way else case[f"{contender}_us"])


def markdown(data: Mapping[str, Any]) -> str:
    """The table of a result file: a case a row, microseconds of a step on the slowest rank."""
    head = ["case", *CONTENDERS, "over NCCL launched", "over NCCL", "over async TP", "ideal", "share of the ideal"]
    lines = [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
    cases = data["cases"]
    for case in cases:
        both = [" / ".join(f"{us:.0f}" for us in case["medians"].get(name, {}).values()) for name in CONTENDERS]
        cells = [case["name"], *both, *_gains([case]), f"{case['ideal_us']:.0f}", f"{100 * share(case):.0f}%"]
        lines.append(f"| {' | '.join(cells)} |")
    cells = ["geometric mean", "", "", "", *_gains(cases), "", ""]
    lines.append(f"| {' | '.join(cells)} |")
    made = f"measured {data['when'][:10]} by `{data['command']}`"
    note = f"{data['device']}, torch {data['versions']['torch']}, bf16; microseconds of forward and backward"
    ways = "launched from Python / as a CUDA graph, of which the faster one counts"
    return "\n".join([*lines, "", f"{note}, {ways}; {made}."]) + "\n"


def _gains(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    gains = [gain(cases, "nccl", "launched"), gain(cases, "nccl"), gain(cases, "async")]
    return ["" if math.isnan(ratio) else f"{ratio:.3f}x" for ratio in gains]


# ---- the command ----------------------------------------------------------------------------------------------------


def show(case: Mapping[str, Any]) -> None:
    def words(name: str) -> str:
        times = case["medians"][name]
        return f"{name} " + "/".join(f"{times[way]:.0f}" if way in times else "-" for way in ("launched", "graph"))

    fine = case["agree"] and case["repeats"]
    print(
        f"{case['name']:>20}  {', '.join(map(words, case['medians']))} us (launched/graph), ideal "
        f"{case['ideal_us']:.0f}: {case['nccl_us'] / case['autotune_us']:.3f}x over NCCL, {100 * share(case):.0f}% of "
        f"the ideal; {case['choice']}{'' if fine else '; WRONG'}",
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if ranks.is_rank():
        cases = itertools.product(args.tokens, args.model, args.part)
        ranks.run_cases(args, cases, functools.partial(_measure, args), show)
        return 0
    from benchmarks import form

    code, found = ranks.start("benchmarks.tensor_parallel", args, argv)
    cases = found["cases"]
    if cases:
        print(f"{gain(cases, 'nccl'):.3f}x over NCCL, {gain(cases, 'async'):.3f}x over async TP (geometric means)")
    if args.out and cases:
        extra = {"suite": "tensor_parallel", "ranks": args.ranks}
        form.write(args.out, f"{args.ranks} x {found['device']}", cases, extra=extra)
    return 0 if code == 0 and cases and all(c["agree"] and c["repeats"] for c in cases) else 1


if __name__ == "__main__":
    sys.exit(main())
