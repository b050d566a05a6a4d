"""A whole step under each compiler: its extent, the comparison of results, and messages."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autotune
from autotune.bench import contenders, kernels, step
from autotune.bench.contenders import Watched, difference, largest
from autotune.bench.step import AUTOTUNE, COMPILE, EAGER, NotCompared, Peer, compare, step_of, trainable
from autotune.errors import UserError
from autotune.measure import timer
from autotune.measure.policy import Policy, default_policy
from autotune.measure.quiet import device_lock
from autotune.runtime.deployment import Deployment, deployment, use
from autotune.store import Store

X = torch.linspace(-2.0, 2.0, 24).reshape(4, 6)


def quick() -> Policy:
    return replace(default_policy("cpu"), final_rounds=5, final_s=1.0, cold_bytes=0, quiet_s=0.0)


@pytest.fixture
def in_eager(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[..., Any]]:
    """Compilers that compile nothing; a test may put others in their place."""
    made: dict[str, Callable[..., Any]] = {COMPILE: lambda fn: fn, AUTOTUNE: lambda fn: fn}
    monkeypatch.setattr(torch, "compile", lambda fn, **kwargs: made[COMPILE](fn))
    monkeypatch.setattr(autotune, "compile", lambda fn, **kwargs: made[AUTOTUNE](fn), raising=False)
    return made


# What a step is


def test_inference_makes_no_gradients() -> None:
    layer = nn.Linear(6, 3)
    out = step_of(layer, (X,), {})()
    assert isinstance(out, Tensor)
    assert not out.requires_grad


def test_training_is_results_and_all_gradients() -> None:
    layer = nn.Linear(6, 3)
    layer.bias.requires_grad_(False)
    x = X.clone().requires_grad_()
    wanted = trainable(layer, (x,), {"unused": X})
    assert [id(t) for t in wanted] == [id(layer.weight), id(x)]
    results, (dw, dx) = step_of(lambda t: (layer(t), 3, t.argmax()), (x,), {}, wanted)()  # type: ignore[misc]
    assert not results[0].requires_grad
    assert results[1] == 3
    torch.testing.assert_close(dw, X.sum(0).expand(3, 6))
    torch.testing.assert_close(dx, layer.weight.detach().sum(0).expand(4, 6))
    assert all(p.grad is None for p in layer.parameters()), "nothing is accumulated in the user's parameters"


def test_a_method_is_trained_by_its_modules_parameters() -> None:
    layer = nn.Linear(6, 3)
    assert len(trainable(layer.forward, (X,), {})) == 2


def test_training_without_gradients_is_refused() -> None:
    with pytest.raises(UserError, match="require a gradient"):
        trainable(torch.relu, (X,), {})
    x = X.clone().requires_grad_()
    with pytest.raises(UserError, match="no result"):
        step_of(torch.argmax, (x,), {}, [x])()


# Whether results are the same


def test_differences_are_of_all_results() -> None:
    a, b = torch.tensor([3.0, 4.0]), torch.tensor([0.0])
    assert difference((a, [b]), (a, [b])) == 0.0
    assert difference((a * 1.5, [b]), (a, [b])) == pytest.approx(0.5)
    assert difference((a, [b + 1]), (a, [b])) == pytest.approx(0.2)
    assert difference({"n": torch.tensor(7), "x": a}, {"n": torch.tensor(8), "x": a}) == 0.0
    c = torch.complex(a, a)
    assert difference(c.conj(), c) == pytest.approx(math.sqrt(2.0))


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (torch.ones(3), torch.ones(1, 3)),
        ((torch.ones(3),), (torch.ones(3), torch.ones(3))),
        (torch.ones(3, dtype=torch.float16), torch.ones(3)),
        (torch.tensor([1.0, math.nan]), torch.ones(2)),
        (torch.ones(2), torch.tensor([1.0, math.inf])),
        (torch.tensor([-math.inf]), torch.tensor([math.inf])),
        ("no tensor", torch.ones(2)),
    ],
)
def test_results_of_another_form_are_infinitely_apart(got: object, want: object) -> None:
    assert difference(got, want) == math.inf


def test_difference_ignores_equal_special_values_and_absent_zeros() -> None:
    odd = torch.tensor([math.nan, math.inf, -math.inf, 2.0])
    assert difference(odd.clone(), odd) == 0.0
    assert difference(odd + torch.tensor([0.0, 0.0, 0.0, 1.0]), odd) == pytest.approx(0.5)
    ones = torch.ones(2)
    assert difference((ones, torch.zeros(3)), (ones, None)) == 0.0, "a gradient that nothing contributes to"
    assert difference((ones, None), (ones, torch.ones(3))) > 0.5
    assert difference(torch.ones(0), torch.ones(0)) == 0.0
    assert difference(torch.eye(2).to_sparse(), torch.eye(2).to_sparse()) == 0.0


def test_large_tensors_are_compared_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.bench.contenders._PIECE", 5)
    assert difference(X.t(), X.t() * 2) == pytest.approx(0.5)


def test_the_largest_element() -> None:
    assert largest((torch.tensor([9]), torch.tensor([-3.0, 2.0]), torch.tensor([50.0]))) == 3.0
    assert largest((None, torch.tensor([9]))) is None
    assert largest(torch.ones(0)) is None


def atomics(off: float) -> Callable[[Tensor], Tensor]:
    """A function whose results are a little different each time, whatever the seed."""
    calls = iter(range(1000))
    return lambda x: x * (1.0 + off * math.sin(12.9898 * next(calls)))


@pytest.mark.parametrize(
    ("fn", "random"),
    [
        (torch.sigmoid, False),
        (lambda x: F.dropout(x, 0.5), True),
        (lambda x: x + 1e-4 * torch.randn_like(x), True),
        (atomics(1e-6), False),
        (atomics(3e-3), False),  # bf16 gradients
        (lambda x: F.dropout(atomics(3e-3)(x), 0.1), True),
    ],
)
def test_random_steps_have_no_results_to_compare(
    fn: Callable[..., Any], random: bool, in_eager: dict[str, Callable[..., Any]]
) -> None:
    found = compare(fn, (X,), train=False, device="cpu", policy=quick())
    assert found.random == random
    assert [s.difference is None for s in found.steps.values()] == [random] * 3


@pytest.mark.parametrize("factor", [2.0, 1e10])
def test_a_step_that_changes_its_inputs_has_no_results_to_compare(
    factor: float, in_eager: dict[str, Callable[..., Any]]
) -> None:
    found = compare(lambda x: x.mul_(factor).square(), (X.clone(),), train=False, device="cpu", policy=quick())
    assert found.changing
    assert not found.random


def test_a_step_that_gives_the_same_each_time_is_not_changing(in_eager: dict[str, Callable[..., Any]]) -> None:
    assert not compare(atomics(3e-3), (X,), train=False, device="cpu", policy=quick()).changing
    assert not compare(lambda x: F.dropout(x, 0.5), (X,), train=False, device="cpu", policy=quick()).changing


def test_checks_draw_numbers_of_their_own() -> None:
    before = torch.get_rng_state()
    one, same, other = (step.seeded(lambda: torch.rand(8), seed, "cpu") for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert difference(one, same) == 0.0 < difference(one, other)


# Comparing


def test_steps_by_contender(in_eager: dict[str, Callable[..., Any]]) -> None:
    in_eager[AUTOTUNE] = lambda fn: lambda x: fn(x) * 1.001
    told = []
    found = compare(
        torch.exp, (X,), train=False, device="cpu", policy=quick(), say=lambda stage, s: told.append((stage, s >= 0))
    )
    assert list(found.steps) == [EAGER, COMPILE, AUTOTUNE]
    assert [name for name, _ in told] == [*found.steps, "timing"]
    assert all(s.us > 0 and s.noise >= 0 and not s.captured and s.kernels is None for s in found.steps.values())
    assert found.steps[EAGER].difference == found.steps[COMPILE].difference == 0.0
    assert found.steps[AUTOTUNE].difference == pytest.approx(1e-3, rel=1e-3)
    assert found.steps[EAGER].largest == pytest.approx(math.exp(2.0))
    assert found.over_compile(COMPILE) == 1.0
    assert found.over_compile(AUTOTUNE) == found.steps[COMPILE].us / found.steps[AUTOTUNE].us


def test_peers_are_timed_with_the_contenders(in_eager: dict[str, Callable[..., Any]]) -> None:
    def fails() -> Callable[..., Any]:
        raise ImportError("no such library")

    peers = {"peer": Peer(lambda: lambda x: torch.exp(x) * (1 + 1e-3)), "missing": Peer(fails)}
    found = compare(torch.exp, (X,), train=False, device="cpu", policy=quick(), peers=peers)
    assert list(found.steps) == [EAGER, COMPILE, AUTOTUNE, "peer"]
    assert found.steps["peer"].difference == pytest.approx(1e-3, rel=1e-3)
    assert found.steps["peer"].peak_bytes is None
    assert found.failed == {"missing": "ImportError: no such library"}


def test_a_peer_that_breaks_the_timing_leaves_the_other_times(in_eager: dict[str, Callable[..., Any]]) -> None:
    calls = []

    def breaks(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        if len(calls) > 1:
            raise RuntimeError("an illegal memory access")
        return torch.exp(x)

    stages: list[str] = []
    found = compare(
        torch.exp,
        (X,),
        train=False,
        device="cpu",
        policy=quick(),
        peers={"peer": Peer(lambda: breaks)},
        say=lambda stage, seconds: stages.append(stage),
    )
    assert list(found.steps) == [EAGER, COMPILE, AUTOTUNE]
    assert all(s.us > 0 for s in found.steps.values())
    assert "an illegal memory access" in found.failed["peer"]
    assert stages.index("timing") < stages.index("peer")


def test_a_device_in_error_after_a_peer_leaves_the_other_times(
    in_eager: dict[str, Callable[..., Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = step.timed

    def in_error(steps: dict[str, Any], *args: Any) -> Any:
        if "peer" in steps:
            raise NotCompared("CUDA error: an illegal memory access was encountered")
        return timed(steps, *args)

    monkeypatch.setattr(step, "timed", in_error)
    peers = {"peer": Peer(lambda: torch.exp)}
    found = compare(torch.exp, (X,), train=False, device="cpu", policy=quick(), peers=peers)
    assert list(found.steps) == [EAGER, COMPILE, AUTOTUNE]
    assert found.failed == {
        "peer": "the timing with it failed: NotCompared: CUDA error: an illegal memory access was encountered"
    }


def test_a_contender_that_runs_out_of_memory_with_a_peer_keeps_its_time(
    in_eager: dict[str, Callable[..., Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = step.timed

    def crowded(steps: dict[str, Any], *args: Any) -> Any:
        found = timed(steps, *args)
        if "peer" not in steps:
            return found
        samples = {name: taken for name, taken in found.samples.items() if name != AUTOTUNE}
        return dataclasses.replace(found, samples=samples, failed={AUTOTUNE: "OutOfMemoryError: no memory"})

    monkeypatch.setattr(step, "timed", crowded)
    peers = {"peer": Peer(lambda: torch.exp)}
    found = compare(torch.exp, (X,), train=False, device="cpu", policy=quick(), peers=peers)
    assert list(found.steps) == [EAGER, COMPILE, AUTOTUNE]
    assert found.failed == {"peer": "the timing with it failed: NotCompared: OutOfMemoryError: no memory"}


def test_who_times_has_the_device_to_itself(
    in_eager: dict[str, Callable[..., Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = []

    def interleave(fns: dict[str, Any], policy: Policy, device: str, **options: Any) -> dict[str, list[float]]:
        with device_lock(device, 0.0) as free:
            alone.append(not free)
        return {name: [1.0, 2.0, 3.0] for name in fns}

    monkeypatch.setattr(timer, "interleave", interleave)
    compare(torch.exp, (X,), train=False, device="cpu", policy=quick())
    assert alone == [True]


class Pieces(nn.Module):
    """Compiled once for each of six shapes, since the graph breaks around what is called with them."""

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(())
        for k in range(1, 7):
            torch._dynamo.graph_break()
            total = total + apart(x[:, :k])
        return total


def apart(x: Tensor) -> Tensor:
    y = torch.exp(x)
    torch._dynamo.graph_break()
    return y.sum()


def test_a_contender_takes_no_compilations_from_the_next(
    in_eager: dict[str, Callable[..., Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: dict[str, int] = {}

    def under(who: str) -> Callable[..., Any]:
        def backend(gm: torch.fx.GraphModule, inputs: object) -> Any:
            graphs[who] = graphs.get(who, 0) + 1
            return gm.forward

        return lambda fn: torch._dynamo.optimize(backend, dynamic=False)(fn)

    in_eager[COMPILE], in_eager[AUTOTUNE] = under(COMPILE), under(AUTOTUNE)
    with torch._dynamo.config.patch(recompile_limit=8):
        compare(Pieces(), (X,), train=False, device="cpu", policy=quick())
    assert graphs[COMPILE] == graphs[AUTOTUNE] >= 12


def test_results_that_disagree_are_in_json_too(in_eager: dict[str, Callable[..., Any]]) -> None:
    in_eager[AUTOTUNE] = lambda fn: lambda x: fn(x) / 0.0
    ours = compare(torch.exp, (X,), train=False, device="cpu", policy=quick()).steps[AUTOTUNE]
    assert ours.disagrees
    told = json.loads(json.dumps(ours.to_json(), allow_nan=False))
    assert (told["disagrees"], told["difference"], told["largest"]) == (True, None, None)
    assert told["us"] == ours.us


def failing(first_good: int) -> Callable[..., Any]:
    """A compiler whose contender fails after so many calls."""
    calls = iter(range(1000))

    def make(fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: Tensor) -> Any:
            if next(calls) >= first_good:
                raise RuntimeError("no memory\nand more")
            return fn(x)

        return call

    return make


@pytest.mark.parametrize("good", [0, 1])
@pytest.mark.parametrize("who", [COMPILE, AUTOTUNE])
def test_a_contender_that_fails_is_left_out(good: int, who: str, in_eager: dict[str, Callable[..., Any]]) -> None:
    in_eager[who] = failing(good)  # when it is made, or when it is timed
    found = compare(torch.exp, (X,), train=False, device="cpu", policy=quick())
    assert found.failed == {who: "RuntimeError: no memory"}
    assert set(found.steps) == {EAGER, COMPILE, AUTOTUNE} - {who}
    assert found.over_compile(AUTOTUNE) is None


@pytest.mark.parametrize("good", [0, 3])
def test_without_eager_there_is_nothing_to_compare(good: int, in_eager: dict[str, Callable[..., Any]]) -> None:
    with pytest.raises(NotCompared, match=r"^RuntimeError: no memory$"):
        compare(failing(good)(torch.exp), (X,), train=False, device="cpu", policy=quick())


def test_modes_without_their_own_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, object]] = []

    def keep(fn: Callable[..., Any], **kwargs: Any) -> Callable[..., Any]:
        given.append(kwargs)
        return fn

    monkeypatch.setattr(torch, "compile", keep)
    monkeypatch.setattr(autotune, "compile", keep, raising=False)
    modes = {
        "default": {}, "reduce-overhead": {}, "max-autotune": {"mode": "max-autotune-no-cudagraphs"},
        "max-autotune-no-cudagraphs": {"mode": "max-autotune-no-cudagraphs"},
    }  # fmt: skip
    for mode, options in modes.items():
        given.clear()
        found = compare(torch.exp, (X,), train=False, device="cpu", mode=mode, policy=quick())
        assert given == [{"dynamic": False, **options}] * 2
        assert list(found.modes) == [options.get("mode", "default")]


@pytest.mark.slow
def test_nothing_is_recorded(tmp_path: Any) -> None:
    file = tmp_path / "t.db"
    try:
        with deployment().deploying_from(str(file)):
            found = compare(lambda x: torch.tanh(x).sum(-1), (X,), train=False, device="cpu", policy=quick())
            assert found.counters["misses"] == 1
            assert not file.exists()
            with Store.open(file):
                pass
            compare(lambda x: torch.tanh(x).amax(-1), (X,), train=False, device="cpu", policy=quick())
            with Store.open(file) as store:
                assert not store.misses()
                assert not store.find_workloads()
    finally:
        use(Deployment())
        torch._dynamo.reset()


# On a GPU, acted


class Capturing:
    """The answers of torch.cuda, and captures that end as a test requires."""

    def __init__(self, refuses: Sequence[str]) -> None:
        self.now, self.refuses = False, refuses

    def capture(self, fn: Callable[[], object]) -> Callable[[], object]:
        """As ``autotune.measure.timer.capture``; the capture of a contender that is called so ends badly."""
        self.now = True
        try:
            fn()
            refused = getattr(fn, "name", "") in self.refuses
        except Exception:
            refused = True
        finally:
            self.now = False
        if refused:
            fn()
            return fn
        return lambda: None


@pytest.fixture
def acted(monkeypatch: pytest.MonkeyPatch) -> Capturing:
    acted = Capturing([])
    cuda = SimpleNamespace(is_available=lambda: True, is_current_stream_capturing=lambda: acted.now)
    monkeypatch.setattr(contenders, "torch", SimpleNamespace(**{**vars(torch), "cuda": cuda}))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(timer, "capture", acted.capture)
    held = iter([1000])  # before the comparison; what it holds later, results of eager's, is none of a step's
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: next(held, 1200))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 1700)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(kernels, "_BUSY_S", 0.0)
    return acted


def test_a_capture_that_is_refused_is_noticed(acted: Capturing) -> None:
    def synchronises() -> None:
        if acted.now:
            raise RuntimeError("operation not permitted when stream is capturing")

    good, raises, ends_badly = Watched(lambda: None), Watched(synchronises), Watched(lambda: None)
    ends_badly.name = "ends badly"  # type: ignore[attr-defined]
    acted.refuses = ["ends badly"]
    for watched in (good, raises, ends_badly):
        watched()
        acted.capture(watched)
    acted.capture(good)
    assert [w.refused for w in (good, raises, ends_badly)] == [False, True, True]


def test_refusals_and_kernels_reach_the_comparison(
    acted: Capturing, monkeypatch: pytest.MonkeyPatch, in_eager: dict[str, Callable[..., Any]]
) -> None:
    def looks(fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: Tensor) -> Any:
            if acted.now:
                raise RuntimeError("operation not permitted when stream is capturing")
            return fn(x)

        return call

    def interleave(
        fns: dict[str, Callable[[], object]],
        policy: Policy,
        device: str,
        *,
        one_memory: bool,
        plain: frozenset[str],
        lead_s: float,
    ) -> dict[str, list[float]]:
        assert one_memory, "two graphs of a large model do not fit"
        assert lead_s > 0.1, "a GPU at its power cap runs at the clock of what ran before"
        for name, fn in fns.items():
            fn()
            if name not in plain:
                acted.capture(fn)
        return {name: [3.0, 1.0, 2.0] for name in fns}

    spans = [(0.0, 2.0, True, "triton_poi_fused_add_0"), (2.0, 3.0, False, "Memset"), (3.0, 7.0, True, "nvjet_mm")]
    traces: list[list[Any]] = [[], spans, []]

    def record(work: Callable[[], object]) -> list[Any]:
        work()
        traces.append(traces.pop(0))
        return traces[-1]

    monkeypatch.setattr(timer, "interleave", interleave)
    monkeypatch.setattr("autotune.bench.kernels.record", record)
    monkeypatch.setattr(step, "seeded", lambda call, seed, device: call())
    in_eager[AUTOTUNE] = looks
    peers = {"own graphs": Peer(lambda: torch.exp, captured=False), "peer": Peer(lambda: torch.exp)}
    found = compare(torch.exp, (X,), train=False, device="cuda:0", policy=quick(), peers=peers)
    captured = {name: s.captured for name, s in found.steps.items()}
    assert captured == {EAGER: True, COMPILE: True, AUTOTUNE: False, "own graphs": False, "peer": True}
    assert {s.us for s in found.steps.values()} == {2.0}
    assert set(found.seconds) == {"timing", "kernels"}
    assert {name: s.peak_bytes for name, s in found.steps.items()} == dict.fromkeys(found.steps, 1000 + 1700 - 1200)
    assert all(found.steps.pop(name).kernels is None for name in peers)  # type: ignore[attr-defined]
    for s in found.steps.values():
        assert s.kernels is not None
        assert (s.kernels["memory_intensive"], s.kernels["library"], s.kernels["library_us"]) == (1, 1, 4.0)


def test_a_profiler_that_sees_nothing_leaves_kernels_out(acted: Capturing, monkeypatch: pytest.MonkeyPatch) -> None:
    def record(work: Callable[[], object]) -> list[Any]:
        raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")

    monkeypatch.setattr("autotune.bench.kernels.record", record)
    assert kernels.kernels_of({"eager": lambda: None}) == {}
    monkeypatch.setattr("autotune.bench.kernels.record", lambda work: [])
    assert kernels.kernels_of({"eager": lambda: None}) == {}


def test_a_trace_follows_replays(acted: Capturing, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rested device's clock is not what a training has."""
    replayed = [0]

    def record(work: Callable[[], object]) -> list[Any]:
        before.append(replayed[0])
        work()
        return [(0.0, 1.0, True, "a kernel")]

    def replays() -> None:
        replayed[0] += 1

    before: list[int] = []
    monkeypatch.setattr(timer, "capture", lambda run: run)
    monkeypatch.setattr("autotune.bench.kernels.record", record)
    monkeypatch.setattr(kernels, "_BUSY_S", 0.01)
    assert kernels.kernels_of({"eager": replays})["eager"]["memory_intensive"] == 1
    assert before
    assert all(b - a > 2 for a, b in zip([0, *before], before, strict=False)), before


