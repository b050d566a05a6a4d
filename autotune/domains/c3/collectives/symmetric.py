"""Access to other ranks' memory without kernels: symmetric buffers, copies between them, and flags in them.

Buffers come from ``torch.distributed._symmetric_memory``, whose rendezvous is a collective call and costs milliseconds,
so they are cached and reused. Flags are words of one such buffer. Their slots are allocated in the same order on every
rank, since making a collective is itself a collective call.

Copies and flags are driver calls without a torch API. Arguments are packed once and passed by ctypes, so that an eager
call takes the host microseconds. All of them can be captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed._symmetric_memory as symmetric

from autotune.domains.c3.group import Group
from autotune.errors import Unsupported, first_line
from autotune.runtime.launch.cuda import check as check_call
from autotune.runtime.launch.cuda import driver

FLAGS = 1 << 16
"""Flag words of a group; a collective uses 2 to 20 words per rank."""
KEPT_BYTES = 16 << 30
"""Maximum bytes of free buffers that are kept; beyond it all of them are freed."""
_ALIGN = 1 << 21
_POOL = "symmetric buffers"
_RESERVE = 1.2
"""Free memory required for buffers, as a multiple of their size."""
_WAIT_32, _WRITE_32 = 1, 2  # CU_STREAM_MEM_OP_WAIT_VALUE_32, ..._WRITE_VALUE_32
_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
_BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID

Copy = tuple[int, int, int]
"""Destination, source (device addresses), bytes."""


# ---- the driver -----------------------------------------------------------------------------------------------------


def check(code: int, doing: str) -> None:
    """Raise LaunchError with the driver's message unless ``code`` is 0."""
    if code:
        check_call(driver(), code, doing)


def new_stream(device: torch.device, *, high: bool = False) -> Any:
    """A stream of the lowest or the highest priority."""
    cuda: Any = torch.cuda
    least, greatest = cuda.Stream.priority_range()
    return cuda.Stream(device, priority=greatest if high else least)


def new_event(*, timing: bool = False) -> Any:
    """An event, with timing or without."""
    cuda: Any = torch.cuda
    return cuda.Event(enable_timing=timing)


def allocation(address: int) -> int:
    """The driver's number of the allocation at a device address, unique in this process's life; 0 if unknown."""
    number = ctypes.c_uint64()
    code = driver().cuPointerGetAttribute(ctypes.byref(number), _BUFFER_ID, ctypes.c_uint64(address))
    return 0 if code else number.value


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
    """Ordered writes to 32-bit words and waits for them, executed by the stream without a kernel or an SM.

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
    """Copies between device addresses (also of peers) by copy engines, in sequence on their stream."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._copies = [
            (ctypes.c_uint64(dst), ctypes.c_uint64(src), ctypes.c_size_t(size)) for dst, src, size in copies if size
        ]
        self._call = driver().cuMemcpyDtoDAsync_v2

    def __call__(self, stream: int) -> None:
        """Enqueue on a raw stream."""
        handle = ctypes.c_void_p(stream)
        for dst, src, size in self._copies:
            check(self._call(dst, src, size, handle), "a copy between devices")


