"""Sums at indices of the data, in simulated kernels: repeated, missing and crowded indices, and odd sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from autotune.compiler.kernel.nodes import Var
from autotune.compiler.planner.cost import Figures
from autotune.compiler.planner.groups import group_configs
from autotune.compiler.planner.latency import predict_cuda
from autotune.compiler.program.scattered import scattered
from autotune.compiler.schedules.cuda import scheme_of
from autotune.compiler.targets.cuda import scatter as cuda_scatter
from autotune.compiler.targets.cuda.device import BARRIER
from autotune.compiler.targets.cuda.source import GroupKernels
from autotune.domains.fusion.task import FusionTask
from autotune.ir.graph import Graph
from autotune.ir.inputs import make_inputs
from autotune.space import load_space
from autotune.task import Config
from tests.support.edited import changed, without
from tests.support.many_parts import run_packed, run_plan
from tests.support.simulator import intrinsics
from tests.support.simulator.errors import KernelError
from tests.support.simulator.groups import check_group, check_inputs, run_group
from tests.support.simulator.machine import Machine
from tests.support.zoo import (
    BF16,
    F16,
    F32,
    I32,
    I64,
    SCATTERS,
    Case,
    T,
    drawn,
    random_configs,
    scatter_tied,
    scatter_twice,
    workloads,
    workloads_of,
)

ALONE = torch.__version__ >= "2.13"
"""Whether the sums are the only region. Earlier versions compute masks of padding, and int64 places, beforehand."""


def graph_of(case: Case) -> Graph:
    """The one group of a case that has sums."""
    groups = [
        group for work in workloads_of(case) for group in FusionTask(work, "cuda:0", target="sm_90", sms=3).plan.groups
    ]
    (graph,) = (group.graph for group in groups if scheme_of(group.graph).name == "scatter")
    assert len(groups) == 1 or not ALONE
    return graph


def gradient(places: int, columns: int, tokens: int, d: torch.dtype = F32, i: torch.dtype = I64) -> Graph:
    """The gradient of an embedding, with a tied one added."""
    return graph_of(Case("", scatter_tied(places), (T(tokens, columns, d=d), T(tokens, d=i), T(places, columns, d=d))))


def made(graph: Graph, config: Config) -> GroupKernels:
    scheme = scheme_of(graph)
    assert scheme.name == "scatter"
    config = scheme.default(graph) | config
    assert scheme.normalize(graph, config) == config, "a configuration that is another in effect"
    assert scheme.reject(graph, config) is None
    return scheme.emit(graph, config, 3)


def shape(threads: int, match: int, vector_bytes: int, owned: int, unroll: int = 1) -> Config:
    return {
        "threads_per_row": threads, "rows_per_block": match, "vector_bytes": vector_bytes, "owned": owned,
        "unroll": unroll,
    }  # fmt: skip


def inputs_at(graph: Graph, places: Tensor, seed: int = 0) -> list[Tensor]:
    """Random inputs, with these places."""
    out = make_inputs(graph, seed=seed)
    (slot,) = [k for k, d in enumerate(graph.inputs) if d in ("int32", "int64")]
    out[slot] = places.to(out[slot].dtype)
    return out


@pytest.mark.parametrize("case", SCATTERS, ids=str)
def test_kernels_of_the_zoo(case: Case) -> None:
    schemes = []
    for work in workloads(case.name):
        task = FusionTask(work, "cuda:0", target="sm_90", sms=3)
        schemes += [scheme_of(group.graph).name for group in task.plan.groups]
        for n, config in enumerate([task.default(), *random_configs(task, 1, seed=5)]):
            for group, part in zip(task.plan.groups, group_configs(task.plan, config), strict=True):
                check_group(group.graph, scheme_of(group.graph).emit(group.graph, part, 3), seed=n, special=n % 2 == 1)
    assert "scatter" in schemes
    assert set(schemes) == {"scatter"} or not ALONE


@pytest.mark.parametrize(
    ("places", "columns", "tokens", "config", "dtype"),
    [
        (35, 24, 80, (2, 32, 4, 1), F16),  # several chunks of columns, a place a block
        (70, 24, 150, (8, 8, 4, 8), F32),  # threads without columns
        (70, 24, 152, (4, 16, 2, 64, 4), F32),  # more places than match lanes, and a part of a block without places
        (70, 24, 152, (4, 16, 2, 64, 4), BF16),
        (70, 24, 97, (8, 8, 1, 16, 2), BF16),  # an odd number of terms
        (5, 8, 300, (1, 64, 1, 4), F32),  # many terms a place
        (5, 8, 300, (1, 64, 1, 4), F16),
        (3, 7, 90, (4, 16, 1, 2), F32),  # an odd number of columns
        (3, 7, 90, (4, 16, 1, 2), BF16),
        (300, 8, 5, (2, 32, 2, 256, 8), F16),  # places without terms
    ],
)
def test_places_and_terms_of_all_numbers(
    places: int, columns: int, tokens: int, config: tuple[int, ...], dtype: torch.dtype
) -> None:
    graph = gradient(places, columns, tokens, dtype)
    threads, match, vec, *rest = config
    check_group(graph, made(graph, shape(threads, match, vec * dtype.itemsize, *rest)), special=dtype == F32)


@pytest.mark.parametrize("itype", [I64, I32])
@pytest.mark.parametrize("how", ["all one", "none", "out of range", "sorted", "crowded"])
def test_where_the_terms_go(how: str, itype: torch.dtype) -> None:
    graph = gradient(40, 8, 200, i=itype)
    places = torch.randint(0, 40, (200,), generator=torch.Generator().manual_seed(1))
    if how == "all one":
        places = torch.full((200,), 17)
    elif how == "none":
        places = torch.full((200,), -1)
    elif how == "out of range":
        places[::3] = torch.tensor([40, -40, 1 << 30, -(1 << 30)]).repeat(17)[:67]
    elif how == "sorted":
        places = places.sort().values
    else:
        places[:150] = 39
    for config in (shape(2, 32, 16, 8), shape(2, 32, 16, 1), shape(8, 8, 4, 64, 4)):
        check_inputs(graph, made(graph, config), inputs_at(graph, places))


@pytest.mark.parametrize("owned", [2, 8])
def test_more_terms_than_a_block_sorts(owned: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are taken in ranges of places, with a scan for each; where they are many, the scan takes several steps."""
    monkeypatch.setattr(cuda_scatter, "MOST_SORTED", 16)
    monkeypatch.setattr(cuda_scatter, "MOST_PACKS", 1)
    graph = gradient(11, 12, 600)
    kernels = made(graph, shape(4, 16, 16, owned))
    assert "total > 16" in kernels.sources[0].text
    check_group(graph, kernels, special=True)
    places = torch.full((600,), -1)
    places[::40] = 3  # one after another within a step, and over all steps
    places[500:510] = 10
    check_inputs(graph, kernels, inputs_at(graph, places))


