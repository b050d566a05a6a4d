"""Launching the kernels of ``autotune.domains.c3.collectives.kernels``."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.runtime.launch.cuda import Launch, make_launch
from autotune.task import Kernel

_ready: dict[tuple[int, int, int, int], tuple[Launch, Kernel]] = {}
"""Launches that were made, each with its kernel, so that no other takes its ``id``."""


def launch(kernel: Kernel, device: int, grid: int, pointers: Sequence[int], count: int, stream: int) -> None:
    """Enqueue a kernel of ``build_comm``; under the capture of a graph too, as its cubin is loaded whole before.

    Args:
        device: number of the device, which is current.
        grid: thread blocks.
        pointers: addresses in the order of ``kernel.launch["args"]``; 0 for a part of a copy that is left out.
        count: bytes of each part ("copy"), or elements ("reduce").
        stream: raw handle of a stream of that device.

    Raises:
        LaunchError: the driver refuses.
    """
    key = (id(kernel), device, grid, count)
    found = _ready.get(key)
    if found is None:
        wanted = len(kernel.launch["args"])
        if len(pointers) != wanted:
            raise ValueError(f"{len(pointers)} pointers for a kernel of {wanted}")
        found = _ready[key] = make_launch(kernel, device, grid, count), kernel
    found[0](stream, pointers)
