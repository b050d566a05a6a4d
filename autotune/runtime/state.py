"""Zeroed memory for the counters of grid barriers.

A kernel with a barrier finds its counters zero and leaves them zero, so one piece of memory serves launch after launch
on one stream. Launches that may run at the same time must not share one: each stream has its own, and each captured
graph, whose replays may run beside anything, takes a new one that is never given back.
"""

from __future__ import annotations

import threading

import torch

_SLICE = 256  # bytes; counters of different slices share no cache line
_POOL = 256 * 1024

_lock = threading.Lock()
_pools: dict[torch.device, list[torch.Tensor]] = {}
_by_stream: dict[tuple[torch.device, int, int], torch.Tensor] = {}


def state_for(device: torch.device, stream: int, nbytes: int) -> torch.Tensor:
    """At least ``nbytes`` of zeros on ``device`` for a launch on the raw stream ``stream``; kept alive here.

    Raises:
        RuntimeError: the first use on a device is under graph capture. Executors are warmed up before they are
            captured, as everything that torch compiles is.
    """
    capturing = torch.cuda.is_current_stream_capturing()
    key = (device, stream, nbytes)
    if not capturing:
        found = _by_stream.get(key)
        if found is not None:
            return found
    with _lock:
        pool = _pools.setdefault(device, [])
        need = -(-nbytes // _SLICE) * _SLICE
        if not pool or pool[-1].numel() < need:
            if capturing:
                raise RuntimeError("a kernel with a grid barrier was captured before it ran once on this device")
            made = torch.zeros(max(_POOL, need), dtype=torch.uint8, device=device)
            torch.cuda.current_stream(device).synchronize()  # other streams must find it zero
            pool.append(made)
        piece, pool[-1] = pool[-1][:need], pool[-1][need:]
        if not capturing:
            _by_stream[key] = piece
        return piece
