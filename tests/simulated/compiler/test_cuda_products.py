"""Random matrix products with operators before and after them, in simulated CUDA kernels of every scheme."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autotune.compiler.planner.groups import group_configs
from autotune.compiler.schedules.cuda import scheme_of
from autotune.domains.fusion.task import FusionTask
from tests.support.simulator.groups import check_group
from tests.support.zoo import BF16, F16, F32, I8, Case, T, random_configs, workloads_of

Fn = Callable[..., Tensor]


def after(rng: random.Random) -> Callable[[Tensor], Tensor]:
    return rng.choice(
        [
            torch.tanh,
            lambda y: torch.softmax(y, -1),
            lambda y: y.sum(0),
            lambda y: F.silu(y) * 0.5 + 1,
            lambda y: y.amax(-1, keepdim=True) - y,
            lambda y: y.transpose(-1, -2).relu(),
            lambda y: torch.cat([y, y.neg()], -1),
        ]
    )


def program(seed: int) -> Case:
    """A product of random form, types and sizes, 1 and odd ones among them."""
    rng = random.Random(seed)
    few = [1, 1, 2, 3, 5, 8, 12]
    m, k, n = rng.choice(few), rng.choice([1, 2, 7, 8, 16, 33, 64, 96]), rng.choice([1, 3, 8, 20, 32, 48])
    dtype, end, form = rng.choice([F32, F16, BF16]), after(rng), rng.randrange(6)
    x, w, b = T(m, k, d=dtype), T(n, k, d=dtype), T(n, d=dtype)
    if form == 0:
        return Case(f"linear_{seed}", lambda x, w, b: end(F.linear(x, w, b)), (x, w, b))
    if form == 1:
        return Case(f"mm_{seed}", lambda x, w: end(x @ w), (x, T(k, n, d=dtype)))
    if form == 2:
        batch = rng.choice([1, 2, 3])
        return Case(f"bmm_{seed}", lambda x, w: end(x @ w), (T(batch, m, k, d=dtype), T(batch, k, n, d=dtype)))
    if form == 3:
        return Case(f"gated_{seed}", lambda x, w, v: end((x @ w.t()) * torch.sigmoid(x @ v.t())), (x, w, w))
    if form == 4:
        ins = (T(1, k, d=dtype), T(n, k, d=I8), T(n, 1, d=dtype))
        return Case(f"bytes_{seed}", lambda x, w, s: end(x @ (w.to(dtype) * s).t()), ins)
    halves = (T(m, k, d=dtype), T(2 * n, k, d=dtype))
    return Case(f"halves_{seed}", lambda x, w: end((x @ w.t())[:, :n] * (x @ w.t())[:, n:]), halves)


@pytest.mark.parametrize("seed", range(24))
def test_random_products(seed: int) -> None:
    for work in workloads_of(program(seed)):
        task = FusionTask(work, "cuda:0", target="sm_90", sms=3)
        for n, config in enumerate([task.default(), *random_configs(task, 2, seed)]):
            for group, part in zip(task.plan.groups, group_configs(task.plan, config), strict=True):
                check_group(group.graph, scheme_of(group.graph).emit(group.graph, part, 3), seed=n, special=n == 2)


def test_a_step_of_a_recurrence_is_one_kernel() -> None:
    """At the sizes of DIEN's and CRNN's; it compiles for the device."""
    from tests.support.zoo import gru_step, lstm_steps

    dien = Case("dien", gru_step, (T(256, 36), T(256, 108), T(108, 36), T(108)))
    crnn = Case(
        "crnn", lstm_steps, (T(2, 8, 256, d=F16), T(2, 8, 256, d=F16), T(2, 8, 1024, d=F16), T(2, 256, 1024, d=F16))
    )
    for case in (dien, crnn):
        (work,) = workloads_of(case)
        task = FusionTask(work, "cuda:0", target="sm_90", sms=132)
        (kernel,) = task.build(task.default()).kernels
        assert kernel.code
