"""The panels of rows that a product is cut into, and their order, so that copies run during the products.

The rows of a product belong to the ranks in equal shards. In a gather, a rank has its own shard first, and a peer's
shard arrives with each copy. In a scatter, the peers wait for their shards, and the rank's own is computed last. Both
use the same order, in opposite directions. Rank ``r`` meets rank ``r XOR k`` in step ``k``, so that each step pairs the
ranks, and aligned blocks of shards are contiguous. Without a power of two, the peers follow in a ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

PARTS = 8
"""The most parts of a shard."""


@dataclass(frozen=True)
class Panel:
    """Rows of one product.

    Attributes:
        first, last: its shards, ``last`` excluded.
        part, parts: the part of the shard, if ``parts`` is above 1; it then has one shard.
    """

    first: int
    last: int
    part: int = 0
    parts: int = 1

    @property
    def shards(self) -> range:
        return range(self.first, self.last)

    def rows(self, shard_rows: int) -> tuple[int, int]:
        """First and last row, ``last`` excluded, if each shard has ``shard_rows`` rows."""
        low, high = self.within(shard_rows)
        return self.first * shard_rows + low, (self.last - 1) * shard_rows + high

    def within(self, shard_rows: int) -> tuple[int, int]:
        """The rows of the part within a shard."""
        return shard_rows * self.part // self.parts, shard_rows * (self.part + 1) // self.parts


@lru_cache(maxsize=256)
def panels(rank: int, ranks: int, chunks: int) -> tuple[Panel, ...]:
    """The panels in a gather's order: those that need no copy first. A scatter reverses them.

    Args:
        chunks: number of products. 1 waits for all rows. ``log2(ranks) + 1`` begins with the own shard, and doubles the
            panel with each step. A divisor of ``ranks`` takes equal blocks of shards, a multiple cuts the peers'
            shards. Another number is replaced by ``ranks``.
    """
    if chunks == 1:
        return (Panel(0, ranks),)
    square = ranks & (ranks - 1) == 0
    if square and chunks == ranks.bit_length():
        blocks = [Panel(rank, rank + 1)]
        for power in range(ranks.bit_length() - 1):
            size = 1 << power
            begin = (rank ^ size) // size * size
            blocks.append(Panel(begin, begin + size))
        return tuple(blocks)
    if square and ranks % chunks == 0:
        size = ranks // chunks
        begins = [(rank // size ^ k) * size for k in range(chunks)]
        return tuple(Panel(begin, begin + size) for begin in begins)
    parts = min(chunks // ranks, PARTS) if chunks % ranks == 0 else 1
    cut = [Panel(p, p + 1, k, parts) for p in peers(rank, ranks) for k in range(parts)]
    return (Panel(rank, rank + 1), *cut)


def peers(rank: int, ranks: int) -> Sequence[int]:
    """The other ranks in the order in which a gather receives their shards."""
    square = ranks & (ranks - 1) == 0
    return [rank ^ k if square else (rank + k) % ranks for k in range(1, ranks)]


def sender(rank: int, ranks: int, owner: int) -> int:
    """The rank that computes ``rank``'s shard in the step in which ``rank`` computes that of ``owner``."""
    square = ranks & (ranks - 1) == 0
    return owner if square else (2 * rank - owner) % ranks
