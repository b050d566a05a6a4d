"""Dynamic shapes: one compilation, a kernel chosen by the sizes that come, misses noted by them."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from torch import nn
from torch.nn import functional as F

import autotune
from autotune.compiler.regions.aten import at_sizes, evaluate, expression_of, symbols_of
from autotune.errors import Unsupported
from autotune.runtime.inductor.region_call import RegionCall
from autotune.store import Store
from tests.support.deployment import Tune
from tests.support.runtime.calls import called
from tests.support.runtime.models import Block, assert_same_step, twin

WIDTH = 48


def compiled(model: Any, **kwargs: Any) -> Any:
    return torch.compile(model, backend="autotune", **kwargs)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


class Graphs:
    """Counts what Dynamo hands to a backend."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, gm: Any, inputs: Any) -> Any:
        self.count += 1
        return gm.forward


def compilations(model: Any, inputs: list[torch.Tensor], dynamic: bool | None) -> int:
    torch._dynamo.reset()
    graphs = Graphs()
    f = torch.compile(model, backend=graphs, dynamic=dynamic)
    for x in inputs:
        f(x)
    torch._dynamo.reset()
    return graphs.count


@pytest.mark.parametrize("dynamic", [None, True])
def test_every_number_of_rows_runs_stored_kernels_in_one_compilation(tune: Tune, dynamic: bool | None) -> None:
    model = Block().eval()
    inputs = [torch.randn(rows, WIDTH) for rows in (32, 64, 40, 24, 40, 7)]
    with torch.no_grad():
        regions = len(tune(model, (inputs[0],)))
        wanted = compilations(model, inputs, dynamic)
        f = compiled(model, dynamic=dynamic)
        for x in inputs:
            close(f(x), model(x))
    counters = autotune.counters()
    assert counters.graphs == wanted <= 2
    assert counters.hits == regions * wanted
    assert counters.misses == counters.fallbacks == 0
    assert counters.hits_other_rows >= regions * 3  # one for each size that was not tuned


class Batched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(F.gelu(self.inner(x)) + x)
        return out


def test_rows_that_are_a_product_of_two_sizes(tune: Tune) -> None:
    model = Batched().eval()
    with torch.no_grad():
        tune(model, (torch.randn(4, 16, WIDTH),))
        f = compiled(model, dynamic=True)
        for batch, length in ((4, 16), (3, 16), (5, 9), (2, 31), (3, 16)):
            x = torch.randn(batch, length, WIDTH)
            close(f(x), model(x))
    assert autotune.counters().graphs == 1
    assert autotune.counters().hits
    assert autotune.counters().misses == autotune.counters().fallbacks == 0


class Chained(nn.Module):
    """The second region reads what the first makes, directly and through a product."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Batched(), Batched()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x))
        return out


def test_a_region_that_reads_another_ones_results(tune: Tune) -> None:
    model = Chained().eval()
    with torch.no_grad():
        tune(model, (torch.randn(4, 16, WIDTH),))
        f = compiled(model, dynamic=True)
        for length in (16, 9):
            x = torch.randn(4, length, WIDTH)
            close(f(x), model(x))
    assert autotune.counters().hits == 2
    assert autotune.counters().misses == autotune.counters().fallbacks == 0


def test_the_size_that_was_tuned_is_met_exactly(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    from autotune.runtime import match

    model = Batched().eval()
    levels = []
    found = match.look_up
    monkeypatch.setattr(match, "look_up", lambda *a, **k: levels.append(m := found(*a, **k)) or m)
    with torch.no_grad():
        for rows in (16, 24):
            tune(model, (torch.randn(4, rows, WIDTH),))
        f = compiled(model, dynamic=True)
        f(torch.randn(4, 40, WIDTH))
        levels.clear()
        f(torch.randn(4, 24, WIDTH))
        f(torch.randn(4, 24, WIDTH))
    assert [(m.level, m.tuned.extent) for m in levels] == [("exact", 96)], "looked up once a size, and found as tuned"


def test_training_with_sequences_of_many_lengths(tune: Tune) -> None:
    model = Block()
    tune(twin(model), (torch.randn(32, WIDTH).requires_grad_(),))
    f, reference = compiled(model, dynamic=True), twin(model)
    for rows in (32, 20, 48, 20):
        model.zero_grad()
        reference.zero_grad()
        assert_same_step(f, model, reference, torch.randn(rows, WIDTH))
    assert autotune.counters().graphs == 2
    assert autotune.counters().hits
    assert autotune.counters().fallbacks == 0


def test_a_backward_pass_that_sums_over_the_rows(tune: Tune) -> None:
    """The weights' gradients and the input's: one kernel for all numbers of rows, many and few."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
    backward = tune(twin(model), (torch.randn(96, WIDTH).requires_grad_(),), select=lambda w: "backward" in w.label)
    assert [w.extent for w in backward] == [96]
    f, reference = compiled(model, dynamic=True), twin(model)
    sizes = (96, 16 * 96, 33, 17, 501, 33)
    for rows in sizes:
        model.zero_grad()
        reference.zero_grad()
        assert_same_step(f, model, reference, torch.randn(rows, WIDTH), tolerance=1e-4)  # of 1536 terms
    counters = autotune.counters()
    assert counters.hits == 1
    assert counters.hits_other_rows == len({*sizes} - {96})
    assert counters.fallbacks == counters.wrong_results == 0


