"""The facts about a graph's nodes: kinds, sizes, reasons to stay outside of regions, and their one maker."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import autotune
from autotune.compiler.lower.facts import LIBRARY_CALL, NO_RULE, GraphFacts, Kind
from autotune.compiler.lower.lazy import Lazy, Region, pointwise
from autotune.compiler.lower.rules import RULES
from autotune.compiler.regions import aten
from autotune.compiler.regions.find import find_regions, outside, regions_from
from tests.support.capture_helpers import check
from tests.unit.compiler.lower.test_translate import t

COMPILER = Path(autotune.__file__).parent / "compiler"


def graph_of(fn: Callable[..., Any], *args: Tensor) -> fx.Graph:
    return make_fx(fn, tracing_mode="fake")(*args).graph  # type: ignore[no-any-return]


def reasons(graph: fx.Graph, side: str = "cpu") -> dict[str, str]:
    """By operator why it is in no region."""
    facts = GraphFacts(graph, side)
    left = outside(facts, regions_from(facts))
    return {facts[n].operator or str(n.target): reason for n, reason in left.items()}


def test_each_kind_of_node() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return (torch.relu(x).t() @ w).cumsum(0) + torch.zeros(8)

    graph = graph_of(f, t(8, 8), t(8, 8))
    facts = GraphFacts(graph, "cpu")
    kinds = {facts[n].operator: facts[n].kind for n in graph.nodes if n.op == "call_function"}
    assert kinds == {
        "relu": Kind.COMPUTE,
        "t": Kind.OUTSIDE,  # Inductor has decomposed it before regions are looked for
        "mm": Kind.LIBRARY,
        "cumsum": Kind.OUTSIDE,
        "zeros": Kind.OUTSIDE,
        "add": Kind.COMPUTE,
    }
    given = next(n for n in graph.nodes if n.op == "placeholder")
    assert (facts[given].kind, facts[given].reason, facts[given].bytes) == (Kind.OUTSIDE, "", 8 * 8 * 4)


def test_sizes_count_all_elements_and_touched_memory_once() -> None:
    graph = graph_of(lambda x: x.expand(16, 8) + 1, t(1, 8))
    facts = GraphFacts(graph)
    (expanded,) = (n for n in graph.nodes if facts[n].operator == "expand")
    assert (facts[expanded].bytes, facts[expanded].touched_bytes) == (16 * 8 * 4, 8 * 4)
    assert facts[expanded].kind is Kind.VIEW


def test_a_reason_for_each_operator_outside() -> None:
    """An operator without a rule, a whole number that may wrap, a mutation and a library call among them."""
    convert = torch.ops.prims.convert_element_type.default

    def f(x: Tensor, w: Tensor, state: Tensor, small: Tensor) -> tuple[Tensor, ...]:
        state.add_(1)
        made = torch.relu(x @ w).cumsum(0)
        return made, small * small, torch.sin(convert(x, torch.float64)), torch.complex(x, x)

    small = torch.ones(8, dtype=torch.int8)
    found = reasons(graph_of(f, t(8, 8), t(8, 8), t(4), small))
    assert found == {
        "mm": LIBRARY_CALL,
        "cumsum": NO_RULE,
        "add_": "it writes into its arguments",
        "mul": "mul in torch.int8 (it may wrap)",
        "convert_element_type": "dtype float64",
        "sin": "dtype float64",
        "complex": NO_RULE,
    }


def test_a_product_that_a_region_may_hold_and_none_does_is_a_library_call() -> None:
    graph = graph_of(lambda x, w: torch.ops.aten.mm(x, w), t(8, 8), t(8, 8))
    facts = GraphFacts(graph, "cuda")
    (product,) = (n for n in graph.nodes if n.op == "call_function")
    assert facts[product].kind is Kind.COMPUTE
    assert reasons(graph, "cuda") == {"mm": LIBRARY_CALL}


def test_a_sum_and_a_write_at_indices_have_their_own_reasons() -> None:
    index = torch.tensor([0, 1])
    put = torch.ops.aten.index_put.default
    adding = graph_of(lambda x, index: put(x, [index], x[:2], True), t(8, 8), index)
    writing = graph_of(lambda x, index: put(x, [index], x[:2]), t(8, 8), index)
    assert reasons(adding) == {"index_put": "a sum at indices on a CPU"}
    assert reasons(writing) == {"index_put": "a write at indices"}


def test_attention_whose_random_state_a_checkpoint_keeps_is_a_library_call() -> None:
    from torch._prims.rng_prims import run_and_save_rng_state

    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

    def f(q: Tensor) -> Tensor:
        _, (out, *_) = run_and_save_rng_state(attention, q, q, q)
        return out.exp()

    graph = graph_of(f, t(1, 2, 8, 8))
    assert reasons(graph) == {"run_and_save_rng_state": LIBRARY_CALL}


def test_an_allocation_moves_no_data_and_needs_no_reason() -> None:
    graph = graph_of(lambda x: torch.ops.aten.copy.default(torch.empty(8, 8), x).cumsum(0), t(8, 8))
    assert "empty" not in reasons(graph)
    assert NO_RULE in reasons(graph).values()


def test_the_positions_of_extremes_have_a_reason_without_names_of_a_graph() -> None:
    graph = graph_of(lambda x: torch.ops.aten.max.dim((x * 2).exp(), 1), t(8, 8))
    assert reasons(graph) == {"max": "its result 2 of 2 is read, which no kernel computes"}


def test_a_result_that_becomes_an_input_s_new_value() -> None:
    def f(x: Tensor, state: Tensor) -> Tensor:
        state.copy_(x * 2)
        return x + 1

    found = reasons(graph_of(f, t(8), t(8)))
    assert found == {"mul": "its result is copied into an input", "copy_": "it writes into its arguments"}


def test_the_elements_of_a_tuple_share_its_reason() -> None:
    graph = graph_of(lambda x: sum(torch.sort(x)), t(8))
    facts = GraphFacts(graph)
    assert {facts[n].reason for n in graph.nodes if facts[n].operator in ("sort", "getitem")} == {NO_RULE}


def _hypot(region: Region, self: Lazy, other: Lazy) -> Lazy:
    return pointwise("sqrt", self * self + other * other)


def test_a_rule_is_all_that_an_operator_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouping, reasons, stored programs and the oracle read the table of rules: an operator is one entry in a file."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        return torch.softmax(torch.hypot(x, y), -1)

    gm = make_fx(f, tracing_mode="fake", decomposition_table=torch._decomp.core_aten_decompositions())(t(4, 8), t(4, 8))
    assert reasons(gm.graph)["hypot"] == NO_RULE
    monkeypatch.setitem(RULES, "hypot", _hypot)
    (region,) = find_regions(gm)
    assert "hypot" not in reasons(gm.graph)
    assert region.workload is not None
    program = aten.from_json(region.workload.source)
    assert any("hypot" in str(n.target) for n in program.graph.nodes)
    check(region)


def test_node_meta_data_is_read_only_by_facts() -> None:
    """The functions that read a node's meta data are called where facts are made; all other passes read facts."""
    asking = re.compile(r"\b(value_of|origin_name|used_results|is_random)\(")
    found = {
        str(file.relative_to(COMPILER))
        for file in COMPILER.rglob("*.py")
        for line in file.read_text("utf-8").splitlines()
        if asking.search(line) and not line.startswith("def ")
    }
    assert found == {"lower/facts.py"}


