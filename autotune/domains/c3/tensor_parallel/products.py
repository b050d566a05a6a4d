"""A call of each operator on one rank: products by panels, and the movement of rows between the ranks.

Shapes: ``B`` batches (1 for matrices), ``s`` rows of a shard, ``W`` ranks, ``S = W * s`` rows. All matrices are
contiguous, except the second factors, which may be transposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autotune.domains.c3.collectives.host import all_gather, reduce_scatter
from autotune.domains.c3.collectives.nccl import DTYPES
from autotune.domains.c3.collectives.sm import launch
from autotune.domains.c3.collectives.symmetric import Copies, Copy, new_event
from autotune.domains.c3.tensor_parallel.outbox import Exchange, Outbox
from autotune.domains.c3.tensor_parallel.panels import Panel, panels, sender
from autotune.task import Artifact, Kernel

_BLOCKS = 264
"""Thread blocks of the kernel that adds: two for each SM of an H100."""


class Line:
    """The ranks of a group, from one rank's perspective, and their means of moving rows.

    Attributes:
        exchange: None without access to the peers' memory.
        kernels: the kernel that adds the parts of a sum, by dtype; without one, torch adds.
    """

    def __init__(self, group: dist.ProcessGroup, exchange: Exchange | None) -> None:
        self.group, self.exchange = group, exchange
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.kernels: dict[torch.dtype, Kernel] = {}
        self._begun: dict[int, tuple[Any, Any]] = {}

    def take(self, artifact: Artifact | None, dtype: str) -> None:
        """Use the kernel of a stored strategy, or of a search."""
        for kernel in artifact.kernels if artifact is not None else ():
            if kernel.launch.get("op") == "reduce" and len(kernel.launch["args"]) == self.ranks + 1:
                self.kernels.setdefault(DTYPES[dtype], kernel)

    # ---- all-gather, then products ---------------------------------------------------------------------------------

    def gather_products(
        self, x: Tensor, factors: Sequence[Tensor], chunks: int, engine: str, lanes: int = 1
    ) -> tuple[Tensor, list[Tensor]]:
        """Gather rows, and multiply the gathered rows by each factor.

        Args:
            x: this rank's rows, [B, s, K].
            factors: [K, N] each.
            chunks: see :func:`autotune.domains.c3.tensor_parallel.panels.panels`.
            engine: "copy", or another word for the group's own all-gather.
            lanes: number of streams of products, and of copies. On two streams, the next product fills the SMs that
                the last blocks of a product leave idle.

        Returns:
            the gathered rows [B, S, K], and the products [B, S, N].
        """
        batches, rows, width = x.shape
        gathered = _empty(x, batches, self.ranks * rows, width)
        results = [_empty(x, batches, self.ranks * rows, factor.shape[1]) for factor in factors]
        order = panels(self.rank, self.ranks, chunks)
        box = self.exchange.outbox(x.nbytes) if engine == "copy" and self.exchange is not None else None
        if box is None or self.exchange is None:
            self._gather(gathered, x)
            for panel in order:
                _multiply(gathered, factors, results, panel.rows(rows), panel.rows(rows))
            return gathered, results
        self._gather_by_panels(box, self.exchange, x, gathered, factors, results, order, lanes)
        return gathered, results

    def _gather_by_panels(
        self,
        box: Outbox,
        exchange: Exchange,
        x: Tensor,
        gathered: Tensor,
        factors: Sequence[Tensor],
        results: Sequence[Tensor],
        order: Sequence[Panel],
        lanes: int,
    ) -> None:
        main, rows = torch.cuda.current_stream(), x.shape[1]
        box.open(main.cuda_stream)
        _copy(x, box.view(x, tuple(x.shape)))
        box.publish(main.cuda_stream)
        copying, computing = exchange.fork(main, lanes)
        own, span = gathered[:, self.rank * rows : (self.rank + 1) * rows], order[0].rows(rows)
        if order[0].shards == range(self.rank, self.rank + 1):
            _multiply(x, factors, results, (0, rows), span)
            with torch.cuda.stream(computing.at(1)):
                _copy(x, own)
            rest = order[1:]
        else:
            _copy(x, own)
            rest = order
        arrivals = []
        for k, panel in enumerate(rest):
            stream = copying.at(k)
            if k == 0:
                box.arrival(stream.cuda_stream)
                come = exchange.event(stream)
            elif k < len(copying.streams):
                stream.wait_event(come)
            for peer in _from_next(panel, self.rank):
                Copies(self._into_gathered(box, gathered, peer, rows, panel))(stream.cuda_stream)
            arrivals.append(exchange.event(stream))
        copying.join(copying.streams[0])
        box.release(copying.streams[0].cuda_stream)
        for k, (panel, arrived) in enumerate(zip(rest, arrivals, strict=True), len(order) - len(rest)):
            stream = computing.at(k)
            stream.wait_event(arrived)
            with torch.cuda.stream(stream):
                _multiply(gathered, factors, results, panel.rows(rows), panel.rows(rows))
        computing.join(main)
        copying.join(main)

    def _into_gathered(self, box: Outbox, gathered: Tensor, peer: int, rows: int, panel: Panel) -> list[Copy]:
        line = gathered.shape[2] * gathered.itemsize
        low, high = panel.within(rows)
        target, source = gathered.data_ptr(), box.pointers[peer]
        return [
            (
                target + (batch * gathered.shape[1] + peer * rows + low) * line,
                source + (batch * rows + low) * line,
                (high - low) * line,
            )
            for batch in range(gathered.shape[0])
        ]

    def _gather(self, gathered: Tensor, x: Tensor) -> None:
        """The group's own all-gather along dimension 1."""
        if x.shape[0] == 1:
            all_gather(gathered.view(-1), x.reshape(-1), group=self.group)
            return
        batches, rows, width = x.shape
        parts = _empty(x, self.ranks, batches, rows, width)
        all_gather(parts.view(-1), x.reshape(-1), group=self.group)
        gathered.view(batches, self.ranks, rows, width).copy_(parts.transpose(0, 1))

    # ---- a product, then reduce-scatter ----------------------------------------------------------------------------

    def begin_scatter(
        self, left: Sequence[Tensor], factors: Sequence[Tensor], chunks: int, engine: str, lanes: int = 1
    ) -> Tensor:
        """Begin ``sum over ranks of sum_i left_i @ factor_i``, of which each rank keeps its rows.

        Args:
            left: [B, S, K_i] each.
            factors: [K_i, N] each.
            chunks: see :func:`autotune.domains.c3.tensor_parallel.panels.panels`.
            engine: "copy", or another word for the group's own reduce-scatter.
            lanes: as for :meth:`gather_products`.

        Returns:
            the parts of the sum [W, B, s, N], for :meth:`end_scatter`. They may still be in motion.
        """
        batches, total, _ = left[0].shape
        rows, width = total // self.ranks, factors[0].shape[1]
        parts = _empty(left[0], self.ranks, batches, rows, width)
        order = panels(self.rank, self.ranks, chunks)[::-1]
        box = self.exchange.outbox(parts.nbytes) if engine == "copy" and self.exchange is not None else None
        if box is None or self.exchange is None:
            self._begin_stock(left, factors, parts, order)
            return parts
        exchange, main = self.exchange, torch.cuda.current_stream()
        box.open(main.cuda_stream)
        whole = box.view(parts, (batches, total, width))
        copying, computing = exchange.fork(main, lanes)
        for k, panel in enumerate(order):
            stream, span = computing.at(k), panel.rows(rows)
            with torch.cuda.stream(stream):
                if panel.shards == range(self.rank, self.rank + 1):
                    _add(left, factors, parts[self.rank], span, (0, rows))
                    continue
                _add(left, factors, whole, span, span)
                if self.rank in panel.shards:
                    _copy(whole[:, self.rank * rows : (self.rank + 1) * rows], parts[self.rank])
            for peer in panel.shards:
                if peer != self.rank:
                    box.publish(stream.cuda_stream, panel.part, peer)
        computing.join(main)
        owners = [(owner, panel) for panel in order for owner in panel.shards if owner != self.rank]
        for k, (owner, panel) in enumerate(owners):
            peer, stream = sender(self.rank, self.ranks, owner), copying.at(k)
            box.arrival(stream.cuda_stream, peer, panel.part)
            Copies(self._into_parts(box, parts, peer, panel))(stream.cuda_stream)
        copying.join(copying.streams[0])
        box.release(copying.streams[0].cuda_stream)
        moved = new_event()  # one of its own: other calls may come before end_scatter
        moved.record(copying.streams[0])
        self._begun[parts.data_ptr()] = (None, moved)
        return parts

    def _into_parts(self, box: Outbox, parts: Tensor, peer: int, panel: Panel) -> list[Copy]:
        _, batches, rows, width = parts.shape
        line = width * parts.itemsize
        low, high = panel.within(rows)
        target, source = parts.data_ptr(), box.pointers[peer]
        return [
            (
                target + ((peer * batches + batch) * rows + low) * line,
                source + (batch * self.ranks * rows + self.rank * rows + low) * line,
                (high - low) * line,
            )
            for batch in range(batches)
        ]

    def _begin_stock(
        self, left: Sequence[Tensor], factors: Sequence[Tensor], parts: Tensor, order: Sequence[Panel]
    ) -> None:
        """The product, and the group's own reduce-scatter, which :meth:`end_scatter` waits for."""
        _, batches, rows, width = parts.shape
        whole = parts.view(batches, self.ranks * rows, width)
        for panel in order:
            _add(left, factors, whole, panel.rows(rows), panel.rows(rows))
        if batches > 1:
            parts.copy_(whole.view(batches, self.ranks, rows, width).transpose(0, 1).clone())
        out = _empty(parts, batches, rows, width)
        work = reduce_scatter(out.view(-1), parts.view(-1), group=self.group, async_op=True)
        self._begun[parts.data_ptr()] = (work, out)

    def end_scatter(self, parts: Tensor) -> Tensor:
        """End :meth:`begin_scatter`: this rank's rows of the sum, [B, s, N]."""
        begun, found = self._begun.pop(parts.data_ptr())
        if begun is not None:
            begun.wait()
            stock: Tensor = found
            return stock
        main = torch.cuda.current_stream()
        main.wait_event(found)
        kernel = self.kernels.get(parts.dtype)
        if kernel is None:
            return parts.sum(0)
        out = _empty(parts, *parts.shape[1:])
        pointers = [part.data_ptr() for part in (*parts.unbind(0), out)]
        launch(kernel, out.device.index or 0, _BLOCKS, pointers, out.numel(), main.cuda_stream)
        return out


