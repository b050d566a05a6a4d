"""The ranks of a group, from one rank's perspective: how processes join, and their process groups."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from autotune.errors import UserError
from autotune.measure.timer import pin_cpu

T = TypeVar("T")


@dataclass
class Group:
    """One rank's view of all ranks. Every method is a collective call.

    Attributes:
        rank, ranks: index of this process, and the number of processes.
        device: device of this rank.
        control: a gloo group over all ranks, for small messages that must not use the devices.
        data: the group that runs the user's collectives: NCCL on CUDA, gloo on CPUs.
        kept: objects made once and shared by many collectives (communicators, symmetric buffers), by name.
        gloo: process groups for one collective each, by the number that :meth:`borrow` returns.
    """

    rank: int
    ranks: int
    device: torch.device
    control: dist.ProcessGroup
    data: dist.ProcessGroup
    kept: dict[Any, Any] = field(default_factory=dict)
    gloo: dict[int, dist.ProcessGroup] = field(default_factory=dict)
    _free: list[int] = field(default_factory=list)

    def keep(self, name: Any, make: Callable[[], T]) -> T:
        """The object kept under ``name``; made on first use, on every rank."""
        if name not in self.kept:
            self.kept[name] = make()
        found: T = self.kept[name]
        return found

    def borrow(self) -> int:
        """The number of an unused gloo process group; return it with :meth:`restore`."""
        if self._free:
            return self._free.pop()
        members = dist.get_process_group_ranks(self.data)
        some = len(members) < dist.get_world_size()  # then only the members take part in creating it
        number = len(self.gloo)
        self.gloo[number] = dist.new_group(members, backend="gloo", use_local_synchronization=some)
        return number

    def restore(self, number: int) -> None:
        """Return a process group for reuse."""
        self._free.append(number)

    def barrier(self) -> None:
        """Wait for all ranks on the host."""
        dist.barrier(group=self.control)

    def gather(self, value: Any) -> list[Any]:
        """Gather one small JSON-like value from each rank, in the order of ranks."""
        data = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.ranks)]
        dist.all_gather(sizes, torch.tensor([data.numel()]), group=self.control)
        most = max(int(s) for s in sizes)
        padded = torch.zeros(most, dtype=torch.uint8)
        padded[: data.numel()] = data
        parts = [torch.zeros(most, dtype=torch.uint8) for _ in range(self.ranks)]
        dist.all_gather(parts, padded, group=self.control)
        return [json.loads(bytes(p[: int(s)].tolist())) for p, s in zip(parts, sizes, strict=True)]

    def any_reason(self, own: str) -> str:
        """The reason of the first rank that has one; "" if none has."""
        return next((why for why in self.gather(own) if why), "")

    def largest(self, values: Sequence[float]) -> list[float]:
        """The maximum over ranks of each value."""
        data = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(data, op=dist.ReduceOp.MAX, group=self.control)
        return [float(v) for v in data]

    def beat(self) -> None:
        """Enqueue a collective of a few bytes in the data group. On CPUs and in a capture nothing.

        Engines wait for peers without NCCL, whose watchdog aborts a program that waits for a dead peer.
        """
        if self.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            word = self.keep("beat", lambda: torch.zeros(1, device=self.device))
            dist.all_reduce(word, group=self.data, async_op=True)

    def settle(self) -> None:
        """Wait for this rank's device, then for all ranks."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.barrier()

    def timed_block(self, warm: int, timed: int, clock: Callable[[], float]) -> Generator[None, None, float]:
        """Yield before each of the untimed and timed steps; returns milliseconds per step on the slowest rank."""
        for _ in range(warm):
            yield
        self.settle()
        begin = clock()
        for _ in range(timed):
            yield
        self.settle()
        return self.largest([(clock() - begin) * 1e3 / timed])[0]


# ---- processes of a search ------------------------------------------------------------------------------------------


