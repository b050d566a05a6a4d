"""Memory that peers read by copy engines: a rank publishes rows in it, and its peers pull them.

A call is, on a rank:

1. wait until the peers have pulled what the last call published (*done*), and write to the outbox;
2. signal to a peer that its rows may be read (*ready*);
3. on the stream of copies: wait for a peer's signal, pull its rows, and signal *done* to it.

Each wait resets its flag, so that a captured call can be replayed. The *done* flags are set from the start. The host
enqueues all signals of a call before it enqueues a wait for peers, so that streams may share a hardware queue.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autotune.domains.c3.collectives.symmetric import (
    Copies,
    Flags,
    MemOps,
    check_access,
    give_all,
    new_event,
    new_stream,
    take,
)
from autotune.domains.c3.group import Group
from autotune.domains.c3.tensor_parallel.panels import PARTS
from autotune.runtime.deployment import deployment

Move = tuple[int, int, int, int]
"""A copy: its offset in the target, the peer, the offset in the peer's outbox, and the number of bytes."""
_DONE = PARTS
_RING = 2
"""Outboxes of a size, used in turn: a call may begin while peers still pull what the call before it published."""
_RESERVE = 1.2
"""Free memory required for outboxes, as a multiple of their size."""


class Outbox:
    """``nbytes`` bytes that the peers read. A collective call.

    Raises:
        Unsupported: a device has no access to a peer's memory.
    """

    def __init__(self, group: Group, nbytes: int) -> None:
        self._group = group
        self._flags = Flags(group, PARTS + 1)
        self._buffer = take(group, nbytes)
        self.pointers = self._buffer.pointers
        others = self._flags.peers
        self._ready: dict[tuple[int, tuple[int, ...]], MemOps] = {}
        self._arrived = {(slot, p): self._flags.wait(slot, [p]) for slot in range(PARTS) for p in others}
        self._all_arrived = self._flags.wait(0)
        self._done, self._free = self._flags.tell(_DONE), self._flags.wait(_DONE)
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
        told = self._ready.get((slot, peers))
        if told is None:
            told = self._ready[slot, peers] = self._flags.tell(slot, peers or None)
        told(stream)

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
        begun: an event on ``main``; each other stream waits for it when it is first used.
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
        self._rings: dict[int, tuple[list[Outbox], list[int]]] = {}

    def outbox(self, nbytes: int) -> Outbox | None:
        """The next outbox of this size; every rank makes the same calls in the same order.

        Returns:
            None if a rank has too little memory for it.
        """
        if nbytes not in self._rings:
            why = next((w for w in self.group.gather(self._too_little(nbytes)) if w), "")
            if why and self.group.rank == 0:
                text = f"autotune: products and collectives run one after the other: {why}"
                deployment().warn_once("tensor parallel memory", text)
            self._rings[nbytes] = [] if why else [Outbox(self.group, nbytes) for _ in range(_RING)], [0]
        boxes, turn = self._rings[nbytes]
        if not boxes:
            return None
        turn[0] = (turn[0] + 1) % len(boxes)
        return boxes[turn[0]]

    def _too_little(self, nbytes: int) -> str:
        needed, free = int(_RESERVE * _RING * nbytes), torch.cuda.mem_get_info(self.group.device)[0]
        return f"{needed >> 20} MiB of buffers do not fit {free >> 20} MiB of free memory" if needed > free else ""

    def fork(self, main: Any, lanes: int) -> tuple[Lanes, Lanes]:
        """Streams of copies and streams of products, which begin after the work enqueued so far on ``main``.

        Args:
            lanes: number of streams of each, 1 or 2. The first stream of products is ``main``.
        """
        self._next = 0
        begun = self.event(main)
        copying = Lanes(self, self._copying[:lanes], main, begun)
        return copying, Lanes(self, [main, self._computing][:lanes], main, begun)

    def event(self, stream: Any) -> Any:
        """An event behind the work enqueued so far. It is used again after the next :meth:`fork`."""
        if self._next == len(self._events):
            self._events.append(new_event())
        event = self._events[self._next]
        self._next += 1
        event.record(stream)
        return event

    def close(self) -> None:
        """Free all outboxes. A collective call."""
        for boxes, _ in self._rings.values():
            for box in boxes:
                box.close()
        self._rings.clear()
