"""Arranging groups into passes: what is reduced, kept, stored and computed again where."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autotune.compiler.planner.plan import make_plan
from autotune.compiler.program.columns import finish_graph, main_program
from autotune.compiler.program.passes import build_program, find_online, split_axes
from autotune.compiler.program.program import Program
from autotune.compiler.targets.cpu.columns import column_split, row_wise
from autotune.errors import Unsupported
from autotune.ir.graph import REDUCTIONS, Graph
from autotune.ir.nodes import POINTWISE
from tests.support.cpu_graphs import Build, cross_entropy, gelu_layer_norm, layer_norm, logsumexp, softmax
from tests.support.zoo import ZOO, workloads


def ops(program: Program, ids: tuple[int, ...]) -> list[str]:
    return [program.graph.values[i].op for i in ids]


def programs(keep: bool, online: bool) -> Iterator[Program]:
    """Every group of the zoo as it runs on a CPU: one program, or one over the rows and one that finishes."""
    for work in [w for c in ZOO for w in workloads(c.name)]:
        for group in make_plan(Graph.from_json(work.spec), "cpu").groups:
            split = None if row_wise(group.graph) else column_split(group.graph)
            if split is None:
                yield build_program(group.graph, keep=keep, online=online)
            else:
                yield main_program(split, keep=keep, online=online, unit_rows=True)
                yield build_program(finish_graph(split, 3)[0], keep=keep, online=online)


@pytest.mark.parametrize("online", [False, True])
def test_one_row_that_is_reduced_has_no_open_extent(online: bool) -> None:
    """A sum of exponentials with its maximum is a reduction too: the row's length is part of the kernel."""
    b = Build(64)
    s = b.load("float32", 0)
    e = b.exp(b.sub(s, b.reduce("max", s, 0)))
    b.out(b.div(e, b.reduce("sum", e, 0)), "float32")
    p = build_program(b.graph(), online=online)
    assert (p.rows, p.cols, p.dynamic) == ((), (0,), -1)


def test_layer_norm_is_three_passes() -> None:
    p = build_program(layer_norm(8, 64))
    assert (p.rows, p.cols, p.dynamic) == ((0,), (1,), 0)
    assert (p.n_rows, p.n_cols, p.pointwise) == (8, 64, False)
    assert [ops(p, q.reduce) for q in p.passes] == [["sum"], ["sum"], []]
    assert [q.stores for q in p.passes] == [(), (), (0,)]
    assert [q.row_stores for q in p.passes] == [(), (1,), ()]  # the mean is known once the first pass is over
    assert ops(p, p.passes[0].kept_out) == ["load"]
    assert all(q.walks for q in p.passes)
    assert ops(p, p.passes[2].row_values) == ["mul", "add", "rsqrt"]


def test_softmax_keeps_the_exponentials() -> None:
    p = build_program(softmax(8, 64))
    assert [ops(p, q.reduce) for q in p.passes] == [["max"], ["sum"], []]
    assert ops(p, p.passes[1].kept_out) == ["exp"]
    assert ops(p, p.passes[2].kept_in) == ["exp"]
    assert ops(p, p.passes[2].compute) == ["div"]


def test_reload_keeps_nothing_and_reads_again() -> None:
    p = build_program(gelu_layer_norm(8, 64), keep=False)
    assert p.kept == ()
    for q in p.passes:
        assert ops(p, q.compute).count("erf") == 1
        assert "load" in ops(p, q.compute)


def test_expensive_operators_run_once_where_values_are_kept() -> None:
    p = build_program(gelu_layer_norm(8, 64))
    assert sum(ops(p, q.compute).count("erf") for q in p.passes) == 1
    assert not any(p.graph.values[i].op == "load" and p.domain(i) == "full" for q in p.passes[1:] for i in q.compute)


def test_light_operators_run_again_rather_than_be_kept() -> None:
    """relu(x) and 2 * relu(x) in a later pass: only one of them waits in registers."""
    b = Build(4, 32)
    y = b.maximum(b.load("float32", 0, 1), b.const(0.0))
    z = b.mul(y, b.const(2.0))
    total = b.add_(b.reduce("sum", y, 1), b.reduce("sum", z, 1))
    b.out(b.add_(b.mul(y, total), z), "float32")
    p = build_program(b.graph())
    assert len(p.kept) == 1
    assert len(p.passes) == 2