@pytest.mark.parametrize("sums", [1, 2])
def test_one_crowded_destination_takes_few_scans_more(sums: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block scanned all indices once for each of its destinations, in 8 ms for a graph network of 240 000 edges."""
    monkeypatch.setattr(cuda_scatter, "MOST_SORTED", 64 if sums == 1 else 16)
    graph = gradient(64, 4, 1024) if sums == 1 else graph_of(TWO_SUMS)
    kernels = made(graph, shape(2, 32, 8, 32))
    slots = [k for k, d in enumerate(graph.inputs) if d in ("int32", "int64")]
    rounds = 0
    meeting = Machine._meet

    def meet(*given: Any) -> None:
        nonlocal rounds
        rounds += 1
        meeting(*given)

    monkeypatch.setattr(Machine, "_meet", meet)

    def rounds_with(crowded: int | None) -> int:
        """Rounds of the simulator, in each of which all threads run up to a barrier or an exchange with their warp."""
        nonlocal rounds
        inputs = make_inputs(graph, seed=1)
        for k in slots:
            places = torch.arange(len(inputs[k])) % (1 << 20) + 64  # no destination
            places[::16] = torch.arange(len(places[::16])) % 40
            if crowded is not None:
                places[1::2] = crowded
            inputs[k] = places.to(inputs[k].dtype)
        rounds = 0
        check_inputs(graph, kernels, inputs)
        return rounds

    even = rounds_with(None)
    for crowded in (0, 5, 31):
        assert rounds_with(crowded) <= 2 * even


TWO_SUMS = Case(
    "", scatter_twice, (T(3, 17, 24, d=F16), T(3, 17, d=I64), T(41, 24, d=F16), T(41, d=I32), T(40, 24, d=F16))
)


@pytest.mark.parametrize("config", [shape(2, 32, 8, 1), shape(2, 32, 8, 16), shape(8, 8, 4, 32, 2), shape(4, 16, 8, 2)])
@pytest.mark.parametrize("most", [2048, 16])
def test_several_sums(config: Config, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has separate tokens; an index is crowded if one of them has many."""
    monkeypatch.setattr(cuda_scatter, "MOST_SORTED", most)
    graph = graph_of(TWO_SUMS)
    assert len(scattered(graph).sums) == 2
    kernels = made(graph, config)
    check_group(graph, kernels, special=True)
    inputs = make_inputs(graph, seed=1)
    slots = [k for k, d in enumerate(graph.inputs) if d in ("int32", "int64")]
    inputs[slots[0]][:] = 7
    check_inputs(graph, kernels, inputs)


def embeddings(g: Tensor, ids: Tensor, h: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of two tables that share rows."""
    backward = torch.ops.aten.embedding_dense_backward
    return backward(g, ids, 30, 0, False), backward(g * 0.5 + h, kinds, 2, -1, False)


def test_tables_share_a_launch() -> None:
    rows = T(60, 16)
    (work,) = workloads_of(Case("", embeddings, (rows, T(60, d=I64), rows, T(60, d=I64))))
    task = FusionTask(work, "cuda:0", target="sm_90", sms=3)
    assert [len(launch) for launch in task.plan.launches] == [2]
    (grid,) = run_packed(task, special=True)
    assert grid > 2
    assert task.build(task.default()).kernels[0].code


def test_scatter_sums_with_a_consumer_are_two_groups() -> None:

    def normed(g: Tensor, ids: Tensor) -> Tensor:
        return torch.softmax(torch.ops.aten.embedding_dense_backward(g, ids, 24, -1, False), -1)

    (work,) = workloads_of(Case("", normed, (T(70, 16), T(70, d=I64))))
    task = FusionTask(work, "cuda:0", target="sm_90", sms=3)
    assert len(task.plan.groups) == 2
    run_plan(task, task.plan.text, seed=1)


def test_the_order_of_threads_does_not_matter() -> None:
    """Unlike sums by atomic additions: every bit is the same."""
    graph = gradient(12, 8, 400, F16)
    inputs = make_inputs(graph, seed=3)
    for config in (shape(2, 32, 8, 1), shape(2, 32, 8, 16)):
        kernels = made(graph, config)
        (one,), (other,) = (run_group(graph, kernels, inputs, seed=n) for n in (0, 1))
        assert torch.equal(one.view(torch.int16), other.view(torch.int16))


@pytest.mark.parametrize(
    "config", [shape(2, 32, 16, 1), shape(8, 8, 16, 16), shape(4, 16, 8, 64, 4), shape(8, 8, 4, 32)]
)
def test_other_inputs_of_the_sums_are_prefetched_during_the_scan(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line of 128 bytes once; nothing where there is nothing."""
    fetched: list[int] = []
    monkeypatch.setitem(intrinsics.PLAIN, "to_l2", lambda p, at: fetched.append(at // 32))
    tied, alone = gradient(75, 32, 30), graph_of(Case("", scatter_tied(75), (T(30, 32), T(30, d=I64), T())))
    if config["threads_per_row"] == 2:
        check_group(tied, made(tied, config | {"prefetch": False}))
    check_group(alone, made(alone, config | {"prefetch": False}))
    assert not fetched
    assert scheme_of(alone).default(alone)["prefetch"] is False
    check_group(tied, made(tied, config | {"prefetch": True}))
    assert set(fetched) == set(range(75))
    chunks = -(-32 // (int(config["threads_per_row"]) * int(config["vector_bytes"]) // 4))
    assert len(fetched) == 75 * chunks


def test_a_wrong_kernel_is_found() -> None:
    graph = gradient(40, 8, 200)
    kernels = made(graph, shape(2, 32, 16, 8))
    (good,) = kernels.sources
    place = Var("d0_0", "int64")
    for change, words in (
        (without(BARRIER), "race|outside a shared"),
        (lambda x: place > 0 if x == (place >= 0) else x, "output 0"),
    ):
        bad = changed(good, change)
        with pytest.raises(KernelError, match=words):
            check_group(graph, replace(kernels, sources=(bad,)))


def test_plan_cuts_scatters_with_further_reductions() -> None:
    def loss(grad: Tensor, ids: Tensor, tied: Tensor) -> tuple[Tensor, Tensor]:
        d = torch.ops.aten.embedding_dense_backward(grad, ids, 30, -1, False) + tied
        return d, (d * d).sum()

    (work,) = workloads_of(Case("", loss, (T(20, 16), T(20, d=I64), T(30, 16))))
    task = FusionTask(work, "cuda:0", target="sm_90", sms=3)
    kinds = [scheme_of(g.graph).name for g in task.plan.groups]
    assert kinds.count("scatter") == 1
    assert len(kinds) == 2
    for group, part in zip(task.plan.groups, group_configs(task.plan, task.default()), strict=True):
        check_group(group.graph, scheme_of(group.graph).emit(group.graph, part, 3))


def test_it_is_planned_as_it_is_scanned() -> None:
    """A block owns about as many bytes of results as it scans; few places are cut along the columns instead."""
    words, types = gradient(30522, 768, 4096, BF16), gradient(2, 768, 4096, BF16)
    scheme = scheme_of(words)
    large, small = scheme.default(words), scheme.default(types)
    assert large["threads_per_row"] * 8 == 768
    assert 4096 * 8 <= large["owned"] * 768 * 2 < 2 * 4096 * 8
    assert large["rows_per_block"] >= 4
    assert small["owned"] == 1
    assert 2 * 768 // (small["threads_per_row"] * 8) >= 90
    assert small["rows_per_block"] >= 64
    space = scheme.space_of(words, load_space("fusion", "cuda"))
    for config in [large, *scheme.seeds(words)]:
        assert all(space[name].index(value) is not None for name, value in config.items())
        assert predict_cuda(words, config, Figures(), "sm_90") > 0
    few = large | {"owned": 1}
    assert predict_cuda(words, few, Figures(), "sm_90") > 2 * predict_cuda(words, large, Figures(), "sm_90")


def test_random_configurations_of_a_large_one_are_distinguished() -> None:
    words = gradient(1000, 96, 4096, BF16)
    found = drawn(scheme_of(words), words, 12, seed=1)
    assert len({int(c["owned"]) for c in found}) > 2
    assert scattered(words).n_destinations == 1000


def test_it_compiles_at_the_size_of_bert() -> None:
    case = Case("bert", scatter_tied(30522, 0), (T(32, 128, 768, d=BF16), T(32, 128, d=I64), T(30522, 768, d=BF16)))
    (work,) = workloads_of(case)
    task = FusionTask(work, "cuda:0", target="sm_90", sms=132)
    (kernel,) = task.build(task.default()).kernels
    assert kernel.code
    assert kernel.resources["stack"] == 0
    assert kernel.resources["blocks_per_sm"] * kernel.resources["threads"] >= 1024


@pytest.mark.parametrize("name", ["scatter_odd", "scatter_numbers", "scatter_made"])
def test_others_compile(name: str) -> None:
    """Single elements, no columns at all, and rows that are made where they are added."""
    for work in workloads(name):
        task = FusionTask(work, "cuda:0", target="sm_90", sms=132)
        for kernel in task.build(task.default()).kernels:
            assert kernel.code
            assert kernel.resources["stack"] == 0
