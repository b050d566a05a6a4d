"""Driver calls that torch does not offer: stream memory operations, plain copies, streams of a part of the SMs.

Arguments are packed once and handed over by ctypes, so that an eager call costs the host microseconds. All of these but
batched copies may be captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from autotune.domains.c3.collectives.streams import new_stream
from autotune.errors import Unsupported
from autotune.runtime.launch.cuda import LaunchError, driver

if TYPE_CHECKING:
    import torch

_WAIT_32, _WRITE_32 = 1, 2  # CU_STREAM_MEM_OP_WAIT_VALUE_32, ..._WRITE_VALUE_32
_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_PREFER_OVERLAP = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
_RESOURCE_SM = 1  # CU_DEV_RESOURCE_TYPE_SM
_DEFAULT_STREAM, _NON_BLOCKING = 1, 1  # CU_GREEN_CTX_DEFAULT_STREAM, CU_STREAM_NON_BLOCKING
_SM_FIELDS = 96  # in a CUdevResource, behind its type and padding: SM count, smallest part, SMs in a group
_RESOURCE_BYTES = 512  # room for a CUdevResource of any CUDA version

Copy = tuple[int, int, int]
"""Destination, source (device addresses), bytes."""


def check(code: int, doing: str) -> None:
    """Raise LaunchError with the driver's words unless ``code`` is 0."""
    if code:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(code, ctypes.byref(text))
        raise LaunchError(f"{doing}: {(text.value or b'unknown error').decode()} (CUDA error {code})")


class _MemOp(ctypes.Structure):
    """``CUstreamBatchMemOpParams``: wait and write have the same layout."""

    _fields_ = (
        ("operation", ctypes.c_int),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("alias", ctypes.c_uint64),
        ("pad", ctypes.c_uint64),
    )


class MemOps:
    """Writes to and waits for 32-bit words, in order, done by the stream itself: no kernel, no SM.

    Args:
        ops: ("write" | "wait", device address, value); a wait ends when the word equals the value.
    """

    def __init__(self, ops: Sequence[tuple[str, int, int]]) -> None:
        self._n = len(ops)
        self._array = (_MemOp * max(1, self._n))()
        for entry, (what, address, value) in zip(self._array, ops, strict=False):
            entry.operation = _WAIT_32 if what == "wait" else _WRITE_32
            entry.address, entry.value = address, value
            entry.flags = _EQUAL if what == "wait" else 0
        self._call = driver().cuStreamBatchMemOp_v2

    def __call__(self, stream: int) -> None:
        """Enqueue on a raw stream."""
        if self._n:
            check(self._call(ctypes.c_void_p(stream), self._n, self._array, 0), "a stream memory operation")


class Copies:
    """Copies between device addresses (peers' too), by copy engines; one after the other on their stream.

    Args:
        batch: hand them over as one batch that prefers to overlap with compute (``cuMemcpyBatchAsync``). A batch has no
            order, and cannot be captured: in a capture the copies are single ones.

    Raises:
        Unsupported: this driver has no batched copies.
    """

    def __init__(self, copies: Sequence[Copy], *, batch: bool = False) -> None:
        self._copies = [
            (ctypes.c_uint64(dst), ctypes.c_uint64(src), ctypes.c_size_t(size)) for dst, src, size in copies if size
        ]
        self._single = driver().cuMemcpyDtoDAsync_v2
        self._batch = _batched([c for c in copies if c[2]]) if batch and self._copies else None

    def __call__(self, stream: int) -> None:
        """Enqueue on a raw stream."""
        if self._batch is not None and not capturing():
            check(self._batch(stream), "a batch of copies")
            return
        handle = ctypes.c_void_p(stream)
        for dst, src, size in self._copies:
            check(self._single(dst, src, size, handle), "a copy between devices")


def capturing() -> bool:
    """Whether the current stream is being captured in a CUDA graph."""
    import torch

    return torch.cuda.is_current_stream_capturing()


class _Attributes(ctypes.Structure):
    """``CUmemcpyAttributes``; the two locations (type, id) are hints that do not apply to device memory."""

    _fields_ = (("order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


def _batched(copies: Sequence[Copy]) -> Callable[[int], int]:
    lib, n = driver(), len(copies)
    if not hasattr(lib, "cuMemcpyBatchAsync_v2"):
        raise Unsupported("this driver has no batched copies (cuMemcpyBatchAsync of CUDA 13)")
    words = ctypes.c_uint64 * n
    dst, src, size = (words(*(c[i] for c in copies)) for i in range(3))
    attributes = _Attributes(_STREAM_ORDER, (ctypes.c_int * 4)(), _PREFER_OVERLAP)
    first = (ctypes.c_size_t * 1)(0)
    call = lib.cuMemcpyBatchAsync_v2

    def run(stream: int) -> int:
        code: int = call(dst, src, size, ctypes.c_size_t(n), ctypes.byref(attributes), first, ctypes.c_size_t(1),
                         ctypes.c_void_p(stream))  # fmt: skip
        return code

    return run


def _grouped() -> bool:
    """Whether this driver tells how SMs are grouped (CUDA 13)."""
    version = ctypes.c_int()
    driver().cuDriverGetVersion(ctypes.byref(version))
    return version.value >= 13000


@lru_cache(maxsize=64)
def partition_stream(device: int, sms: int, high: bool = False) -> tuple[torch.cuda.Stream, int]:
    """A stream whose kernels run on at most ``sms`` SMs of ``device`` (a green context), and how many they really are.

    SMs come in groups (8 on sm_90), of which there are as many as fit. The stream stays for the life of the process, as
    captured graphs hold it; ``high`` gives it the highest priority.

    Raises:
        Unsupported: the driver has no green contexts, or refuses this one.
    """
    import torch

    lib = driver()
    if not hasattr(lib, "cuGreenCtxStreamCreate"):
        raise Unsupported("this driver has no green contexts (CUDA 12.5)")
    priority = new_stream(torch.device("cuda", device), high=high).priority
    torch.cuda.current_stream(device).synchronize()  # the primary context exists from here on

    def buffer() -> Any:
        return ctypes.create_string_buffer(_RESOURCE_BYTES)

    try:
        handle = ctypes.c_int()
        check(lib.cuDeviceGet(ctypes.byref(handle), device), "finding the device")
        every, part, rest = buffer(), buffer(), buffer()
        check(lib.cuDeviceGetDevResource(handle, every, _RESOURCE_SM), "asking for the SMs")
        unit = max(1, ctypes.c_uint.from_buffer(every, _SM_FIELDS + 8).value) if _grouped() else 8
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