@pytest.mark.parametrize(("storage", "kept"), [("bfloat16", "load"), ("float16", "load"), ("float32", "add")])
def test_sixteen_bit_inputs_are_kept_as_loaded(storage: str, kept: str) -> None:
    """Half the registers; what light operators make of it is made again. A float32 sum takes no more than its input."""
    b = Build(4, 32)
    y = b.add_(b.load(storage, 0, 1), b.const(1.0))
    b.out(b.sub(y, b.reduce("max", y, 1)), storage)
    p = build_program(b.graph())
    assert ops(p, p.kept) == [kept]


def test_two_sixteen_bit_inputs_are_kept_as_their_sum() -> None:
    b = Build(4, 32)
    y = b.add_(b.load("bfloat16", 0, 1), b.load("bfloat16", 0, 1))
    b.out(b.sub(y, b.reduce("max", y, 1)), "bfloat16")
    p = build_program(b.graph())
    assert ops(p, p.kept) == ["add"]


@pytest.mark.parametrize("make", [softmax, logsumexp, cross_entropy])
def test_online_forms(make) -> None:
    graph = make(4, 64)
    (pair,) = find_online(graph)
    assert graph.values[pair.peak].op == "max"
    assert graph.values[pair.total].op == "sum"
    assert graph.values[pair.peak].args == (pair.score,)
    p, plain = build_program(graph, online=True), build_program(graph)
    assert p.passes[0].online == (pair,)
    assert p.passes[0].reduce == ()
    assert len(p.passes) == len(plain.passes) - 1
    assert not any(q.online for q in plain.passes)


def test_cross_entropy_walks_once_online() -> None:
    assert [q.walks for q in build_program(cross_entropy(4, 64), online=True).passes] == [True, False]


def sum_of_exp(shift_of) -> Graph:
    b = Build(4, 32)
    x = b.load("float32", 0, 1)
    b.out(b.reduce("sum", b.exp(b.sub(x, shift_of(b, x, b.reduce("max", x, 1)))), 1), "float32")
    return b.graph()


NOT_ONLINE = {
    "a column value": lambda b, x, m: b.add_(m, b.load("float32", 1)),
    "another input of the row": lambda b, x, m: b.add_(m, b.load("float32", 0)),
    "another reduction": lambda b, x, m: b.add_(m, b.reduce("min", x, 1)),
    "the maximum of something else": lambda b, x, m: b.reduce("max", b.mul(x, b.const(2.0)), 1),
}


@pytest.mark.parametrize("why", NOT_ONLINE)
def test_not_online_where_the_shift_depends_on(why: str) -> None:
    graph = sum_of_exp(NOT_ONLINE[why])
    assert find_online(graph) == ()
    assert not any(q.online for q in build_program(graph, online=True).passes)


def test_online_where_the_shift_is_made_from_the_maximum() -> None:
    graph = sum_of_exp(lambda b, x, m: b.where(b.isinf(m), b.const(0.0), m))
    (pair,) = find_online(graph)
    assert pair.shift != pair.peak


def test_one_sum_for_each_maximum() -> None:
    b = Build(4, 32)
    x = b.load("float32", 0, 1)
    m = b.reduce("max", x, 1)
    first = b.reduce("sum", b.exp(b.sub(x, m)), 1)
    second = b.reduce("sum", b.exp(b.sub(x, b.add_(m, b.const(1.0)))), 1)
    b.out(b.div(first, second), "float32")
    assert [o.total for o in find_online(b.graph())] == [first]


def test_axes_of_the_domains() -> None:
    b = Build(4, 32)
    x, w, c = b.load("float32", 0, 1), b.load("float32", 1), b.load("float32", 0)
    k = b.const(2.0)
    b.out(b.mul(b.add_(b.mul(x, w), c), k), "float32")
    s = b.reduce("sum", x, 1)
    b.out(s, "float32")
    p = build_program(b.graph())
    assert [p.domain(i) for i in (x, w, c, k, s)] == ["full", "col", "row", "const", "row"]


def test_rows_come_outermost_first_and_axis_zero_before_all() -> None:
    assert split_axes(layer_norm(4, 8)) == ((0,), (1,))
    b = Build(3, 5, 7)  # stored with axis 2 outermost, reduced over axis 1
    x = b.load("float32", 0, 1, 2, strides=(5, 1, 15))
    b.out(b.reduce("sum", x, 1), "float32", axes=(0, 2), strides=(1, 3))
    assert split_axes(b.graph()) == ((0, 2), (1,))
    b = Build(3, 5, 7)  # reduced over two axes, the inner of which is axis 1
    x = b.load("float32", 0, 1, 2, strides=(35, 1, 5))
    b.out(b.reduce("sum", x, 1, 2), "float32")
    assert split_axes(b.graph()) == ((0,), (2, 1))


