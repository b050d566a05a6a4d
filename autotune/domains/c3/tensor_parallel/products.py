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
from autotune.domains.c3.collectives.sm import launch
from autotune.domains.c3.collectives.symmetric import Copy, new_event
from autotune.domains.c3.tensor_parallel.outbox import Exchange, Outbox
from autotune.domains.c3.tensor_parallel.panels import Panel, panels, sender
from autotune.task import Kernel


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

    # ---- all-gather, then products ---------------------------------------------------------------------------------

    def gather_products(
        self, x: Tensor, factors: Sequence[Tensor], chunks: int, engine: str
    ) -> tuple[Tensor, list[Tensor]]:
        """Gather rows, and multiply the gathered rows by each factor.

        Args:
            x: this rank's rows, [B, s, K].
            factors: [K, N] each.
            chunks: see :func:`autotune.domains.c3.tensor_parallel.panels.panels`.
            engine: "copy", or another word for the group's own all-gather.

        Returns:
            the gathered rows [B, S, K], and the products [B, S, N].
        """
        batches, rows, width = x.shape
        gathered = x.new_empty(batches, self.ranks * rows, width)
        results = [x.new_empty(batches, self.ranks * rows, factor.shape[1]) for factor in factors]
        order = panels(self.rank, self.ranks, chunks)
        if engine != "copy" or self.exchange is None:
            self._gather(gathered, x)
            for panel in order:
                _multiply(gathered, factors, results, panel.rows(rows))
            return gathered, results
        exchange, main = self.exchange, torch.cuda.current_stream()
        box, raw = exchange.outbox(x.nbytes), exchange.stream.cuda_stream
        box.open(main.cuda_stream)
        own = gathered[:, self.rank * rows : (self.rank + 1) * rows]
        published = box.view(x, tuple(x.shape))
        if batches == 1:  # equal strides: one kernel, which reads the rows once
            torch._foreach_copy_([published[0], own[0]], [x[0], x[0]])
        else:
            torch._foreach_copy_([published, own], [x, x])
        box.publish(main.cuda_stream)
        exchange.fork(main)
        alone = order[0].shards == range(self.rank, self.rank + 1)
        if alone:
            _multiply(gathered, factors, results, order[0].rows(rows))
        arrived, events = set[int](), []
        for panel in order[1 if alone else 0 :]:
            for peer in _from_next(panel, self.rank):
                if peer not in arrived:
                    box.arrival(raw, peer)
                    arrived.add(peer)
                exchange.pull(self._into_gathered(box, gathered, peer, rows, panel))
            event = new_event()
            event.record(exchange.stream)
            events.append((panel, event))
        box.release(raw)
        for panel, event in events:
            main.wait_event(event)
            _multiply(gathered, factors, results, panel.rows(rows))
        main.wait_stream(exchange.stream)  # a capture must join it
        return gathered, results

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
        parts = x.new_empty(self.ranks, batches, rows, width)
        all_gather(parts.view(-1), x.reshape(-1), group=self.group)
        gathered.view(batches, self.ranks, rows, width).copy_(parts.transpose(0, 1))

    # ---- a product, then reduce-scatter ----------------------------------------------------------------------------

    def begin_scatter(self, left: Sequence[Tensor], factors: Sequence[Tensor], chunks: int, engine: str) -> Tensor:
        """Begin ``sum over ranks of sum_i left_i @ factor_i``, of which each rank keeps its rows.

        Args:
            left: [B, S, K_i] each.
            factors: [K_i, N] each.
            chunks: see :func:`autotune.domains.c3.tensor_parallel.panels.panels`.
            engine: "copy", "sm" for a kernel that reads the peers' memory, or another word for the group's own
                reduce-scatter.

        Returns:
            the parts of the sum [W, B, s, N], for :meth:`end_scatter`. They may still be in motion.
        """
        batches, total, _ = left[0].shape
        rows, width = total // self.ranks, factors[0].shape[1]
        parts = left[0].new_empty(self.ranks, batches, rows, width)
        order = panels(self.rank, self.ranks, chunks)[::-1]
        if engine not in ("copy", "sm") or self.exchange is None:
            self._begin_stock(left, factors, parts, order)
            return parts
        exchange, main = self.exchange, torch.cuda.current_stream()
        box, raw = exchange.outbox(parts.nbytes), exchange.stream.cuda_stream
        box.open(main.cuda_stream)
        whole = box.view(parts, (batches, total, width))
        direct = engine == "sm" and batches == 1 and parts.dtype in self.kernels
        if not direct:
            exchange.fork(main)  # the parts' memory is free from here on
        for panel in order:
            if panel.shards == range(self.rank, self.rank + 1):
                shifted = Panel(0, 1, panel.part, panel.parts)
                _add(left, factors, parts[self.rank], panel.rows(rows), shifted.rows(rows))
                continue
            span = panel.rows(rows)
            _add(left, factors, whole, span, span)
            if self.rank in panel.shards:
                parts[self.rank].copy_(whole[:, self.rank * rows : (self.rank + 1) * rows])
            for peer in panel.shards:
                if peer != self.rank:
                    box.publish(main.cuda_stream, panel.part, peer)
        if direct:
            self._begun[parts.data_ptr()] = (box, order)
            return parts
        for panel in order:
            for owner in panel.shards:
                if owner != self.rank:
                    peer = sender(self.rank, self.ranks, owner)
                    box.arrival(raw, peer, panel.part)
                    exchange.pull(self._into_parts(box, parts, peer, panel))
        box.release(raw)
        event = new_event()
        event.record(exchange.stream)
        self._begun[parts.data_ptr()] = (None, event)
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
        out = parts.new_empty(batches, rows, width)
        work = reduce_scatter(out.view(-1), parts.view(-1), group=self.group, async_op=True)
        self._begun[parts.data_ptr()] = (work, out)

    def end_scatter(self, parts: Tensor) -> Tensor:
        """End :meth:`begin_scatter`: this rank's rows of the sum, [B, s, N]."""
        begun, found = self._begun.pop(parts.data_ptr())
        if begun is not None and not isinstance(begun, Outbox):
            begun.wait()
            stock: Tensor = found
            return stock
        main = torch.cuda.current_stream()
        kernel = self.kernels.get(parts.dtype)
        if isinstance(begun, Outbox):
            raw = main.cuda_stream
            for panel in found:
                for owner in panel.shards:
                    if owner != self.rank:
                        begun.arrival(raw, sender(self.rank, self.ranks, owner), panel.part)
            own = self.rank * parts[0].nbytes
            sources = [pointer + own for pointer in begun.pointers]
            sources[self.rank] = parts[self.rank].data_ptr()
        else:
            main.wait_event(found)
            sources = [parts[rank].data_ptr() for rank in range(self.ranks)]
        if kernel is None:
            return parts.sum(0)
        out = torch.empty_like(parts[0])
        blocks = 2 * torch.cuda.get_device_properties(out.device).multi_processor_count
        launch(kernel, out.device.index or 0, blocks, [*sources, out.data_ptr()], out.numel(), main.cuda_stream)
        if isinstance(begun, Outbox):
            begun.release(main.cuda_stream)
        return out


def _from_next(panel: Panel, rank: int) -> list[int]:
    """The peers in a panel; those after ``rank`` first, so that ranks read from different peers."""
    others = [shard for shard in panel.shards if shard != rank]
    return sorted(others, key=lambda shard: shard ^ rank)


def _multiply(source: Tensor, factors: Sequence[Tensor], results: Sequence[Tensor], span: tuple[int, int]) -> None:
    """Products of rows ``span`` of every batch."""
    low, high = span
    for factor, result in zip(factors, results, strict=True):
        for batch in range(source.shape[0]):
            torch.mm(source[batch, low:high], factor, out=result[batch, low:high])


def _add(
    left: Sequence[Tensor], factors: Sequence[Tensor], target: Tensor, span: tuple[int, int], to: tuple[int, int]
) -> None:
    """Sums of products of rows ``span``, written to rows ``to`` of the target."""
    for batch in range(target.shape[0]):
        out = target[batch, to[0] : to[1]]
        torch.mm(left[0][batch, span[0] : span[1]], factors[0], out=out)
        for other, factor in zip(left[1:], factors[1:], strict=True):
            out.addmm_(other[batch, span[0] : span[1]], factor)
