"""Tensor-parallel products on gloo ranks: results of one rank, a search in the steps, look-ups, and mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.store import Store
from tests.support.runtime.ranks import Ranks

CHECKS = "tests.support.runtime.tensor_parallel_checks"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(tmp_path_factory.mktemp("ranks")) as started:
        yield started


@pytest.fixture
def db(tmp_path: Path) -> str:
    path = tmp_path / "tensor_parallel.db"
    Store.open(path).close()
    return str(path)


@pytest.mark.parametrize("batches", [0, 2])
@pytest.mark.parametrize("chunks", [0, 1, 2, 4, 16])
def test_results_and_gradients_are_those_of_one_rank(ranks: Ranks, batches: int, chunks: int) -> None:
    assert ranks.run(CHECKS, "equal", batches, chunks) == [[True] * 5] * 2


def test_other_numbers_of_ranks(tmp_path: Path) -> None:
    with Ranks(tmp_path, 3) as three:
        for chunks in (1, 2, 3, 6):
            assert three.run(CHECKS, "equal", 0, chunks) == [[True] * 5] * 3


def test_compiled(ranks: Ranks) -> None:
    assert ranks.run(CHECKS, "equal", 2, 2, True) == [[True] * 5] * 2


def test_inputs_without_a_gradient_are_not_exchanged(ranks: Ranks) -> None:
    assert ranks.run(CHECKS, "frozen") == [[True] * 3] * 2


def test_an_exception_between_the_two_calls_of_a_scatter(ranks: Ranks) -> None:
    assert ranks.run(CHECKS, "abandoned") == [[True] * 3] * 2


def test_engines_that_win_are_stored_and_train_as_the_sequence_does(ranks: Ranks, db: str) -> None:
    for answer in ranks.run(CHECKS, "searched", db, 0.1):
        assert answer["ours"] == pytest.approx(answer["stock"], rel=1e-5)
        assert answer["looked_up"] == pytest.approx(answer["stock"][:4], rel=1e-5)
        assert len(answer["chosen"]) == 3  # the scatter of the forward pass and that of the backward pass differ
        assert {engine for _, _, engine in answer["chosen"]} == {"copy"}
        assert answer["repeated"] == answer["chosen"]
        stock_ms, step_ms = answer["found"]
        assert step_ms < stock_ms
        assert "copy" in answer["text"]
        assert not answer["searches"]
        assert answer["closed"] == "Joined(closed)"
    with Store.open(db) as store:
        assert {schedule.winner for schedule in store.schedules()} == {"autotune"}


def test_the_sequence_stays_where_nothing_is_faster(ranks: Ranks, db: str) -> None:
    for answer in ranks.run(CHECKS, "searched", db, -0.1):
        assert {engine for _, _, engine in answer["chosen"]} == {None}
        assert answer["repeated"] == answer["chosen"]
        assert not answer["searches"]
    with Store.open(db) as store:
        assert {schedule.winner for schedule in store.schedules()} == {"sequential"}


def test_a_step_that_the_program_captures(ranks: Ranks, db: str) -> None:
    for answer in ranks.run(CHECKS, "captured", db):
        assert {engine for _, _, engine in answer["chosen"]} == {"copy"}
        assert answer["faster"]
        assert answer["tried"] == 2


def test_a_step_that_raises_in_a_search(ranks: Ranks, db: str) -> None:
    assert ranks.run(CHECKS, "interrupted", db) == [["the program's own", None]] * 2


@pytest.mark.parametrize("batches", [1, 2])
def test_dtensor_programs(ranks: Ranks, db: str, batches: int) -> None:
    """Graphs join their products in a search, and later where a strategy was stored; nothing else changes them."""
    for answer in ranks.run(CHECKS, "dtensor", db, batches):
        assert answer["alone"] == pytest.approx(answer["stock"][:2], rel=1e-4)
        assert answer["before"] == 0
        assert answer["ours"] == pytest.approx(answer["stock"], rel=1e-4)
        assert answer["found"]
        # Two layers: a gather and a scatter each, forward and backward. Backward scatters of gate and up are one.
        assert answer["calls"] == [["all_gather", 2], ["all_gather", 2], ["reduce_scatter", 2], ["reduce_scatter", 2]]
        assert {engine for _, _, engine in answer["chosen"]} == {"copy"}
        assert answer["looked_up"] == pytest.approx(answer["stock"][:3], rel=1e-4)
        assert answer["repeated"] == answer["chosen"]


def test_a_dtensor_program_that_captures_its_step(ranks: Ranks, db: str) -> None:
    """Its graphs join products though no search runs in its steps."""
    for answer in ranks.run(CHECKS, "dtensor_captured", db):
        assert "no product that is joined with a collective" in answer["said"]
        assert {engine for _, _, engine in answer["chosen"]} == {"copy"}
        assert answer["ours"] == pytest.approx(answer["stock"], rel=1e-4)


def test_ranks_with_other_products_search_nothing(ranks: Ranks, db: str) -> None:
    answers = ranks.run(CHECKS, "uneven", db)
    assert [answer["found"] for answer in answers] == [False, False]
    assert [answer["steps"] for answer in answers] == [3, 3]
    assert "ranks run other products than rank 0" in answers[0]["said"]
    assert answers[1]["said"] == ""


def test_autocast(ranks: Ranks) -> None:
    assert ranks.run(CHECKS, "autocast") == [[True] * 4] * 2


def test_a_handle_that_outlives_its_group(tmp_path: Path, db: str) -> None:
    with Ranks(tmp_path) as two:
        assert two.run(CHECKS, "outlived", db) == ["cpu Joined(closed)"] * 2


def test_gpus_without_access_keep_the_sequence(ranks: Ranks) -> None:
    answers = ranks.run(CHECKS, "no_access")
    for answer in answers:
        assert answer["exchanges"] == [True, True]
        assert answer["product"] == [3.0, 3.0, 6.0, 6.0]
        assert answer["rows"] == 4
    text = "autotune: products and collectives run one after the other: no peer access here\n"
    assert [answer["said"] for answer in answers] == [text, ""]


def test_mistakes(ranks: Ranks) -> None:
    for said in ranks.run(CHECKS, "refused"):
        assert len(said) == 7
        assert "the weight is [6, 10] float32 for an input of [8, 6] float32" in said[0]
        assert "not float64" in said[1]
        assert "7 rows do not divide among 2 ranks" in said[2]
        assert "2 or 3 dimensions, not 1" in said[3]
        assert "32 steps at least, not 5" in said[4]
        assert "no parameters" in said[5]
        assert "8 plans at least, not 3" in said[6]
