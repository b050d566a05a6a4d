"""torch.compile(backend="autotune") on the CPU, end to end: real kernels, found, run, compared with eager."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch.nn import functional as F

import autotune
from autotune.store import Store
from tests.support.deployment import Tune, baseline
from tests.support.runtime.models import Block, Statistics, assert_same_step, twin


def compiled(model: Any, **kwargs: Any) -> Any:
    return torch.compile(model, backend="autotune", **kwargs)


def code_of(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, str]:
    """The results of a compiled function that is one graph, and the module that Inductor writes for it."""
    results, (code,) = run_and_get_code(compiled(fn, **kwargs), *args)
    return results, code


def region_calls(code: str) -> list[str]:
    """The lines that call regions."""
    return re.findall(r"^\s+autotune_\w+_\d+\(.*\)$", code, re.MULTILINE)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_inference_runs_stored_kernels(tune: Tune) -> None:
    model, x = Block().eval(), torch.randn(32, 48)
    with torch.no_grad():
        assert len(tune(model, (x,))) == 2
        close(compiled(model)(x), model(x))
    assert autotune.counters().hits == 2
    assert autotune.counters().misses == autotune.counters().fallbacks == 0


def test_the_stored_kernels_compute(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    from autotune.compiler.targets.cpu.launcher import CpuKernel

    launches = []
    bind = CpuKernel.bind

    def counting(kernel: Any, extent0: int, count: int) -> Any:
        run = bind(kernel, extent0, count)
        return lambda stream, pointers: (launches.append(extent0), run(stream, pointers))

    model, x = Block().eval(), torch.randn(32, 48)
    with torch.no_grad():
        tune(model, (x,))
        monkeypatch.setattr(CpuKernel, "bind", counting)
        f = compiled(model)
        f(x), f(x)
    assert launches == [32] * 4


def test_training_step(tune: Tune) -> None:
    model, x = Block(), torch.randn(32, 48)
    stored = tune(twin(model), (x.clone().requires_grad_(),))
    reference = twin(model)
    assert_same_step(compiled(model), model, reference, x)
    counters = autotune.counters()
    assert counters.hits == len(stored) > 2
    assert counters.graphs == 2
    assert counters.fallbacks == 0


def test_only_a_backward_region_is_stored(tune: Tune) -> None:
    model, x = Block(), torch.randn(32, 48)
    forward = {w.fingerprint for w in _inference_workloads(model, x)}
    stored = tune(twin(model), (x.clone().requires_grad_(),), select=lambda w: w.fingerprint not in forward)
    assert stored
    assert_same_step(compiled(model), model, twin(model), x)
    assert autotune.counters().hits == len(stored)
    assert autotune.counters().misses


def _inference_workloads(model: nn.Module, x: torch.Tensor) -> list[Any]:
    with torch.no_grad():
        return [r.workload for r in autotune.lookup(model, (x,)) if r.workload]


def test_buffers_written_in_graphs_with_stored_kernels(tune: Tune) -> None:
    model, x = Statistics(), torch.randn(32, 24)
    assert tune(twin(model), (x.clone().requires_grad_(),))
    assert_same_step(compiled(model), model, twin(model), x)


def normalized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows over their norms, and the first column of each that has the largest norm: there is one column."""
    norm = x.norm(dim=-1, keepdim=True)
    return x / norm, norm.argmax(-1)


@pytest.mark.parametrize("options", [{}, {"memory_planning": True}], ids=["as is", "planned"])
def test_a_result_whose_reader_needs_no_value(tune: Tune, options: dict[str, Any]) -> None:
    """Inductor's argmax of one element reads nothing, so it allocates no memory for the norm. The kernel writes it."""
    x = torch.randn(64, 96)
    tune(normalized, (x,))
    with torch._inductor.config.patch(options):
        for got, want in zip(compiled(normalized)(x), normalized(x), strict=True):
            close(got, want)
    assert autotune.counters().hits
    assert autotune.counters().fallbacks == 0


def test_buffers_written_by_the_rest(tune: Tune) -> None:
    model, x = Statistics(), torch.randn(32, 24)
    stored = tune(twin(model), (x.clone().requires_grad_(),), select=lambda w: "softmax" in w.label)
    assert stored
    assert_same_step(compiled(model), model, twin(model), x)
    assert autotune.counters().misses


def test_another_number_of_rows(tune: Tune) -> None:
    model = Block().eval()
    with torch.no_grad():
        tune(model, (torch.randn(32, 48),))
        for rows in (40, 24):
            x = torch.randn(rows, 48)
            close(compiled(model, dynamic=False)(x), model(x))
    counters = autotune.counters()
    assert counters.hits == counters.hits_other_rows == 4
    assert counters.misses == counters.fallbacks == 0