def test_pointwise_columns_are_where_the_output_is_dense() -> None:
    b = Build(4, 32)
    b.out(b.neg(b.load("float32", 0, 1)), "float32", strides=(1, 4))
    p = build_program(b.graph())
    assert (p.rows, p.cols, p.pointwise, p.dynamic) == ((1,), (0,), True, -1)
    b = Build(50)
    b.out(b.neg(b.load("float32", 0)), "float32")
    p = build_program(b.graph())
    assert (p.rows, p.cols, p.dynamic) == ((), (0,), 0)


def test_dead_values_are_not_computed() -> None:
    b = Build(4, 32)
    x = b.load("float32", 0, 1)
    b.reduce("sum", b.exp(x), 1)
    b.out(b.neg(x), "float32")
    p = build_program(b.graph())
    assert [ops(p, q.compute) for q in p.passes] == [["load", "neg"]]
    assert p.passes[0].reduce == ()


def test_reductions_over_different_axes_are_unsupported() -> None:
    b = Build(4, 32)
    x = b.load("float32", 0, 1)
    b.out(b.reduce("sum", x, 1), "float32")
    b.out(b.reduce("sum", x, 0), "float32")
    with pytest.raises(Unsupported, match="different axes"):
        build_program(b.graph())


def test_output_without_the_rows_is_unsupported() -> None:
    b = Build(4, 32)
    b.out(b.reduce("sum", b.load("float32", 0, 1), 1), "float32")
    b.out(b.neg(b.load("float32", 1)), "float32")
    with pytest.raises(Unsupported, match="does not vary over the group's rows"):
        build_program(b.graph())


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("online", [True, False])
def test_every_pass_has_the_values_that_it_uses(keep: bool, online: bool) -> None:
    """For every group of the test programs: run the passes symbolically; each value exists when it is used."""
    accumulated = 0
    for p in programs(keep, online):
        graph, vals = p.graph, p.graph.values
        row_known = {i for i in range(len(vals)) if p.domain(i) == "row" and vals[i].op in ("const",)}
        kept: set[int] = set()
        stored: list[int] = []
        added: list[int] = []

        def ready(i: int, here: set[int], row_known: set[int] = row_known, p: Program = p) -> bool:
            return p.domain(i) == "const" or (i in row_known if p.domain(i) == "row" else i in here)

        for q in p.passes:
            for i in q.row_values:
                assert all(ready(a, set()) for a in vals[i].args)
                row_known.add(i)
            assert all(ready(graph.outputs[k].value, set()) for k in q.row_stores)
            assert all(ready(p.columns[n].value, set()) for n in q.row_columns)
            assert set(q.kept_in) <= kept
            here = set(q.kept_in)
            assert list(q.compute) == sorted(q.compute)
            for i in q.compute:
                assert vals[i].op in POINTWISE or vals[i].op in ("load", "gather", "index")
                assert all(ready(a, here) for a in vals[i].args)
                here.add(i)
            assert all(ready(vals[i].args[0], here) for i in q.reduce)
            assert all(ready(x.score, here) for x in (*q.online, *q.moments))
            assert all(ready(p.columns[n].value, here) for n in q.columns)
            assert all(ready(graph.outputs[k].value, here) for k in q.stores)
            assert set(q.kept_out) <= set(q.compute)
            kept |= set(q.kept_out)
            row_known |= set(q.reduce)
            for o in q.online:
                row_known |= {o.peak, o.total}
                # Row values between the maximum and its sum belong to the pair.
                row_known |= {i for i in range(o.peak, o.shift + 1) if p.domain(i) == "row" and vals[i].op in POINTWISE}
            for m in q.moments:
                row_known |= {m.total, m.square}
            stored += [*q.stores, *q.row_stores]
            added += [*q.columns, *q.row_columns]
        assert sorted(stored) == list(range(len(graph.outputs)))
        assert sorted(added) == list(range(len(p.columns)))
        accumulated += len(added)
        assert keep or not p.kept
        done = [i for q in p.passes for i in q.reduce]
        done += [i for q in p.passes for o in q.online for i in (o.peak, o.total)]
        done += [i for q in p.passes for m in q.moments for i in (m.total, m.square)]
        assert sorted(done) == [i for i, v in enumerate(vals) if v.op in REDUCTIONS]
    assert accumulated  # some of them are reductions over the rows
