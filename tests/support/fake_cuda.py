"""Runs the text of an emitted CUDA kernel in plain Python, to test what it means where there is no GPU.

Every CUDA thread is a generator that gives way at barriers and shuffles, so thousands of threads need no real ones, and
what a GPU would only do now and then is found every time:

* a barrier or shuffle that some threads do not reach, or not the same one (an error names them);
* a race: two threads touch one word of shared memory, one of them writing, with no barrier between;
* an asynchronous copy whose words are touched before it was awaited;
* a load through the path for read-only data of what the same launch wrote;
* an access outside a tensor, or a vector access that is not aligned; an output element that is written twice;
* anything that depends on the order of threads: they take turns in a random order.

Arithmetic is fp32 as NumPy has it; integers are Python's, wrapped where the source says ``int32(...)``. The functions
that generated code calls are in :mod:`fake_intrinsics`.
"""

from __future__ import annotations

import ast
import functools
import itertools
import operator
import sys
from collections.abc import Callable, Generator, Sequence
from types import CodeType, SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor

from autotune.compiler.targets.cuda.kernels import GroupKernels
from autotune.compiler.targets.cuda.source import CudaSource, Listing
from autotune.ir.graph import REDUCTIONS, Graph
from autotune.ir.oracle.conditioning import from_float
from autotune.ir.oracle.interpret import interpret, make_inputs
from autotune.measure.verify import compare
from tests.support import fake_intrinsics as names
from tests.support.fake_async import Copies
from tests.support.fake_intrinsics import Pointer

WARP = 32
_SYNC = {"syncthreads", "syncwarp", "shfl_xor_sync", "shfl_down_sync", "shfl_up_sync", "shfl_sync", "ballot_sync"}


class KernelError(AssertionError):
    """The kernel did something that would be wrong, or undefined, on a GPU."""


class _Yields(ast.NodeTransformer):
    """Calls that wait for other threads become ``yield``s, in device functions too."""

    def __init__(self, waiting: set[str]) -> None:
        self.waiting, self.found = waiting, False

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in _SYNC or name in names.WAITING:
            self.found = True
            return ast.Yield(ast.Tuple([ast.Constant(name), *node.args], ast.Load()))
        if name in self.waiting:
            self.found = True
            return ast.YieldFrom(node)
        return node


@functools.lru_cache(maxsize=64)
def _compile(text: str) -> CodeType:
    """The module of a kernel's text, with generators for what waits; tests run the same one often."""
    tree = ast.parse(text)
    waiting: set[str] = set()
    for function in (n for n in tree.body if isinstance(n, ast.FunctionDef)):
        turned = _Yields(waiting)
        turned.visit(function)
        if turned.found:
            waiting.add(function.name)
        elif function.name == "kernel":  # a generator all the same
            function.body.append(ast.parse("if False:\n    yield").body[0])
    return compile(ast.fix_missing_locations(tree), "<kernel>", "exec")


