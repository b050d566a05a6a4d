"""Indices out of range raise in deployed regions, as they do in eager mode and in Inductor's own kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch.nn import functional as F

import autotune
from autotune.compiler.capture.recording import capture
from autotune.compiler.lower.facts import GraphFacts
from autotune.compiler.regions.find import regions_from
from autotune.runtime.inductor.index_check import MOST, indices_of, together
from tests.support.deployment import Tune


def labels(*changes: tuple[int, int], count: int = 64, below: int = 32) -> torch.Tensor:
    out = torch.arange(count) % below
    for at, value in changes:
        out[at] = value
    return out


X = torch.randn(64, 32)
PROGRAMS: dict[str, tuple[Callable[..., Any], torch.Tensor]] = {
    "cross_entropy": (lambda i: F.cross_entropy(X * 2, i), labels()),
    "nll_loss": (lambda i: F.nll_loss(torch.log_softmax(X, 1), i), labels()),
    "embedding": (lambda i: F.embedding(i, X.T) * 2 + 1, labels()),
    "gather": (lambda i: X.exp().gather(1, i[:, None]) + 1, labels()),
    "index": (lambda i: X.T[i] * 2 + 1, labels()),
    "index_select": (lambda i: X.index_select(1, i) * 2 + 1, labels()),
    "take": (lambda i: torch.take(X, i) * 2 + 1, labels(below=64 * 32)),
    "scatter": (lambda i: (X * 2).scatter(1, i[:, None], 1.0).cumsum(0), labels()),
    "two": (lambda i: X[i, i % 32] * 2, labels()),
    "int32": (lambda i: F.embedding(i.int(), X.T) * 2 + 1, labels()),
}


def compiled(fn: Callable[..., Any], **options: Any) -> Any:
    return torch.compile(fn, backend="autotune", options=options or None)


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_index_out_of_range_raises(tune: Tune, name: str) -> None:
    fn, index = PROGRAMS[name]
    assert tune(fn, (index,))
    f = compiled(fn)
    torch.testing.assert_close(f(index), fn(index), atol=1e-5, rtol=1e-5)
    assert autotune.counters().hits
    for bad in (100_000, -100_000):
        wrong = index.clone()
        wrong[17] = bad
        with pytest.raises(
            IndexError, match=rf"kernel \w+.*: the index \w+ of \w+ is out of range: {bad} is not in \[-?\d+, \d+\)"
        ):
            f(wrong)
    torch.testing.assert_close(f(index), fn(index), atol=1e-5, rtol=1e-5)
    assert autotune.counters().fallbacks == 0


def test_the_first_index_behind_the_range_raises(tune: Tune) -> None:
    """An index one past a table's end, in its last element and in its first."""
    table = torch.randn(32, 8)
    tune(fn := lambda i: F.embedding(i, table) + 1, (labels(),))
    f = compiled(fn)
    for at in (0, 63):
        with pytest.raises(IndexError, match=r"32 is not in \[0, 32\)"):
            f(labels((at, 32)))
        with pytest.raises(IndexError, match=r"-1 is not in \[0, 32\)"):
            f(labels((at, -1)))


def test_negative_indices_count_from_the_end(tune: Tune) -> None:
    tune(fn := lambda i: X.T[i] * 2 + 1, (labels(),))
    f, last = compiled(fn), labels((3, -32), (4, -1))
    torch.testing.assert_close(f(last), fn(last))
    with pytest.raises(IndexError, match=r"-33 is not in \[-32, 32\)"):
        f(labels((3, -33)))


def test_ignored_labels_are_in_range(tune: Tune) -> None:
    tune(fn := lambda i: F.cross_entropy(X * 2, i), (labels(),))
    f, ignored = compiled(fn), labels((3, -100), (60, -100))
    torch.testing.assert_close(f(ignored), fn(ignored))
    with pytest.raises(IndexError, match="32 is not in"):
        f(labels((3, 32)))


def test_the_option_is_obeyed_and_each_index_is_checked_once(tune: Tune) -> None:
    def fn(i: torch.Tensor) -> torch.Tensor:
        hidden = (F.embedding(i, X.T) * 3).softmax(1) @ X
        return F.embedding(i, X[:32]) * hidden

    assert len(tune(fn, (labels(),))) > 1
    _, (code,) = run_and_get_code(compiled(fn), labels())
    assert code.count("autotune_check_index(") == 1
    torch._dynamo.reset()
    f = compiled(fn, assert_indirect_indexing=False)
    _, (code,) = run_and_get_code(f, labels())
    assert "autotune_check_index" not in code
    f(labels((3, 1000)))  # reads inside of the table all the same


