"""A call of each operator on one rank: products by panels, and the movement of rows between the ranks.

Shapes: ``B`` batches (1 for matrices), ``s`` rows of a shard, ``W`` ranks, ``S = W * s`` rows. All matrices are
contiguous, except the second factors, which may be transposed.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autotune.domains.c3.collectives.host import all_gather, reduce_scatter
from autotune.domains.c3.collectives.nccl import DTYPES
from autotune.domains.c3.collectives.sm import launch
from autotune.domains.c3.collectives.symmetric import new_event
from autotune.domains.c3.tensor_parallel.outbox import Exchange, Move, Outbox
from autotune.domains.c3.tensor_parallel.panels import Panel, panels, sender
from autotune.task import Artifact, Kernel

_Product = tuple[tuple[int, int], int, tuple[int, ...], bool]
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
        self._begun: dict[int, tuple[Any, Any, Any]] = {}
        self._moved: list[Any] = []

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
        box = self.exchange.outbox(x.nbytes) if engine == "copy" and self.exchange is not None else None
        if box is None or self.exchange is None:
            self._gather(gathered, x)
            for panel in panels(self.rank, self.ranks, chunks):
                span = panel.rows(rows)
                _multiply(_rows(gathered, span), factors, results, span)
            return gathered, results
        what = ("gather", x.shape, x.dtype, chunks, lanes, *_layouts(factors))
        tensors, exchange = [x, gathered, *factors, *results], self.exchange
        exchange.run(
            what,
            box,
            tensors,
            lambda: self._gather_by_panels(exchange, box, x, gathered, factors, results, chunks, lanes),
        )
        return gathered, results

    def _gather_by_panels(
        self,
        exchange: Exchange,
        box: Outbox,
        x: Tensor,
        gathered: Tensor,
        factors: Sequence[Tensor],
        results: Sequence[Tensor],
        chunks: int,
        lanes: int,
    ) -> None:
        batches, rows, width = x.shape
        own, rest = _gather_steps(self.rank, self.ranks, chunks, batches, rows, width * x.itemsize)
        main = torch.cuda.current_stream()
        box.open(main.cuda_stream)
        _copy(x, [box.view(x, (batches, rows, width)), gathered[:, self.rank * rows : (self.rank + 1) * rows]])
        box.publish(main.cuda_stream)
        copying, computing = exchange.copying(main, lanes), exchange.computing(main, lanes)
        if own is not None:
            _multiply(x, factors, results, own)
        target, arrivals = gathered.data_ptr(), []
        for k, (_, moves) in enumerate(rest):
            stream = copying.at(k)
            if k == 0:
                box.arrival(stream.cuda_stream)
                come = exchange.event(stream) if lanes > 1 else None
            elif k < lanes:
                stream.wait_event(come)
            box.pull(stream.cuda_stream, target, moves)
            if k == len(rest) - 1:
                copying.join(stream)
                box.release(stream.cuda_stream)
            arrivals.append(exchange.event(stream))
        for k, ((span, _), arrived) in enumerate(zip(rest, arrivals, strict=True), own is not None):
            stream = computing.at(k)
            stream.wait_event(arrived)
            with _on(stream, main):
                _multiply(_rows(gathered, span), factors, results, span)
        computing.join(main)

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
            the parts of the sum [W, B, s, N], for :meth:`end_scatter`. They may still be in motion. If an exception
            frees them before that, the current stream waits for the copies.
        """
        batches, total, _ = left[0].shape
        rows, width = total // self.ranks, factors[0].shape[1]
        parts = _empty(left[0], self.ranks, batches, rows, width)
        box = self.exchange.outbox(parts.nbytes) if engine == "copy" and self.exchange is not None else None
        if box is None or self.exchange is None:
            self._begin_stock(left, factors, parts, panels(self.rank, self.ranks, chunks)[::-1])
            return parts
        exchange, main = self.exchange, torch.cuda.current_stream()
        products, moves = _scatter_steps(self.rank, self.ranks, chunks, batches, rows, width * parts.itemsize)
        copying = exchange.after(main)
        what = ("scatter", parts.shape, parts.dtype, chunks, lanes, *_layouts(left), *_layouts(factors))
        tensors = [parts, *left, *factors]
        exchange.run(
            what, box, tensors, lambda: self._scatter_by_panels(exchange, box, left, factors, parts, products, lanes)
        )
        torch.cuda.set_stream(copying)
        try:
            what = ("pull", parts.shape, parts.dtype, chunks, lanes)
            exchange.run(what, box, [parts], lambda: _pull(exchange, box, parts, moves, lanes))
        finally:
            torch.cuda.set_stream(main)
        moved = self._moved.pop() if self._moved else new_event()  # other calls may come before end_scatter
        moved.record(copying)
        at = parts.data_ptr()
        freed = weakref.ref(parts.untyped_storage(), lambda _: self._drop(at, main))
        self._begun[at] = (None, moved, freed)
        return parts

    def _scatter_by_panels(
        self,
        exchange: Exchange,
        box: Outbox,
        left: Sequence[Tensor],
        factors: Sequence[Tensor],
        parts: Tensor,
        products: Sequence[_Product],
        lanes: int,
    ) -> None:
        """The products, whose rows peers may then read."""
        _, batches, rows, width = parts.shape
        main = torch.cuda.current_stream()
        box.open(main.cuda_stream)
        whole = box.view(parts, (batches, self.ranks * rows, width))
        computing = exchange.computing(main, lanes)
        for k, (span, part, peers, own) in enumerate(products):
            stream = computing.at(k)
            with _on(stream, main):
                if not peers:
                    _add(left, factors, parts[self.rank], span)
                    continue
                _add(left, factors, _rows(whole, span), span)
                if own:
                    _copy(whole[:, self.rank * rows : (self.rank + 1) * rows], [parts[self.rank]])
            box.publish(stream.cuda_stream, part, peers)
        computing.join(main)

    def _begin_stock(
        self, left: Sequence[Tensor], factors: Sequence[Tensor], parts: Tensor, order: Sequence[Panel]
    ) -> None:
        """The product, and the group's own reduce-scatter, which :meth:`end_scatter` waits for."""
        _, batches, rows, width = parts.shape
        whole = parts.view(batches, self.ranks * rows, width)
        for panel in order:
            _add(left, factors, _rows(whole, panel.rows(rows)), panel.rows(rows))
        if batches > 1:
            parts.copy_(whole.view(batches, self.ranks, rows, width).transpose(0, 1).clone())
        out = _empty(parts, batches, rows, width)
        work = reduce_scatter(out.view(-1), parts.view(-1), group=self.group, async_op=True)
        self._begun[parts.data_ptr()] = (work, out, None)

    def end_scatter(self, parts: Tensor) -> Tensor:
        """End :meth:`begin_scatter`: this rank's rows of the sum, [B, s, N]."""
        begun, found, _ = self._begun.pop(parts.data_ptr())
        if begun is not None:
            begun.wait()
            stock: Tensor = found
            return stock
        main = torch.cuda.current_stream()
        main.wait_event(found)
        self._moved.append(found)
        kernel = self.kernels.get(parts.dtype)
        if kernel is None:
            return parts.sum(0)
        out = _empty(parts, *parts.shape[1:])
        begin = parts.data_ptr()
        pointers = [*(begin + out.nbytes * rank for rank in range(self.ranks)), out.data_ptr()]
        launch(kernel, out.device.index or 0, _BLOCKS, pointers, out.numel(), main.cuda_stream)
        return out

    def _drop(self, at: int, main: Any) -> None:
        """Forget the parts at an address, which were freed without :meth:`end_scatter`.

        torch gives their memory to later work on ``main``, which waits for the copies into it.
        """
        _, moved, _ = self._begun.pop(at)
        main.wait_event(moved)
        self._moved.append(moved)