def test_another_row_length_is_a_recorded_miss(tune: Tune, db: str) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return F.softmax(x * 2, -1)

    tune(fn, (torch.randn(32, 48),))
    f, x = compiled(fn), torch.randn(32, 56)
    close(f(x), fn(x))
    assert autotune.counters().misses == 1
    assert autotune.counters().hits == 0
    torch._dynamo.reset()
    close(compiled(fn)(x), fn(x))
    with Store.open(db) as store:
        (miss,) = store.misses()
        assert miss.count == 1, "a process records a miss once"
        workload = store.get_workload(miss.workload)
    assert workload is not None
    assert workload.source, "a search can start from the record alone"
    assert "56" in workload.label


@pytest.mark.parametrize("named", [True, False])
def test_a_database_that_is_new_is_said_where_it_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, named: bool
) -> None:
    """A slip in the name would leave every region untuned, and nobody the wiser."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("AUTOTUNE_DB", str(tmp_path / "slip.db") if named else "")
    with caplog.at_level("WARNING"):
        compiled(lambda x: F.softmax(x * 2, -1))(torch.randn(32, 48))
    assert autotune.counters().misses == 1
    assert ("slip.db is a new database without schedules" in caplog.text) == named


def test_the_rest_goes_to_inductor(tune: Tune) -> None:
    model, x = Block().eval(), torch.randn(32, 48)
    with torch.no_grad():
        tune(model, (x,), select=lambda w: "softmax" in w.label)
        got, code = code_of(model, x)
        close(got, model(x))
    assert autotune.counters().hits == autotune.counters().misses == 1
    assert len(region_calls(code)) == 1
    assert "cpp_fused" in code


@pytest.mark.parametrize("winner", ["inductor", "eager"])
def test_a_baseline_that_won_is_a_hit_and_leaves_the_graph_alone(tune: Tune, winner: str) -> None:
    model, x = Block().eval(), torch.randn(32, 48)
    with torch.no_grad():
        tune(model, (x,), edit=baseline(winner))
        got, code = code_of(model, x)
        close(got, model(x))
    counters = autotune.counters()
    assert counters.hits == counters.baseline_wins == 2
    assert counters.misses == 0
    assert region_calls(code) == []
    assert "autotune" not in code


def test_a_kernel_for_the_backward_alone(tune: Tune) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1).mul(2.0)

    x = torch.randn(32, 48, requires_grad=True)
    edits = iter([baseline("eager"), lambda s: s])  # the forward's region comes first
    assert len(tune(fn, (x,), edit=lambda s: next(edits)(s))) == 2
    (got,), codes = run_and_get_code(lambda: torch.autograd.grad(compiled(fn)(x), x, torch.ones(32, 48)))
    (want,) = torch.autograd.grad(fn(x), x, torch.ones(32, 48))
    close(got, want)
    assert [len(region_calls(c)) for c in codes] == [0, 1]


BESIDE: dict[str, Callable[[torch.Tensor], Any]] = {
    "input": lambda x: (torch.softmax(x, -1), x),
    "view": lambda x: (torch.softmax(x, -1), x.view(-1)),
    "twice": lambda x: (lambda y: (y, y))(torch.softmax(x, -1)),
    "views": lambda x: (lambda y: (y, y.view(-1)))(torch.softmax(x, -1)),
    "written": lambda x: (torch.softmax(x, -1), x.mul_(0.5)),
    "rest": lambda x: torch.softmax(x, -1).cumsum(-1),
    "number": lambda x: (torch.softmax(x, -1), 3),
}


@pytest.mark.parametrize(
    ("fn", "train"),
    [
        *(pytest.param(BESIDE[name], True, id=name) for name in BESIDE if name != "input"),
        *(pytest.param(BESIDE[name], False, id=f"{name}, inference") for name in ("input", "view", "written")),
    ],
)
def test_compiled_step_computes_operators_outside_of_regions(tune: Tune, fn: Any, train: bool) -> None:
    def program(x: torch.Tensor) -> Any:
        return fn(x * 1.5)

    model = program if train else fn
    x = torch.randn(32, 48, requires_grad=train)
    tune(model, (x,))
    given, expected = x.detach().clone().requires_grad_(train), x.detach().clone().requires_grad_(train)
    got, want = compiled(model)(given), model(expected)
    got, want = [list(r) if isinstance(r, tuple) else [r] for r in (got, want)]
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(given, expected)
    tensors = [(a, b) for a, b in zip(got, want, strict=True) if isinstance(a, torch.Tensor)]
    for a, b in tensors:
        assert [a.data_ptr() == o.data_ptr() for o, _ in tensors] == [b.data_ptr() == o.data_ptr() for _, o in tensors]
        assert (a.data_ptr() == given.data_ptr()) is (b.data_ptr() == expected.data_ptr())
        assert a.requires_grad is b.requires_grad
    if train:
        sum(a.sum() for a, _ in tensors).backward()  # type: ignore[union-attr]
        sum(b.sum() for _, b in tensors).backward()  # type: ignore[union-attr]
        assert given.grad is not None
        close(given.grad, expected.grad)  # type: ignore[arg-type]


class _Double(torch.overrides.TorchFunctionMode):
    """The result of ``relu``, twice."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.relu else result


