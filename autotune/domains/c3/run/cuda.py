"""A computation beside a collective on a CUDA device, as a strategy says: streams, priorities, SMs, order, graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autotune.domains.c3.collectives.driver import partition_stream
from autotune.domains.c3.collectives.streams import new_stream
from autotune.domains.c3.strategy import Strategy

if TYPE_CHECKING:
    import torch

    from autotune.domains.c3.collectives.base import Collective
    from autotune.domains.c3.run.compute import Computation

Step = Callable[[], None]


class CudaOverlap:
    """Runs a strategy again and again on the same computation and collective; either may be missing.

    A call enqueues both behind what the current stream has, and lets that stream go on after both. With ``launch`` =
    "graph" they are captured once, in the first call or by :meth:`prepare`; a call under the caller's own capture
    becomes a part of the caller's graph.

    Attributes:
        sms: what the computation really has, where some are kept from it; 0 where it has all.
    """

    def __init__(
        self, compute: Computation | None, collective: Collective | None, strategy: Strategy, device: torch.device
    ) -> None:
        import torch

        self.compute, self.collective, self.strategy = compute, collective, strategy
        self._comm = new_stream(device, high=strategy.priority == "comm")
        self._side: Any = None
        favoured = strategy.priority == "gemm"
        self.sms = 0
        if strategy.order != "sequential" and strategy.reserve:
            every = torch.cuda.get_device_properties(device).multi_processor_count
            index = device.index or 0
            self._side, self.sms = partition_stream(index, every - strategy.reserve, favoured)
        elif strategy.order != "sequential" and strategy.priority == "gemm":
            self._side = new_stream(device, high=True)
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        import torch

        if self.strategy.launch != "graph" or torch.cuda.is_current_stream_capturing():
            self._enqueue()
            return
        if self._graph is None:
            self.prepare()
        assert self._graph is not None
        self._graph.replay()

    def prepare(self) -> None:
        """Run once, so that what is made lazily exists, and capture. A collective call."""
        import torch

        self._enqueue()
        torch.cuda.synchronize()
        if self.strategy.launch != "graph":
            return
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog queries events from a thread of its own, which a global capture would forbid.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._enqueue()
        self._graph = graph

    def _enqueue(self) -> None:
        """Both, on the streams of the strategy, between a fork from and a join to the current stream."""
        import torch

        main = torch.cuda.current_stream()
        if self.strategy.order == "sequential" or self.compute is None or self.collective is None:
            for step in (*self._panels(main), *self._chunks(main)):
                step()
            return
        side = self._side or main
        self._comm.wait_stream(main)
        if side is not main:
            side.wait_stream(main)
        panels, chunks = self._panels(side), self._chunks(self._comm)
        met, comm_first = self.collective.met, self.strategy.order == "comm_first"
        steps = _in_turn(chunks, panels) if comm_first else _in_turn(panels, chunks)
        if comm_first and met is not None:
            steps.insert(1, lambda: side.wait_event(met))  # behind the first piece, which records it
        for step in steps:
            step()
        if side is not main:
            main.wait_stream(side)
        main.wait_stream(self._comm)

    def _panels(self, stream: Any) -> list[Step]:
        import torch

        compute = self.compute
        if compute is None:
            return []

        def step(panel: int) -> Step:
            def run() -> None:
                with torch.cuda.stream(stream):
                    compute.run(panel)

            return run

        return [step(k) for k in range(compute.panels)]

    def _chunks(self, stream: Any) -> list[Step]:
        collective = self.collective
        if collective is None:
            return []

        def step(chunk: int) -> Step:
            return lambda: collective.enqueue(chunk, stream)

        return [step(k) for k in range(collective.chunks)]

    def close(self) -> None:
        """Let the graph go. The collective is its owner's to close."""
        import torch

        torch.cuda.synchronize()
        self._graph = None


def _in_turn(first: list[Step], second: list[Step]) -> list[Step]:
    """Steps of both, beginning with ``first``, spread evenly over each other."""
    keyed = [(k / len(first), 0, s) for k, s in enumerate(first)]
    keyed += [(k / len(second), 1, s) for k, s in enumerate(second)]
    return [s for _, _, s in sorted(keyed, key=lambda e: e[:2])]
