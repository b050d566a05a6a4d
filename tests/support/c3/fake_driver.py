"""Fakes of :mod:`.fake_device`: the driver's library, torch.cuda, and symmetric memory.

All of them are below the code under test.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch

from autotune.domains.c3.collectives import sm as sm_module
from autotune.domains.c3.collectives import symmetric as symmetric_module
from autotune.domains.c3.collectives.sm import emit_sum
from autotune.domains.c3.strategy import Strategy, form_of, kernel_of
from autotune.task import Artifact, Kernel
from tests.support.c3.fake_device import World
from tests.support.c3.fake_streams import Event, Graph, Stream


def kernels(strategy: Strategy, op: str, ranks: int, dtype: str, mean: bool = False) -> Artifact:
    """The kernel of a strategy, without code: its effect follows from its launch arguments."""
    config = strategy.config()
    made = [emit_sum(ranks, dtype, form=form_of(config), mean=mean).launch] if kernel_of(config, op) else []
    return Artifact("sm_90", tuple(Kernel(f"{op}_reduce", b"", {**told, "dtype": dtype}) for told in made))


class Driver:
    """The calls of the driver's library that collectives make."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def _stream(self, handle: ctypes.c_void_p) -> Stream:
        return self._device.world.streams[int(handle.value or 0)]

    def cuStreamBatchMemOp_v2(self, stream: ctypes.c_void_p, n: int, array: Any, flags: int) -> int:
        for entry in array[:n]:
            wait = entry.operation == 1
            assert entry.flags == (1 if wait else 0)
            self._stream(stream).add("wait" if wait else "write", entry.address, entry.value)
        return 0

    def cuMemcpyDtoDAsync_v2(self, dst: Any, src: Any, size: Any, stream: ctypes.c_void_p) -> int:
        self._device.move(self._stream(stream), dst.value, src.value, size.value)
        return 0

    def cuPointerGetAttribute(self, number: Any, attribute: int, address: ctypes.c_uint64) -> int:
        assert attribute == 7
        number._obj.value = self._device.world.allocation(address.value)
        return 0 if number._obj.value else 1

    def cuGetErrorString(self, code: int, text: Any) -> int:
        text._obj.value = b"not permitted under capture"
        return 0


class Device:
    """The patches, and the world that they serve."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self.world: World = None  # type: ignore[assignment]
        patch.setattr(symmetric_module, "driver", lambda: Driver(self))
        patch.setattr(sm_module, "make_launch", self._launch)
        patch.setattr(sm_module, "_launches", {})
        patch.setattr(symmetric_module, "_ALIGN", 128)  # so that an access behind a buffer's end is seen
        patch.setattr(symmetric_module, "FLAGS", 1 << 12)
        patch.setattr(symmetric, "empty", lambda *a, **k: self.world.symmetric(*a, **k))
        patch.setattr(symmetric, "rendezvous", lambda *a: self.world.rendezvous(*a))
        fakes: dict[str, Any] = {
            "Stream": self._streams(), "Event": lambda enable_timing: Event(), "CUDAGraph": self._new_graph,
            "graph": lambda *a, **k: self.world.capture(*a, **k), "stream": lambda s: self.world.using(s),
            "set_stream": lambda s: self.world.switch(s),
            "current_stream": lambda device=None: self.world.current(), "synchronize": lambda device=None: None,
            "is_current_stream_capturing": lambda: self.world.current().graph is not None,
        }  # fmt: skip
        for name, fake in fakes.items():
            patch.setattr(torch.cuda, name, fake)
        self._patch = patch

    def open(self, ranks: int, seed: int, queues: str = "own", bias: str = "fair") -> World:
        """A new world, for which torch.empty allocates."""
        self.world = World(ranks, seed, queues, bias)
        self._patch.setattr(torch, "empty", lambda *a, **k: self.world.allocate(*a, **k))
        return self.world

    def _streams(self) -> type:
        device = self

        class New:
            def __new__(cls, where: object = None, priority: int = 0) -> Any:
                return Stream(device.world, priority)

            @staticmethod
            def priority_range() -> tuple[int, int]:
                return 0, -5

        return New

    def _new_graph(self) -> Graph:
        return Graph(self.world)

    def move(self, stream: Stream, dst: int, src: int, size: int) -> None:
        """A copy, in two halves."""
        half = size // 2
        if half:
            stream.add("copy", dst, src, half)
        stream.add("copy", dst + half, src + half, size - half)

    def _launch(self, kernel: Kernel, device: int, grid: int, count: int) -> Callable[[int, list[int]], None]:
        dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[str(kernel.launch["dtype"])]

        def run(handle: int, pointers: list[int]) -> None:
            stream = self.world.streams[handle]
            for begin, end in ((0, count // 2), (count // 2, count)):
                stream.add("call", lambda begin=begin, end=end: add(pointers, begin, end))

        def add(pointers: list[int], begin: int, end: int) -> None:
            size = dtype.itemsize
            views = [self.world.bytes_at(p + begin * size, (end - begin) * size).view(dtype) for p in pointers]
            terms = torch.stack([v.float() for v in views[:-1]])
            views[-1].copy_(terms.mean(0) if kernel.launch["op"].endswith("_mean") else terms.sum(0))

        return run
