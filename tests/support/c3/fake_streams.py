"""Streams, events and graphs of :mod:`tests.support.c3.fake_device`: queued operations and their dependencies."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.support.c3.fake_device import World

Op = tuple[str, Any, Any, Any]
"""("write" | "wait", address, value), ("copy", to, from, bytes), ("mark" | "await", token), ("call", function)."""


class CaptureFault(AssertionError):
    """A capture that CUDA would refuse."""


class Queue:
    """A hardware queue of one rank: its operations run in order."""

    def __init__(self, rank: int) -> None:
        self.rank, self.priority = rank, 0.0
        self.ops: deque[Op] = deque()


class Token:
    """A point in a queue that others wait for. ``clock`` is the part of a graph before it, by stream."""

    def __init__(self, graph: Graph | None = None, clock: dict[Stream, int] | None = None) -> None:
        self.done = False
        self.graph, self.clock = graph, clock or {}

    def __repr__(self) -> str:
        return "a token"


class Event:
    """torch.cuda.Event; its token is that of its last record."""

    token: Token | None = None

    def record(self, stream: Stream) -> None:
        self.token = stream.mark()


class Stream:
    """torch.cuda.Stream, of the rank that the world's program runs as."""

    def __init__(self, world: World, priority: int = 0) -> None:
        self.world, self.priority, self.rank = world, priority, world.rank
        self.queue = world.queue(self.rank)
        self.cuda_stream = world.adopt(self)
        self.graph: Graph | None = None

    def add(self, what: str, a: Any, b: Any = None, c: Any = None) -> None:
        assert self.rank == self.world.rank, "a rank enqueues on a stream of another"
        op = (what, a, b, c)
        if self.graph is not None:
            self.graph.add(self, op)
        else:
            self.queue.ops.append(op)

    def mark(self) -> Token:
        token = Token(self.graph, dict(self.graph.clocks[self]) if self.graph is not None else None)
        self.add("mark", token)
        return token

    def wait_stream(self, other: Stream) -> None:
        self._await(other.mark())

    def wait_event(self, event: Event) -> None:
        if event.token is not None:
            self._await(event.token)

    def _await(self, token: Token) -> None:
        if self.graph is not token.graph:
            if self.graph is not None:
                raise CaptureFault("a captured stream waits for what is not captured")
            assert token.graph is not None
            token.graph.join(self)
        self.add("await", token)


class Graph:
    """torch.cuda.CUDAGraph: what one capture recorded, to be run again and again.

    Its branches get queues as streams do; with ``world.shuffle`` they share a queue in any order that their
    dependencies allow, and not in that of the capture.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.ops: list[tuple[Stream, Op]] = []
        self.clocks: dict[Stream, dict[Stream, int]] = {}
        self._memory: dict[int, int] = {}
        self._over = False

    def begin(self, origin: Stream) -> None:
        self._origin = origin
        self.join(origin)

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        self.begin(self.world.current())

    def capture_end(self) -> None:
        self.end()

    def pool(self) -> object:
        return self

    def join(self, stream: Stream) -> None:
        if self._over:
            raise CaptureFault("a stream waits for what only a graph has")
        stream.graph = self
        self.clocks[stream] = {stream: 0}

    def add(self, stream: Stream, op: Op) -> None:
        clock = self.clocks[stream]
        if op[0] == "await":
            for s, n in op[1].clock.items():
                clock[s] = max(n, clock.get(s, 0))
        elif op[0] != "mark":
            clock[stream] += 1
        if op[0] == "copy":
            self._memory |= {address: self.world.allocation(address) for address in op[1:3]}
        self.ops.append((stream, op))

    def end(self) -> None:
        self._over = True
        seen = self.clocks[self._origin]
        for stream, clock in self.clocks.items():
            stream.graph = None
            if seen.get(stream, 0) != clock[stream]:
                raise CaptureFault("a stream of the capture was not joined")

    def replay(self) -> None:
        """Enqueue all of it on the current stream."""
        if any(self.world.allocation(address) != number for address, number in self._memory.items()):
            raise CaptureFault("a graph copies from or to an allocation that was freed")
        stream = self.world.current()
        queues = {s: self.world.queue(stream.rank) for s in self.clocks}
        begun = stream.mark()
        tokens: dict[Token, Token] = {}
        for queue in queues.values():
            queue.ops.append(("await", begun, None, None))
        for s, (what, a, b, c) in self._order():
            if isinstance(a, Token):
                a = tokens.setdefault(a, Token())
            queues[s].ops.append((what, a, b, c))
        for queue in queues.values():
            over = Token()
            queue.ops.append(("mark", over, None, None))
            stream.add("await", over)

    def _order(self) -> list[tuple[Stream, Op]]:
        """The operations in the order of the capture, or in another that keeps every stream's and marks' before
        waits."""
        if not self.world.shuffle:
            return self.ops
        rows: dict[Stream, deque[Op]] = {s: deque() for s in self.clocks}
        for s, op in self.ops:
            rows[s].append(op)
        out: list[tuple[Stream, Op]] = []
        marked: set[Token] = set()
        while any(rows.values()):
            free = [s for s, row in rows.items() if row and (row[0][0] != "await" or row[0][1] in marked)]
            s = self.world.rng.choice(free)
            op = rows[s].popleft()
            if op[0] == "mark":
                marked.add(op[1])
            out.append((s, op))
        return out