def distances(x: Tensor, y: Tensor) -> Tensor:
    x, y = x.repeat(8, 1), y.repeat(1, 16)
    return (x.pow(2).sum(-1, keepdim=True) - 2 * (x @ y) + y.pow(2).sum(0)).argmin(-1)


def with_values(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    values, positions = (x * y.t() + x).max(-1)
    return values, positions


def of_softmax(x: Tensor, y: Tensor) -> Tensor:
    """A region would store the exponentials for a quotient outside of it."""
    e = (x + 1).exp()
    return (e / (y[0] * e.sum(-1, keepdim=True))).argmax(-1)


def of_many(x: Tensor, y: Tensor) -> Tensor:
    return (x + y.t() * x.roll(1, 0) + y.roll(1, 0).t()).argmax(-1)


@pytest.mark.parametrize(
    ("fn", "left"),
    [
        (distances, ["add", "mul", "sub"]),
        (with_values, ["add", "mul"]),
        (lambda x, y: (x + 1).max(-1)[0], []),
        (lambda x, y: ((x + 1).argmax(-1), (x + 1).exp()), ["add"]),
        (lambda x, y: (lambda z: (z.argmax(-1), z))(x.exp()), []),  # also a result
        (lambda x, y: (x + 1).permute(1, 0).argmax(-1), ["add"]),
        (lambda x, y: x.relu().argmax(-1) + x.relu().argmin(-1), ["relu", "relu"]),
        (of_many, []),
    ],
)
def test_elements_that_only_a_search_for_positions_reads_are_left_to_its_kernel(
    fn: Callable[..., Any], left: list[str]
) -> None:
    graph = graph_of(fn, t(64, 128), t(128, 64))
    for side, wanted in (("cuda", left), ("cpu", [])):
        facts = GraphFacts(graph, side)
        assert sorted(facts[n].operator for n in graph.nodes if facts[n].reason.startswith("the kernel of")) == wanted


def test_a_region_stores_nothing_else_for_a_search_for_positions() -> None:
    graph = graph_of(of_softmax, t(64, 128), t(1, 128))
    assert reasons(graph, "cuda") == {"argmax": NO_RULE}