def _pull(
    exchange: Exchange, box: Outbox, parts: Tensor, moves: Sequence[tuple[int, int, tuple[Move, ...]]], lanes: int
) -> None:
    """The copies of a scatter: the parts of this rank's rows from its peers."""
    main, target = torch.cuda.current_stream(), parts.data_ptr()
    pulling = exchange.pulling(main, lanes)
    for k, (peer, part, pulled) in enumerate(moves):
        stream = pulling.at(k)
        box.arrival(stream.cuda_stream, peer, part)
        box.pull(stream.cuda_stream, target, pulled)
    pulling.join(main)
    box.release(main.cuda_stream)


@lru_cache(maxsize=1024)
def _gather_steps(
    rank: int, ranks: int, chunks: int, batches: int, rows: int, line: int
) -> tuple[tuple[int, int] | None, tuple[tuple[tuple[int, int], tuple[Move, ...]], ...]]:
    """The rows of the product that needs no copy, and the rows of the others, with the copies that each waits for.

    Args:
        line: bytes of a row.
    """
    order = panels(rank, ranks, chunks)
    begins = order[0].shards == range(rank, rank + 1)
    rest = []
    for panel in order[begins:]:
        low, high = panel.within(rows)
        # The peers after this rank come first, so that ranks read from different peers.
        others = sorted((shard for shard in panel.shards if shard != rank), key=lambda shard: shard ^ rank)
        moves = tuple(
            (((batch * ranks + peer) * rows + low) * line, peer, (batch * rows + low) * line, (high - low) * line)
            for peer in others
            for batch in range(batches)
        )
        rest.append((panel.rows(rows), moves))
    return order[0].rows(rows) if begins else None, tuple(rest)