def take_share(rank: int, ranks: int) -> int:
    """Pin this process to its share of the cores, so that ranks do not compete; call it before any thread starts.

    If there are fewer cores than ranks, each rank may use all cores, with one thread.

    Returns:
        the new size of torch's thread pool: one thread per core of the share.
    """
    cores = pin_cpu()
    share = max(1, cores // ranks)
    if cores >= ranks:
        cpus = sorted(os.sched_getaffinity(0))[rank * share : (rank + 1) * share]
        os.sched_setaffinity(0, cpus)
    torch.set_num_threads(share)
    return share


def join(rank: int, ranks: int, device: str, init_method: str, timeout_s: float) -> Group:
    """Join the other ranks, all on this host, and open the process groups. A collective call.

    Args:
        device: device of this rank: "cpu" or "cuda:N".
        init_method: rendezvous of the ranks, as for ``torch.distributed.init_process_group``.
        timeout_s: timeout of collective calls, in addition to the deadlines of the process that started the ranks.
    """
    where = torch.device(device)
    timeout = timedelta(seconds=timeout_s)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name may not resolve, or to a slower interface
    if where.type == "cuda":
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")  # abort at once when a peer dies
        torch.cuda.set_device(where)
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method=init_method, rank=rank, world_size=ranks,
                                timeout=timeout, device_id=where)  # fmt: skip
        dist.all_reduce(torch.zeros(1, device=where))  # connect the ranks now, within the deadline for starting
        torch.cuda.synchronize()
    else:
        dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=ranks, timeout=timeout)
    control = dist.new_group(backend="gloo", timeout=timeout)
    assert dist.group.WORLD is not None
    group = Group(rank, ranks, where, control, dist.group.WORLD)
    group.barrier()
    return group


# ---- processes of a user --------------------------------------------------------------------------------------------

_lock = threading.Lock()
_deployed: dict[tuple[str, str], tuple[dist.ProcessGroup, Group]] = {}


def deploy_group(group: dist.ProcessGroup | None, device: torch.device) -> Group:
    """The ranks of ``group`` with this process's ``device``. A collective call the first time.

    The result is cached, so that all callers share the objects kept in it (communicators, symmetric buffers).

    Args:
        group: a process group; None for the default one.

    Raises:
        UserError: torch.distributed is not initialised, or this process is not in the group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise UserError("autotune.overlap needs a process group: call torch.distributed.init_process_group first")
    process_group = group if group is not None else dist.group.WORLD
    if not isinstance(process_group, dist.ProcessGroup) or dist.get_rank(process_group) < 0:
        raise UserError("autotune.overlap: this process is not in the given process group")
    with _lock:
        key = (process_group.group_name, str(device))
        known = _deployed.get(key)
        if known is None or known[0] is not process_group:  # a name may be reused after destroy_process_group
            ranks = dist.get_process_group_ranks(process_group)
            control = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
            made = Group(dist.get_rank(process_group), len(ranks), device, control=control, data=process_group)
            if not _deployed:
                atexit.register(_let_go)
            known = _deployed[key] = (process_group, made)
        return known[1]


def exists(group: dist.ProcessGroup) -> bool:
    """False for a destroyed process group, whose name may be another's."""
    known: Any = dist.distributed_c10d
    return group in known._world.pg_map


def _let_go() -> None:
    """Destroy the gloo groups that were made here, which ends their threads, before the interpreter shuts down.

    gloo's thread frees an operation's tensors shortly after it reports completion, and needs the GIL to do so. If that
    happens during interpreter shutdown, the process aborts ("terminate called without an active exception"). Destroying
    a group joins its threads without communicating with the peers.
    """
    groups = [group for _, group in _deployed.values()]
    _deployed.clear()
    for group in groups:
        made = [group.control, *group.gloo.values()]
        group.control = None  # type: ignore[assignment]  # the caller's overlaps still refer to the group
        group.gloo.clear()
        while made:
            with contextlib.suppress(Exception):  # the user already destroyed it with all others
                dist.destroy_process_group(made[-1])
            made.pop()
