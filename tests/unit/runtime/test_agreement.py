"""Ranks agree on one answer through a key-value store, in any order of arrival."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from autotune.runtime.inductor import verdict
from autotune.runtime.inductor.verdict import _settle, has_collectives, ranks_agree


def settle(states: list[bytes], late: float = 0.0) -> list[bool]:
    store = dist.HashStore()

    def rank(k: int) -> bool:
        time.sleep(late * k)
        return _settle(store, k, len(states), states[k])

    with ThreadPoolExecutor(len(states)) as pool:
        return list(pool.map(rank, range(len(states))))


@pytest.mark.parametrize("late", [0.0, 0.2])
def test_all_get_the_same_answer(late: float) -> None:
    assert settle([b"one"] * 4, late) == [True] * 4
    assert settle([b"one", b"one", b"two", b"one"], late) == [False] * 4


def test_a_late_rank_is_bound_by_the_others_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(verdict, "WAIT_S", 0.1)
    assert [_settle(store, rank, 2, b"one") for rank in (0, 1)] == [False, False], "though their databases are equal"


def test_one_answer_though_one_gives_up_as_the_other_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict, "WAIT_S", 0.05)
    for late in (0.03, 0.045, 0.05, 0.055, 0.07):
        assert len(set(settle([b"one", b"one"], late))) == 1


def test_which_graphs_ask() -> None:
    def alone(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    class DTensor:
        pass

    traced = torch.fx.symbolic_trace(alone).graph
    assert not has_collectives(traced)
    assert has_collectives(traced, [DTensor()])
    reduce = torch.ops._c10d_functional.all_reduce
    for operator in (reduce.default, reduce):  # Inductor's graphs have the first, Dynamo's the second
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        graph.output(graph.call_function(operator, (x, "sum", "0")))
        assert has_collectives(graph)
        assert ranks_agree(graph), "a program of one process asks nobody"
