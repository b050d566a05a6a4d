"""Which tensors of Dynamo's graphs are known when a graph is compiled: never one that may hold something else."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from autotune.compiler.capture.attention import constants
from autotune.compiler.capture.attention.constants import Constants
from autotune.compiler.capture.attention.effects import Writes

ran: list[str] = []
X = torch.randn(5)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    torch._dynamo.reset()
    ran.clear()
    yield
    torch._dynamo.reset()


@torch.library.custom_op("capture_constants::ones", mutates_args=())
def ones(count: int) -> Tensor:
    ran.append("operator")
    return torch.ones(count, count, dtype=torch.bool)


ones.register_fake(lambda count: torch.ones(count, count, dtype=torch.bool))


@torch.library.custom_op("capture_constants::narrow", mutates_args=("mask",))
def narrow(x: Tensor, mask: Tensor) -> None:
    mask.tril_(-1)


@torch._dynamo.allow_in_graph
def positive(x: Tensor) -> Tensor:
    ran.append("allowed")
    return x > 0


@torch._dynamo.allow_in_graph
def narrowed(mask: Tensor) -> Tensor:
    mask.tril_(-1)
    return mask.sum()


def graph_of(fn: Callable[..., Any], *args: Any, **options: Any) -> fx.GraphModule:
    kept: list[fx.GraphModule] = []

    def collect(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        kept.append(gm)
        return gm.forward

    torch.compile(fn, backend=collect, fullgraph=True, **options)(*args)
    return kept[0]


def constants_of(gm: fx.GraphModule, given: Mapping[fx.Node, Tensor] | None = None) -> Constants:
    return Constants(gm.graph, Writes(gm), given)


def masks(gm: fx.GraphModule) -> list[fx.Node]:
    """The nodes of bools."""
    values = {n: n.meta.get("example_value") for n in gm.graph.nodes}
    found = [n for n, v in values.items() if isinstance(v, Tensor) and v.dtype == torch.bool]
    assert found
    return found


def known(fn: Callable[..., Any], *args: Any, **options: Any) -> list[Tensor]:
    """The constants among the bools in ``fn``'s graph."""
    gm = graph_of(fn, *args, **options)
    found = constants_of(gm)
    return [v for v in map(found.of, masks(gm)) if v is not None]


def later(count: int) -> Tensor:
    place = torch.arange(count)
    return place[None, :] <= place[:, None]


def test_comparisons_of_places_are_known() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        mask = later(5) & ~torch.zeros(5, dtype=torch.bool)
        return mask[None].expand(2, -1, -1), x * 2 + torch.full((5,), -1.5, dtype=torch.bfloat16)

    found = known(fn, X)
    assert len(found) == len(masks(graph_of(fn, X))) > 3
    assert torch.equal(found[-1], later(5).expand(2, -1, -1))
    assert found[-1].stride() == (0, 5, 1), "as the program makes it"
    gm = graph_of(fn, X)
    (numbers,) = gm.graph.find_nodes(op="call_function", target=torch.full)
    torch.testing.assert_close(constants_of(gm).of(numbers), torch.full((5,), -1.5, dtype=torch.bfloat16))


def test_values_that_depend_on_an_input_are_unknown() -> None:
    assert known(lambda x: (torch.arange(5) < x, x > 0), X) == []
    assert len(known(lambda x: (torch.arange(5) < 3) & (x > 0), X)) == 1, "the half that does not"


@pytest.mark.parametrize("draw", [
    lambda: torch.rand(5) >= 0, lambda: torch.randperm(5) >= 0, lambda: F.dropout(torch.ones(5), 0.5) >= 0,
    lambda: torch.bernoulli(torch.ones(5)).bool(), lambda: torch.empty(5).uniform_() >= 0,
])  # fmt: skip
def test_random_numbers_are_not_known_nor_drawn(draw: Callable[[], Tensor]) -> None:
    gm = graph_of(draw)
    before = torch.get_rng_state()
    assert constants_of(gm).of(masks(gm)[-1]) is None
    assert torch.equal(torch.get_rng_state(), before), "the program itself would draw others"


def assign(x: Tensor, mask: Tensor, places: Tensor) -> None:
    mask[..., 2:] = False


