"""FSDP2's all-gather by a strategy of the C3 domain: what ``FSDPModule.set_custom_all_gather`` takes.

gather = TunedAllGather(deploy_group(None, device), match.config, match.artifact)
for layer in layers:
    layer.set_custom_all_gather(gather)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather  # torch names it nowhere else

from autotune.c3.collectives.base import Collective, Spec
from autotune.c3.collectives.open import open_collective
from autotune.c3.group import Group
from autotune.task import Artifact, Choice

SHORT = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed by torch 2.13


class TunedAllGather(AllGather):
    """FSDP2's all-gather by a strategy; see ``torch.distributed.fsdp``'s ``AllGather``.

    FSDP asks for an output, copies the rank's shard to its place in it, and then has it gathered: in place, where the
    strategy's engine can. Outputs may be of symmetric memory, which is dear to make, so they are kept, and handed out
    again once nothing refers to them: FSDP lets go of an output after its streams wait for the last reader, as it must
    for any memory that torch reuses.
    """

    def __init__(self, group: Group, config: Mapping[str, Choice], artifact: Artifact | None = None) -> None:
        self.group, self.config, self.artifact = group, dict(config), artifact
        self._opened: dict[tuple[int, torch.dtype], list[tuple[Collective, int]]] = {}
        self._by_address: dict[int, Collective] = {}

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        numel = int(torch.Size([int(s) for s in size]).numel())
        if dtype not in SHORT:
            return torch.empty(*size, dtype=dtype, device=device)
        opened = self._opened.setdefault((numel, dtype), [])
        for collective, idle in opened:
            if _references(collective.output) == idle:
                break
        else:
            collective = self._open(numel, dtype)
            opened.append((collective, _references(collective.output)))
        out: Tensor = collective.output.view([int(s) for s in size])
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
        for chunk in range(collective.chunks):
            collective.enqueue(chunk)

    def close(self) -> None:
        """Give the memory back. A collective call."""
        for collective in self._by_address.values():
            collective.close()
        self._opened.clear()
        self._by_address.clear()


def _references(t: Tensor) -> int:
    """How many tensors share the memory of ``t``, or a number that grows with it."""
    return int(torch._C._storage_Use_Count(t.untyped_storage()._cdata))