@lru_cache(maxsize=1024)
def _scatter_steps(
    rank: int, ranks: int, chunks: int, batches: int, rows: int, line: int
) -> tuple[tuple[_Product, ...], tuple[tuple[int, int, tuple[Move, ...]], ...]]:
    """The products of a scatter in their order, and the copies from peers.

    Returns:
        of each product: its rows, the part of its shard, the peers that wait for it, and True if it has the own shard
        too. Of each peer's part: the peer, the part, and the copies.
    """
    order = panels(rank, ranks, chunks)[::-1]
    products, moves = [], []
    for panel in order:
        low, high = panel.within(rows)
        others = tuple(shard for shard in panel.shards if shard != rank)
        products.append((panel.rows(rows), panel.part, others, len(others) < len(panel.shards)))
        for owner in others:
            peer = sender(rank, ranks, owner)
            pulled = tuple(
                (
                    ((peer * batches + batch) * rows + low) * line, peer,
                    ((batch * ranks + rank) * rows + low) * line, (high - low) * line,
                )
                for batch in range(batches)
            )  # fmt: skip
            moves.append((peer, panel.part, pulled))
    return tuple(products), tuple(moves)


def _empty(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def _layouts(matrices: Sequence[Tensor]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Shapes and strides."""
    return [(matrix.shape, matrix.stride()) for matrix in matrices]


def _rows(matrices: Tensor, span: tuple[int, int]) -> Tensor:
    """Rows ``span`` of every batch."""
    return matrices[:, span[0] : span[1]]


def _on(stream: Any, main: Any) -> Any:
    """A context manager that makes ``stream`` current, where ``main`` is."""
    return contextlib.nullcontext() if stream is main else torch.cuda.stream(stream)


def _copy(source: Tensor, targets: Sequence[Tensor]) -> None:
    """Copy to each target, by one kernel if all are contiguous."""
    if source.shape[0] == 1:  # a slice of one batch is contiguous, but has other strides
        source, targets = source[0], [target[0] for target in targets]
    torch._foreach_copy_(list(targets), [source] * len(targets))


def _multiply(source: Tensor, factors: Sequence[Tensor], results: Sequence[Tensor], to: tuple[int, int]) -> None:
    """Products of every batch, written to rows ``to`` of the results."""
    for factor, result in zip(factors, results, strict=True):
        for batch in range(source.shape[0]):
            torch.mm(source[batch], factor, out=result[batch, to[0] : to[1]])


def _add(left: Sequence[Tensor], factors: Sequence[Tensor], target: Tensor, span: tuple[int, int]) -> None:
    """Sums of products of rows ``span``, written to the target."""
    for batch in range(target.shape[0]):
        out = target[batch]
        torch.mm(left[0][batch, span[0] : span[1]], factors[0], out=out)
        for other, factor in zip(left[1:], factors[1:], strict=True):
            out.addmm_(other[batch, span[0] : span[1]], factor)