class _Words:
    """One view of a shared array, every access checked for bounds and races."""

    def __init__(self, machine: Machine, block: _Block, key: int, dtype: Any, nbytes: int) -> None:
        self.machine, self.block, self.key = machine, block, key
        self.data = block.buffer(key, nbytes).view(dtype)
        self.size, self.length = self.data.itemsize, len(self.data)
        self.float = self.data.dtype == np.float32

    def _touch(self, k: int, write: bool) -> None:
        if not 0 <= k < self.length:
            raise KernelError(f"index {k} outside a shared array of {self.length}")
        size, block = self.size, self.block
        for number in (k,) if size == 4 else range(k * size // 4, (k * size + size + 3) // 4):
            word = (self.key, number)
            if block.in_flight and word in block.in_flight:
                raise KernelError(f"word {number} of shared memory is touched before its copy is there")
            block.touch(word, self.machine.now, write)

    def __getitem__(self, k: int) -> Any:
        self._touch(k, False)
        x = self.data[k]
        return x if self.float else int(x)

    def __setitem__(self, k: int, x: Any) -> None:
        self._touch(k, True)
        self.data[k] = x


Word = tuple[int, int]
_Stamp = tuple["_Thread", int, int, int]
"""Who touched a word: a thread, the number and the epoch of its block, and the epoch of all blocks together."""


class _Block:
    """Shared memory of one block: dynamic (key -1) and static arrays (numbered in the order of the source)."""

    def __init__(self, number: int) -> None:
        self.number, self.epoch, self.cluster_epoch, self.met = number, 0, 0, False
        self.buffers: dict[int, np.ndarray[Any, Any]] = {}
        self.writer: dict[Word, _Stamp] = {}
        self.readers: dict[Word, list[_Stamp]] = {}
        self.in_flight: dict[Word, _Thread] = {}

    def buffer(self, key: int, nbytes: int) -> np.ndarray[Any, Any]:
        if key not in self.buffers:
            self.buffers[key] = np.full(nbytes, 0xC7, np.uint8)  # not zeros: nobody may count on them
        return self.buffers[key]

    def touch(self, word: Word, who: _Thread, write: bool) -> None:
        """Note an access, and raise where one by another thread is not ordered before it by a barrier."""
        home = who.block
        stamp = (who, home.number, home.epoch, home.cluster_epoch)
        last, readers = self.writer.get(word), self.readers.get(word)
        if last is not None and _apart(last, stamp):
            _race(last, stamp, word)
        if write:
            for before in readers or ():
                if _apart(before, stamp):
                    _race(before, stamp, word)
            if readers:
                del self.readers[word]
            self.writer[word] = stamp
        elif not readers:
            self.readers[word] = [stamp]
        elif readers[-1] != stamp:
            self.readers[word] = [*[r for r in readers if _apart(r, stamp)][:3], stamp]


def _apart(before: _Stamp, now: _Stamp) -> bool:
    """Whether two threads touched a word with no barrier between."""
    return before[0] is not now[0] and before[3] >= now[3] and (before[1] != now[1] or before[2] >= now[2])


def _race(before: _Stamp, now: _Stamp, word: Word) -> None:
    raise KernelError(f"threads {before[0].name} and {now[0].name} race for word {word[1]} of shared memory")


class _Thread:
    def __init__(self, block: _Block, tid: int, run: Generator[Any, Any, None]) -> None:
        self.block, self.tid, self.send = block, tid, run.send
        self.copies: list[list[Any]] = [[]]  # groups of asynchronous copies not awaited yet, the last one still open
        self.waits: tuple[Any, ...] | None = None
        self.answer: Any = None
        self.done = False

    @property
    def name(self) -> str:
        return f"{self.block.number}:{self.tid}"


class Machine:
    """Runs one launch. ``now`` is the thread whose turn it is."""

    def __init__(self, source: CudaSource | Listing, grid: int, seed: int = 0) -> None:
        self.source, self.grid, self.rng = source, grid, np.random.default_rng(seed)
        self.now: _Thread
        self.code: dict[str, Any] = {}
        exec(_compile(source.text), self.code)
        self.code.update(names.space(source.text))
        self.code.update(Copies(self).space(source.text))
        self.thread_index, self.block_index = SimpleNamespace(x=0), SimpleNamespace(x=0)  # of the thread ``now``
        self.code["cuda"] = SimpleNamespace(
            threadIdx=self.thread_index,
            blockIdx=self.block_index,
            gridDim=SimpleNamespace(x=grid),
            blockDim=SimpleNamespace(x=source.block),
            shared=SimpleNamespace(array=self.shared_array),
            popc=lambda x: (int(x) & 0xFFFFFFFF).bit_count(),
        )
        self.blocks: dict[int, _Block] = {}
        self.sites: dict[tuple[str, int], int] = {}
        self.code["cluster_rank"] = lambda: self.now.block.number % source.cluster
        self.code.update({f"rs_{t}": self.remote_store for t in ("float32", "int32", "int64")})

    def remote_store(self, array: _Words, index: int, rank: int, value: Any) -> None:
        """Write to the array of the same number in another block of the cluster."""
        here = self.now.block
        if not here.met:
            raise KernelError(f"thread {self.now.name} writes to a block that may not have begun")
        there = self.blocks[here.number // self.source.cluster * self.source.cluster + rank]
        _Words(self, there, array.key, array.data.dtype, array.data.nbytes)[index] = value

    def shared_array(self, n: int, kind: Any) -> _Words:
        thread, dtype = self.now, names.dtype_of(kind)
        if n == 0:  # all of the dynamic shared memory
            return _Words(self, thread.block, -1, dtype, int(self.source.launch["shared"]))
        caller = sys._getframe(1)  # a static array is one, however often its line runs
        site = self.sites.setdefault((caller.f_code.co_name, caller.f_lineno), len(self.sites))
        return _Words(self, thread.block, site, dtype, n * dtype.itemsize)

    def run(self, pointers: Sequence[Pointer], extent0: int) -> None:
        for p in pointers:
            if isinstance(p, Pointer):  # a test may have memory of its own
                p.fresh[:] = False
        args = [*pointers, *([extent0] if self.source.launch["dynamic"] else [])]
        together = self.source.cluster
        if self.grid % together:
            raise KernelError(f"{self.grid} blocks are not whole clusters of {together}")
        with np.errstate(all="ignore"):
            for first in range(0, self.grid, together):
                self._run_blocks(list(range(first, first + together)), args)

    def _run_blocks(self, numbers: list[int], args: Sequence[Any]) -> None:
        size, kernel = self.source.block, self.code["kernel"]
        self.blocks = {n: _Block(n) for n in numbers}
        blocks = [[_Thread(block, tid, kernel(*args)) for tid in range(size)] for block in self.blocks.values()]
        threads = left = list(itertools.chain(*blocks))
        warps = [own[k : k + WARP] for own in blocks for k in range(0, size, WARP)]
        while left := [t for t in left if not t.done]:
            ready = [t for t in left if t.waits is None]
            if not ready:
                waiting = sorted({str(t.waits[0]) for t in threads if t.waits})
                few = ", ".join(t.name for t in [t for t in threads if t.waits][:4])
                raise KernelError(f"threads wait for ever at {' and '.join(waiting)}, the first are {few}")
            for k in self.rng.permutation(len(ready)).tolist():
                self.now = thread = ready[k]
                self.thread_index.x, self.block_index.x = thread.tid, thread.block.number
                try:
                    thread.waits = thread.send(thread.answer)
                except StopIteration:
                    thread.done = True
                    if any(thread.copies):
                        raise KernelError(f"thread {thread.name} ends before its copies are there") from None
                thread.answer = None
            for warp in warps:
                kind = _common(warp)
                if kind.startswith(("shfl", "syncwarp", "ballot")):
                    _shuffle(kind, warp)
            self._meet(blocks, threads)

    def _meet(self, blocks: list[list[_Thread]], threads: list[_Thread]) -> None:
        """Let those go on who have all come to a barrier: of a block, or of all blocks at hand, which are a cluster."""
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


def _common(threads: list[_Thread]) -> str:
    """What all of ``threads`` wait for; empty where some do not wait, or not for the same."""
    first = threads[0].waits
    if first is None:
        return ""
    kind: str = first[0]
    for t in threads:
        if t.waits is None or t.waits[0] != kind:
            return ""
    return kind


def _shuffle(kind: str, warp: list[_Thread]) -> None:
    waits = [t.waits for t in warp if t.waits]
    if kind == "ballot_sync":
        votes = names.int32(sum(bool(wait[2]) << lane for lane, wait in enumerate(waits)))
        for thread in warp:
            thread.answer = votes
    elif kind != "syncwarp":
        partner = _PARTNERS.get(kind, lambda lane, by: by)
        for lane, (thread, wait) in enumerate(zip(warp, waits, strict=True)):
            other = partner(lane, int(wait[3]))
            if not 0 <= other < len(waits):
                raise KernelError(f"thread {thread.name} shuffles with lane {other} of {len(waits)}")
            thread.answer = waits[other][2]
    _go(warp)


_PARTNERS: dict[str, Callable[[int, int], int]] = {
    "shfl_xor_sync": operator.xor,
    "shfl_down_sync": operator.add,
    "shfl_up_sync": operator.sub,
}


def _go(threads: list[_Thread]) -> None:
    for t in threads:
        t.waits = None


def grid_of(source: CudaSource, extent0: int, sms: int) -> int:
    """Blocks of a launch, as ``runtime.executor.grid_of`` has it; a persistent grid is one block an SM."""
    rule = source.launch
    if "grid" in rule:
        return int(rule["grid"])
    units = (extent0 if rule["dynamic"] else 1) * int(rule["inner"])
    grid = -(-units // int(rule["per_block"])) * int(rule.get("cluster", 1))
    return min(grid, sms) if int(rule["blocks_per_sm"]) else grid


def run_group(
    graph: Graph,
    made: GroupKernels,
    inputs: Sequence[Tensor],
    sms: int = 3,
    seed: int = 0,
    over: Sequence[tuple[int, int]] = (),
) -> list[Tensor]:
    """A group's kernels on the CPU, one after the other; its outputs as flat tensors.

    Args:
        over: slots and outputs that are one tensor.

    Raises:
        KernelError: see the module.
    """
    outputs = [Pointer.poisoned(o.dtype, graph.output_numel(k), once=True) for k, o in enumerate(graph.outputs)]
    reading = [Pointer.reading(t, graph.inputs[k]) for k, t in enumerate(inputs)]
    for slot, k in over:
        reading[slot] = outputs[k] = Pointer(reading[slot].short, reading[slot].data, once=True)
    memory = {
        "input": reading,
        "output": outputs,
        "private": [Pointer.poisoned(p.storage, p.numel) for p in made.private],
    }
    extent0 = graph.extents[0] if graph.extents else 1
    for source, refs in zip(made.sources, made.args, strict=True):
        assert len(refs) == len(source.params) == len(source.launch["align"])
        pointers = [memory[kind][n] for kind, n in refs]
        for p, short, need in zip(pointers, source.params, source.launch["align"], strict=True):
            p.check(short, int(need))
        Machine(source, grid_of(source, extent0, sms), seed).run(pointers, extent0)
    return [p.tensor() for p in outputs]


def check_group(graph: Graph, made: GroupKernels, seed: int = 0, special: bool = False, sms: int = 3) -> None:
    """Run a group's kernels on random inputs and compare every output with the oracle.

    Raises:
        KernelError: an output is wrong, or see the module.
    """
    check_inputs(graph, made, make_inputs(graph, seed=seed, special=special), seed, sms)


def check_inputs(
    graph: Graph,
    made: GroupKernels,
    inputs: Sequence[Tensor],
    seed: int = 0,
    sms: int = 3,
    over: Sequence[tuple[int, int]] = (),
) -> None:
    """As :func:`check_group`, on inputs of the caller's, one flat tensor a slot; ``over`` as of :func:`run_group`."""
    outputs = run_group(graph, made, inputs, sms, seed, over)
    length = max((graph.size(v.over) for v in graph.values if v.op in REDUCTIONS), default=1)
    for k, (o, want) in enumerate(zip(graph.outputs, interpret(graph, inputs), strict=True)):
        got = outputs[k].as_strided([graph.extents[a] for a in o.axes], o.strides, o.offset)
        floats = o.dtype in ("float32", "float16", "bfloat16")
        verdict = compare(got, want, o.dtype, length, off_by_one=not floats and from_float(graph, k))
        if not verdict.ok:
            raise KernelError(f"output {k}: {verdict.detail}")
