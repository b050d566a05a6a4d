"""What runs a computation beside a collective, for the bench and for deployment alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from autotune.domains.c3.strategy import HostStrategy, Strategy
from autotune.task import Choice

if TYPE_CHECKING:
    import torch

    from autotune.domains.c3.collectives.base import Collective


class Panels(Protocol):
    """A computation in pieces that run one after the other, as :class:`autotune.domains.c3.run.compute.Computation`."""

    panels: int

    def run(self, panel: int) -> None: ...


class Overlap(Protocol):
    """A strategy on one computation and one collective, ready to be run again and again; either may be missing."""

    @property
    def collective(self) -> Collective | None: ...

    def __call__(self) -> None:
        """Run both. CUDA: enqueue them behind what the current stream has, and let it go on after both. CPU: both are
        done at return."""
        ...

    def prepare(self) -> None:
        """Do what the first call would have to (capturing a graph, say). Runs both once; called by every rank."""
        ...

    def close(self) -> None:
        """Let go of what it made. The collective is its owner's to close."""
        ...


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