@pytest.mark.parametrize("mode", [_Double, lambda: torch.device("cpu")], ids=["function", "device"])
def test_under_a_function_mode(tune: Tune, mode: Any) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.relu(x) @ w, -1)

    args = torch.randn(32, 48), torch.randn(48, 48)
    with mode():
        assert tune(fn, args)
        close(compiled(fn)(*args), fn(*args))
    assert autotune.counters().hits == 2


class _Tripled(torch.Tensor):
    """A tensor whose ``relu`` is three times as large."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        return result * 3 if func is torch.relu else result


def test_tensors_of_a_subclass(tune: Tune) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.relu(x) @ w, -1)

    x, w = torch.randn(32, 48), torch.randn(48, 48)
    assert tune(lambda x, w: torch.softmax((torch.relu(x) * 3) @ w, -1), (x, w))
    given = x.as_subclass(_Tripled)
    close(compiled(fn)(given, w), fn(given, w))
    assert autotune.counters().hits == 2


def test_graph_breaks(tune: Tune) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = F.softmax(x, -1)
        torch._dynamo.graph_break()
        return F.layer_norm(y, (48,)) * 2

    x = torch.randn(16, 48)
    assert len(tune(fn, (x,))) == 2
    close(compiled(fn)(x), fn(x))
    assert autotune.counters().graphs == 2
    assert autotune.counters().hits == 2


def test_no_regions(db: str) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x @ y

    x, y = torch.randn(8, 8), torch.randn(8, 8)
    close(compiled(fn)(x, y), fn(x, y))
    assert autotune.counters().graphs == 1
    assert not Path(db).exists(), "nothing to record, nothing created"


def test_a_written_input(tune: Tune) -> None:
    def fn(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        old = F.softmax(state + x, -1)
        state.mul_(0.5).add_(x)
        return old + F.softmax(state @ state.T, -1).sum()

    x, state = torch.randn(16, 48), torch.randn(16, 48)
    assert tune(fn, (x, state.clone()))
    mine, theirs = state.clone(), state.clone()
    close(compiled(fn)(x, mine), fn(x, theirs))
    close(mine, theirs)
    assert autotune.counters().hits


def test_outputs_that_alias_inputs_and_each_other(tune: Tune) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.softmax(x, -1)
        return x.t(), y, y.t(), x[1:3]

    x = torch.randn(16, 48)
    assert tune(fn, (x,))
    got, want = compiled(fn)(x), fn(x)
    for a, b in zip(got, want, strict=True):
        close(a, b)
        assert a.stride() == b.stride()
    assert got[0].data_ptr() == x.data_ptr()
    got[1].zero_()
    assert not got[2].any(), "two views of one result stay views of one result"


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[::2],
        lambda x: x[:, 8:40],
        lambda x: x.expand(3, *x.shape),
        lambda x: x[1:].flatten(),
    ],
    ids=["transposed", "every other", "columns", "expanded", "offset"],
)
def test_strided_and_offset_inputs(tune: Tune, view: Any) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return F.softmax(x * 1.5, -1)

    x = view(torch.randn(18, 48))
    assert tune(fn, (x,))
    close(compiled(fn)(x), fn(x))
    assert autotune.counters().hits == 1


def test_no_rows_at_all(tune: Tune) -> None:
    model = Block().eval()
    with torch.no_grad():
        tune(model, (torch.randn(32, 48),))
        f = compiled(model, dynamic=False)
        assert f(torch.randn(0, 48)).shape == (0, 48)
        close(f(torch.ones(32, 48)), model(torch.ones(32, 48)))


def test_several_threads(tune: Tune) -> None:
    model = Block().eval()
    inputs = [torch.randn(32, 48) for _ in range(4)]
    wrong: list[BaseException] = []
    with torch.no_grad():
        tune(model, (inputs[0],))
        want = [model(x) for x in inputs]
        f = compiled(model)
        if torch.__version__ < "2.14":  # FX's flag for tracing is global: Dynamo refuses calls while a thread compiles
            f(inputs[0])

    def work(k: int) -> None:
        try:
            with torch.no_grad():
                for _ in range(25):
                    close(f(inputs[k]), want[k])
        except BaseException as e:
            wrong.append(e)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert autotune.counters().hits >= 2


def test_a_random_operator_between_regions(tune: Tune) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn_like(x) * 0.0  # normal numbers stay with Inductor
        return F.softmax(F.dropout(F.layer_norm(x, (48,)), 0.5, True) @ (x + noise).T, -1)

    x = torch.randn(16, 48)
    assert tune(fn, (x,))
    got = compiled(fn)(x)
    close(got.sum(-1), torch.ones(16))
    assert autotune.counters().hits >= 2
    assert autotune.counters().fallbacks == 0


def test_compile_is_torch_compile(tune: Tune) -> None:
    model, x = Block().eval(), torch.randn(32, 48)
    with torch.no_grad():
        tune(model, (x,))
        close(autotune.compile(model, fullgraph=True)(x), model(x))
    assert autotune.counters()["hits"] == 2
