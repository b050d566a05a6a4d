"""``autotune.fsdp`` on gloo ranks: losses of stock FSDP2, a search in the steps, look-ups, and refusals."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.store import Store
from autotune.store.records import Schedule
from tests.support.runtime.fsdp_soak import soaked
from tests.support.runtime.ranks import Ranks

CHECKS = "tests.support.runtime.fsdp_checks"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(tmp_path_factory.mktemp("ranks")) as started:
        yield started


@pytest.fixture
def db(tmp_path: Path) -> str:
    path = tmp_path / "fsdp.db"
    Store.open(path).close()
    return str(path)


def stored(db: str) -> list[Schedule]:
    with Store.open(db) as store:
        return list(store.schedules())


@pytest.mark.parametrize(
    "way", ["", "accumulated", "evaluated", "eval mode", "mixed", "kept", "checkpointed", "compiled"]
)
def test_engines_that_win_are_stored_and_train_as_stock_does(ranks: Ranks, db: str, way: str) -> None:
    for answer in ranks.run(CHECKS, "searched", db, 0.1, way):
        assert answer["ours"] == pytest.approx(answer["stock"], rel=2e-2 if way == "mixed" else 1e-5)
        assert answer["looked_up"] == pytest.approx(answer["stock"][:4], rel=2e-2 if way == "mixed" else 1e-5)
        assert {op for op, _ in answer["chosen"]} == {"all_gather", "reduce_scatter"}
        assert {engine for _, engine in answer["chosen"]} == {"copy"}
        assert answer["repeated"] == answer["chosen"]
        stock_ms, step_ms = answer["found"]
        assert step_ms < stock_ms
        assert "copy" in answer["text"]
        assert answer["closed"] == "Sharded(closed)"
        assert answer["gathers"] == "Gather"
        assert answer["unused"] == 0
    schedules = stored(db)
    assert len(schedules) == len(answer["chosen"])
    assert {s.winner for s in schedules} == {"autotune"}
    assert all(s.latency_us < s.baselines["sequential"] for s in schedules)


def test_stock_stays_where_nothing_is_faster(ranks: Ranks, db: str) -> None:
    for answer in ranks.run(CHECKS, "searched", db, -0.1):
        assert {engine for _, engine in answer["chosen"]} == {None}
        assert answer["gathers"] == "DefaultAllGather"
        assert answer["repeated"] == answer["chosen"]
        assert answer["ours"] == pytest.approx(answer["stock"], rel=1e-5)
    assert {s.winner for s in stored(db)} == {"sequential"}
    assert {s.config for s in stored(db)} == {None}


@pytest.mark.parametrize(
    ("where", "words"),
    [("everywhere", "no peer access here"), ("one rank", "12 MiB of buffers do not fit 3 MiB of free memory")],
)
def test_a_strategy_that_cannot_run_leaves_fsdp2_as_it_is(ranks: Ranks, db: str, where: str, words: str) -> None:
    answers = ranks.run(CHECKS, "searched", db, 0.1)
    said = []
    for answer, stopped in zip(answers, ranks.run(CHECKS, "stopped", db, where), strict=True):
        said.append(stopped["said"])
        assert {engine for _, engine in stopped["chosen"]} == {None}
        assert stopped["losses"] == pytest.approx(answer["stock"][:4], rel=1e-5)
    assert said == [f"autotune: FSDP2 is not changed: copy cannot run all_gather: {words}\n", ""]


def test_mistakes(ranks: Ranks, db: str) -> None:
    for said in ranks.run(CHECKS, "refused", db):
        assert "call fully_shard first" in said[0]
        assert "at least 24 steps, not 5" in said[1]


def test_collectives_that_the_program_set_stay(ranks: Ranks, db: str) -> None:
    assert ranks.run(CHECKS, "left_alone", db) == [[True, True]] * 2


def test_a_second_handle(ranks: Ranks, db: str) -> None:
    for said, kept, first, second in ranks.run(CHECKS, "repeated", db):
        assert "another autotune.fsdp has set the collectives of this model's modules: call close()" in said
        assert kept == "Gather"
        assert (first, second) == ("Sharded(closed)", "Sharded(closed)")


def test_prefetching_that_the_program_sets_later_stays(ranks: Ranks, db: str) -> None:
    assert ranks.run(CHECKS, "prefetched", db) == [[[1, 1, 1, 0], [0, 0, 2, 0]]] * 2


def test_a_rank_that_lacks_a_kernel_or_memory_in_a_search(ranks: Ranks, db: str) -> None:
    """The candidate runs on no rank; the search goes on, and all ranks choose the same."""
    answers = ranks.run(CHECKS, "hindered", db)
    assert answers[0]["chosen"] == answers[1]["chosen"]
    for answer in answers:
        assert answer["ours"] == pytest.approx(answer["stock"], rel=1e-5)
        assert {engine for op, engine in answer["chosen"] if op == "all_gather"} == {"copy"}
        assert {engine for op, engine in answer["chosen"] if op == "reduce_scatter"} == {None}


def test_parameters_on_no_device_yet(ranks: Ranks, db: str) -> None:
    assert ranks.run(CHECKS, "unallocated", db) == [["cpu", True]] * 2


def test_results_are_never_shared(ranks: Ranks) -> None:
    assert ranks.run(CHECKS, "shared") == [True, True]


def test_checkpoints_load_with_and_without_engines(ranks: Ranks, db: str) -> None:
    for answer in ranks.run(CHECKS, "reloaded", db):
        went_on, stock, again = answer["losses"]
        assert stock == pytest.approx(went_on, rel=1e-5)
        assert again == pytest.approx(went_on, rel=1e-5)
        assert answer["engines"] == ["copy"]


@pytest.mark.parametrize(
    ("when", "words"), [("search", "closed|reset|ended"), ("training", "the process of rank 1 has ended")]
)
def test_a_rank_that_dies_ends_the_others(tmp_path: Path, db: str, when: str, words: str) -> None:
    """As with stock FSDP2 on gloo: an error, within seconds."""
    with Ranks(tmp_path) as two:
        (answer,) = two.run(CHECKS, "bereft", db, when, lost=1)
    assert re.search(words, answer["error"])
    assert answer["seconds"] < 30
    assert when == "search" or answer["engines"] == ["copy"]


def test_a_handle_that_outlives_its_group(tmp_path: Path, db: str) -> None:
    with Ranks(tmp_path) as two:
        answers = two.run(CHECKS, "outlived", db, str(tmp_path / "again"))
    assert answers == [[[["copy"]] * 3, "Sharded(closed)", "Sharded(closed)", True]] * 2


def test_a_rank_that_is_stopped_and_goes_on(tmp_path: Path, db: str) -> None:
    with Ranks(tmp_path) as two:
        assert soaked(two, db, steps=150, stops=2, stopped_s=1.5) < 1e-5


@pytest.mark.parametrize(("steps", "first"), [(90, 1), (24, 27)], ids=["in the search", "after it"])
def test_settings_that_change_between_steps(ranks: Ranks, db: str, tmp_path: Path, steps: int, first: int) -> None:
    for losses, engines in ranks.run(CHECKS, "changed", db, str(tmp_path), steps, first):
        assert [change for change, ours, stock in losses if ours != pytest.approx(stock, rel=1e-4)] == []
        assert len(losses) >= 20
        assert engines == ["copy"]


@pytest.mark.parametrize("way", ["hybrid", "halved"])
def test_groups_of_some_ranks(tmp_path: Path, db: str, way: str) -> None:
    """Hybrid sharding; and gathers of two sizes of groups, in the forward pass and in the backward pass."""
    with Ranks(tmp_path, 4) as four:
        answers: list[Any] = four.run(CHECKS, "searched", db, 0.1, way, 24)
    for answer in answers:
        assert answer["ours"] == pytest.approx(answer["stock"], rel=1e-5)
        assert {engine for _, engine in answer["chosen"]} == {"copy"}