Write = Callable[[Tensor, Tensor, Tensor], Any]
WRITES: dict[str, Write] = {
    "by setting": assign,
    "through a view": lambda x, mask, places: mask.view(-1)[3:].fill_(False),
    "through its data": lambda x, mask, places: mask.data.tril_(-1),
    "and": lambda x, mask, places: operator.iand(mask, x > 0),
    "or": lambda x, mask, places: operator.ior(mask, x > 0),
    "to out": lambda x, mask, places: torch.logical_and(x > 1, x > 0, out=mask[0]),
    "what it was made of": lambda x, mask, places: places.add_(1),
    "inplace, by name": lambda x, mask, places: F.relu(places, inplace=True),
    "a second argument": lambda x, mask, places: narrow(x, mask),
    "a list": lambda x, mask, places: torch._foreach_zero_([mask]),
    "one of two outs": lambda x, mask, places: torch.max(x[None], 1, out=(x[:1].clone(), places[:1])),
    "inplace, by position": lambda x, mask, places: F.relu(places, True),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_constants_exclude_overwritten_tensors(write: Write) -> None:
    def fn(x: Tensor) -> Tensor:
        places = torch.arange(-2, 3)
        mask = places[None, :] <= places[:, None]
        before = mask[None].expand(2, -1, -1)
        write(x, mask, places)
        return before & mask

    assert known(fn, X) == []


def by_a_function_allowed(x: Tensor) -> Tensor:
    mask = later(5)
    return mask if narrowed(mask) is not None else x


def as_statistics(x: Tensor) -> Tensor:
    mean = torch.zeros(5)
    F.batch_norm(x.expand(4, 5) + 1, mean, torch.ones(5), training=True)
    return mean == 0


def as_a_table_of_bounded_norm(x: Tensor) -> Tensor:
    table = torch.ones(5, 3)
    F.embedding(torch.arange(5), table, max_norm=0.1)
    return table == 1


@pytest.mark.parametrize("write", [by_a_function_allowed, as_statistics, as_a_table_of_bounded_norm])
def test_constants_exclude_tensors_written_by_undeclared_mutation(write: Callable[[Tensor], Tensor]) -> None:
    gm = graph_of(write, X)
    assert constants_of(gm).of(masks(gm)[-1]) is None


def test_a_table_without_a_bound_is_only_read() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(5)
        return F.embedding(places, x, None, None), places >= 0

    assert len(known(fn, torch.randn(5, 3))) == 1


def test_writing_elsewhere_changes_nothing() -> None:
    """As in models that add to their activations in place, with the mask's operands in the sum."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        mask = later(5)
        y = x + mask
        y += 1
        y.relu_()
        y[0] = 2
        return mask, y

    (mask,) = known(fn, X)
    assert torch.equal(mask, later(5))


def test_a_given_one_that_is_written_over_is_not_known() -> None:
    gm = graph_of(lambda mask: mask.logical_not_(), later(5))
    (given,) = gm.graph.find_nodes(op="placeholder")
    assert constants_of(gm, {given: later(5)}).of(given) is None


def test_given_ones_are_used() -> None:
    gm = graph_of(lambda mask, x: (mask & later(5), mask & (x > 0)), torch.ones(5, 5, dtype=torch.bool), X)
    given, *others = masks(gm)
    found = constants_of(gm, {given: ~later(5)})
    values = [v for v in map(found.of, others) if v is not None]
    assert len(values) == 2, "the comparison of places and what is made of both, nothing of x"
    assert not values[1].any(), "of what was given"


def test_a_large_one_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn() -> Tensor:
        mask = later(5)
        return (mask & later(5)) | mask

    gm = graph_of(fn)
    for largest, kept in ((25, True), (24, False)):
        monkeypatch.setattr(constants, "_KEPT", largest)
        found, wanted = constants_of(gm), masks(gm)[-1]
        first = found.of(wanted)
        assert first is not None
        assert torch.equal(first, later(5))
        assert (found.of(wanted) is first) is kept


def test_constants_do_not_run_unseen_writes() -> None:
    gm = graph_of(lambda: later(5).logical_not_())
    assert Constants(gm.graph, Writes(graph_of(lambda: later(5)))).of(masks(gm)[-1]) is None


def test_of_symbolic_sizes_nothing_is_known() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return later(x.shape[0]), later(5).expand(x.shape[0], 5, 5)

    (fixed,) = known(fn, torch.randn(7), dynamic=True)
    assert fixed.shape == (5, 5)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert known(lambda: torch.arange(5).nonzero() >= 0) == []


def test_too_large_constants_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "_LARGEST", 5 * 8)  # the places, of int64
    assert len(known(lambda: later(5))) == 1
    monkeypatch.setattr(constants, "_LARGEST", 5 * 8 - 1)
    assert known(lambda: later(5)) == []


@pytest.mark.parametrize("make", [
    lambda: ones(5), lambda: torch.ops.capture_constants.ones(5), lambda: positive(torch.arange(5)),
])  # fmt: skip
def test_functions_outside_of_torch_are_not_run(make: Callable[[], Tensor]) -> None:
    gm = graph_of(make)
    before = len(ran)
    assert constants_of(gm).of(masks(gm)[0]) is None
    assert len(ran) == before > 0


def test_failing_nodes_are_unknown() -> None:
    gm = graph_of(lambda: later(5))
    (node,) = masks(gm)
    node.args = (node.args[0], "no tensor")
    found = constants_of(gm)
    assert found.of(node) is found.of(node) is None
