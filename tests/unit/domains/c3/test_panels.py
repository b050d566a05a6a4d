"""The panels of a product between ranks: each row once, own rows first, and steps that match between the ranks."""

from __future__ import annotations

import pytest

from autotune.domains.c3.tensor_parallel.panels import PARTS, panels, peers, sender

RANKS = [2, 3, 4, 6, 8]
CHUNKS = [1, 2, 3, 4, 5, 8, 16, 128]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_each_row_is_in_one_panel(ranks: int, chunks: int, rows: int) -> None:
    for rank in range(ranks):
        found = [panel.rows(rows) for panel in panels(rank, ranks, chunks)]
        assert sorted(row for low, high in found for row in range(low, high)) == list(range(ranks * rows))
        assert all(panel.part < panel.parts <= PARTS for panel in panels(rank, ranks, chunks))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("chunks", CHUNKS)
def test_own_rows_come_first(ranks: int, chunks: int) -> None:
    for rank in range(ranks):
        assert rank in panels(rank, ranks, chunks)[0].shards


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("chunks", CHUNKS)
def test_parts_are_published_as_they_are_awaited(ranks: int, chunks: int) -> None:
    """A rank signals a part of a shard once, and the owner waits for exactly these signals."""
    for rank in range(ranks):
        awaited = sorted(
            (sender(rank, ranks, owner), panel.part)
            for panel in panels(rank, ranks, chunks)
            for owner in panel.shards
            if owner != rank
        )
        published = sorted(
            (peer, panel.part)
            for peer in peers(rank, ranks)
            for panel in panels(peer, ranks, chunks)
            if rank in panel.shards
        )
        assert awaited == published


@pytest.mark.parametrize("ranks", RANKS)
def test_each_step_pairs_the_ranks(ranks: int) -> None:
    for step in range(ranks - 1):
        assert sorted(peers(rank, ranks)[step] for rank in range(ranks)) == list(range(ranks))
        for rank in range(ranks):
            owner = peers(rank, ranks)[step]
            assert peers(sender(rank, ranks, owner), ranks)[step] == rank
