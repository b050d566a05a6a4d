"""Access to other ranks' memory without a kernel: symmetric buffers, copies between them, flags in them.

Buffers come from ``torch.distributed._symmetric_memory``, whose rendezvous is a collective call and costs
milliseconds, so they are kept and handed out again. Flags are words of one such buffer; their slots are dealt out in
the same order on every rank, since making a collective is itself a collective call.

Copies and flags are driver calls that torch does not offer. Arguments are packed once and handed over by ctypes, so
that an eager call costs the host microseconds. All may be captured in a CUDA graph.
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
from autotune.errors import Unsupported
from autotune.runtime.launch.cuda import LaunchError, driver

FLAGS = 1 << 16
"""Words for flags that a group has; a collective takes 2 to 20 times as many as there are ranks."""
KEPT_BYTES = 16 << 30
"""Free buffers are kept up to this; then all of them are let go."""
_ALIGN = 1 << 21
_POOL = "symmetric buffers"
_WAIT_32, _WRITE_32 = 1, 2  # CU_STREAM_MEM_OP_WAIT_VALUE_32, ..._WRITE_VALUE_32
_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ

Copy = tuple[int, int, int]
"""Destination, source (device addresses), bytes."""


# ---- the driver -----------------------------------------------------------------------------------------------------


def check(code: int, doing: str) -> None:
    """Raise LaunchError with the driver's words unless ``code`` is 0."""
    if code:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(code, ctypes.byref(text))
        raise LaunchError(f"{doing}: {(text.value or b'unknown error').decode()} (CUDA error {code})")


def new_stream(device: torch.device, *, high: bool = False) -> Any:
    """A stream of the lowest priority, or of the highest."""
    cuda: Any = torch.cuda
    least, greatest = cuda.Stream.priority_range()
    return cuda.Stream(device, priority=greatest if high else least)


def new_event(*, timing: bool = False) -> Any:
    """An event, with timing or without."""
    cuda: Any = torch.cuda
    return cuda.Event(enable_timing=timing)


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
    """Copies between device addresses (peers' too), by copy engines; one after the other on their stream."""

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
    """``nbytes`` bytes on every rank; ``pointers`` are the addresses, by rank, as this process sees them."""

    memory: torch.Tensor
    pointers: list[int]
    nbytes: int
    handle: Any

    def view(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """The first ``numel`` elements of ``dtype`` of this rank's memory."""
        part: torch.Tensor = self.memory[: numel * dtype.itemsize].view(dtype)
        return part

    def to_peers(self, peers: Sequence[int], begin: int, nbytes: int) -> list[Copy]:
        """Copies that bring a part of this rank's memory to the same place at every peer."""
        source = self.memory.data_ptr() + begin
        return [(self.pointers[p] + begin, source, nbytes) for p in peers]


def check_access(group: Group) -> None:
    """Raise Unsupported, on every rank alike, where some device cannot reach the memory of another."""

    def found() -> str:
        here, mine = socket.gethostname(), group.device.index or 0
        why = ""
        for rank, (host, index) in enumerate(group.gather([here, mine])):
            if host != here:
                why = f"rank {rank} is on another host"
            elif index != mine and not torch.cuda.can_device_access_peer(mine, index):
                why = f"GPU {mine} has no access to the memory of GPU {index}"
            elif index == mine and rank != group.rank:
                why = f"ranks {group.rank} and {rank} share GPU {mine}"
        return next((w for w in group.gather(why) if w), "")

    why = group.keep("peer access", found)
    if why:
        raise Unsupported(f"copies between devices need peer access over NVLink or PCIe: {why}")


def take(group: Group, nbytes: int) -> Buffer:
    """A buffer of at least ``nbytes``, of a size shared by many requests. A collective call.

    Raises:
        Unsupported: see :func:`check_access`.
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
        torch.cuda.synchronize(group.device)
        drop_free(group)  # sizes are the same on all ranks, so all do
    memory = symmetric.empty(size, dtype=torch.uint8, device=group.device)
    handle = symmetric.rendezvous(memory, group.data)
    return Buffer(memory, [int(p) for p in handle.buffer_ptrs], size, handle)


def give(group: Group, *buffers: Buffer) -> None:
    """Give buffers back, for :func:`take` to hand out again. Called in the same order on every rank."""
    free: list[Buffer] = group.keep(_POOL, list)
    free.extend(buffers)


def drop_free(group: Group) -> None:
    """Let the memory go that nobody uses. A collective call."""
    group.keep(_POOL, list).clear()


# ---- flags ----------------------------------------------------------------------------------------------------------


class Flags:
    """A stretch of flag words: ``slots`` words for each peer, zero before and after every use. A collective call."""

    def __init__(self, group: Group, slots: int) -> None:
        def make() -> tuple[Buffer, list[int]]:
            buffer = take(group, 4 * FLAGS)
            buffer.memory.zero_()
            torch.cuda.synchronize()
            group.barrier()  # no peer writes before it is zero
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
        """The other ranks, beginning behind this one, so that not all begin with the same."""
        return [(self._rank + k) % self._ranks for k in range(1, self._ranks)]

    def _word(self, at: int, sender: int, slot: int) -> int:
        return self._pointers[at] + 4 * (self._first + slot * self._ranks + sender)

    def tell(self, slot: int) -> MemOps:
        """Raise flag ``slot`` of this rank at every peer."""
        return MemOps([("write", self._word(p, self._rank, slot), 1) for p in self.peers])

    def wait(self, slot: int) -> MemOps:
        """Wait for flag ``slot`` of every peer, and lower them for the next time.

        A peer raises it again only after it has heard of this rank in between, so none is lost.
        """
        words = [self._word(self._rank, p, slot) for p in self.peers]
        return MemOps([("wait", w, 1) for w in words] + [("write", w, 0) for w in words])

    def close(self) -> None:
        """Give the slots back, in the same order on every rank, once no call is under way."""
        self._free.append(self._first)


def give_all(group: Group, flags: Flags, *buffers: Buffer | None) -> None:
    """Give a collective's flags and buffers back, once all ranks are through with it. A collective call."""
    torch.cuda.synchronize(group.device)
    group.barrier()
    flags.close()
    give(group, *(buffer for buffer in buffers if buffer is not None))


class DeviceBarrier:
    """All ranks meet on their streams. Two sets of flags take turns: a rank may be one meeting ahead of another."""

    def __init__(self, group: Group) -> None:
        flags = Flags(group, 2)
        self._steps = [(flags.tell(k), flags.wait(k)) for k in range(2)]
        self._turn = 0

    def __call__(self, stream: int) -> None:
        tell, wait = self._steps[self._turn]
        self._turn = 1 - self._turn
        tell(stream)
        wait(stream)
