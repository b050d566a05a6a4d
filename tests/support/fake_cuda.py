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
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import CodeType, SimpleNamespace
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from autotune.compiler.targets.cuda.kernels import GroupKernels
from autotune.compiler.targets.cuda.source import CudaSource, Listing
from autotune.domains.fusion.bench import from_float
from autotune.ir.graph import REDUCTIONS, Graph
from autotune.ir.interpret import interpret, make_inputs
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
            if word in block.in_flight:
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
        number, epoch, cluster = home.number, home.epoch, home.cluster_epoch

        def apart(before: _Stamp) -> bool:
            """Whether no barrier is between the two."""
            thread, block, then, together = before
            return thread is not who and together >= cluster and (block != number or then >= epoch)

        last, readers = self.writer.get(word), self.readers.get(word)
        clash = [last] if last and apart(last) else []
        if write:
            if readers:
                clash += filter(apart, readers)
                del self.readers[word]
            self.writer[word] = (who, number, epoch, cluster)
        elif not readers:
            self.readers[word] = [(who, number, epoch, cluster)]
        elif readers[-1] != (stamp := (who, number, epoch, cluster)):
            self.readers[word] = [*[r for r in readers if apart(r)][:3], stamp]
        if clash:
            raise KernelError(f"threads {clash[0][0].name} and {who.name} race for word {word[1]} of shared memory")


class _Thread:
    def __init__(self, block: _Block, tid: int) -> None:
        self.block, self.tid = block, tid
        self.copies: list[list[Any]] = [[]]  # groups of asynchronous copies not awaited yet, the last one still open
        self.run: Iterator[Any] = iter(())
        self.waits: tuple[Any, ...] | None = None
        self.answer: Any = None
        self.done = False

    @property
    def name(self) -> str:
        return f"{self.block.number}:{self.tid}"


Kernel = TypeVar("Kernel", CudaSource, Listing)


class Machine:
    """Runs one launch. ``now`` is the thread whose turn it is."""

    def __init__(self, source: CudaSource | Listing, grid: int, seed: int = 0) -> None:
        self.source, self.grid, self.rng = source, grid, random.Random(seed)
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
        self.blocks = {n: _Block(n) for n in numbers}
        threads = [_Thread(b, t) for b in self.blocks.values() for t in range(self.source.block)]
        for thread in threads:
            thread.run = self.code["kernel"](*args)
        while left := [t for t in threads if not t.done]:
            ready = [t for t in left if t.waits is None]
            if not ready:
                waiting = sorted({str(t.waits[0]) for t in threads if t.waits})
                few = ", ".join(t.name for t in [t for t in threads if t.waits][:4])
                raise KernelError(f"threads wait for ever at {' and '.join(waiting)}, the first are {few}")
            self.rng.shuffle(ready)
            for thread in ready:
                self._step(thread)
            self._release(threads)

    def _step(self, thread: _Thread) -> None:
        self.now = thread
        self.thread_index.x, self.block_index.x = thread.tid, thread.block.number
        try:
            thread.waits = thread.run.send(thread.answer) if thread.answer is not None else next(thread.run)  # type: ignore[attr-defined]
        except StopIteration:
            thread.done = True
            if any(thread.copies):
                raise KernelError(f"thread {thread.name} ends before its copies are there") from None
        thread.answer = None

    def _release(self, threads: list[_Thread]) -> None:
        for _, group in itertools.groupby(threads, lambda t: (t.block.number, t.tid // WARP)):
            warp = list(group)
            kinds = {t.waits[0] if t.waits else "" for t in warp}
            if len(kinds) == 1 and (kind := kinds.pop()).startswith(("shfl", "syncwarp", "ballot")):
                self._shuffle(kind, warp)
        size = self.source.block
        for k, block in enumerate(self.blocks.values()):
            own = threads[k * size : (k + 1) * size]
            if all(t.waits and t.waits[0] == "syncthreads" for t in own):
                block.epoch += 1
                _go(own)
        # Beyond a block: all blocks at hand are the cluster.
        for wide in ("cluster_sync", "cluster_wait"):
            if all(t.waits and t.waits[0] == wide for t in threads):
                for block in self.blocks.values():
                    block.met = True
                    if wide != "cluster_wait":  # which follows a relaxed arrival: it orders no memory
                        block.cluster_epoch += 1
                        block.epoch += 1
                _go(threads)

    def _shuffle(self, kind: str, warp: list[_Thread]) -> None:
        if kind == "ballot_sync":
            votes = names.int32(sum(bool(t.waits[2]) << lane for lane, t in enumerate(warp) if t.waits))
            for thread in warp:
                thread.answer = votes
        elif kind != "syncwarp":
            values = [t.waits[2] for t in warp if t.waits]
            for lane, thread in enumerate(warp):
                assert thread.waits is not None
                by = int(thread.waits[3])
                other = {"shfl_xor_sync": lane ^ by, "shfl_down_sync": lane + by, "shfl_up_sync": lane - by}.get(
                    kind, by
                )
                if not 0 <= other < len(values):
                    raise KernelError(f"thread {thread.name} shuffles with lane {other} of {len(values)}")
                thread.answer = values[other]
        for thread in warp:
            thread.waits = None


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


def run_group(graph: Graph, made: GroupKernels, inputs: Sequence[Tensor], sms: int = 3, seed: int = 0) -> list[Tensor]:
    """A group's kernels on the CPU, one after the other; its outputs as flat tensors.

    Raises:
        KernelError: see the module.
    """
    outputs = [Pointer.poisoned(o.dtype, graph.output_numel(k), once=True) for k, o in enumerate(graph.outputs)]
    memory = {
        "input": [Pointer.reading(t, graph.inputs[k]) for k, t in enumerate(inputs)],
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


def with_text(source: Kernel, text: str) -> Kernel:
    """A copy of the kernel with another text."""
    made = replace(source)
    made.__dict__["text"] = text
    return made


def check_group(graph: Graph, made: GroupKernels, seed: int = 0, special: bool = False, sms: int = 3) -> None:
    """Run a group's kernels on random inputs and compare every output with the oracle.

    Raises:
        KernelError: an output is wrong, or see the module.
    """
    check_inputs(graph, made, make_inputs(graph, seed=seed, special=special), seed, sms)


def check_inputs(graph: Graph, made: GroupKernels, inputs: Sequence[Tensor], seed: int = 0, sms: int = 3) -> None:
    """As :func:`check_group`, on inputs of the caller's, one flat tensor a slot."""
    outputs = run_group(graph, made, inputs, sms, seed)
    length = max((graph.size(v.over) for v in graph.values if v.op in REDUCTIONS), default=1)
    for k, (o, want) in enumerate(zip(graph.outputs, interpret(graph, inputs), strict=True)):
        got = outputs[k].as_strided([graph.extents[a] for a in o.axes], o.strides, o.offset)
        floats = o.dtype in ("float32", "float16", "bfloat16")
        verdict = compare(got, want, o.dtype, length, off_by_one=not floats and from_float(graph, k))
        if not verdict.ok:
            raise KernelError(f"output {k}: {verdict.detail}")
