"""A computation that overlaps a collective: streams, priorities and SM partitions on CUDA, threads on CPUs."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, Protocol

import torch

from autotune.domains.c3.collectives.nccl import Collective
from autotune.domains.c3.collectives.symmetric import check, new_stream
from autotune.domains.c3.strategy import HostStrategy, Strategy
from autotune.errors import Unsupported
from autotune.runtime.launch.cuda import LaunchError, driver
from autotune.task import Choice

_RESOURCE_SM = 1  # CU_DEV_RESOURCE_TYPE_SM
_DEFAULT_STREAM, _NON_BLOCKING = 1, 1  # CU_GREEN_CTX_DEFAULT_STREAM, CU_STREAM_NON_BLOCKING
_SM_FIELDS = 96  # offset in a CUdevResource of: SM count, smallest partition, SMs per group
_RESOURCE_BYTES = 512  # enough for a CUdevResource of any CUDA version


class Runs(Protocol):
    """Interface of a computation."""

    def run(self) -> None:
        """Enqueue the computation on the current stream (CUDA), or run it (CPU)."""
        ...


def open_overlap(
    compute: Runs | None,
    collective: Collective | None,
    config: Mapping[str, Choice],
    device: torch.device,
    *,
    graph: bool = True,
) -> CudaOverlap | HostOverlap:
    """Open the strategy ``config`` of the type of ``device`` for both parts; either may be missing.

    Args:
        graph: capture both in one CUDA graph; if False, each call enqueues them.
    """
    if device.type == "cpu":
        return HostOverlap(compute, collective, HostStrategy.of(config))
    return CudaOverlap(compute, collective, Strategy.of(config), device, graph)


class CudaOverlap:
    """Run a strategy repeatedly on the same computation and collective; either may be missing.

    A call enqueues both after the current stream's work, and the stream then waits for both. With ``graph`` they are
    captured once, in the first call or by :meth:`prepare`. A call during the caller's own capture becomes a part of the
    caller's graph.

    Attributes:
        sms: number of SMs that the computation has, if the strategy reserves some; 0 if it has all.
    """

    def __init__(
        self,
        compute: Runs | None,
        collective: Collective | None,
        strategy: Strategy,
        device: torch.device,
        graph: bool,
    ) -> None:
        self.compute, self.collective, self.strategy, self.graph = compute, collective, strategy, graph
        self._comm = new_stream(device, high=strategy.priority == "comm")
        self._side: Any = None
        self.sms = 0
        if strategy.order != "sequential" and strategy.reserve:
            every = torch.cuda.get_device_properties(device).multi_processor_count
            self._side, self.sms = partition_stream(device.index or 0, every - strategy.reserve)
        self._captured: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """Enqueue both parts."""
        if not self.graph or torch.cuda.is_current_stream_capturing():
            self._enqueue()
            return
        if self._captured is None:
            self.prepare()
        assert self._captured is not None
        self._captured.replay()

    def prepare(self) -> None:
        """Run once, so that lazily made objects exist, then capture. A collective call."""
        self._enqueue()
        torch.cuda.synchronize()
        if self.graph:
            captured = torch.cuda.CUDAGraph()
            # NCCL's watchdog queries events from another thread, which a global capture would forbid.
            with torch.cuda.graph(captured, capture_error_mode="thread_local"):
                self._enqueue()
            self._captured = captured

    def _enqueue(self) -> None:
        """Enqueue both parts on the strategy's streams, forked from and joined to the current stream."""
        main, compute, collective = torch.cuda.current_stream(), self.compute, self.collective
        if self.strategy.order == "sequential" or compute is None or collective is None:
            if compute is not None:
                compute.run()
            if collective is not None:
                collective.enqueue(main)
            return
        side = self._side or main
        self._comm.wait_stream(main)
        if side is not main:
            side.wait_stream(main)
        comm_first = self.strategy.order == "comm_first"
        if comm_first:
            collective.enqueue(self._comm)
            if collective.met is not None:
                side.wait_event(collective.met)
        with torch.cuda.stream(side):
            compute.run()
        if not comm_first:
            collective.enqueue(self._comm)
        if side is not main:
            main.wait_stream(side)
        main.wait_stream(self._comm)

    def close(self) -> None:
        """Free the graph. The owner of the collective closes it."""
        torch.cuda.synchronize()
        self._captured = None


