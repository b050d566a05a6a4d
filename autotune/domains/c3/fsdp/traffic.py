"""The collectives of a model that ``fully_shard`` sharded, and the engines that run them.

FSDP2 passes each all-gather and each reduce-scatter to an object of the module (``set_custom_all_gather``,
``set_custom_reduce_scatter``). It requests the buffer from that object, copies the shards or the gradients to the
buffer, and then runs the collective on its own stream. :class:`Gather` and :class:`Scatter` are those objects.
:class:`Traffic` selects how the collectives of each size run: in torch's own group, in an NCCL communicator with fewer
thread blocks, or in an engine of C3, which owns its buffers.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter  # not exported elsewhere

from autotune.domains.c3.caller import NAMES
from autotune.domains.c3.collectives.host import all_gather, reduce_scatter
from autotune.domains.c3.collectives.nccl import Collective, Spec, open_collective
from autotune.domains.c3.collectives.symmetric import too_little
from autotune.domains.c3.group import Group
from autotune.domains.c3.scenario import ITEMSIZE
from autotune.domains.c3.strategy import kernel_of
from autotune.errors import Unsupported, first_line
from autotune.runtime.deployment import deployment
from autotune.task import Artifact, Config


@dataclass(frozen=True, order=True)
class Kind:
    """Collectives that run with the same strategy: all of one size and dtype, for any module.

    Attributes:
        op: "all_gather" or "reduce_scatter".
        numel: elements of the larger buffer.
        dtype: "bf16", "f16" or "f32".
        ranks: number of ranks of the process group.
        group: name of the process group, valid only in this process.
    """

    op: str
    numel: int
    dtype: str
    ranks: int
    group: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of the larger buffer."""
        return self.numel * ITEMSIZE[self.dtype]


@dataclass
class Seen:
    """Observations of one kind in a step.

    Attributes:
        group: the process group that FSDP2 passes.
        calls: calls per step.
        alive: maximum number of buffers in use at the same time.
        mean: a reduce-scatter makes means over ranks, not sums.
    """

    group: dist.ProcessGroup
    calls: int = 0
    alive: int = 1
    mean: bool = False


@dataclass
class _Ring:
    """Collectives of one kind, used in rotation, since FSDP2 uses several buffers at the same time.

    The rotation depends only on the number of calls: all ranks must use the same collective, and ranks release memory
    at different times.

    Attributes:
        collectives: each with its larger buffer.
        handed: the tensor over that buffer that FSDP2 has, by the collective's place in the rotation.
    """

    collectives: list[tuple[Collective, Tensor]]
    turn: int = 0
    handed: dict[int, weakref.ref[Tensor]] = field(default_factory=dict)

    def buffer(self, shape: Sequence[int]) -> Tensor:
        """The buffer of the collective whose turn it is, which belongs to FSDP2 until it frees this tensor."""
        self.save(self.turn)
        out = self.collectives[self.turn][1].view(shape)
        self.handed[self.turn] = weakref.ref(out)
        return out

    def save(self, turn: int) -> None:
        """Give FSDP2 a copy of a buffer that it still has, since the next collective overwrites the buffer.

        That happens if the program prefetches more modules than in its first step. The host waits for the copy, since
        FSDP2 may have recorded the event behind which it reads the buffer.
        """
        handed = self.handed.pop(turn, None)
        tensor = handed() if handed is not None else None
        if tensor is None:
            return
        if tensor.device.type == "cuda":
            torch.cuda.synchronize(tensor.device)
        copy = tensor.clone()
        if tensor.device.type == "cuda":
            torch.cuda.synchronize(tensor.device)
        tensor.data = copy
        if dist.get_rank() == 0:
            deployment().warn_once(
                "fsdp buffers",
                "autotune: FSDP2 uses more buffers than in the first step with autotune.fsdp, and the program waits "
                "while they are copied: call autotune.fsdp after all settings of prefetching",
            )


