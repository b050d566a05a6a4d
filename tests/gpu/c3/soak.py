"""A soak of the copy-engine collectives: thousands of calls of random sizes, late ranks, two in flight, all checked.

Run on every rank through :meth:`autotune.domains.c3.measuring.ranks.Ranks.call`. What is drawn from ``seed`` alone is
the same on all ranks (what is called, and when two go together); delays are drawn by each rank for itself. Results
are compared on the device, so that calls follow each other without the host waiting.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

from autotune.domains.c3.collectives.dma import CopyCollective
from autotune.domains.c3.collectives.nccl import DTYPES, Spec
from autotune.domains.c3.collectives.symmetric import new_stream
from autotune.domains.c3.group import Group
from autotune.domains.c3.scenario import COLLECTIVES, REDUCING
from autotune.domains.c3.strategy import Strategy
from autotune.task import Artifact

if TYPE_CHECKING:
    import torch

_MODULUS = 16
"""Values are whole numbers below this, so that sums over 16 ranks are exact in bf16."""
_SLEEP_CYCLES = 2_000_000  # about a millisecond of the device


class _Job:
    """One collective of the soak, with the expected result of its next call."""

    def __init__(self, group: Group, rng: random.Random, most: int) -> None:
        import torch

        op = rng.choice(COLLECTIVES)
        numel = int(2 ** rng.uniform(0, most.bit_length() - 1))
        numel = numel if op == "all_reduce" else max(1, numel // group.ranks) * group.ranks
        strategy = Strategy(
            order=rng.choice(("comm_first", "gemm_first")),
            engine="copy",
            ctas=rng.choice((4, 16)),
            chunks=rng.choice((1, 1, 2, 4)),
        )
        self.op, self.group, self.strategy = op, group, strategy
        spec = Spec(op, numel, "bf16")
        artifact = group.keep("soak kernels", lambda: _kernels(group)) if op in REDUCING else None
        self.collective = CopyCollective(spec, group, strategy, artifact)
        self.part = spec.part(group.ranks)
        # Bound to the collective's own stream order by the caller; one graph replays what the other half enqueues.
        self.graph: Any = None
        self.offsets = torch.arange(numel, device=group.device)

    def capture(self) -> None:
        """Record one call as a graph, for every second job."""
        import torch

        self.call(torch.cuda.current_stream())
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.call(torch.cuda.current_stream())
        self.graph = graph

    def value(self, rank: int, numel: int, call: int) -> torch.Tensor:
        """The input of rank ``rank`` at the ``call``-th call of the soak."""
        return ((self.offsets[:numel] * 5 + rank * 3 + call * 7) % _MODULUS).to(DTYPES["bf16"])

    def fill(self, call: int) -> None:
        c = self.collective
        c.output.fill_(-1)  # before the input, which is in it where a collective works in place
        c.input.copy_(self.value(self.group.rank, c.input.numel(), call))

    def call(self, stream: Any) -> None:
        self.collective.enqueue(stream)

    def run(self, stream: Any) -> None:
        import torch

        if self.graph is None:
            self.call(stream)
        else:
            with torch.cuda.stream(stream):
                self.graph.replay()

    def wrong(self, call: int) -> torch.Tensor:
        """The number of wrong elements of the output, as a tensor on the device."""
        import torch

        ranks, me, part = self.group.ranks, self.group.rank, self.part
        output = self.collective.output
        if self.op == "all_gather":
            want = torch.cat([self.value(r, part, call) for r in range(ranks)])
        elif self.op == "all_to_all":
            want = torch.cat([self.value(r, part * ranks, call)[me * part : (me + 1) * part] for r in range(ranks)])
        else:
            want = sum((self.value(r, self.offsets.numel(), call) for r in range(ranks)), torch.zeros_like(output[:1]))
            if self.op == "reduce_scatter":
                want = want[me * part : (me + 1) * part]
        return (output != want).sum()


def _kernels(group: Group) -> Artifact:
    """The kernel that adds, compiled here: the soak is a check, not a deployment."""
    import torch

    from autotune.domains.c3.collectives.sm import build_sum

    major, minor = torch.cuda.get_device_capability(group.device)
    target = f"sm_{major}{minor}"
    return Artifact(target, (build_sum(group.ranks, "bf16", target),))


def soak(group: Group, *, calls: int, jobs: int = 48, most: int = 1 << 22, seed: int = 0) -> dict[str, Any]:
    """Call ``jobs`` random collectives ``calls`` times in random order.

    Args:
        most: elements of the largest buffer.

    Returns:
        ``calls``, ``wrong`` (elements, on this rank), ``pairs`` (how often two were in flight), ``late`` (delays of
        this rank), ``seconds``, and the calls ``by_op``.
    """
    import torch

    torch.cuda.set_stream(new_stream(group.device))
    shared, own = random.Random(seed), random.Random(seed * 1000 + group.rank + 1)
    every = [_Job(group, shared, most) for _ in range(jobs)]
    for job in every[::2]:
        job.capture()
    torch.cuda.synchronize()
    group.barrier()
    sides = [new_stream(group.device) for _ in range(2)]
    main = torch.cuda.current_stream()
    wrong = torch.zeros(1, dtype=torch.int64, device=group.device)
    done = pairs = late = 0
    by_op = dict.fromkeys(COLLECTIVES, 0)
    begin = time.perf_counter()
    while done < calls:
        now = shared.sample(every, 2 if shared.random() < 0.25 else 1)
        pairs += len(now) - 1
        if own.random() < 0.05:
            late += 1
            if own.random() < 0.5:
                time.sleep(own.uniform(0, 2e-3))
            else:
                torch.cuda._sleep(int(own.uniform(0, _SLEEP_CYCLES)))  # type: ignore[no-untyped-call, unused-ignore]
        for job, side in zip(now, sides, strict=False):
            job.fill(done)
            side.wait_stream(main)
            job.run(side)
        for job, side in zip(now, sides, strict=False):
            main.wait_stream(side)
            wrong += job.wrong(done)
            by_op[job.op] += 1
        done += len(now)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    for job in every:
        job.collective.close()
    return {
        "calls": done,
        "wrong": int(wrong.item()),
        "pairs": pairs,
        "late": late,
        "seconds": seconds,
        "by_op": by_op,
    }
