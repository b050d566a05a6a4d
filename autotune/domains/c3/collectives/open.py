"""Making the collective that a strategy asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from autotune.domains.c3.collectives.base import Collective, Spec
from autotune.task import Choice

if TYPE_CHECKING:
    from autotune.domains.c3.group import Group
    from autotune.task import Artifact


def open_collective(
    spec: Spec, group: Group, config: Mapping[str, Choice], artifact: Artifact | None = None
) -> Collective:
    """The collective ``spec`` by the engine that ``config`` names. A collective call.

    Args:
        config: a strategy of the side that ``group.device`` is on.
        artifact: what the task's ``build`` made of the strategy: the kernels of engine "sm", and the reduction of
            engine "copy". None where the strategy needs none.

    Raises:
        Unsupported: the devices cannot do it (no peer access, say); one line.
    """
    if group.device.type == "cpu":
        from autotune.domains.c3.collectives.host import open_host
        from autotune.domains.c3.strategy import HostStrategy

        return open_host(spec, group, HostStrategy.of(config))
    from autotune.domains.c3.strategy import Strategy

    strategy = Strategy.of(config)
    if strategy.engine == "nccl":
        from autotune.domains.c3.collectives.nccl import NcclCollective

        return NcclCollective(spec, group, strategy)
    if strategy.engine == "copy":
        from autotune.domains.c3.collectives.dma import CopyCollective

        return CopyCollective(spec, group, strategy, artifact)
    from autotune.domains.c3.collectives.sm import SmCollective

    return SmCollective(spec, group, strategy, artifact)