class Traffic:
    """All collectives of a model by kind, and the strategy of each kind.

    Attributes:
        seen: observed kinds, in the order of their first call.
        order: modules in the order of their first all-gather.
        scattered: number of reduce-scatters since it was reset to 0.
        counting: calls that engines run are counted too; not after the choice, to save time of the host.
    """

    def __init__(self) -> None:
        self.seen: dict[Kind, Seen] = {}
        self.order: list[Any] = []
        self.scattered = 0
        self.counting = True
        self._rings: dict[Kind, _Ring] = {}
        self._limited: dict[Kind, dist.ProcessGroup] = {}
        self._by_address: dict[int, tuple[_Ring, Collective]] = {}
        self._live: dict[Kind, list[weakref.ref[Tensor]]] = {}
        self._counts: Counter[Kind] = Counter()

    def new_step(self) -> None:
        """Start counting the calls of a step."""
        for kind, calls in self._counts.items():
            self.seen[kind].calls = calls
        self._counts.clear()
        self.scattered = 0

    # ---- the interface to FSDP2 ------------------------------------------------------------------------------------

    def buffer(
        self, op: str, size: Sequence[int | torch.SymInt], dtype: torch.dtype, device: torch.device, group: Any
    ) -> Tensor:
        """The larger buffer of the next collective, owned by the engine that runs it, if any.

        Args:
            group: group of the module's collectives; None before its first one.
        """
        shape = torch.Size([int(extent) for extent in size])
        if self._rings and group is not None and (kind := _kind(op, shape.numel(), dtype, group)) in self._rings:
            return self._rings[kind].buffer(shape)
        return torch.empty(shape, dtype=dtype, device=device)

    def note(self, op: str, larger: Tensor, group: dist.ProcessGroup, mean: bool = False) -> Kind | None:
        """Count a call; None if no engine could run it."""
        kind = _kind(op, larger.numel(), larger.dtype, group)
        if kind is None or kind.ranks < 2:
            return None
        found = self.seen.setdefault(kind, Seen(group, mean=mean))
        self._counts[kind] += 1
        live = self._live[kind] = [ref for ref in self._live.get(kind, []) if ref() is not None]
        live.append(weakref.ref(larger))
        found.alive = max(found.alive, len(live))
        return kind

    def engine(self, larger: Tensor) -> Collective | None:
        """The collective that owns this buffer, for one call; the next buffer is that of the next collective."""
        ring, collective = self._by_address.get(larger.data_ptr(), (None, None))
        if ring is not None:
            ring.turn = (ring.turn + 1) % len(ring.collectives)
        return collective

    def group(self, kind: Kind | None, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """The group that runs collectives of this kind without an engine."""
        return self._limited.get(kind, group) if kind is not None else group

    @property
    def engines(self) -> bool:
        """True if an engine of C3 runs any kind."""
        return bool(self._rings)

    @property
    def changed(self) -> bool:
        """True if a kind runs in another way than torch's own."""
        return bool(self._rings or self._limited)

    # ---- strategies of kinds ---------------------------------------------------------------------------------------

    def use(self, kind: Kind, config: Config | None, artifact: Artifact | None, everyone: Group, group: Group) -> str:
        """Run a kind with a strategy from now on. A collective call, between two steps.

        Args:
            config: the strategy; None for torch's own group.
            everyone: all ranks of the program, which must agree.
            group: the ranks of the kind's own group.

        Returns:
            the reason why the strategy cannot run, in which case torch's own group runs the kind; else "".
        """
        self.release(kind)
        if config is None or (config["engine"] in ("nccl", "gloo") and not config.get("ctas")):
            return ""
        depth = max(everyone.gather(self.seen[kind].alive)) + 1
        if config["engine"] == "nccl":
            from autotune.domains.c3.collectives.nccl import communicator

            self._limited[kind] = communicator(group, int(config["ctas"]))
            return ""
        nbytes = depth * kind.nbytes * (1 if kind.op == "all_gather" else 2)
        lacking = f"the kernel of {kind.op} is missing" if artifact is None and kernel_of(config, kind.op) else ""
        why = everyone.any_reason(lacking or too_little(group.device, nbytes))
        opened: list[Collective] = []
        spec = Spec(kind.op, kind.numel, kind.dtype, self.seen[kind].mean)
        while not why and len(opened) < depth:
            try:
                opened.append(open_collective(spec, group, config, artifact))
            except Unsupported as error:
                why = str(error)
            except (RuntimeError, OSError, MemoryError) as error:
                why = first_line(error)
            why = everyone.any_reason(why)  # after each: the next one is a collective call
        if why:
            complete = min(everyone.gather(len(opened)))
            for collective in opened[:complete]:
                collective.close()
            return why
        larger = [collective.output if kind.op == "all_gather" else collective.input for collective in opened]
        ring = self._rings[kind] = _Ring(list(zip(opened, larger, strict=True)))
        for collective, buffer in ring.collectives:
            self._by_address[buffer.data_ptr()] = ring, collective
            if kind.op == "reduce_scatter":
                collective.output = buffer.new_empty(0)  # each call has FSDP2's tensor
        return ""

    def release(self, kind: Kind) -> None:
        """Return a kind to torch's own group, and free an engine's buffers. A collective call."""
        self._limited.pop(kind, None)
        ring = self._rings.pop(kind, None)
        if ring is None:
            return
        for turn, (collective, buffer) in enumerate(ring.collectives):
            ring.save(turn)
            del self._by_address[buffer.data_ptr()]
            collective.close()


def _kind(op: str, numel: int, dtype: torch.dtype, group: dist.ProcessGroup) -> Kind | None:
    short = NAMES.get(dtype)
    return Kind(op, numel, short, dist.get_world_size(group), group.group_name) if short is not None else None


class Gather(AllGather):
    """A module's all-gather; see ``torch.distributed.fsdp``'s ``AllGather``.

    Args:
        params: FSDP2's parameter group of the module. If ``reshard_after_forward`` is a number of ranks, the backward
            pass gathers in a smaller process group.
    """

    def __init__(self, traffic: Traffic, module: Any, params: Any) -> None:
        self.traffic, self._module, self._params = traffic, module, params
        self._group: dist.ProcessGroup | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the gathered buffer."""
        group = getattr(self._params, "_all_gather_process_group", self._group)
        return self.traffic.buffer("all_gather", size, dtype, device, group)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """Enqueue the all-gather on the current stream."""
        traffic, self._group = self.traffic, group
        if self._module not in traffic.order:
            traffic.order.append(self._module)
        collective = traffic.engine(output_tensor)
        counts = traffic.counting or collective is None
        kind = traffic.note("all_gather", output_tensor, group) if counts else None
        if collective is None or collective.input.numel() != input_tensor.numel():  # or one of another group
            return all_gather(output_tensor, input_tensor, group=traffic.group(kind, group), async_op=async_op)
        if collective.input.data_ptr() != input_tensor.data_ptr():
            collective.input.copy_(input_tensor)
        collective.enqueue()
        return None


class Scatter(ReduceScatter):
    """A module's reduce-scatter; see ``torch.distributed.fsdp``'s ``ReduceScatter``.

    FSDP2 keeps the result as the gradient, so it is never an engine's buffer.
    """

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self._group: dist.ProcessGroup | None = None
        self._filled: weakref.ref[Tensor] | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the buffer of the gradients, then that of the sums: FSDP2 requests them in this order.

        It has freed the first one if an exception ended the program's last backward pass between the two.
        """
        if self._filled is not None and self._filled() is not None:
            self._filled = None
            return torch.empty([int(extent) for extent in size], dtype=dtype, device=device)
        buffer = self.traffic.buffer("reduce_scatter", size, dtype, device, self._group)
        self._filled = weakref.ref(buffer)
        return buffer

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        """Enqueue the reduce-scatter on the current stream."""
        traffic, self._group = self.traffic, group
        self._filled = None
        traffic.scattered += 1
        mean = op == dist.ReduceOp.AVG
        collective: Any = traffic.engine(input_tensor)
        counts = traffic.counting or collective is None
        kind = traffic.note("reduce_scatter", input_tensor, group, mean) if counts else None
        if collective is None or op != (dist.ReduceOp.AVG if collective.spec.mean else dist.ReduceOp.SUM):
            return reduce_scatter(
                output_tensor, input_tensor, op=op, group=traffic.group(kind, group), async_op=async_op
            )
        own, collective.output = collective.output, output_tensor.view(-1)
        try:
            collective.enqueue()
        finally:
            collective.output = own
        return None
