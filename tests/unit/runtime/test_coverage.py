"""The table of operators that Inductor compiles, with reasons."""

from __future__ import annotations

import torch

from autotune.compiler.capture.recording import capture
from autotune.compiler.lower.facts import NO_RULE, GraphFacts
from autotune.compiler.regions.find import regions_from
from autotune.runtime.coverage import Coverage, Row, covered
from autotune.runtime.deployment import Deployment


def test_equal_rows_add_up_and_the_most_bytes_come_first() -> None:
    rows = [Row("gelu", False, "not tuned", bytes=10), Row("softmax", True, "", bytes=500)]
    rows += [Row("gelu", False, "not tuned", bytes=30), Row("gelu", False, "left", bytes=90)]
    found = Coverage(rows).rows
    assert [(row.what, row.stored, row.why, row.count, row.bytes) for row in found] == [
        ("softmax", True, "", 1, 500), ("gelu", False, "left", 1, 90), ("gelu", False, "not tuned", 2, 40),
    ]  # fmt: skip


def test_rows_of_unknown_size_are_shown_and_small_ones_are_summed() -> None:
    rows = [Row("softmax", True, "", bytes=7000), Row("gelu", False, "it was not searched", bytes=2990)]
    rows += [Row("cumsum", False, "no rule", bytes=6), Row("sort", False, "no rule", bytes=4, count=2)]
    rows += [Row("norm", False, "kernels for one size only", bytes=None)]
    lines = list(Coverage(rows).lines())
    assert [line.split("  ")[0] for line in lines[:3]] == ["region or operator", "norm", "gelu"]
    assert "unknown" in lines[1]
    assert lines[2].endswith("2.92 KiB  it was not searched")
    assert lines[3:] == [
        "3 more calls move 10 bytes together, less than 1% of all bytes each",
        "stored kernels run 70% of the 9.77 KiB that memory-intensive operators move",
    ]


def test_nothing_was_looked_up() -> None:
    assert str(Coverage()) == ""


def test_a_table_fits_into_an_issue() -> None:
    row = Row("a_region_with_a_very_long_name_of_all_its_operators", False, "a reason of many words " * 4, bytes=1)
    assert all(len(line) <= 80 for line in Coverage([row]).lines())


def test_regions_and_operators_outside_have_their_bytes_and_reasons() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(torch.softmax(x, 1), 1) @ w

    graph = capture(f, (torch.randn(8, 16), torch.randn(16, 4)), grad=False)[0]
    facts = GraphFacts(graph.module.graph)
    (region,) = regions_from(facts)
    rows = list(covered(facts, {region: (True, "")}))
    assert [(row.what.split(" ")[0], row.stored, row.bytes) for row in rows] == [
        ("softmax", True, 2 * 8 * 16 * 4), ("cumsum", False, 2 * 8 * 16 * 4),
    ]  # fmt: skip
    assert rows[1].why == NO_RULE


def test_counters_and_coverage_are_reset_together() -> None:
    own = Deployment()
    own.cover([Row("gelu", False, "why", bytes=1)])
    own.cover([Row("gelu", False, "why", bytes=1)])
    assert [row.count for row in own.coverage().rows] == [2]
    own.reset_counters()
    assert not own.coverage().rows


def test_code_that_is_replaced_is_counted_apart() -> None:
    own = Deployment()
    own.count("misses")
    with own.counting_apart() as apart:
        own.count("misses", 5)
        own.cover([Row("gelu", False, "why", bytes=1)])
    own.count("hits")
    assert (own.counters().hits, own.counters().misses) == (1, 1)
    assert not own.coverage().rows
    own.count_again(apart)
    assert (own.counters().hits, own.counters().misses) == (1, 6)
    assert [row.what for row in own.coverage().rows] == ["gelu"]


def test_counts_of_code_that_lost_are_replaced_until_a_reset() -> None:
    own = Deployment()
    with own.counting_apart() as apart:
        own.count("hits", 5)
        own.cover([Row("gelu", True, "", bytes=1)])
    own.count_again(apart)
    apart.counts, apart.rows = {**apart.counts, "hits": 0, "left": 5}, [Row("gelu", False, "why", bytes=1)]
    assert (own.counters().hits, own.counters().left) == (0, 5)
    assert [row.stored for row in own.coverage().rows] == [False]
    own.reset_counters()
    apart.counts = {**apart.counts, "hits": 7}
    assert own.counters().hits == 0
    assert not own.coverage().rows