def _from_next(panel: Panel, rank: int) -> list[int]:
    """The peers in a panel; those after ``rank`` first, so that ranks read from different peers."""
    others = [shard for shard in panel.shards if shard != rank]
    return sorted(others, key=lambda shard: shard ^ rank)


def _empty(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def _copy(source: Tensor, *targets: Tensor) -> None:
    """Copy to each target, by one kernel if all are contiguous."""
    if source.shape[0] == 1:  # a slice of one batch is contiguous, but has other strides
        source, targets = source[0], tuple(target[0] for target in targets)
    torch._foreach_copy_(list(targets), [source] * len(targets))


def _multiply(
    source: Tensor, factors: Sequence[Tensor], results: Sequence[Tensor], span: tuple[int, int], to: tuple[int, int]
) -> None:
    """Products of rows ``span`` of every batch, written to rows ``to`` of the results."""
    for factor, result in zip(factors, results, strict=True):
        for batch in range(source.shape[0]):
            torch.mm(source[batch, span[0] : span[1]], factor, out=result[batch, to[0] : to[1]])


def _add(
    left: Sequence[Tensor], factors: Sequence[Tensor], target: Tensor, span: tuple[int, int], to: tuple[int, int]
) -> None:
    """Sums of products of rows ``span``, written to rows ``to`` of the target."""
    for batch in range(target.shape[0]):
        out = target[batch, to[0] : to[1]]
        torch.mm(left[0][batch, span[0] : span[1]], factors[0], out=out)
        for other, factor in zip(left[1:], factors[1:], strict=True):
            out.addmm_(other[batch, span[0] : span[1]], factor)
