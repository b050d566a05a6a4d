"""Ranks that compile equal graphs: one searches, the others wait for it, but not for ever."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx
from torch.distributed import HashStore

from autotune.in_program import ranks
from autotune.in_program.ranks import RankTurn
from autotune.runtime.deployment import Deployment, use
from autotune.runtime.inductor.code import name_of


@pytest.fixture
def store() -> HashStore:
    made = HashStore()
    made.set_timeout(timedelta(seconds=60))
    return made


def test_one_of_them_searches(store: HashStore) -> None:
    turns = [RankTurn(store, "graph") for _ in range(4)]
    assert [turn.searches for turn in turns] == [True, False, False, False]
    assert not any(turn.alone for turn in turns)
    assert RankTurn(store, "another graph").searches


def test_a_program_of_one_rank_does_not_wait() -> None:
    assert RankTurn(None, "graph").searches
    assert RankTurn(None, "graph").alone


def test_the_others_wait_for_its_end(store: HashStore) -> None:
    first, other = RankTurn(store, "graph"), RankTurn(store, "graph")
    ended: list[bool] = []
    waiting = threading.Thread(target=lambda: ended.append(other.wait()))
    waiting.start()
    first.begin(1000.0)
    waiting.join(0.3)
    assert ended == []
    first.end()
    waiting.join()
    assert ended == [True]


def test_no_rank_waits_past_the_budget(store: HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE_S", 0.0)
    first, other = RankTurn(store, "graph"), RankTurn(store, "graph")
    first.begin(0.1)
    assert not other.wait()


def test_a_rank_that_fails_releases_the_others(store: HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_store", lambda: store)
    with contextlib.suppress(RuntimeError), ranks.rank_turn("graph") as first:
        assert first.searches
        raise RuntimeError
    with ranks.rank_turn("graph") as other:
        assert not other.searches
        assert other.wait()


def graph(device: str, width: int, fn: str = "relu", x_like: torch.Tensor | None = None) -> fx.GraphModule:
    made = fx.Graph()
    x = made.placeholder("x")
    x.meta["example_value"] = torch.empty(8, width, device="meta") if x_like is None else x_like
    made.output(made.call_method(fn, (made.call_method("to", (x, device)),)))
    return fx.GraphModule(torch.nn.Module(), made)


def test_equal_graphs_of_several_devices_have_one_name() -> None:
    first = name_of(graph("cuda:0", 4), "cpu")
    assert first == name_of(graph("cuda:3", 4), "cpu")
    assert first != name_of(graph("cuda:0", 5), "cpu"), "other sizes"
    assert first != name_of(graph("cuda:0", 4, "sigmoid"), "cpu"), "other operators"
    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        with mode:
            assert first != name_of(graph("cuda:0", 4), "cpu"), "a validation has the training's graph"


def test_other_layouts_and_settings_have_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their regions are others, which no search has seen."""
    names = [name_of(graph("cuda:0", 4), "cpu")]
    strided = torch.empty_strided((8, 4), (1, 8), device="meta")
    names.append(name_of(graph("cuda:0", 4, x_like=strided), "cpu"))
    shard = torch.empty(8, 4, device="meta")
    for placements in ("Shard(0)", "Replicate()"):
        shard.placements = placements  # type: ignore[attr-defined]
        names.append(name_of(graph("cuda:0", 4, x_like=shard), "cpu"))
    for name, value in (
        ("AUTOTUNE_ATTENTION", "keep"),
        ("AUTOTUNE_PRODUCTS", "search"),
        ("AUTOTUNE_PRECISION", "strict"),
    ):
        monkeypatch.setenv(name, value)
        use(Deployment())
        names.append(name_of(graph("cuda:0", 4), "cpu"))
    assert len(set(names)) == len(names)
    monkeypatch.setenv("AUTOTUNE_PRECISION", "some")  # an invalid variable ends no compilation
    name_of(graph("cuda:0", 4), "cpu")
    use(Deployment())
    name_of(graph("cuda:0", 4, x_like=torch.ones(8, 4).to_sparse()), "cpu")


def calling(inner: fx.GraphModule, fn: Callable[..., object]) -> Any:
    """A graph that calls another one, as activation checkpointing does, with a function among the arguments.

    It has no Python code, in which the function could not be written.
    """
    made = fx.Graph()
    x = made.placeholder("x")
    made.output(made.call_function(torch.ops.higher_order.invoke_subgraph, (made.get_attr("body"), fn, x)))
    return SimpleNamespace(graph=made, body=inner)


def test_a_graph_is_named_by_the_graphs_that_it_calls_and_by_no_address() -> None:
    def one() -> None: ...

    first = one

    def one() -> None: ...  # type: ignore[no-redef]

    assert repr(first) != repr(one)
    name = name_of(calling(graph("cuda:0", 4), first), "cpu")
    assert name == name_of(calling(graph("cuda:1", 4), one), "cpu")
    assert name != name_of(calling(graph("cuda:0", 4, "sigmoid"), first), "cpu"), "other operators in the called graph"
