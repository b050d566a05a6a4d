"""The fingerprint of a region: blind to names, order and process, sharp for everything that changes the work."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autotune.ir import canonical
from autotune.ir.canonical import (
    _Colours,
    canonicalize,
    family_of,
    one_body,
    open_extent,
    row_extent,
    to_workload,
    without_constants,
)
from autotune.ir.graph import Graph, Output, Value
from autotune.ir.inputs import make_inputs
from autotune.ir.oracle import interpret
from autotune.ir.simplify import remap_output, remap_value
from autotune.workload import Workload
from tests.support import ROOT
from tests.support.capture_helpers import graph_of, only_region
from tests.support.plain_colours import PlainColours
from tests.unit.compiler.lower.test_translate import ONE_REGION, ints, one_region, t


def fingerprint(fn: Callable[..., Any], *args: Any) -> str:
    workload = only_region(fn, *args).workload
    assert workload is not None
    return workload.fingerprint


def shuffled(graph: Graph, seed: int) -> tuple[Graph, list[int], list[int]]:
    """The same graph with values, axes, slots, outputs and commuting arguments in another order."""
    rng = random.Random(seed)
    axes_order = rng.sample(range(len(graph.extents)), len(graph.extents))
    axes = {a: k for k, a in enumerate(axes_order)}
    waiting, order = set(range(len(graph.values))), []
    while waiting:
        ready = sorted(i for i in waiting if not set(graph.values[i].args) & waiting)
        order.append(rng.choice(ready))
        waiting.remove(order[-1])
    where = {old: new for new, old in enumerate(order)}
    slots = rng.sample(range(len(graph.inputs)), len(graph.inputs))
    outputs = rng.sample(range(len(graph.outputs)), len(graph.outputs))
    values = []
    for i in order:
        v = remap_value(graph.values[i], where, axes)
        v = replace(v, slot=slots.index(v.slot)) if v.slot >= 0 else v
        values.append(replace(v, args=v.args[::-1]) if v.op in ("add", "mul", "maximum", "and", "or", "eq") else v)
    mixed = Graph(
        tuple(graph.extents[a] for a in axes_order),
        tuple(values),
        tuple(graph.inputs[s] for s in slots),
        tuple(remap_output(graph.outputs[k], where, axes) for k in outputs),
    )
    mixed.check()
    return mixed, slots, outputs


NAMES = sorted(ONE_REGION - {"max_values", "batch_norm_eval"})


@pytest.mark.parametrize("name", NAMES)
def test_any_order_gives_the_same_form(name: str) -> None:
    graph = graph_of(one_region(name))
    assert canonicalize(graph)[0] == graph
    for seed in range(3):
        mixed, _, _ = shuffled(graph, seed)
        assert canonicalize(mixed)[0].to_json() == graph.to_json()


@pytest.mark.parametrize("name", ["lstm", "rope", "cat_three", "layer_norm", "embedding", "adam"])
def test_orders_map_slots_and_outputs(name: str) -> None:
    graph = graph_of(one_region(name))
    mixed, _, _ = shuffled(graph, 5)
    again, slots, outputs = canonicalize(mixed)
    inputs = make_inputs(mixed, 3)
    before = interpret(mixed, inputs)
    after = interpret(again, [inputs[s] for s in slots])
    for k, got in enumerate(after):
        want = before[outputs[k]]
        axes = mixed.outputs[outputs[k]].axes
        # Axes are renumbered: compare as multisets of values, then by address.
        assert sorted(got.shape) == sorted(want.shape) == sorted(mixed.extents[a] for a in axes)
        torch.testing.assert_close(_stored(again, k, got), _stored(mixed, outputs[k], want), equal_nan=True)


def _stored(graph: Graph, k: int, value: Tensor) -> Tensor:
    memory = torch.zeros(graph.output_numel(k), dtype=value.dtype)
    memory.as_strided(value.shape, graph.outputs[k].strides).copy_(value)
    return memory


SAME: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]] = {
    "commuted": (lambda a, b: (a + b) * a, lambda a, b: a * (b + a), (t(4, 5), t(4, 5))),
    "arguments": (lambda a, b: a - b, lambda a, b: b - a, (t(4, 5), t(4, 5))),
    "softmax": (
        lambda x: torch.softmax(x, -1),
        lambda x: (lambda e: e / e.sum(-1, keepdim=True))((x - x.amax(-1, keepdim=True)).exp()),
        (t(4, 5),),
    ),
    "views": (lambda x: x.view(2, 2, 5).relu().view(4, 5), lambda x: x.relu(), (t(4, 5),)),
    "transposed twice": (lambda x: (x.T * 2).T, lambda x: x * 2, (t(4, 5),)),
    "results": (lambda x: (lambda y: (y, y.exp()))(x * 2), lambda x: (lambda y: (y.exp(), y))(x * 2), (t(4, 5),)),
    "twice the same": (lambda x: x.exp() + x.exp(), lambda x: (lambda e: e + e)(x.exp()), (t(4, 5),)),
}


@pytest.mark.parametrize("name", SAME)
def test_same_work_same_fingerprint(name: str) -> None:
    one, other, args = SAME[name]
    assert fingerprint(one, *args) == fingerprint(other, *args)


def test_leading_dimensions_do_not_matter() -> None:
    norm = lambda x: F.layer_norm(x, (24,))  # noqa: E731
    assert fingerprint(norm, t(2, 3, 4, 24)) == fingerprint(norm, t(24, 24)) == fingerprint(norm, t(6, 4, 24))


DIFFERENT: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "base": (lambda x: (x * 2).softmax(-1), (t(8, 12),)),
    "rows": (lambda x: (x * 2).softmax(-1), (t(9, 12),)),
    "row length": (lambda x: (x * 2).softmax(-1), (t(8, 13),)),
    "swapped": (lambda x: (x * 2).softmax(-1), (t(12, 8),)),
    "type": (lambda x: (x * 2).softmax(-1), (t(8, 12, dtype=torch.bfloat16),)),
    "half": (lambda x: (x * 2).softmax(-1), (t(8, 12, dtype=torch.float16),)),
    "result type": (lambda x: (x * 2).softmax(-1, dtype=torch.float32), (t(8, 12, dtype=torch.float16),)),
    "stride": (lambda x: (x * 2).softmax(-1), (t(12, 8).t(),)),
    "padded rows": (lambda x: (x * 2).softmax(-1), (t(8, 16)[:, :12],)),
    "constant": (lambda x: (x * 2.5).softmax(-1), (t(8, 12),)),
    "integer constant": (lambda x: (x * 3).softmax(-1), (t(8, 12),)),
    "operator": (lambda x: (x / 2).softmax(-1), (t(8, 12),)),
    "axis": (lambda x: (x * 2).softmax(0), (t(8, 12),)),
    "logarithm": (lambda x: (x * 2).log_softmax(-1), (t(8, 12),)),
    "more results": (lambda x: (lambda y: (y, y.softmax(-1)))(x * 2), (t(8, 12),)),
    "two inputs": (lambda x, y: (x * y).softmax(-1), (t(8, 12), t(8, 12))),
    "broadcast input": (lambda x, y: (x * y).softmax(-1), (t(8, 12), t(12))),
    "column input": (lambda x, y: (x * y).softmax(-1), (t(8, 12), t(8, 1))),
}


def test_different_work_different_fingerprint() -> None:
    found = {name: fingerprint(fn, *args) for name, (fn, args) in DIFFERENT.items()}
    assert len(set(found.values())) == len(found), found


def test_not_commutative_is_not_commuted() -> None:
    args = (t(4, 5), t(5))
    assert fingerprint(lambda a, b: a - b, *args) != fingerprint(lambda a, b: b - a, *args)


def test_signed_zero_and_integer_constants_differ() -> None:
    x = t(4, 5)
    assert fingerprint(lambda x: x.maximum(torch.zeros(())), x) != fingerprint(lambda x: x.maximum(-torch.zeros(())), x)


def workload(fn: Callable[..., Any], *args: Any) -> Workload:
    found = only_region(fn, *args).workload
    assert found is not None
    return found


def test_family_leaves_only_the_rows_open() -> None:
    norm = lambda x: F.layer_norm(x, x.shape[-1:])  # noqa: E731
    a, b, c = workload(norm, t(8, 24)), workload(norm, t(16, 24)), workload(norm, t(8, 32))
    assert (a.extent, b.extent, c.extent) == (8, 16, 8)
    assert a.family == b.family != c.family
    assert a.fingerprint != b.fingerprint


def test_reductions_over_every_axis_have_no_rows() -> None:
    region = only_region(lambda x: x.sum() + x.amax(), t(8, 24))
    assert row_extent(graph_of(region)) == 0
    assert region.workload is not None
    assert region.workload.family == ""


def test_reduced_axis_is_never_the_row_axis() -> None:
    graph = graph_of(only_region(lambda x: x - x.mean(0), t(8, 24)))
    assert graph.extents == (24, 8)
    assert row_extent(graph) == 24


def normed_gradients(g: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return g - x * (g * x).sum(-1, keepdim=True), (g * x).sum(0), g.sum(0)


def test_sums_over_the_rows_leave_them_open_where_results_run_over_them() -> None:
    a, b = (workload(normed_gradients, t(rows, 24), t(rows, 24)) for rows in (40, 56))
    assert (a.extent, b.extent) == (40, 56)
    assert a.family == b.family != ""
    graph = Graph.from_json(a.spec)
    assert open_extent(graph) == 40
    assert row_extent(graph) == 0, "its rows have to do with each other"
    assert one_body(graph) == ""
    mean = workload(lambda g, x: (g - x * (g * x).sum(-1, keepdim=True), g.mean(0)), t(40, 24), t(40, 24))
    more = workload(lambda g, x: (g - x * (g * x).sum(-1, keepdim=True), g.mean(0)), t(56, 24), t(56, 24))
    assert mean.family != more.family, "one over the rows is a constant"


def test_sums_of_everything_leave_nothing_open() -> None:
    for fn in (lambda x: (x * x).sum(), lambda x: (x * 2, x.sum()), lambda x: (x.sum(0).amax(), x.sum())):
        region = only_region(fn, t(40, 24))
        assert region.workload is not None
        assert region.workload.family == ""


def test_parts_of_one_graph_stand_in_an_order_that_families_do_not_change() -> None:
    """It is in fingerprints: parts with sums over the rows go by their own, as before they had a family."""
    made = [workload(normed_gradients, t(rows, 24), t(rows, 24)) for rows in (40, 56)]
    assert [one_body(Graph.from_json(w.spec)) for w in made] == ["", ""]
    assert family_of(Graph.from_json(made[0].spec)).key == made[0].fingerprint
    assert not family_of(Graph.from_json(made[0].spec)).has(family_of(Graph.from_json(made[1].spec)))


def test_round_trip_through_json() -> None:
    made = one_region("logsumexp_gather").workload
    assert made is not None
    again = Workload.from_json(json.loads(json.dumps(made.to_json())))
    assert again.fingerprint == made.fingerprint
    graph = Graph.from_json(again.spec)
    assert to_workload(graph).fingerprint == made.fingerprint
    assert to_workload(canonicalize(graph)[0]).family == made.family


CHILD = """
from tests.unit.compiler.lower.test_translate import one_region
for name in {names!r}:
    print(one_region(name).workload.fingerprint)
