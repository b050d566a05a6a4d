"""Remote fusion and packing: which regions join, what their graph is, which launches are shared, by which schedule."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import dropout

from autotune.compiler.planner.groups import MOST_POINTERS, pack, read_text, write_text
from autotune.compiler.planner.plan import build_plan, greedy, make_plan
from autotune.compiler.regions.find import find_regions
from autotune.compiler.regions.grouping import Candidate, Flow, bundle_groups, may_join
from autotune.domains.fusion.bench import FusionBench
from autotune.ir.canonical import canonicalize, family_of, row_extent, single, to_workload
from autotune.ir.graph import Graph
from autotune.ir.inputs import make_inputs
from autotune.ir.oracle import interpret
from autotune.ir.simplify import components, part, simplify
from autotune.task import Config
from tests.support.capture_helpers import check, graph_of, regions_of
from tests.support.cpu_graphs import Build, layer_norm, softmax
from tests.support.group_order import acyclic
from tests.support.many_parts import beside, row_sums, task_of, update
from tests.unit.compiler.lower.test_translate import t
from tests.unit.ir.test_canonical import shuffled

Lists = list[Tensor]


def adam(params: Lists, grads: Lists, firsts: Lists, seconds: Lists) -> tuple[Lists, Lists, Lists]:
    firsts = [0.9 * m + 0.1 * g for m, g in zip(firsts, grads, strict=True)]
    seconds = [0.999 * v + 0.001 * g * g for v, g in zip(seconds, grads, strict=True)]
    new = [p - 0.01 * m / (v.sqrt() + 1e-8) for p, m, v in zip(params, firsts, seconds, strict=True)]
    return new, firsts, seconds


def state(*sizes: int) -> tuple[Lists, Lists, Lists, Lists]:
    p, g, m, v = ([t(n) for n in sizes] for _ in range(4))
    return p, g, m, [x.abs() for x in v]


def canonical(graph: Graph) -> Graph:
    return canonicalize(simplify(graph))[0]


# ---- regions --------------------------------------------------------------------------------------------------------


def test_an_optimizer_step_is_one_region() -> None:
    sizes = (1, 3, 5, 12, 37, 129)
    (region,) = regions_of(adam, *state(*sizes))
    graph = graph_of(region)
    assert len(components(graph)) == 6
    assert (len(region.inputs), len(region.outputs)) == (24, 18)
    assert region.workload is not None
    assert region.workload.label.endswith("of 6 parts")
    assert region.workload.family == ""
    check(region)


@pytest.mark.slow
def test_a_step_over_many_tensors_is_few_regions_in_few_launches() -> None:
    regions = regions_of(adam, *state(*range(2, 70)))
    assert [len(components(graph_of(r))) for r in regions] == [64, 4]
    for r in regions:
        plan = make_plan(graph_of(r))
        assert len(plan.launches) == 1
        assert len(set(plan.leaders)) == 1


def test_equal_updates_of_large_tensors_join_and_other_large_work_does_not() -> None:
    def f(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, ...]:
        return torch.exp(a) + 1, torch.exp(b) + 1, torch.softmax(c, 1), torch.tanh(d)

    with FakeTensorMode() as mode:
        made = [mode.from_tensor(torch.empty(1500, 1500)) for _ in range(4)]
        regions = find_regions(make_fx(f, select_decomp_table(), tracing_mode="fake")(*made))
    assert [len(components(graph_of(r))) for r in regions] == [2, 1, 1]


def test_small_independent_regions_join_and_dependent_ones_do_not() -> None:
    def f(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return torch.tanh(x) @ w, torch.softmax(y, 1), torch.relu(x @ w) * 2

    regions = regions_of(f, t(4, 4), t(6, 10), t(4, 4))
    assert len(regions) == 2
    assert sorted(len(components(graph_of(r))) for r in regions) == [1, 2]
    for r in regions:
        check(r)


def test_regions_that_read_one_tensor_join() -> None:
    """Its sum and its other readers are separate parts of the same kernel."""
    x = t(64, 64)
    (region,) = regions_of(lambda x: (x.sum(0), torch.softmax(x, 1)), x)
    assert len(components(graph_of(region))) == 1
    check(region)


def test_parts_that_share_the_numbers_of_elements_are_apart() -> None:
    """They are equal parts of one kernel. Connected, the dropouts of eight layers compiled for 98 s, one for 15."""
    (region,) = regions_of(lambda x, y: (dropout(x.exp(), 0.5), dropout(y.exp(), 0.5)), t(6, 8), t(6, 8))
    assert len(components(graph_of(region))) == 2
    assert region.workload is not None
    assert region.workload.label.endswith("of 2 parts")
    check(region)


BIG, LIKE = 1 << 30, family_of(canonical(update(1000)))


def one(place: int = 0, moved: int = BIG, family=None, pointers: int = 4, **reads: int) -> Candidate:
    return Candidate((place,), pointers, reads, moved, family)


def test_which_regions_may_join() -> None:
    small = one(moved=1000)
    assert may_join([small, small], small)
    assert not may_join([small], one(1, moved=1000))
    assert not may_join([small], one())
    assert not may_join([one()], one())
    assert may_join([one(family=LIKE)], one(family=LIKE))
    assert not may_join([one(family=LIKE), one()], one(family=LIKE))
    assert not may_join([one(family=LIKE)], one(family=family_of(canonical(softmax(4, 8)))))
    assert may_join([one(x=BIG // 4)], one(x=BIG // 4))
    assert not may_join([one(x=BIG // 5)], one(x=BIG // 5))
    assert not may_join([small] * 64, small)
    assert not may_join([one(moved=1000, pointers=MOST_POINTERS)], small)
    assert not may_join([None], small)
    assert not may_join([small], None)


def test_bundles_make_no_cycle() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        order = list(range(rng.randint(2, 20)))
        before = {i: sorted(rng.sample(range(i), min(i, rng.randint(0, 2)))) for i in order}
        groups = [[i] for i in order if rng.random() < 0.6]
        bundles = bundle_groups(Flow(order, before, set()), groups, lambda members, k: True)
        assert sorted(k for b in bundles for k in b) == list(range(len(groups)))
        joined = [[i for k in b for i in groups[k]] for b in bundles]
        assert acyclic(order, before, joined), seed
        for a in range(len(joined)):
            for b in range(a + 1, len(joined)):
                merged = [g for k, g in enumerate(joined) if k not in (a, b)] + [joined[a] + joined[b]]
                touch = _path(before, joined[a], joined[b]) or _path(before, joined[b], joined[a])
                assert touch or not acyclic(order, before, merged), (seed, joined[a], joined[b])


def _path(before: dict[int, list[int]], start: list[int], end: list[int]) -> bool:
    stack, seen = list(end), set()
    while stack:
        i = stack.pop()
        if i in start:
            return True
        if i not in seen:
            seen.add(i)
            stack += before[i]
    return False


# ---- the canonical form ---------------------------------------------------------------------------------------------


def several() -> Graph:
    return beside(
        update(40, rate=True), softmax(3, 8), update(9, rate=True), update(), layer_norm(4, 8), update(40, rate=True),
        shared={(2, 2): (0, 2), (5, 2): (0, 2)},
    )  # fmt: skip


def test_any_order_of_parts_gives_one_form() -> None:
    graph = canonical(several())
    assert canonicalize(graph)[0] == graph
    assert len(components(graph)) == 6
    for seed in range(8):
        mixed = shuffled(graph, seed)[0]
        assert canonicalize(mixed)[0].to_json() == graph.to_json()


def test_orders_map_slots_and_outputs() -> None:
    graph = several()
    form, slots, outputs = canonicalize(simplify(graph))
    inputs = make_inputs(graph, seed=1, special=False)
    got = interpret(form, [inputs[s] for s in slots])
    want = interpret(graph, inputs)
    for k, o in enumerate(outputs):
        torch.testing.assert_close(got[k].reshape(-1), want[o].reshape(-1))


def test_equal_parts_and_families_are_side_by_side() -> None:
    graph = canonical(beside(update(9), softmax(3, 8), update(40), softmax(5, 8), update(9)))
    extents = [tuple(part(graph, p)[0].extents) for p in components(graph)]
    assert sorted(extents) == [(3, 8), (5, 8), (9,), (9,), (40,)]
    lengths = [len(e) for e in extents]
    assert lengths in ([1, 1, 1, 2, 2], [2, 2, 1, 1, 1])
    for n in (1, 2):  # the longest of a family first
        rows = [e[0] for e in extents if len(e) == n]
        assert rows == sorted(rows, reverse=True)


def test_many_equal_parts_take_no_time() -> None:
    import time

    graph = simplify(beside(*(update(64, 64) for _ in range(64))))
    start = time.process_time()
    form = canonicalize(graph)[0]
    assert time.process_time() - start < 10
    assert len(components(form)) == 64


def test_parts_have_rows_and_the_whole_has_none() -> None:
    graph = canonical(beside(update(9), update(40)))
    assert row_extent(graph) == 0
    work = to_workload(graph)
    assert (work.family, work.extent) == ("", 0)
    own = [part(graph, p)[0] for p in components(graph)]
    assert {row_extent(g) for g in own} == {9, 40}


def test_connected_values() -> None:
    b = Build(4, 6)
    x, y, rate = b.load("float32", 0), b.load("float32", 1), b.load("float32")
    scale = b.mul(rate, b.const(2.0))
    b.out(b.mul(x, scale), "float32")
    b.out(b.mul(y, scale), "float32")
    b.out(scale, "float32")
    assert components(b.graph()) == ((0,), (1,), (2,))
    total = b.reduce("sum", x, 0)  # a number made by a reduction is not computed twice
    b.out(b.mul(y, total), "float32")
    assert components(b.graph()) == ((0, 1, 3), (2,))
    b.out(scale, "float32", axes=(0,))  # a number that is stored along an axis goes with the axis
    assert components(b.graph()) == ((0, 1, 3, 4), (2,))
    assert components(replace(b.graph(), outputs=())) == ()


# ---- families -------------------------------------------------------------------------------------------------------


def test_families() -> None:
    long, short, number = (family_of(canonical(update(*n))) for n in ((40,), (9,), ()))
    assert long == short
    assert long.key != number.key
    assert long.has(number)
    assert number.has(long)
    assert number.has(number)
    assert not family_of(canonical(update(40, rate=True))).has(number)
    assert not family_of(canonical(softmax(4, 8))).has(family_of(canonical(softmax(4, 9))))
    assert family_of(canonical(softmax(4, 8))).has(family_of(canonical(softmax(7, 8))))
    b = Build(40)
    b.out(b.mul(b.load("float32", 0), b.add("index", axes=(0,), scale=1)), "float32")
    assert single(canonical(b.graph())) is None  # where an element is matters


# ---- plans ----------------------------------------------------------------------------------------------------------


def test_pack() -> None:
    graph = canonical(beside(update(40), softmax(3, 8), update(9), layer_norm(4, 8)))
    apart = greedy(graph)
    assert [len(launch) for launch in apart] == [1, 1, 1, 1]
    together = pack(build_plan(graph, apart))
    assert len(together) == 1
    assert pack(build_plan(graph, together)) == together
    assert read_text(write_text(together)) == together
    assert make_plan(graph).text == write_text(together)
    assert make_plan(graph, "cpu").text == write_text(apart)


def two_steps() -> Graph:
    """A sum over everything, then a row-wise use of it: two groups, one after the other."""
    b = Build(6, 10)
    x = b.load("float32", 0, 1)
    total = b.reduce("sum", x, 0, 1)
    b.out(b.reduce("max", b.div(x, total), 1), "float32")
    return b.graph()


def test_pack_separates_groups_from_their_producers() -> None:
    graph = canonical(beside(two_steps(), update(40), two_steps()))
    apart = greedy(graph, "cpu")
    assert len(apart) == 5
    packed = build_plan(graph, pack(build_plan(graph, apart)))
    made = {n: k for k, g in enumerate(packed.groups) for kind, n in g.outputs if kind == "scratch"}
    place = {g: n for n, launch in enumerate(packed.launches) for g in launch}
    waits = [(made[n], k) for k, g in enumerate(packed.groups) for kind, n in g.inputs if kind == "scratch"]
    assert len(waits) == 2
    assert all(place[a] < place[b] for a, b in waits)
    assert len(packed.launches) < len(apart)
    assert {r for g in packed.groups for r in g.roots} == {r for launch in apart for g in launch for r in g}


def test_a_launch_has_room_for_so_many_tensors() -> None:
    graph = canonical(beside(*(update(8 + n) for n in range(130))))
    plan = make_plan(graph)
    counts = [sum(len(plan.groups[k].inputs) + len(plan.groups[k].outputs) for k in launch) for launch in plan.launches]
    assert max(counts) <= MOST_POINTERS
    assert sorted(map(len, plan.launches)) == [5, 125]
    assert len(set(plan.leaders)) == 1


# ---- schedules ------------------------------------------------------------------------------------------------------


def test_one_set_of_parameters_for_a_family() -> None:
    task = task_of(beside(*(update(n) for n in (40, 9, 100))))
    names = {p.name for p in task.space()}
    assert len({n.partition(".")[0] for n in names}) == 1
    config = task.default()
    assert set(config) <= names
    assert task.normalize(config) == config
    leader = task.plan.leaders[0]
    assert task.plan.groups[leader].graph.extents == (100,)
    # The long form, with parameters for every group, equals the leader's.
    plain = {k.partition(".")[2]: v for k, v in config.items()}
    long: Config = {f"g{k}.{n}": v for k in range(3) for n, v in plain.items()}
    assert task.normalize(long) == config


@pytest.mark.parametrize("blocks", [(64, 8), (256, 1), (32, 4)])
def test_a_launch_has_one_block_size(blocks: tuple[int, int]) -> None:
    task = task_of(beside(update(400), softmax(30, 64), row_sums(20, 50)))
    rows = [k for k, g in enumerate(task.plan.groups) if len(g.graph.extents) == 2]
    config = task.default()
    config[f"g{rows[0]}.threads_per_row"], config[f"g{rows[0]}.rows_per_block"] = blocks
    made = task.normalize(config)
    sizes = {int(made[f"g{k}.threads_per_row"]) * int(made[f"g{k}.rows_per_block"]) for k in range(3)}
    assert len(sizes) == 1
    assert task.normalize(made) == made
    task.build(made)


# ---- running on a CPU -----------------------------------------------------------------------------------------------


def test_a_packed_plan_runs_on_a_cpu() -> None:
    task = task_of(beside(update(40), softmax(3, 8), update(), update(9)), "cpu")
    bench = FusionBench(task.workload, "cpu")
    apart = task.default()
    for config in (apart, apart | {"plan": write_text(pack(build_plan(task.graph, greedy(task.graph))))}):
        config = task.normalize(config)
        verdict = bench.verify(bench.load(config, task.build(config)), seed=3)
        assert verdict.ok, verdict.detail