class Tables(nn.Module):
    """Embeddings of a recommender: a table for each column of the categories, some found by a computed index."""

    def __init__(self, tables: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(32 + k, 8) for k in range(tables))

    def forward(self, categories: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        found = [table(categories[:, k]) for k, table in enumerate(self.tables)]
        found += [table(others[:, 0] + k) for k, table in enumerate(self.tables[:2])]
        return torch.stack(found, 1).softmax(1)


@torch.no_grad()
def test_indices_of_a_region_are_checked_together(tune: Tune) -> None:
    """A step has one check of the columns and one of the computed indices, however many tables there are."""
    tables = 6
    model, categories, others = Tables(tables), torch.arange(16 * tables).view(16, -1) % 32, torch.zeros(16, 1).long()
    assert tune(model, (categories, others))
    found, (code,) = run_and_get_code(compiled(model), categories, others)
    torch.testing.assert_close(found, model(categories, others))
    assert code.count("autotune_check_index(") == tables + 2
    assert sum("autotune_check_index(" in line for line in code.splitlines()) == 2
    f = compiled(model)
    for k in range(tables):
        wrong = categories.clone()
        wrong[15, k] = 32 + k
        with pytest.raises(IndexError, match=rf"{32 + k} is not in \[0, {32 + k}\)"):
            f(wrong, others)
    for bad in (32, -1):
        with pytest.raises(IndexError, match=r"is out of range: (32|-1) is not in \[0, 32\)"):
            f(categories, others + bad)
    torch.testing.assert_close(f(categories, others), found)


def test_inputs_of_one_length_are_checked_once_a_graph(db: str) -> None:
    """A longer one has its own check, and no check has too many arguments."""
    tables = MOST + 2

    def fn(columns: list[torch.Tensor], long: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = [F.embedding(i.view(4, 4), X) * (k + 2) for k, i in enumerate(columns)]
        return *found, F.embedding(long, X).sum(0)

    inputs = [labels(count=16) for _ in range(tables)], labels(count=48)
    (graph,) = capture(fn, inputs, grad=False)
    facts = GraphFacts(graph.module.graph)
    reads = [(indices_of(facts, one, {}), str(k), one.nodes[-1]) for k, one in enumerate(regions_from(facts))]
    checks = together(reads)
    assert sorted(len(check.indices) for check in checks) == [1, 2, MOST]
    first = min(node for _, _, node in reads)
    assert all(check.before >= first for check in checks)


def test_repeated_indices_are_checked_once(tune: Tune) -> None:
    """The heads of an attention share relative positions: the check reads them once, and two readers have one check."""
    heads, positions = torch.randn(6, 8, 32), (torch.arange(8)[:, None] + torch.arange(8)) % 32

    def fn(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return (x * 2).gather(2, i.expand(6, 8, 8)).softmax(2) + (x * 3).gather(2, i.expand(6, 8, 8))

    (graph,) = capture(fn, (heads, positions), grad=False)
    facts = GraphFacts(graph.module.graph)
    reads = [(indices_of(facts, one, {}), "", one.nodes[-1]) for one in regions_from(facts)]
    (check,) = together(reads)
    assert [one.index.meta["val"].numel() for one in check.indices] == [64]
    assert tune(fn, (heads, positions))
    f = compiled(fn)
    torch.testing.assert_close(f(heads, positions), fn(heads, positions))
    positions[7, 7] = 32
    with pytest.raises(IndexError, match=r"32 is not in \[0, 32\)"):
        f(heads, positions)


def test_a_training_step(tune: Tune) -> None:
    """The embedding's gradient and the loss's: a label beyond the classes does not train on."""
    table = torch.randn(32, 16, requires_grad=True)

    def fn(i: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.embedding(i, table) * 2, target)

    assert tune(fn, (labels(), labels(below=16)))
    f = compiled(fn)
    f(labels(), labels(below=16)).backward()
    for i, target in ((labels((5, 32)), labels(below=16)), (labels(), labels((5, 1000), below=16))):
        with pytest.raises(IndexError, match="is out of range"):
            f(i, target).backward()


def test_any_number_of_indices(tune: Tune) -> None:
    """One compilation for all sizes."""
    table = torch.randn(32, 8)
    tune(fn := lambda i: F.embedding(i, table) * 2 + 1, (labels(),))
    f = compiled(fn)
    for count in (64, 80, 96):
        torch._dynamo.mark_dynamic(index := labels(count=count), 0)
        torch.testing.assert_close(f(index), fn(index))
        with pytest.raises(IndexError, match=r"32 is not in \[0, 32\)"):
            f(labels((count - 1, 32), count=count))
    assert autotune.counters().graphs == 1
    assert autotune.counters().hits_other_rows == 2


def test_sums_at_places_are_checked_on_a_gpu() -> None:
    """Additions at an index become regions on a GPU alone; those torch trusts (``_unsafe``) have no check."""

    def fn(i: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        added = torch.zeros(32, 8).index_add(0, i, rows * 2) + 1
        put = torch.zeros(40, 8).index_put((i,), rows * 3, accumulate=True) + 1
        return added, put

    (graph,) = capture(fn, (labels(), torch.randn(64, 8)), grad=False)
    facts = GraphFacts(graph.module.graph, "cuda")
    found = {
        (indexed.low, indexed.extent) for region in regions_from(facts) for indexed in indices_of(facts, region, {})
    }
    assert found == {(-32, 32), (-40, 40)}