"""


@pytest.mark.slow
def test_another_process_finds_the_same() -> None:
    names = ["layer_norm", "lstm", "rope", "logsumexp_gather", "two_axes"]
    child = subprocess.run(
        [sys.executable, "-c", CHILD.format(names=names)],
        env={**os.environ, "PYTHONHASHSEED": "4711", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert child.stdout.split() == [one_region(n).workload.fingerprint for n in names]


def test_symmetric_graphs_have_one_form() -> None:
    """Tied colours: parts that can be exchanged for each other."""

    def parts(*xs: Tensor) -> tuple[Tensor, ...]:
        scale = xs[0] * 2
        return tuple((x - scale).exp() * 0.5 for x in xs[1:])

    graph = graph_of(only_region(parts, torch.tensor(2.0), *[t(4, 5) for _ in range(6)]))
    for seed in range(4):
        assert canonicalize(shuffled(graph, seed)[0])[0].to_json() == graph.to_json()


@pytest.mark.parametrize("name", NAMES)
def test_canonical_colours_match_the_plain_refinement(name: str) -> None:
    """Other ones would be other fingerprints, and all that was ever stored would be lost."""
    graph = shuffled(graph_of(one_region(name)), 5)[0]
    for open_axis in (None, 0):
        quick, plain = _Colours(graph, open_axis), PlainColours(graph, open_axis)
        for _ in range(4):
            quick._round()
            plain._round()
        assert not quick.discrete()
        plain.discrete()
        for what in ("value", "axis", "slot", "output"):
            assert getattr(quick, what) == getattr(plain, what)


def chain(length: int) -> Graph:
    """Pointwise operators one after the other."""
    values = [Value("load", axes=(0,), slot=k, strides=(1,)) for k in (0, 1)] + [Value("const", number=0.5)]
    for i in range(length):
        at = len(values) - 1 if i else 0
        args = ((at,), (at, 1), (at, 2))[i % 3]
        values.append(Value(("tanh", "maximum", "mul")[i % 3], args, (0,)))
    out = Output(value=len(values) - 1, axes=(0,), strides=(1,), dtype="float32")
    return Graph((4096,), tuple(values), ("float32", "float32"), (out,))


@pytest.fixture
def uncached() -> Iterator[None]:
    """Forms of a test that changes the limit of the work are computed in it, and no later test gets them."""
    canonicalize.cache_clear()
    yield
    canonicalize.cache_clear()


@pytest.mark.slow
@pytest.mark.usefixtures("uncached")
def test_a_long_chain_is_coloured_from_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round by round that takes as many rounds as the chain is long."""
    done, whole = [0], _Colours._round

    def counted(self: _Colours) -> None:
        done[0] += len(self.value)
        whole(self)

    monkeypatch.setattr(_Colours, "_round", counted)
    monkeypatch.setattr(canonical, "_WORK", 1 << 15)  # a chain of 500 is as far beyond it as one of 1500 is beyond ours
    graph = chain(500)
    form = canonicalize(graph)[0]
    assert done[0] < 1.2 * canonical._WORK
    assert canonicalize(shuffled(graph, 1)[0])[0] == form
    assert canonicalize(form)[0] == form
    values = list(graph.values)
    values[300] = replace(values[300], op="exp", args=(299,))
    other = replace(graph, values=tuple(values))
    assert canonicalize(other)[0] != form
    monkeypatch.setattr(canonical, "_WORK", 0)  # short ones too then
    canonicalize.cache_clear()
    for name in NAMES:
        form = canonicalize(graph_of(one_region(name)))[0]
        assert canonicalize(shuffled(form, 3)[0])[0] == form, name


