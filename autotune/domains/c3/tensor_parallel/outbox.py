"""Memory that peers read by copy engines: a rank publishes rows in it, and its peers pull them.

A call is, on a rank:

1. wait until the peers have pulled what the last call published (*done*), and write to the outbox;
2. signal to a peer that its rows may be read (*ready*);
3. on the stream of copies: wait for a peer's signal, pull its rows, and signal *done* to it.

Each wait resets its flag, so that a captured call can be replayed. The *done* flags are set from the start. The host
enqueues all signals of a call before it enqueues a wait for peers, so that streams may share a hardware queue.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from autotune.domains.c3.collectives.symmetric import (
    Copies,
    Flags,
    MemOps,
    allocation,
    check_access,
    drop_free,
    give_all,
    new_event,
    new_stream,
    take,
    too_little,
)
from autotune.domains.c3.group import Group
from autotune.domains.c3.tensor_parallel.panels import PARTS
from autotune.errors import Unsupported, first_line
from autotune.runtime.deployment import deployment

log = logging.getLogger("autotune")
Move = tuple[int, int, int, int]
"""A copy: its offset in the target, the peer, the offset in the peer's outbox, and the number of bytes."""
_DONE = PARTS
_RING = 2
"""Outboxes of a size, used in turn: a call may begin while peers still pull what the call before it published."""
_GRAPHS = 0
"""The most captures of a group. With 2048, the host took 142 instead of 421 us a gather on four H200s. Three ranks of
``benchmarks.tensor_parallel`` then ended by a segmentation fault, before graphs had the allocations' numbers: 0 until
GPUs have run them with these."""


