"""Collectives on CPUs: by gloo, and by copies through memory that the ranks of a host share.

The latter are a model of copy engines. Each rank has its buffers and two counters in memory that its peers map.
``ready`` is the number of the call that the rank has reached: its input may be read and its output written. ``done`` is
the last call whose reads and writes the rank has completed, including those at its peers. A call is complete when all
ranks have done it. A rank writes only its own counters.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from autotune.domains.c3.collectives.nccl import DTYPES, Spec
from autotune.domains.c3.group import Group
from autotune.domains.c3.scenario import ITEMSIZE, REDUCING
from autotune.domains.c3.strategy import HostStrategy
from autotune.errors import Unsupported
from autotune.task import Artifact

# Names in torch 2.13, else those of torch 2.11.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_PAGE = 4096
_READY, _DONE = 0, 16  # indices of 8-byte words in the first page, two cache lines apart
_BLOCK = 1 << 14
"""Elements per reduction step: the block stays in the cache, and torch uses a single thread for so few."""
_SPINS = 50
_LOCK = threading.Lock()


class GlooCollective:
    """A gloo collective on buffers that it allocates.

    A gloo group matches operations by their order. Each open collective therefore has its own group, so that two
    collectives may run in different threads.
    """

    engine = "gloo"
    met = None

    def __init__(self, spec: Spec, group: Group, strategy: HostStrategy, artifact: Artifact | None = None) -> None:
        part, n = spec.part(group.ranks), spec.numel
        self.spec, self.group = spec, group
        self._number: int | None = group.borrow()
        self.input = torch.zeros(part if spec.op == "all_gather" else n, dtype=DTYPES[spec.dtype])
        self.output = torch.zeros(part if spec.op == "reduce_scatter" else n, dtype=DTYPES[spec.dtype])

    def enqueue(self, stream: Any = None) -> None:
        if self._number is None:
            raise RuntimeError("the collective was closed")
        comm = self.group.gloo[self._number]
        if self.spec.op == "all_reduce":
            self.output.copy_(self.input)
            dist.all_reduce(self.output, group=comm)
        else:
            move = {"all_gather": all_gather, "reduce_scatter": reduce_scatter}
            move.get(self.spec.op, dist.all_to_all_single)(self.output, self.input, group=comm)
            if self.spec.mean:
                self.output.div_(self.group.ranks)

    def close(self) -> None:
        """Return the process group for reuse. A collective call."""
        if self._number is not None:
            self.group.restore(self._number)
            self._number = None


class HostCopy:
    """A collective by copies between processes. All-gather is in place.

    Reductions read the peers' inputs, sum them in fp32 in the order of ranks, and write the sums to their destinations.

    Attributes:
        timeout_s: seconds without progress of a peer after which a call fails.

    Raises:
        Unsupported: the ranks do not share memory, or there is too little of it.
        RuntimeError: in a call, if a peer's process has ended.
        TimeoutError: in a call, if a peer does not come.

    """

    engine = "copy"
    met = None

    def __init__(self, spec: Spec, group: Group, strategy: HostStrategy, artifact: Artifact | None = None) -> None:
        ranks, dtype, size = group.ranks, DTYPES[spec.dtype], ITEMSIZE[spec.dtype]
        self.spec, self.group, self.timeout_s = spec, group, 300.0
        self._part, self._calls = spec.part(ranks), 0
        self._pieces = pieces(self._part, strategy.copies)
        outputs = self._part if spec.op == "reduce_scatter" else spec.numel
        inputs = 0 if spec.op == "all_gather" else spec.numel
        begin = _PAGE + _pages(outputs * size)
        windows = share(group, begin + _pages(inputs * size))
        self._processes = [int(pid) for pid in group.gather(os.getpid())]

        def view(window: mmap.mmap, offset: int, numel: int) -> Tensor:
            return torch.frombuffer(window, dtype=dtype, count=numel, offset=offset)

        self._outputs = [view(w, _PAGE, outputs) for w in windows]
        self._inputs = [view(w, begin, inputs) for w in windows] if inputs else []
        self._flags = [np.frombuffer(w, dtype=np.int64, count=_PAGE // 8) for w in windows]
        self.output = self._outputs[group.rank]
        self.input = self._inputs[group.rank] if inputs else self.output[group.rank * self._part :][: self._part]
        self._pool = ThreadPoolExecutor(strategy.copies, "autotune-copy") if strategy.copies > 1 else None

    def enqueue(self, stream: Any = None) -> None:
        own_flags = self._flags[self.group.rank]
        self._calls += 1
        _fence()
        own_flags[_READY] = self._calls
        work = self._add if self.spec.op in REDUCING else self._move
        if self._pool is None:
            work(*self._pieces[0])
        else:
            for future in [self._pool.submit(work, begin, end) for begin, end in self._pieces]:
                future.result()
        _fence()
        own_flags[_DONE] = self._calls
        for peer in self._order():
            self._await(peer, _DONE, self._calls)

    def _order(self) -> list[int]:
        """This rank and its peers, starting with this rank, so that ranks access different peers first."""
        me, ranks = self.group.rank, self.group.ranks
        return [(me + k) % ranks for k in range(ranks)]

    def _move(self, begin: int, end: int) -> None:
        """Send elements ``begin`` to ``end`` of this rank's shard to every peer."""
        me, part = self.group.rank, self._part
        gather = self.spec.op == "all_gather"
        for peer in self._order():
            if gather and peer == me:
                continue
            self._await(peer, _READY, self._calls)
            source = self.input[begin:end] if gather else self.input[peer * part + begin : peer * part + end]
            _copy(self._outputs[peer][me * part + begin : me * part + end], source)

    def _add(self, begin: int, end: int) -> None:
        """Sum elements ``begin`` to ``end`` of this rank's shard over ranks."""
        for peer in self._order():
            self._await(peer, _READY, self._calls)
        first = self.group.rank * self._part
        last = min(first + end, self.spec.numel)  # the last shard of an all-reduce may be short
        scatter = self.spec.op == "reduce_scatter"
        targets = [self.output] if scatter else [self._outputs[p] for p in self._order()]
        total = torch.empty(_BLOCK, dtype=torch.float32)
        for lo in range(first + begin, last, _BLOCK):
            hi = min(lo + _BLOCK, last)
            block = total[: hi - lo]
            block.copy_(self._inputs[0][lo:hi])
            for other in self._inputs[1:]:
                block.add_(other[lo:hi])
            if self.spec.mean:
                block.div_(self.group.ranks)
            at = lo - first if scatter else lo
            for target in targets:
                target[at : at + hi - lo].copy_(block)

    def _await(self, peer: int, word: int, value: int) -> None:
        """Wait until a peer's counter is at least ``value``."""
        flags = self._flags[peer]
        if flags[word] >= value:
            return
        spins, end = 0, time.monotonic() + self.timeout_s
        while flags[word] < value:
            spins += 1
            time.sleep(0 if spins < _SPINS else 2e-5 if spins < 20 * _SPINS else 1e-3)  # releases the GIL
            if spins % _SPINS == 0 and spins > 20 * _SPINS and _ended(self._processes[peer]):
                raise RuntimeError(f"{self.spec.op}: the process of rank {peer} has ended")
            if spins > _SPINS and time.monotonic() > end:
                raise TimeoutError(f"{self.spec.op}: rank {peer} did not come within {self.timeout_s:g} s")
        _fence()

    def close(self) -> None:
        """Release the memory; it is freed after the last rank and the last tensor in it have released it."""
        if self._pool is not None:
            self._pool.shutdown()
        self._outputs, self._inputs, self._flags = [], [], []


