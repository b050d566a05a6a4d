"""The ranks that take part, as one rank sees them: how processes join, and which groups of processes they talk in."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from autotune.errors import UserError
from autotune.measure.timing.timer import pin_cpu

T = TypeVar("T")


@dataclass
class Group:
    """One rank's view of the ranks. Every method is a collective call.

    Attributes:
        rank, ranks: this process's number, and how many there are.
        device: where this rank computes.
        control: a gloo group over all ranks, for what is small and must not touch the devices.
        data: the group that the user's collectives run in: NCCL's on CUDA, gloo's on CPUs.
        kept: what is made once and used by many collectives (communicators, symmetric buffers), by name.
        gloo: process groups for one collective each, by a number that :meth:`borrow` gives.
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
        """The object kept under ``name``, made on first use; on every rank alike."""
        if name not in self.kept:
            self.kept[name] = make()
        found: T = self.kept[name]
        return found

    def borrow(self) -> int:
        """The number of a gloo process group that nobody uses; give it back to :meth:`restore`."""
        if self._free:
            return self._free.pop()
        members = dist.get_process_group_ranks(self.data)
        some = len(members) < dist.get_world_size()  # then the other processes take no part in making it
        number = len(self.gloo)
        self.gloo[number] = dist.new_group(members, backend="gloo", use_local_synchronization=some)
        return number

    def restore(self, number: int) -> None:
        """Leave a process group to the next one who borrows."""
        self._free.append(number)

    def barrier(self) -> None:
        """Wait for all ranks, on the host."""
        dist.barrier(group=self.control)

    def gather(self, value: Any) -> list[Any]:
        """One small JSON-like value of each rank, in the order of ranks."""
        data = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.ranks)]
        dist.all_gather(sizes, torch.tensor([data.numel()]), group=self.control)
        most = max(int(s) for s in sizes)
        padded = torch.zeros(most, dtype=torch.uint8)
        padded[: data.numel()] = data
        parts = [torch.zeros(most, dtype=torch.uint8) for _ in range(self.ranks)]
        dist.all_gather(parts, padded, group=self.control)
        return [json.loads(bytes(p[: int(s)].tolist())) for p, s in zip(parts, sizes, strict=True)]

    def largest(self, values: Sequence[float]) -> list[float]:
        """The largest over ranks of each value."""
        data = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(data, op=dist.ReduceOp.MAX, group=self.control)
        return [float(v) for v in data]


# ---- processes of a search ------------------------------------------------------------------------------------------


def take_share(rank: int, ranks: int) -> int:
    """Keep this process on its share of the cores, so that ranks do not get in each other's way; call it before
    anything starts threads.

    Where there are fewer cores than ranks, each rank may use all of them, with one thread.

    Returns:
        the threads of torch's pool from now on: one a core of the share.
    """
    cores = pin_cpu()
    share = max(1, cores // ranks)
    if cores >= ranks and hasattr(os, "sched_setaffinity"):
        mine = sorted(os.sched_getaffinity(0))[rank * share : (rank + 1) * share]
        os.sched_setaffinity(0, mine)
    torch.set_num_threads(share)
    return share


def join(rank: int, ranks: int, device: str, init_method: str, timeout_s: float) -> Group:
    """Meet the other ranks, all on this host, and open the process groups. A collective call.

    Args:
        device: of this rank: "cpu" or "cuda:N".
        init_method: where ranks find each other, as for ``torch.distributed.init_process_group``.
        timeout_s: after which a collective call gives up. Whoever started the ranks has deadlines of its own.
    """
    where = torch.device(device)
    timeout = timedelta(seconds=timeout_s)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name may lead nowhere, or to a slower way round
    if where.type == "cuda":
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")  # die at once when a peer does
        torch.cuda.set_device(where)
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method=init_method, rank=rank, world_size=ranks,
                                timeout=timeout, device_id=where)  # fmt: skip
        dist.all_reduce(torch.zeros(1, device=where))  # connects the ranks now, within the start's deadline
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
    """The ranks of ``group`` with this process's ``device``, made once: what is kept in it (communicators, symmetric
    buffers) is shared by all who ask. A collective call the first time.

    Args:
        group: None is the default one.

    Raises:
        UserError: torch.distributed is not initialised, or this process is not in the group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise UserError("autotune.overlap works between processes: call torch.distributed.init_process_group first")
    mine = group if group is not None else dist.group.WORLD
    if not isinstance(mine, dist.ProcessGroup) or dist.get_rank(mine) < 0:
        raise UserError("autotune.overlap: this process is not in the process group that was given")
    with _lock:
        key = (mine.group_name, str(device))
        known = _deployed.get(key)
        if known is None or known[0] is not mine:  # a name may come back after destroy_process_group
            ranks = dist.get_process_group_ranks(mine)
            control = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
            made = Group(dist.get_rank(mine), len(ranks), device, control=control, data=mine)
            if not _deployed:
                atexit.register(_let_go)
            known = _deployed[key] = (mine, made)
        return known[1]


def _let_go() -> None:
    """End the threads of the gloo groups that were made here, before the interpreter goes.

    gloo's thread drops the tensors of an operation a moment after it has told that it is through, and needs Python's
    lock for it. One that comes to that when the interpreter is going takes the process down ("terminate called without
    an active exception"). A group's end waits for its threads; it asks nothing of the peers.
    """
    groups = [group for _, group in _deployed.values()]
    _deployed.clear()
    for group in groups:
        made = [group.control, *group.gloo.values()]
        group.control = None  # type: ignore[assignment]  # the caller's overlaps outlive this
        group.gloo.clear()
        while made:
            with contextlib.suppress(Exception):  # the user has destroyed it, with all others
                dist.destroy_process_group(made[-1])
            made.pop()
