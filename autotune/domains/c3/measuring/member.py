"""Taking part as one rank: a process's share of the machine, and the process groups that ranks talk in."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from autotune.domains.c3.group import Group


def take_share(rank: int, ranks: int) -> int:
    """Keep this process on its share of the cores, so that ranks do not get in each other's way; call it before
    anything starts threads.

    Where there are fewer cores than ranks, each rank may use all of them, with one thread.

    Returns:
        the threads of torch's pool from now on: one a core of the share.
    """
    from autotune.measure.timing.timer import pin_cpu

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
