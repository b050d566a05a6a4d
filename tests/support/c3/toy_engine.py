"""One more engine, as somebody would write it: a file with a collective, and a line in ``strategy.ENGINES``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from autotune.domains.c3.collectives.nccl import DTYPES, Spec
from autotune.domains.c3.group import Group
from autotune.domains.c3.strategy import ENGINES, HostStrategy
from autotune.task import Artifact


class SendCollective:
    """Every collective by an all-gather of the control group."""

    engine = "send"
    met = None

    def __init__(self, spec: Spec, group: Group, strategy: HostStrategy, artifact: Artifact | None = None) -> None:
        self.spec, self.group = spec, group
        part, n = spec.part(group.ranks), spec.numel
        self.input = torch.zeros(part if spec.op == "all_gather" else n, dtype=DTYPES[spec.dtype])
        self.output = torch.zeros(part if spec.op == "reduce_scatter" else n, dtype=DTYPES[spec.dtype])

    def enqueue(self, stream: Any = None) -> None:
        ranks, part = self.group.ranks, self.spec.part(self.group.ranks)
        whole = [torch.empty_like(self.input) for _ in range(ranks)]
        dist.all_gather(whole, self.input, group=self.group.control)
        mine = slice(self.group.rank * part, (self.group.rank + 1) * part)
        if self.spec.op == "all_gather":
            self.output.copy_(torch.cat(whole))
        elif self.spec.op == "all_to_all":
            self.output.copy_(torch.cat([one[mine] for one in whole]))
        else:
            total = torch.stack(whole).float().sum(0)
            self.output.copy_(total[mine] if self.spec.op == "reduce_scatter" else total)

    def close(self) -> None:
        pass


def sound(group: Group, **arguments: Any) -> list[list[Any]]:
    """As :func:`tests.support.c3.host_jobs.sound`, with the line there."""
    from tests.support.c3 import host_jobs

    engines: Any = ENGINES["cpu"]
    engines["send"] = "tests.support.c3.toy_engine:SendCollective"
    try:
        return host_jobs.sound(group, **arguments)
    finally:
        del engines["send"]  # other tests share this process
