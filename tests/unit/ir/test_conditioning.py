"""Distances between correct kernels of a program that magnifies rounding."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from autotune.domains.fusion.program_spec import workloads_of
from autotune.ir.graph import Graph
from autotune.ir.oracle import as_stored, interpret, slack
from autotune.measure.verify import compare


def mean(x: Tensor) -> Tensor:
    return x.mean(-1) + 0.0


def centred(rows: int, terms: int, largest: int) -> Tensor:
    """Rows whose terms cancel, of sizes from 2^-largest to 2^largest."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(rows, terms, dtype=torch.float64, generator=rng)
    size = 2.0 ** torch.randint(-largest, largest + 1, (rows, 1), generator=rng)
    return ((x - x.mean(-1, keepdim=True)) * size).float()


def test_the_means_of_many_rows_that_cancel_may_be_summed_in_any_order() -> None:
    """A layer norm of ConvNeXt-B was given up on an H200: one of 401408 rows was 1.07 times its tolerance off."""
    x = centred(60_000, 128, largest=6)
    ((work, _),) = workloads_of(mean, (x,))
    graph = Graph.from_json(work.spec)
    (want,) = interpret(graph, [x])
    one_by_one = torch.from_numpy(np.cumsum(x.numpy(), 1, dtype=np.float32)[:, -1] / np.float32(x.shape[1]))
    (more,) = slack(graph, [x], [want], x.device)
    assert not compare(one_by_one, want, "float32", x.shape[1]).ok
    assert compare(one_by_one, want, "float32", x.shape[1], slack=more).ok
    wrong = one_by_one.clone()
    wrong[7] += 1e-4 * float(x[7].abs().max())
    assert not compare(wrong, want, "float32", x.shape[1], slack=more).ok


def summed_and_normed(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    z = x + y
    return z, torch.nn.functional.layer_norm(z, z.shape[-1:])


def test_a_result_may_be_read_back_as_it_was_stored() -> None:
    """Two of MLP-Mixer's layer norms were given up on an H200: plans that read the sum back were 1.02 and 1.04 times
    their tolerance off, as eager mode is."""
    rng = torch.Generator().manual_seed(0)
    x, y = (torch.randn(256, 64, generator=rng).add(4).bfloat16() for _ in range(2))
    ((work, _),) = workloads_of(summed_and_normed, (x, y))
    graph = Graph.from_json(work.spec)
    flat = [x.flatten(), y.flatten()]
    want = interpret(graph, flat)
    (norm,) = (k for k, o in enumerate(graph.outputs) if "sum" in kinds_before(graph, o.value))
    exact = want[norm]

    def read_back(z: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(z.double(), (64,)).bfloat16().reshape(exact.shape)

    more = slack(graph, flat, want, x.device)[norm]
    assert not compare(read_back(x + y), exact, "bfloat16", 64).ok
    assert compare(read_back(x + y), exact, "bfloat16", 64, slack=more).ok
    two_bits_less = (x.double() + y.double()).mul(4).round().div(4)
    assert not compare(read_back(two_bits_less), exact, "bfloat16", 64, slack=more).ok
    assert not compare(exact.mul(1 + 2.0**-5).bfloat16(), exact, "bfloat16", 64, slack=more).ok


def test_as_stored_ignores_results_that_nothing_reads_back() -> None:
    """Storing changes no bound of unused results, and of float32."""
    x = torch.randn(64, 32).bfloat16()
    for fn in (summed_and_normed, mean):
        args = (x.float(), x.float()) if fn is summed_and_normed else (x,)
        ((work, _),) = workloads_of(fn, args)
        assert as_stored(Graph.from_json(work.spec)) is None


def kinds_before(graph: Graph, value: int) -> set[str]:
    return {graph.values[i].op for i in graph.making([value])}


def is_low(x: Tensor) -> Tensor:
    return x.mean(-1) <= 0.0


def test_a_truth_may_be_either_where_rounding_turns_it() -> None:
    """ResNet-50's last norm was given up on an H200: 1 of 25,690,112 elements of its ReLU's mask was another."""
    cancel, clear = centred(500, 128, largest=6), torch.randn(500, 128, generator=torch.Generator().manual_seed(1))
    x = torch.cat([cancel, clear])
    ((work, _),) = workloads_of(is_low, (x,))
    graph = Graph.from_json(work.spec)
    (want,) = interpret(graph, [x])
    one_by_one = torch.from_numpy(np.cumsum(x.numpy(), 1, dtype=np.float32)[:, -1] <= np.float32(0))
    (either,) = slack(graph, [x], [want], x.device)
    assert either is not None
    assert not either[500:].any()
    assert not compare(one_by_one, want, "bool").ok
    assert compare(one_by_one, want, "bool", slack=either).ok
    for row in (500, 999):
        wrong = one_by_one.clone()
        wrong[row] ^= True
        assert not compare(wrong, want, "bool", slack=either).ok


def exact_mask(token: Tensor) -> Tensor:
    return (1.0 - (token > 3).float()) * 2.0 == 2.0


def twice(token: Tensor) -> Tensor:
    return token.float() * 2 == token.float() + token.float()


def test_a_truth_of_exact_numbers_is_one_thing() -> None:
    """A float32 value is not rounded."""
    token = torch.randint(0, 9, (16, 64))
    for fn in (exact_mask, twice):
        ((work, _),) = workloads_of(fn, (token,))
        graph = Graph.from_json(work.spec)
        flat = [token.flatten()]
        (want,) = interpret(graph, flat)
        assert want.any()
        (either,) = slack(graph, flat, [want], token.device)
        assert either is not None
        assert not either.any()
        assert not compare(torch.zeros_like(want), want, "bool", slack=either).ok
