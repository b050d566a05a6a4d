"""Opening what runs a computation beside a collective, by the side that its device is on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from autotune.domains.c3.strategy import HostStrategy, Strategy
from autotune.task import Choice

if TYPE_CHECKING:
    import torch

    from autotune.domains.c3.collectives.base import Collective
    from autotune.domains.c3.run.base import Overlap, Panels


def open_overlap(
    compute: Panels | None, collective: Collective | None, config: Mapping[str, Choice], device: torch.device
) -> Overlap:
    """The way that ``config``, a strategy of the side that ``device`` is on, runs the two.

    Args:
        compute: in as many panels as the strategy has; None for the collective alone.
        collective: in as many chunks as the strategy has; None for the computation alone.
    """
    if device.type == "cpu":
        from autotune.domains.c3.run.cpu import HostOverlap

        return HostOverlap(compute, collective, HostStrategy.of(config), device)
    from autotune.domains.c3.run.cuda import CudaOverlap

    return CudaOverlap(compute, collective, Strategy.of(config), device)  # type: ignore[arg-type, unused-ignore]
