"""FSDP2's all-gather by a strategy of the C3 domain: what ``FSDPModule.set_custom_all_gather`` takes.

gather = TunedAllGather(deploy_group(None, device), match.config, match.artifact)
for layer in layers:
    layer.set_custom_all_gather(gather)
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather  # torch names it nowhere else

from autotune.domains.c3.collectives.base import Collective, Spec, open_collective
from autotune.domains.c3.group import Group
from autotune.task import Artifact, Choice

SHORT = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed by torch 2.13


class TunedAllGather(AllGather):
    """FSDP2's all-gather by a strategy; see ``torch.distributed.fsdp``'s ``AllGather``.

    FSDP asks for an output, copies the rank's shard to its place in it, and then has it gathered: in place, where the
    strategy's engine can. Outputs may be of symmetric memory, which is dear to make, so they are kept and take turns.
    Nothing but the number of calls decides whose turn it is, as all ranks must take the same, and memory is not let go
    of at the same time on each. FSDP lets go of an output after its streams wait for the last reader, for the sake of
    torch's own allocator, so that it may be written again then.

    Args:
        depth: outputs of one size that take turns. FSDP uses two at a time, and one more for each layer that
            it is told to prefetch beyond the next.
    """

    def __init__(
        self, group: Group, config: Mapping[str, Choice], artifact: Artifact | None = None, depth: int = 3
    ) -> None:
        self.group, self.config, self.artifact, self.depth = group, dict(config), artifact, depth
        self._turns: dict[tuple[int, torch.dtype], list[Collective]] = {}  # the one that is next comes first
        self._by_address: dict[int, Collective] = {}
        self._handed: dict[int, weakref.ref[Tensor]] = {}  # by address too

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        shape = torch.Size([int(s) for s in size])
        if dtype not in SHORT:
            return torch.empty(shape, dtype=dtype, device=device)
        turns = self._turns.setdefault((shape.numel(), dtype), [])
        collective = turns.pop(0) if len(turns) == self.depth else self._open(shape.numel(), dtype)
        turns.append(collective)
        out = collective.output.view(shape)
        before = self._handed.get(out.data_ptr())
        if before is not None and before() is not None:
            raise RuntimeError(f"more than {self.depth} gathered layers are in use: give TunedAllGather a larger depth")
        self._handed[out.data_ptr()] = weakref.ref(out)
        return out

    def _open(self, numel: int, dtype: torch.dtype) -> Collective:
        spec = Spec("all_gather", numel, SHORT[dtype])
        collective = open_collective(spec, self.group, self.config, self.artifact)
        self._by_address[collective.output.data_ptr()] = collective
        return collective

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        collective = self._by_address.get(output_tensor.data_ptr())
        if collective is None:
            _all_gather(output_tensor, input_tensor, group=group)
            return
        if collective.input.data_ptr() != input_tensor.data_ptr():
            collective.input.copy_(input_tensor)
        collective.enqueue()

    def close(self) -> None:
        """Give the memory back. A collective call."""
        for collective in self._by_address.values():
            collective.close()
        self._turns.clear()
        self._by_address.clear()
        self._handed.clear()
