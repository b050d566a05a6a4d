"""The user's process group as the ranks that a collective is made for."""

from __future__ import annotations

import atexit
import contextlib
import threading

import torch
import torch.distributed as dist

from autotune.domains.c3.collectives.host import open_groups
from autotune.domains.c3.group import Group
from autotune.errors import UserError

_lock = threading.Lock()
_groups: dict[tuple[str, str], tuple[dist.ProcessGroup, Group]] = {}


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
        known = _groups.get(key)
        if known is None or known[0] is not mine:  # a name may come back after destroy_process_group
            ranks = dist.get_process_group_ranks(mine)
            control = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
            made = Group(dist.get_rank(mine), len(ranks), device, control=control, data=mine)
            known = _groups[key] = (mine, made)
        return known[1]


@atexit.register
def _let_go() -> None:
    """End the threads of the gloo groups that were made here, before the interpreter goes.

    gloo's thread drops the tensors of an operation a moment after it has told that it is through, and needs Python's
    lock for it. One that comes to that when the interpreter is going takes the process down ("terminate called without
    an active exception"). A group's end waits for its threads; it asks nothing of the peers.
    """
    groups = [group for _, group in _groups.values()]
    _groups.clear()
    for group in groups:
        made = [group.control, *open_groups(group)]
        group.control = None  # type: ignore[assignment]  # the caller's overlaps outlive this
        while made:
            with contextlib.suppress(Exception):  # the user has destroyed it, with all others
                dist.destroy_process_group(made[-1])
            made.pop()
