"""Random programs as a user runs them: torch.compile(backend="autotune") with a kernel stored for every region."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from autotune.domain import open_task
from autotune.measure.verify import compare
from autotune.runtime.backend import deploy_backend
from autotune.runtime.control import counters
from autotune.runtime.deployment import Deployment, deployment, use
from autotune.store import Store
from tests.support.deployment import store_default
from tests.support.random_programs.checks import eager_in_double, regions_of
from tests.support.random_programs.families import long_program, program
from tests.support.random_programs.programs import Program
from tests.support.zoo import random_configs


@pytest.fixture
def db(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    path = str(tmp_path / "tuned.db")
    monkeypatch.setenv("AUTOTUNE_DB", path)
    deployment().reset_counters()
    yield path
    use(Deployment())


def store_all(p: Program, db: str, seed: int | None = None) -> int:
    """Stores the default configuration of every region as if a search had found it; how many regions there are.

    With a ``seed``, a random configuration.
    """
    found = [r.workload for r in regions_of(p) if r.workload is not None]
    with Store.open(db) as store:
        for w in dict.fromkeys(found):
            drawn = [] if seed is None else random_configs(open_task(w, "cpu"), 1, seed)
            store_default(store, w, config=lambda default, drawn=drawn: drawn[0] if drawn else default)
    return len(found)


def _has_elements(p: Program) -> bool:
    return not any(0 in i.shape for i in p.inputs)


def _infers(seed: int) -> bool:
    """False for programs of the other tests: those with autograd, or without elements."""
    p = program(seed)
    return not p.train and _has_elements(p)


@pytest.mark.programs(0.3, _infers)
def test_compiled_programs_agree_with_eager(seed: int, db: str) -> None:
    p = program(seed)
    check(p, store_all(p, db), seed)


@pytest.mark.programs(0.1, lambda seed: _has_elements(long_program(seed)))
def test_long_programs_with_random_schedules_agree_with_eager(seed: int, db: str) -> None:
    p = long_program(seed)
    check(p, store_all(p, db, seed), seed)


def check(p: Program, regions: int, seed: int) -> None:
    """Run a compiled program and compare its results with eager mode's in float64; each region has to be deployed."""
    inputs = p.arguments(seed)
    with torch.no_grad():
        graph = make_fx(p.fn)(*inputs)
    longest = max((i.span for i in p.inputs), default=1)
    torch._dynamo.reset()
    with torch.no_grad():
        got = torch.compile(p.fn, backend=deploy_backend, dynamic=False)(*inputs)
    assert counters().hits == regions
    assert counters().fallbacks == 0
    for k, (a, want) in enumerate(zip(got, eager_in_double(graph, inputs), strict=True)):
        assert a.shape == want.shape
        verdict = compare(a, want, a.dtype, longest)
        assert verdict.ok, f"result {k}: {verdict.detail}\n{p}"
