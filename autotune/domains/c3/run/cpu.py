"""A computation beside a collective on CPUs: threads, and who begins."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from autotune.domains.c3.strategy import HostStrategy

if TYPE_CHECKING:
    from autotune.domains.c3.collectives.base import Collective
    from autotune.domains.c3.run.base import Panels


class HostOverlap:
    """Runs a strategy again and again on the same computation and collective; either may be missing.

    The computation runs in the caller's thread, or in one of its own where the strategy gives it another number of
    threads. A collective beside it runs in a thread of its own, which waits for its peers without Python's lock.

    With the order "gemm_first", row panels hold the pieces of the collective back: piece ``c`` of ``C`` begins with
    panel ``c * panels / C``.
    """

    def __init__(
        self, compute: Panels | None, collective: Collective | None, strategy: HostStrategy, device: torch.device
    ) -> None:
        self.compute, self.collective, self.strategy, self.device = compute, collective, strategy, device
        self._beside = compute is not None and collective is not None and strategy.order != "sequential"
        self._comm = _thread("comm", 1) if self._beside else None
        self._gemm = _thread("compute", strategy.threads) if compute is not None and strategy.threads else None

    def __call__(self) -> None:
        if not self._beside:
            self._compute(lambda panel: None)
            self._communicate(lambda chunk: None)
            return
        assert self._comm is not None
        assert self.compute is not None
        assert self.collective is not None
        chunks, panels = self.collective.chunks, self.compute.panels
        if self.strategy.order == "comm_first":
            begun = threading.Event()
            beside = self._comm.submit(self._communicate, lambda chunk: begun.set())
            begun.wait()
            _both(lambda: self._compute(lambda panel: None), beside)
            return
        gates = [threading.Event() for _ in range(chunks)]

        def before(panel: int) -> None:
            for chunk, gate in enumerate(gates):
                if chunk * panels // chunks == panel:
                    gate.set()

        def compute() -> None:
            try:
                self._compute(before)
            finally:  # the peers wait for this rank's pieces, whatever became of its computation
                for gate in gates:
                    gate.set()

        beside = self._comm.submit(self._communicate, lambda chunk: gates[chunk].wait())
        _both(compute, beside)

    def prepare(self) -> None:
        """Run once, so that the threads are there. Called by every rank."""
        self()

    def _compute(self, before: Callable[[int], object]) -> None:
        if self.compute is None:
            return
        if self._gemm is None:
            self._panels(before, torch.is_grad_enabled())
        else:
            self._gemm.submit(self._panels, before, torch.is_grad_enabled()).result()

    def _panels(self, before: Callable[[int], object], grad: bool) -> None:
        assert self.compute is not None
        with torch.set_grad_enabled(grad):  # each thread has a mode of its own
            for panel in range(self.compute.panels):
                before(panel)
                self.compute.run(panel)

    def _communicate(self, before: Callable[[int], object]) -> None:
        if self.collective is None:
            return
        for chunk in range(self.collective.chunks):
            before(chunk)
            self.collective.enqueue(chunk)

    def close(self) -> None:
        """End the threads. The collective is its owner's to close."""
        for pool in (self._comm, self._gemm):
            if pool is not None:
                pool.shutdown()


def _both(here: Callable[[], None], beside: Future[None]) -> None:
    """Run ``here``, and wait for ``beside`` even where it fails."""
    try:
        here()
    finally:
        beside.result()


def _thread(name: str, width: int) -> ThreadPoolExecutor:
    """A thread whose torch operators are run by ``width`` threads.

    torch's setting belongs to the thread that makes it, but for its default for new threads, which is put back. A
    thread takes the default when it first asks, so it has to ask before it sets.
    """
    mine = torch.get_num_threads()
    pool = ThreadPoolExecutor(1, thread_name_prefix=f"autotune-{name}")
    try:
        pool.submit(torch.get_num_threads).result()
        pool.submit(torch.set_num_threads, width).result()
    finally:
        torch.set_num_threads(mine)
    return pool
