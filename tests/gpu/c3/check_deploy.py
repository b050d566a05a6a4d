"""Is ``autotune.overlap`` right here? Stored strategies on a caller's tensors, compared with torch.distributed.

Every check is a function that runs on all ranks, through :meth:`autotune.domains.c3.measuring.ranks.Ranks.call` and
:func:`deployed`. Collectives are of small integers, whose sums are exact, and compared exactly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from itertools import cycle
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import autotune
from autotune.domains.c3.collectives.symmetric import new_stream
from autotune.domains.c3.group import Group, deploy_group
from autotune.domains.c3.scenario import COLLECTIVES
from autotune.domains.c3.strategy import HostStrategy, Strategy
from tests.gpu.c3.check_case import Case, by_torch

if TYPE_CHECKING:
    from autotune.domains.c3.deploy import Overlapped

_BACKWARD = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}


def deployed(group: Group, *, check: str, db: str) -> list[str]:
    """Run the check of that name; returns what is wrong on this rank.

    Args:
        check: of :data:`CHECKS`.
        db: prefix of new files.
    """
    from autotune.runtime.deployment import Deployment, use

    use(Deployment())
    dist.barrier(group=group.control)
    case = Case(group, db)
    CHECKS[check](case)
    use(Deployment())
    return case.wrong


def _steps(case: Case, collective: str, strategy: Strategy | HostStrategy, group: dist.ProcessGroup | None) -> None:
    """A loop: other tensors in every step, a rank that comes late, the result in place, copied, or written directly."""
    mine, what = deploy_group(group, case.device), f"{collective} by {strategy.label}"
    with case.overlap(collective, strategy, group=group) as op, torch.no_grad():
        out = torch.empty_like(op.buffers.output)
        for step in range(7):
            x, tensor = case.inputs(step), case.put(collective, step, mine)
            want = by_torch(collective, tensor, mine)
            if mine.rank == step % mine.ranks:
                time.sleep(0.003)
            if step % 3 == 1:
                op.buffers.input.copy_(tensor)
                y, moved = op(x)
            else:
                y, moved = op(x, tensor, out=out if step % 3 == 2 else None)
            case.same(f"{what}, step {step}", moved, want)
            case.near(f"{what}, step {step}, the layer", y, case.layer(x))


def _linear(case: Case) -> None:
    """Inference with every stored strategy."""
    for collective in COLLECTIVES:
        for strategy in case.fitting(collective):
            _steps(case, collective, strategy, None)


def _callable(case: Case) -> None:
    """A plain function, and one that is no GEMM at all, which finds no schedule."""
    mine, weight = deploy_group(None, case.device), case.layer.weight.detach().t().contiguous()

    def block(x: Tensor) -> Tensor:
        return F.gelu(x @ weight)

    for collective, strategy in zip(COLLECTIVES, cycle(case.strategies), strict=False):
        what = f"{collective} beside a function, by {strategy.label}"
        with case.overlap(collective, strategy, block) as op:
            for step in range(4):
                x, tensor = case.inputs(step), case.put(collective, step, mine)
                want = by_torch(collective, tensor, mine)
                with torch.no_grad() if step % 2 else nullcontext():
                    y, moved = op(x, tensor)
                case.same(f"{what}, step {step}", moved, want)
                case.near(f"{what}, step {step}, the function", y, block(x))
    op = autotune.overlap(torch.cumsum, "all_gather", db=case.db)
    x, tensor = case.inputs(0), case.put("all_gather", 0, mine)
    y, moved = op((x, 0), tensor)
    case.same("all_gather beside torch.cumsum", moved, by_torch("all_gather", tensor, mine))
    case.near("torch.cumsum", y, torch.cumsum(x, 0))
    op.close()


def _training(case: Case) -> None:
    """Gradients of the layer during a collective, and through the collective on request."""
    mine = deploy_group(None, case.device)
    for nth, collective in enumerate(COLLECTIVES):
        fitting = case.fitting(collective)
        strategy = fitting[-1 - nth % len(fitting)]
        what = f"{collective} by {strategy.label}"
        back = _BACKWARD.get(collective, collective)
        with case.overlap(collective, strategy, differentiable=True) as op:
            for step in range(3):
                x, tensor = case.inputs(step), case.put(collective, step, mine).requires_grad_()
                case.layer.zero_grad()
                y, moved = op(x, tensor)
                case.same(
                    f"{what}, step {step} of training", moved.detach(), by_torch(collective, tensor.detach(), mine)
                )
                weight = case.integers(back, 7000 + 10 * step + mine.rank, mine.ranks)
                ((moved * weight).sum() + y.float().square().sum()).backward()
                case.same(f"{what}, step {step} of training, the gradient", tensor.grad, by_torch(back, weight, mine))
                found = case.layer.weight.grad
                case.layer.zero_grad()
                case.layer(x).float().square().sum().backward()
                wanted = case.layer.weight.grad
                assert found is not None
                assert wanted is not None
                case.near(
                    f"{what}, step {step} of training, the layer",
                    found / wanted.abs().max(),
                    wanted / wanted.abs().max(),
                )


def _captured(case: Case) -> None:
    """Tensors that are fixed, written to between replays: ``op.capture``, and a capture of the caller's."""
    mine = deploy_group(None, case.device)
    for collective in COLLECTIVES:
        for strategy in case.fitting(collective):
            what = f"{collective} by {strategy.label}"
            with case.overlap(collective, strategy) as op:
                x, tensor = case.inputs(0), case.put(collective, 0, mine)
                ways = {"op.capture": op.capture(x, tensor)}
                if case.cuda:
                    ways["a caller's graph"] = _graph(op, x, tensor)
                for step in range(4):
                    x.copy_(case.inputs(step))
                    tensor.copy_(case.put(collective, step, mine))
                    want = by_torch(collective, tensor, mine)
                    for name, way in ways.items():
                        y, moved = way()
                        case.same(f"{what} in {name}, step {step}", moved, want)
                        with torch.no_grad():
                            case.near(f"{what} in {name}, step {step}, the layer", y, case.layer(x))
                if case.cuda:
                    torch.cuda.synchronize()
                ways.clear()