@pytest.mark.parametrize(("length", "name"), [(99, "cca50b3675c7"), (500, "3f0d23e8fd64")])
def test_a_chain_of_equal_operators_takes_few_hashes(monkeypatch: pytest.MonkeyPatch, length: int, name: str) -> None:
    hashed, whole = [0], canonical._hash

    def counted(text: str) -> str:
        hashed[0] += 1
        return whole(text)

    monkeypatch.setattr(canonical, "_hash", counted)
    graph = Graph(
        (64,),
        (Value("load", axes=(0,), slot=0, strides=(1,)), *(Value("sin", (i,), (0,)) for i in range(length))),
        ("float32",),
        (Output(value=length, axes=(0,), strides=(1,), dtype="float32"),),
    )
    assert to_workload(canonicalize(graph)[0]).fingerprint[:12] == name
    assert hashed[0] < length * length, "a hash of each value in each round would be three times as many and more"
    quick, plain = _Colours(graph, 0), PlainColours(graph, 0)
    for _ in range(60):
        quick._round()
        plain._round()
        assert (quick.value, quick.axis, quick.slot, quick.output) == (
            plain.value,
            plain.axis,
            plain.slot,
            plain.output,
        )


def test_integer_inputs_keep_their_width() -> None:
    fn = lambda i: i + 1  # noqa: E731
    assert fingerprint(fn, ints(8)) != fingerprint(fn, ints(8, dtype=torch.int32))


