"""Memory for the counters of grid barriers, zero at first.

What a barrier's blocks add to its counter is 2**31 in all: a launch leaves it at 0 or at 2**31, and either will do for
the next one. So one piece of memory serves launch after launch on one stream. (What earlier versions stored
wants zeros every time; it takes more bytes, and hence pieces of its own.) A launch that never ends leaves a count that
no barrier works with; the device's context is lost with it.

Launches that may run at the same time must not share one: each stream has its own, and each captured graph, whose
replays may run beside anything, takes a new one that is never given back.
"""

from __future__ import annotations

import threading

import torch

_SLICE = 256  # bytes; counters of different slices share no cache line
_POOL = 1024 * _SLICE
_LOW = 128 * _SLICE
"""What is left when more is made. That is done outside of captures, where memory cannot be had; so many graphs may be
captured between two ordinary launches."""

_lock = threading.Lock()
_pools: dict[torch.device, torch.Tensor] = {}
_by_stream: dict[tuple[torch.device, int, int], torch.Tensor] = {}


def state_for(device: torch.device, stream: int, nbytes: int) -> torch.Tensor:
    """At least ``nbytes`` of zeros on ``device`` for a launch on the raw stream ``stream``; kept alive here.

    Raises:
        RuntimeError: under graph capture, before the first launch on the device or after a great many captures without
            one. Executors are warmed up before they are captured, as everything that torch compiles is.
    """
    capturing = torch.cuda.is_current_stream_capturing()
    key = (device, stream, nbytes)
    need = -(-nbytes // _SLICE) * _SLICE
    with _lock:
        pool = _pools.get(device)
        if pool is None or pool.numel() < (need if capturing else max(need, _LOW)):
            if capturing:
                raise RuntimeError("a kernel with a grid barrier was captured before it ran on this device")
            pool = torch.zeros(max(_POOL, need), dtype=torch.uint8, device=device)
            torch.cuda.current_stream(device).synchronize()  # other streams must find it zero
            _pools[device] = pool
        found = None if capturing else _by_stream.get(key)
        if found is None:
            found, _pools[device] = pool[:need], pool[need:]
            if capturing:
                _captured.append(found)
            else:
                _by_stream[key] = found
        return found


_captured: list[torch.Tensor] = []
"""Slices in captured graphs, which hold addresses and not tensors."""