def _graph(op: Overlapped, x: Tensor, tensor: Tensor) -> Any:
    """As a caller captures a step of a model, work before and after included."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.no_grad(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y, moved = op(x * 1, tensor)
        y, moved = y * 1, moved * 1

    def replay() -> tuple[Tensor, Tensor]:
        graph.replay()
        return y, moved

    return replay


def _in_flight(case: Case) -> None:
    """Two overlaps on two streams, neither of which waits for the other; and one within the computation of another."""
    mine = deploy_group(None, case.device)
    strategy, other = case.strategies[1], case.strategies[-1]
    with case.overlap("all_gather", strategy) as one, case.overlap("all_reduce", other) as two, torch.no_grad():
        streams: list[Any] = [new_stream(case.device) for _ in range(2)] if case.cuda else []
        for step in range(12):
            x = case.inputs(step)
            puts = [case.put(c, step, mine) for c in ("all_gather", "all_reduce")]
            wants = [by_torch(c, t, mine) for c, t in zip(("all_gather", "all_reduce"), puts, strict=True)]
            if mine.rank == step % mine.ranks:
                time.sleep(0.002)
            got = []
            for k, op in enumerate((one, two)):
                if case.cuda:
                    streams[k].wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(streams[k]) if case.cuda else nullcontext():
                    got.append(op(x, puts[k])[1])
            for stream in streams:
                torch.cuda.current_stream().wait_stream(stream)
            for name, moved, want in zip(("first", "second"), got, wants, strict=True):
                case.same(f"two in flight, step {step}, the {name}", moved, want)
        total = case.put("all_reduce", 50, mine)
        want = by_torch("all_reduce", total, mine)

        def within(x: Tensor) -> Tensor:
            return two(x, total)[1].clone()

        with case.overlap("reduce_scatter", strategy, within) as outer:
            for step in range(4):
                x, tensor = case.inputs(step), case.put("reduce_scatter", step, mine)
                wanted = by_torch("reduce_scatter", tensor, mine)
                inner, moved = outer(x, tensor)
                case.same(f"one within another, step {step}, the inner", inner, want)
                case.same(f"one within another, step {step}, the outer", moved, wanted)


def _subgroup(case: Case) -> None:
    """All ranks but the first, whose numbers in their group are others; of two ranks both, in a group of their own."""
    world = case.world.ranks
    members = list(range(1, world)) if world > 2 else [0, 1]
    group = dist.new_group(members)
    if case.world.rank in members:
        for collective in COLLECTIVES:
            for strategy in case.fitting(collective):
                _steps(case, collective, strategy, group)
    case.world.barrier()


CHECKS: Mapping[str, Callable[[Case], None]] = {
    "linear": _linear,
    "callable": _callable,
    "training": _training,
    "captured": _captured,
    "in_flight": _in_flight,
    "subgroup": _subgroup,
}
"""What there is to check of deployment."""
