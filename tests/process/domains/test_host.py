"""Collectives on CPUs, in processes: right whatever the ranks' pace, and honest about what cannot be."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import Any

import pytest

from autotune.domains.c3 import task
from autotune.domains.c3.collectives import host
from autotune.domains.c3.collectives.host import pieces
from autotune.domains.c3.measuring.ranks import Ranks
from autotune.domains.c3.scenario import COLLECTIVES
from autotune.errors import Unsupported

RANKS = 3  # no power of two


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(None, "cpu", task.policy("cpu"), ranks=RANKS) as ranks:
        yield ranks


def call(ranks: Ranks, name: str, **arguments: Any) -> list[Any]:
    return ranks.call(f"tests.support.c3.host_jobs:{name}", arguments, 60.0)


@pytest.mark.parametrize("engine", ["gloo", "copy"])
@pytest.mark.parametrize("op", COLLECTIVES)
def test_every_element_is_right_back_to_back_and_with_skewed_ranks(ranks: Ranks, op: str, engine: str) -> None:
    cases = [
        {"op": op, "numel": numel, "dtype": dtype, "engine": engine, "copies": copies}
        for numel, dtype, copies in [
            (RANKS, "f32", 1),  # one element a rank
            (RANKS * 5, "bf16", 8),  # fewer elements than pieces
            (RANKS * 40_001, "f16", 4),  # shares that do not divide
            (RANKS * 33_000, "f32", 3),
        ]
    ]
    if op == "all_reduce":
        cases += [dict(cases[2], numel=100_001), dict(cases[3], numel=1), dict(cases[3], numel=4)]
    assert call(ranks, "calls", cases=cases, repeats=6) == [[]] * RANKS


@pytest.mark.parametrize("engine", ["gloo", "copy"])
def test_two_collectives_in_flight(ranks: Ranks, engine: str) -> None:
    assert call(ranks, "in_flight", engine=engine) == [[]] * RANKS


def test_a_rank_that_does_not_come_is_named(ranks: Ranks) -> None:
    said = call(ranks, "absent")
    assert said[1:] == ["all_gather: rank 0 did not come within 0.1 s"] * (RANKS - 1)


def test_shared_memory_has_no_name(ranks: Ranks) -> None:
    assert call(ranks, "traces") == [[]] * RANKS


class Alone:
    """A group whose other rank gives a prepared answer."""

    def __init__(self, **other: Any) -> None:
        self.other = other
        self.told: list[Any] = []

    def gather(self, value: Any) -> list[Any]:
        self.told.append(value)
        return [value, {**value, **self.other} if isinstance(value, dict) else ""]

    def any_reason(self, own: str) -> str:
        return next((why for why in self.gather(own) if why), "")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"host": "elsewhere 1"}, "different hosts"),
        ({"name": "/proc/1/fd/no"}, "cannot be mapped"),
        ({"problem": "no 5 bytes of shared memory"}, "no 5 bytes"),
    ],
)
def test_ranks_that_cannot_share_memory_report_the_reason(other: dict[str, str], words: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Unsupported, match=words):
        host.share(Alone(**other), 4096)  # type: ignore[arg-type]
    assert len(os.listdir("/proc/self/fd")) == before


def test_too_little_memory_is_told_to_the_peers_and_not_a_signal_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    group = Alone()
    with pytest.raises(Unsupported, match="no 4096 bytes of shared memory: No space left"):
        host.share(group, 4096)  # type: ignore[arg-type]
    assert "No space" in group.told[0]["problem"]


def test_pieces_cover_all_and_differ_by_one() -> None:
    for numel in (0, 1, 5, 64, 1001):
        for chunks in (1, 3, 8):
            cut = pieces(numel, chunks)
            assert [i for begin, end in cut for i in range(begin, end)] == list(range(numel))
            sizes = [end - begin for begin, end in cut]
            assert len(sizes) == chunks
            assert max(sizes) - min(sizes) <= 1