def share(group: Group, nbytes: int) -> list[mmap.mmap]:
    """Allocate ``nbytes`` of zeroed memory per rank and map all of it; in the order of ranks. A collective call.

    It has no name in a file system, so that killed ranks leave nothing behind.

    Raises:
        Unsupported: the ranks are on different hosts, or cannot open each other's memory, or there is too little.
    """
    problem, fd = "", -1
    try:
        fd = os.memfd_create("autotune-c3")
        os.posix_fallocate(fd, 0, nbytes)  # a lack of memory is an error here instead of a signal later
    except OSError as error:
        problem = f"no {nbytes} bytes of shared memory: {error.strerror}"
    windows: list[mmap.mmap] = []
    try:
        gathered = group.gather({"host": _host(), "name": f"/proc/{os.getpid()}/fd/{fd}", "problem": problem})
        problem = next((t["problem"] for t in gathered if t["problem"]), "")
        if len({t["host"] for t in gathered}) > 1:
            problem = "the ranks are on different hosts, and share no memory"
        try:
            windows = [] if problem else [_map(str(t["name"]), nbytes) for t in gathered]
        except OSError as error:
            problem = f"a rank's memory cannot be mapped by another: {error.strerror}"
        problem = group.any_reason(problem)
    finally:
        if fd >= 0:
            os.close(fd)
    if problem:
        raise Unsupported(problem)
    return windows


def _map(name: str, nbytes: int) -> mmap.mmap:
    fd = os.open(name, os.O_RDWR)
    try:
        return mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)


def _host() -> str:
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as f:
        return f"{socket.gethostname()} {f.read().strip()}"
    return socket.gethostname()


def _pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def _ended(pid: int) -> bool:
    """True if a process of this host has ended, also if its parent has not noticed."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def _copy(target: Tensor, source: Tensor) -> None:
    """Copy bytes with NumPy, which releases the GIL and starts no threads, unlike torch."""
    np.copyto(target.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())


def _fence() -> None:
    """Memory fence: on some processors, peers could otherwise see a counter before the data it covers.

    Releasing a lock and acquiring it again orders the accesses.
    """
    with _LOCK:
        pass
    with _LOCK:
        pass


def pieces(numel: int, parts: int) -> list[tuple[int, int]]:
    """Split ``numel`` elements into ``parts`` ranges (begin, end) of nearly equal length; some may be empty."""
    return list(itertools.pairwise(numel * k // parts for k in range(parts + 1)))
