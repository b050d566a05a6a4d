"""The floor: how fast the device moves bytes when it does nothing else."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from autotune.measure.policy import Policy
from autotune.measure.timer import interleave

_ELEMENTS = {"cuda": 1 << 28, "cpu": 1 << 25}


def copy_bandwidth(policy: Policy, device: str) -> float:
    """Bytes a microsecond of a copy of 1 GiB (128 MiB on a CPU) on the device, reads and writes counted.

    A captured ``copy_`` is a copy node, which copy engines may run, slower; an element-wise kernel moves as many bytes.
    The faster of both counts.
    """
    a = torch.randn(_ELEMENTS[torch.device(device).type], device=device)
    b = torch.empty_like(a)
    ways: dict[str, Callable[[], object]] = {"copy": lambda: b.copy_(a), "kernel": lambda: torch.neg(a, out=b)}
    fastest = min(statistics.median(samples) for samples in interleave(ways, policy, device).values())
    return 2 * a.numel() * a.element_size() / fastest