class HostOverlap:
    """Run a strategy repeatedly on the same computation and collective; either may be missing.

    The computation runs in the caller's thread, or in a separate thread if the strategy sets its number of torch
    threads. An overlapped collective runs in a separate thread, which waits for its peers without the GIL. The
    strategy's order determines which of the two starts first.
    """

    def __init__(self, compute: Runs | None, collective: Collective | None, strategy: HostStrategy) -> None:
        self.compute, self.collective, self.strategy = compute, collective, strategy
        self._beside = compute is not None and collective is not None and strategy.order != "sequential"
        self._comm = _thread("comm", 1) if self._beside else None
        self._own = _thread("compute", strategy.threads) if compute is not None and strategy.threads else None

    def __call__(self) -> None:
        """Run both parts to completion."""
        if self._comm is None:
            if self.compute is not None:
                self._compute(lambda: None)
            if self.collective is not None:
                self.collective.enqueue()
            return
        begun, comm_first = threading.Event(), self.strategy.order == "comm_first"
        beside = self._comm.submit(self._communicate, begun.set if comm_first else begun.wait)
        try:
            if comm_first:
                begun.wait()
            self._compute(begun.set)
        finally:  # the peers wait for this rank's collective, even if the computation failed
            begun.set()
            beside.result()

    def prepare(self) -> None:
        """Run once, so that the threads exist. Called by every rank."""
        self()

    def _compute(self, begun: Callable[[], object]) -> None:
        """Run the computation in its thread, with the caller's grad mode, since grad mode is per thread."""
        grad = torch.is_grad_enabled()

        def run() -> None:
            assert self.compute is not None
            begun()
            with torch.set_grad_enabled(grad):
                self.compute.run()

        if self._own is None:
            run()
        else:
            self._own.submit(run).result()

    def _communicate(self, before: Callable[[], object]) -> None:
        assert self.collective is not None
        before()
        self.collective.enqueue()

    def close(self) -> None:
        """End the threads. The owner of the collective closes it."""
        for pool in (self._comm, self._own):
            if pool is not None:
                pool.shutdown()


def _thread(name: str, width: int) -> ThreadPoolExecutor:
    """A thread whose torch operators run on ``width`` threads.

    torch's setting is per thread, except that it also changes the default for new threads, which is restored here. A
    thread adopts the default at its first query, so the thread must query before it sets the number.
    """
    previous = torch.get_num_threads()
    pool = ThreadPoolExecutor(1, thread_name_prefix=f"autotune-{name}")
    try:
        pool.submit(torch.get_num_threads).result()
        pool.submit(torch.set_num_threads, width).result()
    finally:
        torch.set_num_threads(previous)
    return pool


@lru_cache(maxsize=64)
def partition_stream(device: int, sms: int) -> tuple[torch.cuda.Stream, int]:
    """A stream whose kernels run on at most ``sms`` SMs of ``device`` (a green context), and their actual number.

    SMs are allocated in groups (8 on sm_90), as many as fit. The stream lives as long as the process, since captured
    graphs refer to it.

    Raises:
        Unsupported: the driver has no green contexts, or rejects this one.
    """
    lib = driver()
    if not hasattr(lib, "cuGreenCtxStreamCreate"):
        raise Unsupported("this driver has no green contexts (CUDA 12.5)")
    priority = new_stream(torch.device("cuda", device)).priority
    torch.cuda.current_stream(device).synchronize()  # creates the primary context

    def buffer() -> Any:
        return ctypes.create_string_buffer(_RESOURCE_BYTES)

    try:
        handle, version = ctypes.c_int(), ctypes.c_int()
        check(lib.cuDeviceGet(ctypes.byref(handle), device), "finding the device")
        every, part, rest = buffer(), buffer(), buffer()
        check(lib.cuDeviceGetDevResource(handle, every, _RESOURCE_SM), "asking for the SMs")
        lib.cuDriverGetVersion(ctypes.byref(version))
        grouped = version.value >= 13000  # drivers from CUDA 13 on report the group size
        unit = max(1, ctypes.c_uint.from_buffer(every, _SM_FIELDS + 8).value) if grouped else 8
        sms = max(unit, sms // unit * unit)
        groups = ctypes.c_uint(1)
        code = lib.cuDevSmResourceSplitByCount(part, ctypes.byref(groups), every, rest, 0, ctypes.c_uint(sms))
        check(code, f"setting {sms} SMs apart")
        descriptor, context, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        check(lib.cuDevResourceGenerateDesc(ctypes.byref(descriptor), part, 1), "describing the SMs")
        check(lib.cuGreenCtxCreate(ctypes.byref(context), descriptor, handle, _DEFAULT_STREAM), "a green context")
        code = lib.cuGreenCtxStreamCreate(ctypes.byref(stream), context, _NON_BLOCKING, priority)
        check(code, "a stream of a green context")
    except LaunchError as error:
        raise Unsupported(f"a part of the SMs: {error}") from None
    count = ctypes.c_uint.from_buffer(part, _SM_FIELDS).value
    cuda: Any = torch.cuda
    return cuda.ExternalStream(stream.value or 0, device=device), count
