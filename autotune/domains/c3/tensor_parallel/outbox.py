"""Memory that peers read by copy engines: a rank publishes rows in it, and its peers pull them.

A call is, on a rank:

1. wait until the peers have pulled what the last call published (*done*), and write to the outbox;
2. signal to a peer that its rows may be read (*ready*);
3. on the stream of copies: wait for a peer's signal, pull its rows, and signal *done* to it.

Each wait resets its flag, so that a captured call can be replayed. The *done* flags are set from the start. The host
enqueues all signals of a call before it enqueues a wait for peers, so that streams may share a hardware queue.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autotune.domains.c3.collectives.symmetric import Copies, Copy, Flags, check_access, give_all, new_stream, take
from autotune.domains.c3.group import Group
from autotune.domains.c3.tensor_parallel.panels import PARTS

_DONE = PARTS
_RING = 2
"""Outboxes of a size, used in turn: a call may begin while peers still pull what the call before it published."""


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
        self._ready = {(slot, p): self._flags.tell(slot, [p]) for slot in range(PARTS) for p in others}
        self._arrived = {(slot, p): self._flags.wait(slot, [p]) for slot in range(PARTS) for p in others}
        self._all_ready = self._flags.tell(0)
        self._done, self._free = self._flags.tell(_DONE), self._flags.wait(_DONE)
        self._done(torch.cuda.current_stream().cuda_stream)

    def view(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The outbox as a tensor of ``shape``."""
        numel = 1
        for extent in shape:
            numel *= extent
        return self._buffer.view(like.dtype, numel).view(shape)

    def open(self, stream: int) -> None:
        """Wait until the peers have pulled the last call's rows."""
        self._free(stream)

    def publish(self, stream: int, slot: int = 0, peer: int | None = None) -> None:
        """Signal to ``peer``, or to all peers, that the rows of ``slot`` may be read."""
        (self._all_ready if peer is None else self._ready[slot, peer])(stream)

    def arrival(self, stream: int, peer: int, slot: int = 0) -> None:
        """Wait until ``peer`` has published the rows of ``slot``."""
        self._arrived[slot, peer](stream)

    def release(self, stream: int) -> None:
        """Signal to all peers that their rows have been pulled."""
        self._done(stream)

    def close(self) -> None:
        """Free the memory. A collective call; no call may be in progress."""
        self._free(torch.cuda.current_stream().cuda_stream)
        give_all(self._group, self._flags, self._buffer)


class Exchange:
    """The outboxes of a group, and its stream of copies. A collective call.

    Raises:
        Unsupported: see :class:`Outbox`.
    """

    def __init__(self, group: Group) -> None:
        check_access(group)
        self.group = group
        self.stream = new_stream(group.device, high=True)
        self._rings: dict[int, tuple[list[Outbox], list[int]]] = {}

    def outbox(self, nbytes: int) -> Outbox:
        """The next outbox of this size; every rank makes the same calls in the same order."""
        if nbytes not in self._rings:
            self._rings[nbytes] = [Outbox(self.group, nbytes) for _ in range(_RING)], [0]
        boxes, turn = self._rings[nbytes]
        turn[0] = (turn[0] + 1) % len(boxes)
        return boxes[turn[0]]

    def fork(self, stream: Any) -> None:
        """Let the stream of copies begin after the work enqueued so far on ``stream``."""
        self.stream.wait_stream(stream)

    def pull(self, copies: list[Copy]) -> None:
        """Enqueue copies on the stream of copies."""
        Copies(copies)(self.stream.cuda_stream)

    def close(self) -> None:
        """Free all outboxes. A collective call."""
        for boxes, _ in self._rings.values():
            for box in boxes:
                box.close()
        self._rings.clear()
