"""GPUs that are not there: all ranks in one process, their streams as queues that a scheduler empties in any order.

Device memory is the process's own; :mod:`.fake_driver` connects it to the code under test. Operations run one
at a time, copies in two halves, so that others come between. An access outside of what was allocated, a flag raised
that is still up and a schedule that comes to a stop are faults.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from autotune.domains.c3.group import Group
from tests.support.c3.fake_streams import Graph, Queue, Stream

POISON = 0xFF  # bytes of memory that nobody has written: NaN in every dtype
BIASES = ("fair", "strict", "one ahead", "one behind")
"""Who runs first: anyone; by priorities that change now and then; all but one rank, or that one."""
QUEUES = ("own", "few", "one")
"""Which hardware queues streams have: one each, or two or one that a rank's streams share."""


class Fault(AssertionError):
    """A forbidden event on a device."""


class Deadlock(Fault):
    """Operations are left, and none of them can run."""


class FakeGroup(Group):
    """A rank whose peers live in the same process: nothing is to be waited for on the host."""

    def barrier(self) -> None:
        pass

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.ranks


class World:
    """All ranks, their memory and their streams.

    Args:
        queues: one of :data:`QUEUES`.
        bias: one of :data:`BIASES`.
    """

    def __init__(self, ranks: int, seed: int, queues: str = "own", bias: str = "fair") -> None:
        self.rng = random.Random(seed)
        self.ranks, self.rank, self._bias = ranks, 0, bias
        self.shuffle = False
        self._one = self.rng.randrange(ranks)
        self._shared = [[Queue(r) for _ in range({"own": 0, "few": 2, "one": 1}[queues])] for r in range(ranks)]
        self.queues: list[Queue] = [q for some in self._shared for q in some]
        self._starts: list[int] = []
        self._ends: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._allocations = itertools.count(1)
        self._blocks: dict[int, torch.Tensor] = {}
        self._words: dict[int, ctypes.c_uint32] = {}
        self._parked: dict[Any, list[Queue]] = {}
        self._symmetric: list[list[torch.Tensor]] = []
        self._asked = [0] * ranks
        self.streams: dict[int, Stream] = {}
        self._handles = itertools.count(1000)
        self.main = [self._of(r, lambda: Stream(self)) for r in range(ranks)]
        self._current = list(self.main)
        cpu, none = torch.device("cpu"), None
        self.groups = [
            FakeGroup(r, ranks, cpu, none, none, {"peer access": ""})  # type: ignore[arg-type]
            for r in range(ranks)
        ]

    # ---- who enqueues -----------------------------------------------------------------------------------------------

    def _of(self, rank: int, make: Callable[[], Stream]) -> Stream:
        self.rank = rank
        return make()

    def on(self, rank: int) -> FakeGroup:
        """From here on the program runs as ``rank``."""
        self.rank = rank
        return self.groups[rank]

    def current(self, device: object = None) -> Stream:
        return self._current[self.rank]

    def switch(self, stream: Stream) -> None:
        """torch.cuda.set_stream"""
        self._current[self.rank] = stream

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        """torch.cuda.stream"""
        rank, before = self.rank, self._current[self.rank]
        self._current[rank] = stream
        try:
            yield
        finally:
            self._current[rank] = before

    @contextmanager
    def capture(self, graph: Graph, **told: object) -> Iterator[None]:
        """torch.cuda.graph"""
        origin = Stream(self)
        graph.begin(origin)
        with self.using(origin):
            yield
        graph.end()

    def adopt(self, stream: Stream) -> int:
        """A raw handle of a new stream."""
        handle = next(self._handles)
        self.streams[handle] = stream
        return handle

    def queue(self, rank: int) -> Queue:
        """The hardware queue of a new stream."""
        if self._shared[rank]:
            return self.rng.choice(self._shared[rank])
        self.queues.append(Queue(rank))
        return self.queues[-1]

    # ---- memory -----------------------------------------------------------------------------------------------------

    def allocate(self, *shape: Any, dtype: torch.dtype = torch.float32, device: object = None) -> torch.Tensor:
        """torch.empty"""
        made = torch.zeros(*shape, dtype=dtype)
        at = made.data_ptr()
        block = made.view(-1).view(torch.uint8)
        block.fill_(POISON)
        bisect.insort(self._starts, at)
        self._blocks[at], self._ends[at] = block, at + block.numel()
        self._numbers[at] = next(self._allocations)
        return made

    def allocation(self, address: int) -> int:
        """The number of the allocation at an address; 0 if there is none."""
        k = bisect.bisect_right(self._starts, address) - 1
        return self._numbers[self._starts[k]] if k >= 0 and address < self._ends[self._starts[k]] else 0

    def renew(self, tensor: torch.Tensor) -> None:
        """Free a tensor's memory, and allocate as much, which happens to get the same address."""
        self._numbers[tensor.data_ptr()] = next(self._allocations)

    def symmetric(self, size: int, dtype: torch.dtype, device: object) -> torch.Tensor:
        """The next buffer that all ranks have."""
        number = self._asked[self.rank]
        self._asked[self.rank] += 1
        if number == len(self._symmetric):
            self._symmetric.append([self.allocate(size, dtype=dtype) for _ in range(self.ranks)])
        found = self._symmetric[number][self.rank]
        if found.numel() != size:
            raise Fault(f"rank {self.rank} asks for {size} symmetric bytes where others asked for {found.numel()}")
        return found

    def rendezvous(self, memory: torch.Tensor, group: object) -> SimpleNamespace:
        row = next(row for row in self._symmetric if row[self.rank] is memory)
        return SimpleNamespace(buffer_ptrs=[t.data_ptr() for t in row])

    def _check(self, address: int, size: int) -> int:
        """The begin of the block with these bytes; a fault if no block has them."""
        k = bisect.bisect_right(self._starts, address) - 1
        if k < 0 or address + size > self._ends[self._starts[k]]:
            raise Fault(f"{size} bytes at {address:#x} were not allocated")
        return self._starts[k]

    def bytes_at(self, address: int, size: int) -> torch.Tensor:
        """Allocated memory."""
        start = self._check(address, size)
        return self._blocks[start][address - start :][:size]

    def _word(self, address: int) -> ctypes.c_uint32:
        """A flag."""
        found = self._words.get(address)
        if found is None:
            self._check(address, 4)
            found = self._words[address] = ctypes.c_uint32.from_address(address)
        return found

    # ---- what runs --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Empty all queues."""
        for queue in self.queues:
            queue.priority = self._priority(queue)
        ready = [q for q in self.queues if q.ops]
        while ready:
            at = self._pick(ready)
            if not self._burst(ready[at], ready):
                ready[at] = ready[-1]
                ready.pop()
        left = [q for q in self.queues if q.ops]
        if left:
            raise Deadlock("; ".join(f"rank {q.rank} at {q.ops[0]}" for q in left))

    def _priority(self, queue: Queue) -> float:
        one = {"one ahead": 2.0, "one behind": -2.0}.get(self._bias, 0.0)
        return self.rng.random() + one * (queue.rank == self._one)

    def _pick(self, ready: list[Queue]) -> int:
        if self._bias == "fair" or len(ready) == 1:
            return self.rng.randrange(len(ready))
        at = max(range(len(ready)), key=lambda k: ready[k].priority)
        if self.rng.random() < 0.1:
            ready[at].priority = self._priority(ready[at])
        return at

    def _burst(self, queue: Queue, ready: list[Queue]) -> bool:
        """Run some operations of a queue; whether it can go on."""
        for _ in range(self.rng.choice((1, 1, 2, 8))):
            if not queue.ops:
                return False
            what, a, b, c = queue.ops[0]
            if what == "wait":
                if self._word(a).value != b:
                    self._parked.setdefault(a, []).append(queue)
                    return False
            elif what == "await":
                if not a.done:
                    self._parked.setdefault(a, []).append(queue)
                    return False
            elif what == "write":
                word = self._word(a)
                if word.value == b == 1:
                    raise Fault(f"rank {queue.rank} raises a flag that is still up")
                word.value = b
                ready += self._parked.pop(a, ())
            elif what == "mark":
                a.done = True
                ready += self._parked.pop(a, ())
            elif what == "copy":
                self._check(a, c), self._check(b, c)
                ctypes.memmove(a, b, c)
            else:
                a()
            queue.ops.popleft()
        return True

    def down(self) -> bool:
        """Return True if all flags of all ranks are lowered."""
        return all(not g.kept["flags"][0].memory.any() for g in self.groups if "flags" in g.kept)