# ---- buffers --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Buffer:
    """``nbytes`` bytes on every rank; ``pointers`` are their addresses in this process, by rank."""

    memory: torch.Tensor
    pointers: list[int]
    nbytes: int
    handle: Any

    def view(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """The first ``numel`` elements of this rank's memory as ``dtype``."""
        part: torch.Tensor = self.memory[: numel * dtype.itemsize].view(dtype)
        return part

    def to_peers(self, peers: Sequence[int], begin: int, nbytes: int) -> list[Copy]:
        """Copies of a part of this rank's memory to the same offset at every peer."""
        source = self.memory.data_ptr() + begin
        return [(self.pointers[p] + begin, source, nbytes) for p in peers]


def check_access(group: Group) -> None:
    """Raise Unsupported on all ranks if a device has no access to a peer's memory."""

    def found() -> str:
        own_host, own_index = socket.gethostname(), group.device.index or 0
        why = ""
        for rank, (host, index) in enumerate(group.gather([own_host, own_index])):
            if host != own_host:
                why = f"rank {rank} is on another host"
            elif index != own_index and not torch.cuda.can_device_access_peer(own_index, index):
                why = f"GPU {own_index} has no access to the memory of GPU {index}"
            elif index == own_index and rank != group.rank:
                why = f"ranks {group.rank} and {rank} share GPU {own_index}"
        return group.any_reason(why)

    why = group.keep("peer access", found)
    if why:
        raise Unsupported(f"copies between devices need peer access over NVLink or PCIe: {why}")


def too_little(device: torch.device, nbytes: int) -> str:
    """Why buffers of ``nbytes`` in all do not fit a GPU's free memory; "" if they do, and on CPUs."""
    if device.type != "cuda":
        return ""
    needed, free = int(_RESERVE * nbytes), torch.cuda.mem_get_info(device)[0]
    return f"{needed >> 20} MiB of buffers do not fit {free >> 20} MiB of free memory" if needed > free else ""


def take(group: Group, nbytes: int) -> Buffer:
    """A buffer of at least ``nbytes``, rounded up so that it can be reused. A collective call.

    Raises:
        Unsupported: see :func:`check_access`; or a rank has too little memory. On all ranks alike.
    """
    check_access(group)
    size = max(_ALIGN, -(-nbytes // _ALIGN) * _ALIGN)
    free: list[Buffer] = group.keep(_POOL, list)
    fitting = [b for b in free if size <= b.nbytes <= 2 * size]
    if fitting:
        best = min(fitting, key=lambda b: b.nbytes)
        free.remove(best)
        return best
    if sum(b.nbytes for b in free) + size > KEPT_BYTES:
        drop_free(group)  # sizes are the same on all ranks, so all ranks reach this
    why = ""
    backend = symmetric.get_backend(group.device) if group.device.type == "cuda" else "CUDA"
    try:
        if backend != "CUDA":  # the program's choice for the whole process
            raise RuntimeError(f"its backend is {backend}, and peers cannot read such memory")
        memory = symmetric.empty(size, dtype=torch.uint8, device=group.device)
    except RuntimeError as error:
        why = first_line(error)
    why = group.any_reason(why)
    if why:  # the others would wait for this rank in the rendezvous
        raise Unsupported(f"no {size >> 20} MiB of symmetric memory: {why}")
    handle = symmetric.rendezvous(memory, group.data)
    return Buffer(memory, [int(p) for p in handle.buffer_ptrs], size, handle)


def give(group: Group, *buffers: Buffer) -> None:
    """Return buffers for reuse by :func:`take`. Called in the same order on every rank."""
    free: list[Buffer] = group.keep(_POOL, list)
    free.extend(buffers)


def drop_free(group: Group) -> None:
    """Free the memory of unused buffers, after the work that used them. A collective call."""
    free: list[Buffer] = group.keep(_POOL, list)
    if free:
        torch.cuda.synchronize(group.device)
        free.clear()


# ---- flags ----------------------------------------------------------------------------------------------------------


class Flags:
    """A range of flag words: ``slots`` words per peer, zero before and after every use. A collective call."""

    def __init__(self, group: Group, slots: int) -> None:
        def make() -> tuple[Buffer, list[int]]:
            buffer = take(group, 4 * FLAGS)
            buffer.memory.zero_()
            torch.cuda.synchronize()
            group.barrier()  # no peer may write before the memory is zero
            return buffer, [0]

        buffer, used = group.keep("flags", make)
        self._rank, self._ranks = group.rank, group.ranks
        self._pointers: list[int] = buffer.pointers
        free: dict[int, list[int]] = group.keep("free flags", dict)
        self._free = free.setdefault(slots, [])
        if self._free:
            self._first = self._free.pop(0)
        else:
            self._first, used[0] = used[0], used[0] + slots * group.ranks
            if used[0] > FLAGS:
                raise Unsupported(f"more than {FLAGS} flags in use: close collectives that are no longer needed")

    @property
    def peers(self) -> list[int]:
        """The other ranks, starting after this one, so that ranks start with different peers."""
        return [(self._rank + k) % self._ranks for k in range(1, self._ranks)]

    def _word(self, at: int, sender: int, slot: int) -> int:
        return self._pointers[at] + 4 * (self._first + slot * self._ranks + sender)

    def signal(self, slot: int, peers: Sequence[int] | None = None) -> MemOps:
        """Set flag ``slot`` of this rank at ``peers``; None for all."""
        signalled = self.peers if peers is None else peers
        return MemOps([("write", self._word(p, self._rank, slot), 1) for p in signalled])

    def wait(self, slot: int, peers: Sequence[int] | None = None) -> MemOps:
        """Wait for flag ``slot`` of ``peers`` (None for all), and reset the flags for the next use.

        A peer sets its flag again only after another signal of this rank, so no signal is lost.
        """
        words = [self._word(self._rank, p, slot) for p in (self.peers if peers is None else peers)]
        return MemOps([("wait", w, 1) for w in words] + [("write", w, 0) for w in words])

    def close(self) -> None:
        """Free the slots, in the same order on every rank, when no call is in progress."""
        self._free.append(self._first)


def give_all(group: Group, flags: Flags, *buffers: Buffer | None) -> None:
    """Free a collective's flags and buffers when all ranks have finished with it. A collective call."""
    torch.cuda.synchronize(group.device)
    group.barrier()
    flags.close()
    give(group, *(buffer for buffer in buffers if buffer is not None))


class DeviceBarrier:
    """A barrier of all ranks on their streams. Two sets of flags alternate, since a rank may be one barrier ahead."""

    def __init__(self, group: Group) -> None:
        flags = Flags(group, 2)
        self._steps = [(flags.signal(k), flags.wait(k)) for k in range(2)]
        self._turn = 0

    def __call__(self, stream: int) -> None:
        signal, wait = self._steps[self._turn]
        self._turn = 1 - self._turn
        signal(stream)
        wait(stream)
