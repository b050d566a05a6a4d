"""A computation beside a collective, as a strategy says: streams, priorities and SMs on CUDA, threads on CPUs."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, Protocol

import torch

from autotune.domains.c3.collectives.base import Collective
from autotune.domains.c3.collectives.symmetric import check, new_stream
from autotune.domains.c3.strategy import HostStrategy, Strategy
from autotune.errors import Unsupported
from autotune.runtime.launch.cuda import LaunchError, driver
from autotune.task import Choice

_RESOURCE_SM = 1  # CU_DEV_RESOURCE_TYPE_SM
_DEFAULT_STREAM, _NON_BLOCKING = 1, 1  # CU_GREEN_CTX_DEFAULT_STREAM, CU_STREAM_NON_BLOCKING
_SM_FIELDS = 96  # in a CUdevResource, behind its type and padding: SM count, smallest part, SMs in a group
_RESOURCE_BYTES = 512  # room for a CUdevResource of any CUDA version


class Runs(Protocol):
    """A computation."""

    def run(self) -> None:
        """Enqueue it on the current stream (CUDA), or run it (CPU)."""
        ...


def open_overlap(
    compute: Runs | None,
    collective: Collective | None,
    config: Mapping[str, Choice],
    device: torch.device,
    *,
    graph: bool = True,
) -> CudaOverlap | HostOverlap:
    """The way that ``config``, a strategy of the side that ``device`` is on, runs the two; either may be missing.

    Args:
        graph: capture both in one CUDA graph; else they are enqueued call by call.
    """
    if device.type == "cpu":
        return HostOverlap(compute, collective, HostStrategy.of(config))
    return CudaOverlap(compute, collective, Strategy.of(config), device, graph)


class CudaOverlap:
    """Runs a strategy again and again on the same computation and collective; either may be missing.

    A call enqueues both behind what the current stream has, and lets that stream go on after both. With ``graph`` they
    are captured once, in the first call or by :meth:`prepare`; a call under the caller's own capture becomes a part of
    the caller's graph.

    Attributes:
        sms: what the computation really has, where some are kept from it; 0 where it has all.
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
        """Enqueue both."""
        if not self.graph or torch.cuda.is_current_stream_capturing():
            self._enqueue()
            return
        if self._captured is None:
            self.prepare()
        assert self._captured is not None
        self._captured.replay()

    def prepare(self) -> None:
        """Run once, so that what is made lazily exists, and capture. A collective call."""
        self._enqueue()
        torch.cuda.synchronize()
        if self.graph:
            captured = torch.cuda.CUDAGraph()
            # NCCL's watchdog queries events from a thread of its own, which a global capture would forbid.
            with torch.cuda.graph(captured, capture_error_mode="thread_local"):
                self._enqueue()
            self._captured = captured

    def _enqueue(self) -> None:
        """Both, on the streams of the strategy, between a fork from and a join to the current stream."""
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
        """Let the graph go. The collective is its owner's to close."""
        torch.cuda.synchronize()
        self._captured = None


class HostOverlap:
    """Runs a strategy again and again on the same computation and collective; either may be missing.

    The computation runs in the caller's thread, or in one of its own where the strategy gives it another number of
    threads. A collective beside it runs in a thread of its own, which waits for its peers without Python's lock. The
    order says which of the two waits until the other has begun.
    """

    def __init__(self, compute: Runs | None, collective: Collective | None, strategy: HostStrategy) -> None:
        self.compute, self.collective, self.strategy = compute, collective, strategy
        self._beside = compute is not None and collective is not None and strategy.order != "sequential"
        self._comm = _thread("comm", 1) if self._beside else None
        self._own = _thread("compute", strategy.threads) if compute is not None and strategy.threads else None

    def __call__(self) -> None:
        """Run both; they are done at return."""
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
        finally:  # the peers wait for this rank's collective, whatever became of its computation
            begun.set()
            beside.result()

    def prepare(self) -> None:
        """Run once, so that the threads are there. Called by every rank."""
        self()

    def _compute(self, begun: Callable[[], object]) -> None:
        """Run the computation where it belongs, in the caller's grad mode: each thread has a mode of its own."""
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
        """End the threads. The collective is its owner's to close."""
        for pool in (self._comm, self._own):
            if pool is not None:
                pool.shutdown()


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


@lru_cache(maxsize=64)
def partition_stream(device: int, sms: int) -> tuple[torch.cuda.Stream, int]:
    """A stream whose kernels run on at most ``sms`` SMs of ``device`` (a green context), and how many they really are.

    SMs come in groups (8 on sm_90), of which there are as many as fit. The stream stays for the life of the process, as
    captured graphs hold it.

    Raises:
        Unsupported: the driver has no green contexts, or refuses this one.
    """
    lib = driver()
    if not hasattr(lib, "cuGreenCtxStreamCreate"):
        raise Unsupported("this driver has no green contexts (CUDA 12.5)")
    priority = new_stream(torch.device("cuda", device)).priority
    torch.cuda.current_stream(device).synchronize()  # the primary context exists from here on

    def buffer() -> Any:
        return ctypes.create_string_buffer(_RESOURCE_BYTES)

    try:
        handle, version = ctypes.c_int(), ctypes.c_int()
        check(lib.cuDeviceGet(ctypes.byref(handle), device), "finding the device")
        every, part, rest = buffer(), buffer(), buffer()
        check(lib.cuDeviceGetDevResource(handle, every, _RESOURCE_SM), "asking for the SMs")
        lib.cuDriverGetVersion(ctypes.byref(version))
        grouped = version.value >= 13000  # from CUDA 13 on a driver tells how SMs are grouped
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
