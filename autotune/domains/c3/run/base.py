"""What runs a computation beside a collective, for the bench and for deployment alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
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