def kept(p: float, scale: float = 0.5, power: float = 2.0) -> str:
    def fn(x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        y = x * (noise < p) / p
        return y, (y * scale).pow(power).mean(-1)

    return without_constants(graph_of(only_region(fn, t(8, 16), t(8, 1))))


def test_graphs_that_differ_in_constants_are_alike() -> None:
    """Layers with stochastic depth of 0.04, 0.06 and 0.08."""
    assert len({kept(p) for p in (0.96, 0.94, 0.92)}) == 1
    assert kept(0.96, scale=0.3) == kept(0.92), "also if the order of constants by their hash is another one"
    assert kept(0.96, power=3.0) != kept(0.96), "other values"
    assert kept(1.0) != kept(0.96), "the neutral element is left out"


def test_whole_numbers_zero_and_infinity_are_no_open_constants() -> None:
    def shifted(n: int) -> str:
        return without_constants(graph_of(only_region(lambda i: i + n, ints(8, 16))))

    def where(value: float) -> str:
        return without_constants(graph_of(only_region(lambda x: torch.where(x > 0.25, x, value), t(8, 16))))

    assert shifted(3) != shifted(5)
    assert len({where(v) for v in (0.0, float("-inf"), 0.5)}) == 3
    assert where(0.5) == where(0.75)
    plain = graph_of(only_region(lambda x: x + 1, t(8, 16)))
    assert without_constants(plain) == to_workload(plain).fingerprint


def test_the_factor_of_a_mean_is_closed_and_a_large_graph_is_like_no_other() -> None:
    def means(scale: float) -> str:
        return without_constants(graph_of(only_region(lambda x: (x.sum(-1) * scale).exp(), t(8, 16))))

    assert means(1 / 16) != means(0.3)
    assert means(0.3) == means(0.7)

    def terms(first: float) -> Graph:
        def fn(x: Tensor) -> Tensor:
            return sum(((x + (first + k)).exp() for k in range(150)), x)

        return graph_of(only_region(fn, t(8, 16)))

    large = terms(0.25)
    assert len(large.values) > 400
    assert without_constants(large) == to_workload(large).fingerprint
