"""torch.compile(backend="autotune") on the CPU, end to end: real kernels, found, run, compared with eager."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autotune
from autotune.runtime import backend
from autotune.store import Store
from tests.runtime.conftest import Tune, baseline
from tests.runtime.models import Block, Statistics, assert_same_step, twin


def compiled(model: Any, **kwargs: Any) -> Any:
    return torch.compile(model, backend="autotune", **kwargs)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_inference_runs_stored_kernels(tune: Tune) -> None:
    model, x = Block().eval(), torch.randn(32, 48)
    with torch.no_grad():
        assert len(tune(model, (x,))) == 2
        close(compiled(model)(x), model(x))
    assert autotune.counters().hits == 2
    assert autotune.counters().misses == autotune.counters().fallbacks == 0


def test_the_stored_kernels_are_what_computes(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    from autotune.runtime import cpu_launch

    launches = []
    bind = cpu_launch._bind

    def counting(kernel: Any, extent0: int, count: int) -> Any:
        run = bind(kernel, extent0, count)
        return lambda stream, pointers: (launches.append(extent0), run(stream, pointers))

    model, x = Block().eval(), torch.randn(32, 48)
    with torch.no_grad():
        tune(model, (x,))
        monkeypatch.setattr(cpu_launch, "_bind", counting)
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


def test_buffers_written_beside_stored_kernels(tune: Tune) -> None:
    model, x = Statistics(), torch.randn(32, 24)
    assert tune(twin(model), (x.clone().requires_grad_(),))
    assert_same_step(compiled(model), model, twin(model), x)


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
        f = compiled(model)
        for rows in (64, 40, 24, 40):
            x = torch.randn(rows, 48)
            close(f(x), model(x))
    counters = autotune.counters()
    assert counters.hits == counters.hits_other_rows == 6
    assert counters.misses == 0
    assert counters.specialised == 2  # the first shape is compiled as it is, the others from the dynamic graph


def test_another_row_length_is_a_recorded_miss(tune: Tune, db: str) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return F.softmax(x * 2, -1)

    tune(fn, (torch.randn(32, 48),))
    f = compiled(fn)
    x = torch.randn(32, 56)
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


def test_training_under_dynamic_shapes(tune: Tune) -> None:
    model = Block()
    tune(twin(model), (torch.randn(32, 48).requires_grad_(),))
    f, reference = compiled(model, dynamic=True), twin(model)
    for rows in (32, 20):
        model.zero_grad()
        reference.zero_grad()
        assert_same_step(f, model, reference, torch.randn(rows, 48))
    assert autotune.counters().specialised == 2
    assert autotune.counters().hits
    assert autotune.counters().hits_other_rows


def test_mixed_pieces_go_to_inductor(tune: Tune) -> None:
    model, x = Block().eval(), torch.randn(32, 48)
    with torch.no_grad():
        tune(model, (x,), select=lambda w: "softmax" in w.label)
        close(compiled(model)(x), model(x))
    assert autotune.counters().hits == autotune.counters().misses == 1


@pytest.mark.parametrize("winner", ["inductor", "eager"])
def test_a_baseline_that_won_is_a_hit(tune: Tune, winner: str) -> None:
    model, x = Block().eval(), torch.randn(32, 48)
    with torch.no_grad():
        tune(model, (x,), edit=baseline(winner))
        close(compiled(model)(x), model(x))
    counters = autotune.counters()
    assert counters.hits == counters.baseline_wins == 2
    assert counters.misses == 0


def _softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1).mul(2.0)


def _assembled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls of ``assemble`` from now on."""
    calls: list[Any] = []

    def counting(*args: Any) -> Any:
        calls.append(args)
        return real(*args)

    real = backend.assemble
    monkeypatch.setattr(backend, "assemble", counting)
    return calls


