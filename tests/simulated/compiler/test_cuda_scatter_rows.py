"""Sums at indices along rows, in simulated kernels: equal and missing indices, shared and separate lists, odd sizes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from autotune.compiler.kernel.nodes import Do
from autotune.compiler.program.scattered import scattered_rows
from autotune.compiler.schedules.cuda import scheme_of
from autotune.compiler.targets.cuda import scatter_rows as kernels
from autotune.compiler.targets.cuda.device import BARRIER, WARP_BARRIER
from autotune.compiler.targets.cuda.source import GroupKernels
from autotune.domains.fusion.task import FusionTask
from autotune.ir.graph import Graph
from autotune.ir.inputs import make_inputs
from autotune.space import load_space
from autotune.task import Config
from tests.support.edited import changed, without
from tests.support.simulator.errors import KernelError
from tests.support.simulator.groups import check_group, check_inputs, run_group
from tests.support.zoo import BF16, BY_NAME, F32, GATHERS, I64, Case, T, gather_backward, workloads_of

CASES = [case.name for case in GATHERS]


def graph_of(case: Case) -> Graph:
    (work,) = workloads_of(case)
    (group,) = FusionTask(work, "cuda:0", target="sm_90", sms=3).plan.groups
    return group.graph


def made(graph: Graph, config: Config) -> GroupKernels:
    scheme = scheme_of(graph)
    assert scheme.name == "scatter_rows"
    config = scheme.normalize(graph, scheme.default(graph) | config)
    assert scheme.reject(graph, config) is None
    return scheme.emit(graph, config, 3)


@pytest.mark.parametrize("name", CASES)
def test_default(name: str) -> None:
    graph = graph_of(BY_NAME[name])
    check_group(graph, made(graph, {}))


@pytest.mark.parametrize("name", ["gather_backward", "gather_own_backward", "gather_across_backward"])
def test_crowded_and_special(name: str) -> None:
    """Half of the indices are equal, and some terms are NaN or infinite."""
    graph = graph_of(BY_NAME[name])
    check_group(graph, made(graph, {}), special=True)


@pytest.mark.parametrize("value", [0, 47, -1, 48, 1 << 40])
def test_equal_indices_and_indices_outside(value: int) -> None:
    """All terms of a row have the same index; those of an index outside are ignored."""
    graph = graph_of(BY_NAME["gather_backward"])
    slot = graph.inputs.index("int64")
    inputs = make_inputs(graph, seed=3)
    inputs[slot].fill_(value)
    check_inputs(graph, made(graph, {}), inputs)
    inputs[slot][::3] = 5
    check_inputs(graph, made(graph, {"owned": 4}), inputs)


def test_more_tokens_than_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MOST_LISTED", 32)
    monkeypatch.setattr(kernels, "LISTED", 32)
    for name in ("gather_own_backward", "gather_across_backward"):
        graph = graph_of(BY_NAME[name])
        check_group(graph, made(graph, {"owned": 2}))


@pytest.mark.parametrize("name", CASES)
def test_seeds_and_random_configurations(name: str) -> None:
    graph = graph_of(BY_NAME[name])
    scheme = scheme_of(graph)
    configs = scheme.seeds(graph)
    space, rng = scheme.space_of(graph, load_space("fusion", "cuda")), random.Random(1)
    configs = [*configs[::4], *(scheme.normalize(graph, space.sample(rng)) for _ in range(3))]
    for config in configs:
        if scheme.reject(graph, config) is None:
            check_group(graph, scheme.emit(graph, config, 3))


def test_runs_are_equal() -> None:
    """The order of additions does not depend on the order of threads."""
    graph = graph_of(BY_NAME["gather_own_backward"])
    inputs = make_inputs(graph, seed=1, special=False)
    inputs[graph.inputs.index("int64")] %= 7
    kernel = made(graph, {})
    first, second = (run_group(graph, kernel, inputs, seed=seed)[0] for seed in (0, 1))
    assert torch.equal(first, second)


@pytest.mark.parametrize(("name", "barrier"), [("gather_backward", WARP_BARRIER), ("gather_across_backward", BARRIER)])
def test_barriers_are_needed(name: str, barrier: Do) -> None:
    """Without one kind of barrier, the simulator finds a race, or an index that no thread has written yet."""
    graph = graph_of(BY_NAME[name])
    group = made(graph, {})
    source = group.sources[0]
    broken = changed(source, without(barrier))
    with pytest.raises(KernelError, match=r"race|outside"):
        check_group(graph, replace(group, sources=(broken,)))


def test_layouts() -> None:
    """Indices that batches share are keys, listed once; terms are read across keys if those are adjacent in memory."""
    names = "gather_backward", "gather_own_backward", "gather_across_backward", "gather_middle_backward"
    shared, own, swapped, few = (scattered_rows(graph_of(BY_NAME[name])) for name in names)
    assert (shared.n_keys, shared.n_repeats, shared.is_across) == (20, 6, False)
    assert (own.n_keys, own.n_repeats, own.is_across) == (35, 1, False)
    assert (swapped.n_keys, swapped.n_repeats, swapped.is_across) == (16, 4, True)
    assert (few.n_keys, few.n_repeats, few.is_across) == (24, 1, True)


def test_the_longest_rows_of_sums() -> None:
    """As many sums a row as the translation permits fit shared memory in each type."""
    for dtype in (BF16, F32):
        graph = graph_of(Case("", gather_backward(1 << 14), (T(40, 16, d=dtype), T(40, 16, d=I64))))
        check_group(graph, made(graph, {}))


@pytest.mark.parametrize(("dtype", "sums"), [(BF16, 1 << 13), (BF16, 1 << 14), (torch.uint8, 1 << 14)])
def test_long_rows_of_narrow_terms_across_have_narrower_vectors(dtype: torch.dtype, sums: int) -> None:
    """A vector of 16 bytes would be for as many warps as have no room for their sums."""

    def fn(terms: Tensor, index: Tensor) -> Tensor:
        return torch.scatter_add(torch.zeros(32, sums), -1, index, terms.t().float() * 2)

    graph = graph_of(Case("", fn, (T(48, 32, d=dtype), T(32, 48, d=I64))))
    scheme = scheme_of(graph)
    assert scattered_rows(graph).is_across
    assert scheme.reject(graph, scheme.default(graph)) is None
    assert scheme.reject(graph, scheme.normalize(graph, scheme.default(graph) | {"vector_bytes": 32})) is None
    check_group(graph, made(graph, {}))


def test_one_list_for_all_rows_is_the_other_scheme() -> None:
    """Indices of the tokens alone, as in graph networks: a block then scans them for its destinations."""

    def fn(messages: Tensor, targets: Tensor) -> Tensor:
        return torch.scatter_add(messages.new_zeros((30, 16)), 0, targets[:, None].expand(messages.shape), messages)

    graph = graph_of(Case("", fn, (T(90, 16), T(90, d=I64))))
    assert scheme_of(graph).name == "scatter"
    check_group(graph, scheme_of(graph).emit(graph, scheme_of(graph).default(graph), 3))