def test_kernels_are_counted_and_summed_by_name() -> None:
    spans = [(0.0, 2.0, "triton_poi_fused_add_0"), (2.5, 5.0, "nvjet_tst_128x64"), (5.0, 6.5, "autotune_kernel"),
             (7.0, 9.0, "triton_poi_fused_add_0"), (9.0, 13.0, "triton_tem_fused_addmm_1")]  # fmt: skip
    found = kernels.summed(spans)
    assert (found["memory_intensive"], found["library"]) == (3, 2)
    assert (found["memory_intensive_us"], found["library_us"]) == (5.5, 6.5)
    assert found["names"] == {"triton_poi_fused_add_0": 2, "autotune_kernel": 1}
    assert found["names_us"] == {"triton_poi_fused_add_0": 4.0, "autotune_kernel": 1.5}
    assert found["library_names"] == {"nvjet_tst_128x64": 1, "triton_tem_fused_addmm_1": 1}
    assert found["library_names_us"] == {"nvjet_tst_128x64": 2.5, "triton_tem_fused_addmm_1": 4.0}


def test_templates_are_compiled_in_threads_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    monkeypatch.setattr(AsyncCompile, "wait_pool_ready", lambda: None)
    monkeypatch.setattr(AlgorithmSelectorCache, "make_precompile_fn", lambda self: config.compile_threads)
    before, cache, shown = AlgorithmSelectorCache.make_precompile_fn, object(), config.autotune_num_choices_displayed
    with contenders.templates_in_threads(False):
        assert AlgorithmSelectorCache.make_precompile_fn is before
    with (
        config.patch(compile_threads=7),
        contenders.templates_in_threads(),
    ):  # monkeypatch would leave config without it
        assert AlgorithmSelectorCache.make_precompile_fn(cache) == 1  # type: ignore[arg-type,comparison-overlap]
        assert config.autotune_num_choices_displayed == 0
        assert config.compile_threads == 7
    assert AlgorithmSelectorCache.make_precompile_fn is before
    assert config.autotune_num_choices_displayed == shown