class Outbox:
    """``nbytes`` bytes that the peers read. A collective call.

    Raises:
        Unsupported: a device has no access to a peer's memory.
    """

    def __init__(self, group: Group, nbytes: int) -> None:
        self._group = group
        self._buffer = take(group, nbytes)
        self._flags = Flags(group, PARTS + 1)
        self.pointers = self._buffer.pointers
        others = self._flags.peers
        self._ready: dict[tuple[int, tuple[int, ...]], MemOps] = {}
        self._arrived = {(slot, p): self._flags.wait(slot, [p]) for slot in range(PARTS) for p in others}
        self._all_arrived = self._flags.wait(0)
        self._done, self._free = self._flags.signal(_DONE), self._flags.wait(_DONE)
        self._done(torch.cuda.current_stream().cuda_stream)
        self._views: dict[tuple[torch.dtype, tuple[int, ...]], Tensor] = {}

    def view(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The outbox as a tensor of ``shape``, with the dtype of ``like``."""
        found = self._views.get((like.dtype, shape))
        if found is None:
            found = self._buffer.view(like.dtype, math.prod(shape)).view(shape)
            self._views[like.dtype, shape] = found
        return found

    def open(self, stream: int) -> None:
        """Wait until the peers have pulled the last call's rows."""
        self._free(stream)

    def publish(self, stream: int, slot: int = 0, peers: tuple[int, ...] = ()) -> None:
        """Signal to ``peers``, or to all without them, that the rows of ``slot`` may be read."""
        signal = self._ready.get((slot, peers))
        if signal is None:
            signal = self._ready[slot, peers] = self._flags.signal(slot, peers or None)
        signal(stream)

    def arrival(self, stream: int, peer: int | None = None, slot: int = 0) -> None:
        """Wait until ``peer`` has published the rows of ``slot``; None for all peers' first slot."""
        (self._all_arrived if peer is None else self._arrived[slot, peer])(stream)

    def pull(self, stream: int, target: int, moves: Sequence[Move]) -> None:
        """Copy rows of peers to the memory that begins at address ``target``."""
        Copies([(target + at, self.pointers[peer] + begin, size) for at, peer, begin, size in moves])(stream)

    def release(self, stream: int) -> None:
        """Signal to all peers that their rows have been pulled."""
        self._done(stream)

    def close(self) -> None:
        """Free the memory. A collective call; no call may be in progress."""
        self._free(torch.cuda.current_stream().cuda_stream)
        give_all(self._group, self._flags, self._buffer)


class Lanes:
    """Streams used in turn. Those that are used must be joined.

    Args:
        main: the caller's stream.
        begun: an event on ``main``; each other stream waits for it when it is first used. None if there is no other.
    """

    def __init__(self, exchange: Exchange, streams: list[Any], main: Any, begun: Any) -> None:
        self.streams, self._exchange, self._main, self._begun = streams, exchange, main, begun
        self._used: list[Any] = []

    def at(self, number: int) -> Any:
        """The stream of the ``number``-th piece of work."""
        stream = self.streams[number % len(self.streams)]
        if stream not in self._used:
            self._used.append(stream)
            if stream is not self._main:
                stream.wait_event(self._begun)
        return stream

    def join(self, stream: Any) -> None:
        """Let ``stream`` wait for the others."""
        for used in self._used:
            if used is not stream:
                stream.wait_event(self._exchange.event(used))


def rounded(nbytes: int) -> int:
    """Bytes of an outbox for ``nbytes``: up to a quarter more, so that batches of many lengths share a few outboxes."""
    step = 1 << max(0, nbytes.bit_length() - 3)
    return -(-nbytes // step) * step


class Exchange:
    """The outboxes of a group, and its streams. A collective call.

    Raises:
        Unsupported: see :class:`Outbox`.
    """

    def __init__(self, group: Group) -> None:
        check_access(group)
        self.group = group
        self._copying = [new_stream(group.device, high=True) for _ in range(2)]
        self._computing = new_stream(group.device)
        self._events: list[Any] = []
        self._next = 0
        self.graphs = Graphs(group.device)
        self._rings: dict[int, tuple[list[Outbox], list[int]]] = {}

    def outbox(self, nbytes: int) -> Outbox | None:
        """The next outbox of at least ``nbytes``; every rank makes the same calls in the same order.

        Returns:
            None if a rank has too little memory for it.
        """
        self._next = 0
        size = rounded(nbytes)
        if size not in self._rings:
            self._rings[size] = self._open(size), [0]
        boxes, turn = self._rings[size]
        if not boxes:
            return None
        turn[0] = (turn[0] + 1) % len(boxes)
        return boxes[turn[0]]

    def _open(self, nbytes: int) -> list[Outbox]:
        """Outboxes of this size; none, and a warning, if a rank has too little memory."""
        why = self.group.any_reason(too_little(self.group.device, _RING * nbytes))
        boxes: list[Outbox] = []
        try:
            while not why and len(boxes) < _RING:
                boxes.append(Outbox(self.group, nbytes))
        except Unsupported as error:  # on all ranks alike
            why = str(error)
        if not why:
            return boxes
        if self.group.rank == 0:
            text = f"autotune: products and collectives run one after the other: {why}"
            deployment().warn_once("tensor parallel memory", text)
        for box in boxes:
            box.close()
        return []

    def copying(self, main: Any, lanes: int) -> Lanes:
        """Streams of copies, 1 or 2, which begin after the work enqueued so far on ``main``."""
        return Lanes(self, self._copying[:lanes], main, self.event(main))

    def computing(self, main: Any, lanes: int) -> Lanes:
        """Streams of products, 1 or 2; the first is ``main``."""
        return self._beside(main, self._computing, lanes)

    def pulling(self, main: Any, lanes: int) -> Lanes:
        """Streams of copies, 1 or 2; the first is ``main``."""
        return self._beside(main, self._copying[1], lanes)

    def _beside(self, main: Any, other: Any, lanes: int) -> Lanes:
        return Lanes(self, [main, other][:lanes], main, self.event(main) if lanes > 1 else None)

    def after(self, main: Any) -> Any:
        """The stream of copies, which waits for the work enqueued so far on ``main``."""
        stream = self._copying[0]
        stream.wait_event(self.event(main))
        return stream

    def event(self, stream: Any) -> Any:
        """An event behind the work enqueued so far. A later call uses it again."""
        if self._next == len(self._events):
            self._events.append(new_event())
        event = self._events[self._next]
        self._next += 1
        event.record(stream)
        return event

    def run(self, what: Hashable, box: Outbox, tensors: Sequence[Tensor], work: Callable[[], None]) -> None:
        """Enqueue ``work`` on the current stream, as one graph if it can; see :meth:`Graphs.get`."""
        events = self._events, self._next
        self._events, self._next = self.graphs.events, 0  # an event of a capture is no event outside of it
        try:
            graph = self.graphs.get(what, box, tensors, work)
        finally:
            self._events, self._next = events
        if graph is None:
            work()
        else:
            graph.replay()

    def close(self) -> None:
        """Free all outboxes. A collective call."""
        for boxes, _ in self._rings.values():
            for box in boxes:
                box.close()  # waits for the device
        self._rings.clear()
        self.graphs.clear()
        drop_free(self.group)


class Graphs:
    """CUDA graphs of pieces of work by the addresses that they use, so that a repeated one costs the host one launch.

    Programs that are launched from Python allocate equal addresses in each step, as a rule. The driver resolves the
    addresses of copies to allocations when it captures them. torch's allocator may free an allocation, and a later one
    may have the same address. So a graph is valid only while all of its allocations are the captured ones.
    """

    def __init__(self, device: torch.device) -> None:
        self.events: list[Any] = []
        self._device = device
        self._stream = new_stream(device)
        self._pool: Any = None
        self._graphs: dict[tuple[Hashable, Outbox, tuple[int, ...]], tuple[Any, list[int]]] = {}
        self._warm: set[tuple[int, Hashable]] = set()
        self._left = _GRAPHS

    def get(self, what: Hashable, box: Outbox, tensors: Sequence[Tensor], work: Callable[[], None]) -> Any:
        """The graph of ``work``; None if it has to be enqueued by calls.

        Work is enqueued by calls in a program's own capture, the first time in a thread, since libraries allocate
        memory then, and after too many captures.

        Args:
            what: shapes and choices.
            box: the outbox of ``work``.
            tensors: all other tensors that ``work`` reads or writes.
        """
        if not (self._graphs or self._left) or torch.cuda.is_current_stream_capturing():
            return None
        addresses = tuple(tensor.data_ptr() for tensor in tensors)
        known = self._graphs.get((what, box, addresses))
        if known is not None:
            graph, memory = known
            if memory == [allocation(address) for address in addresses]:
                return graph
            # All graphs go: the first one destroyed may free the cuBLAS workspace of all that one stream captured.
            torch.cuda.synchronize(self._device)
            self._drop()
        warm = (threading.get_ident(), what)
        if warm not in self._warm:
            self._warm.add(warm)
            return None
        memory = [allocation(address) for address in addresses]
        ends = [allocation(at + tensor.nbytes - 1) for at, tensor in zip(addresses, tensors, strict=True)]
        if not self._left or 0 in memory or memory != ends:
            return None  # parts of expandable segments are mapped one by one
        graph = self._capture(work)
        if graph is not None:
            self._graphs[what, box, addresses] = graph, memory
        return graph

    def _capture(self, work: Callable[[], None]) -> Any:
        cuda: Any = torch.cuda
        graph = cuda.CUDAGraph()
        self._left -= 1
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    work()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            log.debug("autotune: products are enqueued by calls: %s", first_line(error))
            self._left = 0
            return None
        self._pool = graph.pool()
        return graph

    def _drop(self) -> None:
        self._graphs.clear()
        self._pool = None

    def clear(self) -> None:
        """Free the graphs; none may be in progress."""
        self._drop()
        self._warm.clear()
