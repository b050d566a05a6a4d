"""Stored algorithms of products at deployment: used where they win, given up where they fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autotune
from autotune import numerics
from autotune.compiler.capture.recording import capture
from autotune.compiler.lower.facts import GraphFacts
from autotune.compiler.regions.epilogues import Product, products_of
from autotune.compiler.regions.find import regions_from
from autotune.domain import domain_of, open_task
from autotune.domains.fusion.program_spec import workloads_of
from autotune.store import Store
from autotune.workload import Workload
from tests.support.cublas import VERSION, Library, emulate
from tests.support.deployment import store_default


class Block(nn.Module):
    """A feed-forward layer of a transformer, in half precision."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(32, 64, dtype=torch.bfloat16), nn.Linear(64, 32, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(32, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x + self.down(F.gelu(self.up(x), approximate="tanh")))
        return out


X = torch.randn(2, 1024, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
GRADIENT = torch.randn(2, 1024, 32, generator=torch.Generator().manual_seed(2)).bfloat16()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    monkeypatch.setenv("AUTOTUNE_PRODUCTS", "search")
    return emulate(monkeypatch, broken=(7,))


def stored(db: str, *, train: bool = False, **changes: Any) -> list[Workload]:
    """Store an algorithm for each product with an epilogue, as if a search had found it."""
    found = []
    with Store.open(db) as store:
        for workload, _ in workloads_of(Block().requires_grad_(train), (X,), train=train):
            if workload.kind == "product" and workload.spec["epilogue"] not in ("", "bias"):
                store_default(store, workload, edit=lambda s: replace(s, **changes))
                found.append(workload)
    torch._dynamo.reset()
    return found


def products() -> list[Product]:
    """Those of a block in inference."""
    with torch.no_grad():
        (graph,) = capture(Block(), (X,))
    facts = GraphFacts(graph.module.graph)
    return products_of(facts, regions_from(facts), VERSION)


def counted() -> dict[str, int]:
    from autotune.runtime.deployment import deployment

    found = {name: n for name, n in autotune.counters().items() if n}
    deployment().reset_counters()
    return found


@torch.no_grad()
def deployed() -> dict[str, int]:
    torch._dynamo.reset()
    block = Block()
    torch.testing.assert_close(autotune.compile(block)(X), block(X), rtol=2e-2, atol=6e-2)
    return counted()


def test_products_are_left_alone_unless_asked_for(library: Library, db: str) -> None:
    assert stored(db)
    autotune.configure(products="leave")
    assert "products" not in deployed()
    assert not library.calls
    assert all(workload.kind != "product" for workload, _ in workloads_of(Block().requires_grad_(False), (X,)))


def test_a_stored_algorithm_is_used(library: Library, db: str) -> None:
    found = stored(db, config={"algorithm": 3})
    assert [workload.spec["epilogue"] for workload in found] == ["gelu", "bias_add"]
    counters = deployed()
    assert library.calls == [("gelu", 3), ("bias_add", 3)]
    assert counters["products"] == 2


def test_the_rest_of_a_region_is_looked_up_as_a_region(library: Library, db: str) -> None:
    stored(db)
    with Store.open(db) as store:
        (rest,) = [p.rest for p in products() if p.rest is not None]
        assert rest in dict(workloads_of(Block().requires_grad_(False), (X,))), "a search finds it, too"
        store_default(store, rest)
    counters = deployed()
    assert counters["products"] == 2
    assert counters["hits"] == 3, "two products and the norm"


def test_a_look_up_lists_products(library: Library, db: str) -> None:
    found = stored(db)
    block = Block().requires_grad_(False)
    rows = {row.workload.fingerprint: row for row in autotune.lookup(block, X, explain=True) if row.workload}
    for workload in found:
        assert rows[workload.fingerprint].level == "exact"
        assert [step.rung for step in rows[workload.fingerprint].ladder] == ["exact"]
    (alone,) = [row for row in rows.values() if row.workload and row.workload.spec.get("epilogue") == "bias"]
    assert alone.level == "none"
    assert alone.reason == "not tuned on this device"
    assert [step.outcome for step in alone.ladder] == ["empty"]
    autotune.configure(products="leave")
    assert not {w.fingerprint for w in found} & {
        row.workload.fingerprint for row in autotune.lookup(block, X) if row.workload
    }


def test_without_an_entry_the_program_stays_as_it_is(library: Library, db: str) -> None:
    Store.open(db).close()
    assert "products" not in deployed()
    with Store.open(db) as store:
        assert "product" in {found.kind for m in store.misses() if (found := store.get_workload(m.workload))}
    assert library.calls == []


@pytest.mark.parametrize(
    "changes",
    [
        {"latency_us": 14.9},
        {"config": None, "artifact": None},
        {"baselines": {"eager": 20.0}},
        {"config": {"algorithm": 99}},
        {"config": {"algorithm": "0"}},
    ],
)
def test_an_algorithm_that_wins_too_little_or_is_none_is_not_used(
    changes: dict[str, Any], library: Library, db: str
) -> None:
    stored(db, **changes)
    assert "products" not in deployed()
    assert library.calls == []


def test_a_faster_kernel_of_the_region_decides_against_the_product(library: Library, db: str) -> None:
    stored(db)
    rests = [product.rest for product in products()]
    with Store.open(db) as store:
        for workload, _ in workloads_of(Block().requires_grad_(False), (X,)):
            if workload.kind == "fusion" and workload not in rests:
                store_default(store, workload, edit=lambda s: replace(s, latency_us=2.0, baselines={"inductor": 9.0}))
    assert "products" not in deployed()


def test_training_by_stored_algorithms_has_the_same_gradients(library: Library, db: str) -> None:
    stored(db, train=True)
    block, x = Block(), X.clone().requires_grad_()
    exact, y = Block().float(), X.float().requires_grad_()
    want = torch.autograd.grad(exact(y), [y, *exact.parameters()], GRADIENT.float())
    torch._dynamo.reset()
    got = torch.autograd.grad(autotune.compile(block)(x), [x, *block.parameters()], GRADIENT)
    assert ("gelu_aux", 0) in library.calls
    assert ("dgelu", 0) in library.calls
    for mine, theirs in zip(got, want, strict=True):
        assert (mine.float() - theirs).norm() <= 2e-2 * theirs.norm()


def test_an_algorithm_that_fails_gives_way_to_the_program(
    library: Library, db: str, caplog: pytest.LogCaptureFixture
) -> None:
    stored(db, config={"algorithm": 7})
    assert deployed()["fallbacks"] == 2
    assert library.calls == []
    assert "failed and is not used any more" in caplog.text


def test_another_version_of_the_library_is_another_workload(
    library: Library, db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from autotune.runtime.launch import cublaslt

    stored(db)
    monkeypatch.setattr(cublaslt, "version", lambda: "cublasLt of later")
    assert "products" not in deployed()


def test_a_wrong_algorithm_fails_verification(monkeypatch: pytest.MonkeyPatch, db: str) -> None:
    emulate(monkeypatch, wrong=(1,))
    for train in (False, True):
        for workload, _ in workloads_of(Block().requires_grad_(train), (X,), train=train):
            if workload.kind == "product":
                task, bench = open_task(workload, "cpu"), domain_of("product").open_bench(workload, "cpu")
                artifact = task.build(task.default())
                right = bench.verify(bench.load({"algorithm": 0}, artifact), 1)
                assert right.ok, right.detail
                assert not bench.verify(bench.load({"algorithm": 1}, artifact), 1).ok


def test_inductor_s_code_is_compiled_ahead(
    library: Library, db: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process parallel to the worker fills Inductor's cache, which the worker's baselines read."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    (workload,) = [w for w in stored(db) if "rest" in w.source]
    domain = domain_of("product")
    with torch._inductor.config.patch(fx_graph_cache=True):
        domain.compile_baselines(workload, "cpu")
        there = set(tmp_path.glob("fxgraph/*/*/*"))
        assert len(there) == 2, "the whole program, and the rest behind the product"
        bench = domain.open_bench(workload, "cpu")
        candidate = bench.load({"algorithm": 0}, open_task(workload, "cpu").build({"algorithm": 0}))
        (baseline,) = bench.baselines().values()
        torch.testing.assert_close(candidate(), baseline()(), rtol=2e-2, atol=6e-2)
        assert set(tmp_path.glob("fxgraph/*/*/*")) == there


def test_a_product_in_tf32_is_verified_by_numbers_that_tf32_has(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, wrong=(1,))
    monkeypatch.setenv("AUTOTUNE_PRODUCTS", "search")
    numerics.restore({"cuda.matmul.fp32_precision": "tf32"})
    linear = nn.Linear(768, 768).requires_grad_(False)
    (workload,) = [w for w, _ in workloads_of(linear, (torch.randn(1024, 768),)) if w.kind == "product"]
    assert workload.spec["dtype"] == "float32"
    bench = domain_of("product").open_bench(workload, "cpu")
    for x in bench.given:
        assert torch.equal(x, x.bfloat16().float())
    task = open_task(workload, "cpu")
    assert bench.verify(bench.load({"algorithm": 0}, task.build(task.default())), 1).ok
    assert not bench.verify(bench.load({"algorithm": 1}, task.build(task.default())), 1).ok


def test_a_verdict_leaves_a_product_with_its_region(library: Library, db: str) -> None:
    from autotune.runtime.backend import trial_backend
    from autotune.runtime.inductor.verdict import Trial

    stored(db)
    trial = Trial()
    with torch.no_grad():
        torch.compile(Block(), backend=trial_backend(trial))(X)
        assert len(library.calls) == 2
        torch._dynamo.reset()
        torch.compile(Block(), backend=trial_backend(Trial(frozenset(trial.families))))(X)
    assert len(library.calls) == 2


def test_a_damaged_workload_is_not_searched(library: Library, db: str) -> None:
    workload, _ = stored(db)
    domain = domain_of("product")
    assert domain.damage(workload) is None
    for change in ({"m": -1}, {"epilogue": "rm"}, {"a": [1, False]}, {"dtype": "float64"}):
        assert domain.damage(replace(workload, spec={**workload.spec, **change}))