def test_each_number_of_rows_counts_once(tune: Tune) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return F.softmax(x * 2, -1)

    tune(fn, (torch.randn(32, 56),))
    f = compiled(fn)
    for rows in (40, 24, 40):
        x = torch.randn(rows, 56)
        torch._dynamo.mark_dynamic(x, 0)
        close(f(x), fn(x))
    assert autotune.counters().hits == 1
    assert autotune.counters().hits_other_rows == 2


def test_a_row_of_unknown_length_is_left_to_inductor(tune: Tune) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return F.softmax(x * 2, -1)

    tune(fn, (torch.randn(32, 56),))
    f = compiled(fn, dynamic=True)
    for columns in (56, 40, 33):
        x = torch.randn(32, columns)
        close(f(x), fn(x))
    assert autotune.counters().graphs == autotune.counters().unsupported == 1
    assert autotune.counters().hits == autotune.counters().fallbacks == 0


def test_a_size_without_a_kernel_is_right_and_noted(tune: Tune, db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from autotune.runtime import fitting

    model = Batched().eval()
    misfit = fitting.misfit
    monkeypatch.setattr(fitting, "misfit", lambda g, t, s: "odd" if g.extents[0] == 44 else misfit(g, t, s))
    with torch.no_grad():
        tune(model, (torch.randn(4, 16, WIDTH),))
        f = compiled(model, dynamic=True)
        close(f(x := torch.randn(4, 16, WIDTH)), model(x))
        close(f(x := torch.randn(4, 11, WIDTH)), model(x))
        close(f(x), model(x))
    assert autotune.counters().misses == 1
    with Store.open(db) as store:
        (miss,) = store.misses()
        workload = store.get_workload(miss.workload)
    assert workload is not None
    assert workload.extent == 44
    assert workload.source["inputs"][0]["shape"], "a search can start from the record alone"


def test_sizes_that_cannot_be_looked_up_run_the_operators(
    tune: Tune, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from autotune.compiler.regions import symbols

    def fails(*_: object) -> Any:
        raise ZeroDivisionError("a fault of ours")

    model = Batched().eval()
    with torch.no_grad():
        tune(model, (torch.randn(4, 16, WIDTH),))
        f = compiled(model, dynamic=True)
        close(f(x := torch.randn(4, 16, WIDTH)), model(x))
        monkeypatch.setattr(symbols, "traced", fails)
        close(f(x := torch.randn(4, 11, WIDTH)), model(x))
        close(f(x), model(x))
    assert "ZeroDivisionError('a fault of ours')" in caplog.text
    assert autotune.counters().fallbacks == 1


@torch.no_grad()
def test_a_region_runs_few_python_functions(tune: Tune) -> None:
    """The choice by sizes if they are symbolic, the arguments, the launch and its argument block."""
    model, x = Block().eval(), torch.randn(32, WIDTH)
    regions = len(tune(model, (x,)))

    def functions(backend: str, dynamic: bool) -> int:
        torch._dynamo.reset()
        f = torch.compile(model, backend=backend, dynamic=dynamic)
        for _ in range(3):
            f(x)
        return called(lambda: f(x)).total()

    for dynamic, most in ((False, 3), (True, 4)):
        more = functions("autotune", dynamic) - functions("inductor", dynamic)
        assert 0 < more <= regions * most


def test_the_call_keeps_its_symbols_as_text() -> None:
    call = RegionCall("l", {}, "t", (0,), (0,), (), (), "cpu", {"a": {"sym": ["Mul", "s0", 2]}}, {"s0": (1, 0)})
    assert RegionCall.of(call.text()) == call


def test_sizes_as_expressions() -> None:
    s, t = sympy.symbols("s t", integer=True, positive=True)

    class Node:
        def __init__(self, expr: Any) -> None:
            self.expr = expr

    def size(expr: Any) -> Any:
        found = torch.SymInt.__new__(torch.SymInt)
        found.node = Node(expr)
        return found

    assert expression_of(7) == 7
    assert expression_of(size(s)) == "s"
    made = expression_of(size(s * s * t + 3))
    assert evaluate(made, {"s": 5, "t": 2}) == 53
    program = {"args": [{"sym": made}, [1, {"sym": "t"}]], "op": "aten.view.default"}
    assert symbols_of(program) == ["s", "t"]
    assert at_sizes(program, {"s": 5, "t": 2}) == {"args": [53, [1, 2]], "op": "aten.view.default"}
    with pytest.raises(Unsupported, match="a size that is"):
        expression_of(size(sympy.sin(s)))
    with pytest.raises(ValueError, match="not a size"):
        evaluate(["eval", "1"], {})