@pytest.mark.parametrize("train", [False, True])
def test_where_eager_won_throughout_nothing_is_assembled(
    tune: Tune, monkeypatch: pytest.MonkeyPatch, train: bool
) -> None:
    x = torch.randn(32, 48, requires_grad=train)
    stored = tune(_softmax, (x,), edit=baseline("eager"))
    calls = _assembled(monkeypatch)
    f = compiled(_softmax)
    torch.testing.assert_close(f(x), _softmax(x), rtol=0, atol=0)
    assert autotune.counters().baseline_wins == len(stored) == 1 + train
    assert not calls
    if train:
        grad = torch.randn(32, 48)
        (got,) = torch.autograd.grad(f(x), x, grad)
        (want,) = torch.autograd.grad(_softmax(x), x, grad)
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_a_kernel_for_the_backward_alone_is_used_where_eager_won_the_forward(
    tune: Tune, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(32, 48, requires_grad=True)
    edits = iter([baseline("eager"), lambda s: s])  # the forward's region comes first
    assert len(tune(_softmax, (x,), edit=lambda s: next(edits)(s))) == 2
    calls = _assembled(monkeypatch)
    f = compiled(_softmax)
    grad = torch.randn(32, 48)
    (got,) = torch.autograd.grad(f(x), x, grad)
    (want,) = torch.autograd.grad(_softmax(x), x, grad)
    close(got, want)
    assert len(calls) == 2


def _bare(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What runs without AOTAutograd's wrapper from now on; None for what runs within."""
    made: list[Any] = []
    bare = backend._Session.bare

    def telling(self: Any, *args: Any) -> Any:
        made.append(bare(self, *args))
        return made[-1]

    monkeypatch.setattr(backend._Session, "bare", telling)
    return made


def test_kernels_alone_need_no_wrapper(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.softmax(y, -1), torch.softmax(x, -1).sum(0)

    args = torch.randn(32, 48), torch.randn(48, 32).t()
    tune(fn, args)
    made = _bare(monkeypatch)
    f = compiled(fn)
    for _ in range(2):
        for got, want in zip(f(*args), fn(*args), strict=True):
            close(got, want)
    assert len(made) == 1
    assert made[0] is not None


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (torch.softmax(x, -1), x),
        lambda x: (torch.softmax(x, -1), x.view(-1)),
        lambda x: (lambda y: (y, y))(torch.softmax(x, -1)),
        lambda x: (lambda y: (y, y.view(-1)))(torch.softmax(x, -1)),
        lambda x: (torch.softmax(x, -1), x.mul_(0.5)),
        lambda x: torch.softmax(x, -1).cumsum(-1),
        lambda x: (torch.softmax(x, -1), 3),
    ],
    ids=["input", "view", "twice", "views", "written", "rest", "number"],
)
@pytest.mark.parametrize("train", [False, True])
def test_what_else_there_is_to_do_is_done(tune: Tune, fn: Any, train: bool) -> None:
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


@pytest.mark.parametrize("options", [{}, {"options": {"max_autotune": True}}])
def test_where_inductor_has_something_left_to_do_the_graph_is_assembled(
    tune: Tune, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1) @ w if options else torch.softmax(x, -1).cumsum(-1)

    args = torch.randn(32, 48), torch.randn(48, 16)
    with torch.no_grad():
        assert tune(fn, args, edit=baseline("eager"), select=lambda w: "softmax" in w.label)
        calls = _assembled(monkeypatch)
        close(compiled(fn, **options)(*args), fn(*args))
    assert len(calls) == 1


def test_an_eager_graph_keeps_what_is_checkpointed(tune: Tune) -> None:
    from torch.utils.checkpoint import checkpoint

    def block(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(torch.cos(torch.sin(x)))

    def fn(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(block, checkpoint(block, x, use_reentrant=False), use_reentrant=False)
        return y

    x = torch.randn(32, 48, requires_grad=True)
    assert tune(fn, (x,), edit=baseline("eager"))

    def saved(run: Any) -> int:
        sizes: dict[int, int] = {}

        def pack(t: torch.Tensor) -> torch.Tensor:
            sizes[t.data_ptr()] = t.nbytes
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = run(x)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        (wanted,) = torch.autograd.grad(fn(x).sum(), x)
        close(gradient, wanted)
        return sum(sizes.values())

    assert saved(compiled(fn)) <= saved(fn)


class _Double(torch.overrides.TorchFunctionMode):
    """What ``relu`` gives, twice."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.relu else result


def test_an_eager_graph_under_a_function_mode(tune: Tune) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) + 1

    x = torch.randn(32, 48)
    with _Double():
        assert tune(fn, (x,), edit=baseline("eager"))
        close(compiled(fn)(x), fn(x))
    assert autotune.counters().baseline_wins == 1


class _Tripled(torch.Tensor):
    """A tensor whose ``relu`` is three times as large."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        return result * 3 if func is torch.relu else result


@pytest.mark.parametrize("edit", [baseline("eager"), lambda s: s], ids=["eager", "kernel"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_tensors_of_a_subclass(tune: Tune, edit: Any, dynamic: bool | None) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.relu(x) @ w, -1)

    x, w = torch.randn(32, 48), torch.randn(48, 48)
    assert tune(lambda x, w: torch.softmax((torch.relu(x) * 3) @ w, -1), (x, w), edit=edit)
    f, given = compiled(fn, dynamic=dynamic), x.as_subclass(_Tripled)
    close(f(given, w), fn(given, w))


@pytest.mark.parametrize("mode", [_Double, lambda: torch.device("cpu")], ids=["function", "device"])
def test_shapes_under_a_function_mode(tune: Tune, mode: Any) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.relu(x) @ w, -1)

    args = torch.randn(32, 48), torch.randn(48, 48)
    assert tune(fn, args, select=lambda w: "softmax" in w.label)
    with mode():
        close(compiled(fn, dynamic=True)(*args), fn(*args))
    assert autotune.counters().hits == (mode is not _Double)


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
        return F.softmax(F.dropout(F.layer_norm(x, (48,)), 0.5, True) @ x.T, -1)

    x = torch.randn(16, 48)
    assert tune(fn, (x,))
    got = compiled(fn)(x)
    close(got.sum(-1), torch.ones(16))
    assert autotune.counters().hits == 2


def test_a_broken_database(db: str, caplog: pytest.LogCaptureFixture) -> None:
    Path(db).write_bytes(b"no database at all")
    model, x = Block().eval(), torch.randn(8, 48)
    with torch.no_grad():
        close(compiled(model)(x), model(x))
        torch._dynamo.reset()
        close(compiled(model)(x), model(x))
    assert "tuned.db" in _only_warning(caplog)
    assert Path(db).read_bytes() == b"no database at all", "what is not ours is left alone"
    assert autotune.counters().misses == 4


def test_a_database_of_another_version(tune: Tune, db: str, caplog: pytest.LogCaptureFixture) -> None:
    model, x = Block().eval(), torch.randn(8, 48)
    with torch.no_grad():
        tune(model, (x,))
        with sqlite3.connect(db) as connection:
            connection.execute("UPDATE autotune_alembic_version SET version_num = 'zzzz'")
        close(compiled(model)(x), model(x))
    assert "newer autotune" in _only_warning(caplog)
    assert autotune.counters().misses == 2


def _only_warning(caplog: pytest.LogCaptureFixture) -> str:
    (warning,) = [r for r in caplog.records if r.name == "autotune" and r.levelname == "WARNING"]
    return warning.getMessage()


def test_a_read_only_database(tune: Tune, db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return F.softmax(x, -1)

    tune(fn, (torch.randn(32, 48),))
    opened = Store.open
    monkeypatch.setattr(Store, "open", lambda url=None, **k: opened(url, **(k | {"readonly": True, "migrate": False})))
    x, other = torch.randn(32, 48), torch.randn(32, 56)
    close(compiled(fn, dynamic=False)(x), fn(x))
    assert autotune.counters().hits == 1
    close(compiled(fn, dynamic=False)(other), fn(other))
    monkeypatch.undo()
    with Store.open(db) as store:
        assert store.misses() == []


def test_a_damaged_schedule_is_a_miss(tune: Tune, db: str) -> None:
    model, x = Block().eval(), torch.randn(32, 48)
    with torch.no_grad():
        tune(model, (x,))
        with sqlite3.connect(db) as connection:
            connection.execute("UPDATE autotune_artifacts SET kernels = '[]'")
        close(compiled(model)(x), model(x))
    assert autotune.counters().hits == 0
    assert autotune.counters().misses == 2


def test_a_kernel_that_cannot_be_loaded(tune: Tune, caplog: pytest.LogCaptureFixture) -> None:
    model, x = Block().eval(), torch.randn(32, 48)
    with torch.no_grad():
        stored = tune(model, (x,))
        from autotune.runtime import cpu_launch

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cpu_launch, "make_launches", _fail)
            close(compiled(model)(x), model(x))
    assert autotune.counters().fallbacks == len(stored)
    assert sum("is not used: no such kernel" in r.getMessage() for r in caplog.records) == len(stored)


def _fail(*args: Any) -> Any:
    raise RuntimeError("no such kernel")


def test_a_launch_that_fails_falls_back_for_good(
    tune: Tune, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from autotune.runtime import cpu_launch

    def fn(x: torch.Tensor) -> torch.Tensor:
        return F.softmax(x, -1)

    x = torch.randn(32, 48)
    tune(fn, (x,))
    launches = []
    monkeypatch.setattr(cpu_launch, "_bind", lambda *a: lambda *b: (launches.append(b), _fail()))
    f = compiled(fn)
    close(f(x), fn(x))
    close(f(x), fn(x))
    assert len(launches) == 1
    assert autotune.counters().fallbacks == 1
    assert sum("given up" in r.getMessage() for r in caplog.records) == 1


def test_what_falls_back_asks_for_no_gradient(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    from autotune.runtime import cpu_launch

    weight = nn.Parameter(torch.randn(48))

    def fn(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return torch.softmax(x * weight, -1)

    x = torch.randn(32, 48)
    tune(fn, (x,))
    made = _bare(monkeypatch)
    monkeypatch.setattr(cpu_launch, "_bind", lambda *a: lambda *b: _fail())
    y = compiled(fn)(x)
    close(y, fn(x))
    assert made[0] is not None
    assert autotune.counters().fallbacks == 1
    assert not y.requires_grad


def test_without_a_working_inductor(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.compile_fx as inductor

    monkeypatch.setattr(inductor, "compile_fx", _fail)
    model, x = Block().eval(), torch.randn(32, 48)
    with torch.no_grad():
        close(compiled(model)(x), model(x))  # nothing stored: the whole graph would go to Inductor
        torch._dynamo.reset()
        tune(model, (x,), select=lambda w: "softmax" in w.label)
        close(compiled(model)(x), model(x))  # a piece would
    assert autotune.counters().hits == 1


def test_compile_is_torch_compile(tune: Tune) -> None:
    model, x = Block().eval(), torch.randn(32, 48)
    with torch.no_grad():
        tune(model, (x,))
        close(autotune.compile(model, fullgraph=True)(x), model(x))
    assert autotune.counters()["hits"] == 2


@pytest.mark.parametrize("options", [{"mode": "max-autotune-no-cudagraphs"}, {"options": {"max_fusion_size": 8}}])
def test_the_users_options_reach_inductor(tune: Tune, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    import torch._inductor.compile_fx as inductor

    seen: list[Any] = []
    real = inductor.compile_fx

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["config_patches"])
        return real(*args, **kwargs)

    monkeypatch.setattr(inductor, "compile_fx", spy)
    model, x = Block().eval(), torch.randn(32, 48)
    with torch.no_grad():
        close(compiled(model, **options)(x), model(x))
        torch._dynamo.reset()
        tune(model, (x,), select=lambda w: "softmax" in w.label)
        close(compiled(model, **options)(x), model(x))
    assert len(seen) >= 2, "the whole graph, then pieces"
    key = "max_autotune" if "mode" in options else "max_fusion_size"
    assert all(patches[key] for patches in seen)


def test_a_capture_that_fails_leaves_the_model_alone(db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from autotune.runtime import replace

    monkeypatch.setattr(replace, "find_regions", _fail)
    model, x = Block(), torch.randn(32, 48)
    assert_same_step(compiled(model), model, twin(model), x)
    assert autotune.counters().hits == autotune.counters().misses == 0


def test_a_cut_that_fails_leaves_the_model_alone(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    from autotune.runtime import backend

    model, x = Block(), torch.randn(32, 48)
    stored = tune(twin(model), (x.clone().requires_grad_(),))
    monkeypatch.setattr(backend, "cuts", _fail)
    assert_same_step(compiled(model), model, twin(model), x)
    assert autotune.counters().fallbacks == len(stored)
