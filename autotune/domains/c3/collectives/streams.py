"""Streams and events, behind types that torch does not give them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def new_stream(device: torch.device, *, high: bool = False) -> Any:
    """A stream of the lowest priority, or of the highest."""
    import torch

    cuda: Any = torch.cuda
    least, greatest = cuda.Stream.priority_range()
    return cuda.Stream(device, priority=greatest if high else least)


def new_event(*, timing: bool = False) -> Any:
    """An event, with timing or without."""
    import torch

    cuda: Any = torch.cuda
    return cuda.Event(enable_timing=timing)
