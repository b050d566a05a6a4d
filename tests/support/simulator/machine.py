"""The machine that a kernel runs on, as plain Python.

Every CUDA thread is a generator that gives way at barriers and shuffles, so thousands of threads need no real ones, and
faults that a GPU shows only now and then are found every time:

* a barrier or shuffle that some threads do not reach, or not the same one (an error names them);
* a race: two threads touch one word of shared memory, one of them writing, with no barrier between;
* an asynchronous copy whose words are touched before it was awaited;
* a load of a value of the same launch through the path for read-only data;
* an access outside a tensor, or a vector access that is not aligned; an output element that is written twice;
* any dependence on the order of threads: they take turns in a random order.

Arithmetic is fp32 as NumPy has it; integers are Python's, wrapped where the kernel says ``int32(...)``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from autotune.compiler.targets.cuda.source import CudaSource
from tests.support.simulator import intrinsics, tensors
from tests.support.simulator.copies import Copies
from tests.support.simulator.errors import KernelError
from tests.support.simulator.printer import SHUFFLES, program_of
from tests.support.simulator.shared import Buffer, Stamp, Words
from tests.support.simulator.tensors import Function, Pointer

WARP = 32
_ENDED = ("the end",)


class Block:
    """A block of threads and its shared memory."""

    def __init__(self, machine: Machine, number: int) -> None:
        self.machine, self.number = machine, number
        self.epoch, self.cluster_epoch, self.met = 0, 0, False
        self._buffers: dict[int, Buffer] = {}
        self._views: dict[tuple[int, str], Words] = {}

    def array(self, number: int, nbytes: int, dtype: str) -> Words:
        """The shared array of that number."""
        if (number, dtype) not in self._views:
            buffer = self._buffers.setdefault(number, Buffer(nbytes))
            self._views[number, dtype] = self.machine.words(self.machine, number, buffer, np.dtype(dtype))
        return self._views[number, dtype]


class Thread:
    """A thread: its indices, its generator, and its wait."""

    __slots__ = ("answer", "block", "copies", "number", "send", "stamp", "waits")

    def __init__(self, block: Block, number: int, send: Callable[[Any], tuple[Any, ...]]) -> None:
        self.block, self.number, self.send = block, number, send
        self.copies: list[list[Any]] = [[]]  # groups of asynchronous copies not awaited yet, the last one still open
        self.waits: tuple[Any, ...] | None = None
        self.answer: Any = None
        self.stamp: Stamp = (number, block.number, 0, 0, 0)

    @property
    def name(self) -> str:
        return f"{self.block.number}:{self.number}"


class Machine:
    """Runs one launch.

    Attributes:
        now: the thread whose turn it is.
        words: the class of views of shared memory; a test may have another one.
    """

    words = Words

    def __init__(self, source: CudaSource, grid: int, seed: int = 0) -> None:
        self.source, self.grid, self.rng = source, grid, np.random.default_rng(seed)
        self.now: Thread
        self.blocks: dict[int, Block] = {}
        program = program_of(source)
        copies = Copies(self)
        makers: dict[str, Callable[..., Any]] = {
            "number": lambda text: np.float32(float(text)),
            "load": tensors.load,
            "unpack": tensors.unpack,
            "store": tensors.store,
            "copy": copies.copy,
            "commit_copies": copies.commit_copies,
            "await_copies": copies.await_copies,
            "take": copies.take,
            "put": copies.put,
            "array": self._array,
            "rs": self._remote_store,
            "thread_index": lambda: lambda: self.now.number,
            "cluster_rank": lambda: lambda: self.now.block.number % source.cluster,
        }
        self.code = intrinsics.names()
        exec(program.code, self.code)
        for name, (kind, *arguments) in program.bound.items():
            if kind not in makers:
                raise LookupError(f"the simulator knows no intrinsic {kind}")
            self.code[name] = makers[str(kind)](*arguments)

    def _array(self, number: int, nbytes: int, dtype: str) -> Function:
        nbytes = nbytes or int(self.source.launch["shared"])  # all of the dynamic shared memory
        return lambda: self.now.block.array(number, nbytes, dtype)

    def _remote_store(self, _dtype: str) -> Function:
        def store(array: Words, index: int, rank: int, value: Any) -> None:
            """Write to the array of the same number in another block of the cluster."""
            here = self.now.block
            if not here.met:
                raise KernelError(f"thread {self.now.name} writes to a block that may not have begun")
            there = self.blocks[here.number // self.source.cluster * self.source.cluster + rank]
            there.array(array.number, array.data.nbytes, array.dtype.name)[index] = value

        return store

    def run(self, pointers: Sequence[Pointer], extent0: int) -> None:
        for p in pointers:
            p.fresh[:] = False
        args = [*pointers, *([extent0] if self.source.launch["dynamic"] else [])]
        together = self.source.cluster
        if self.grid % together:
            raise KernelError(f"{self.grid} blocks are not whole clusters of {together}")
        with np.errstate(all="ignore"):
            for first in range(0, self.grid, together):
                self._run_blocks(range(first, first + together), args)

    def _run_blocks(self, numbers: Sequence[int], args: Sequence[Any]) -> None:
        size, kernel = self.source.block, self.code["kernel"]
        self.blocks = {n: Block(self, n) for n in numbers}
        blocks = [
            [Thread(block, k, kernel(n, self.grid, *args).send) for k in range(size)]
            for n, block in self.blocks.items()
        ]
        threads = list(itertools.chain(*blocks))
        warps = [own[k : k + WARP] for own in blocks for k in range(0, size, WARP)]
        while ready := [t for t in threads if t.waits is None]:
            for k in self.rng.permutation(len(ready)).tolist():
                self.now = thread = ready[k]
                try:
                    thread.waits = thread.send(thread.answer)
                except StopIteration:
                    thread.waits = _ENDED
                    if any(thread.copies):
                        raise KernelError(f"thread {thread.name} ends before its copies are there") from None
            for warp in warps:
                kind = _common(warp)
                if kind in SHUFFLES:
                    _shuffle(kind, warp)
            self._meet(blocks, threads)
        if waiting := [t for t in threads if t.waits is not _ENDED]:
            kinds = sorted({str(t.waits[0]) for t in waiting if t.waits})
            few = ", ".join(t.name for t in waiting[:4])
            raise KernelError(f"threads wait for ever at {' and '.join(kinds)}, the first are {few}")

    def _meet(self, blocks: list[list[Thread]], threads: list[Thread]) -> None:
        """Release the threads of complete barriers: of a block, or of all given blocks, which are a cluster."""
        for own in blocks:
            if _common(own) == "syncthreads":
                own[0].block.epoch += 1
                _go(own)
        wide = _common(threads)
        if wide in ("cluster_sync", "cluster_wait"):
            for block in self.blocks.values():
                block.met = True
                if wide != "cluster_wait":  # which follows a relaxed arrival: it orders no memory
                    block.cluster_epoch += 1
                    block.epoch += 1
            _go(threads)


def _common(threads: list[Thread]) -> str:
    """The common wait of all ``threads``; empty if some do not wait, or not for the same."""
    first = threads[0].waits
    if first is None:
        return ""
    kind: str = first[0]
    for t in threads:
        if t.waits is None or t.waits[0] != kind:
            return ""
    return kind


def _shuffle(kind: str, warp: list[Thread]) -> None:
    """Give each thread of a warp what another one has, or what all voted."""
    waits = [t.waits for t in warp if t.waits]
    if kind == "ballot_sync":
        votes = intrinsics.int32(sum(bool(wait[1]) << lane for lane, wait in enumerate(waits)))
    for lane, thread in enumerate(warp):
        thread.waits = None
        if kind == "syncwarp":
            thread.answer, thread.stamp = None, (*thread.stamp[:4], thread.stamp[4] + 1)
            continue
        if kind == "ballot_sync":
            thread.answer = votes
            continue
        by = waits[lane][2]
        other = lane ^ by if kind == "shfl_xor_sync" else by
        if not 0 <= other < len(waits):
            raise KernelError(f"thread {thread.name} shuffles with lane {other} of {len(waits)}")
        thread.answer = waits[other][1]


def _go(threads: list[Thread]) -> None:
    """Let threads go on, in a new epoch where there is one."""
    for t in threads:
        t.waits = t.answer = None
        t.stamp = (t.number, t.block.number, t.block.epoch, t.block.cluster_epoch, t.stamp[4])
