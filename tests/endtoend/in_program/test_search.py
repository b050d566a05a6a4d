"""A search inside of a program: when it runs, what its program runs afterwards, and that nothing of it can fail it."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._functorch import config as aot_config
from torch._functorch._aot_autograd import runtime_wrappers

import autotune
from autotune.in_program import contest, options, search, searcher
from autotune.in_program.backend import dynamo_backend
from autotune.in_program.traced import Traced
from autotune.measure.child import Child
from autotune.runtime.deployment import deployment
from autotune.runtime.inductor import code, verdict
from autotune.store import Store
from autotune.store.snapshot_writer import export_snapshot
from tests.support.runtime.calls import called
from tests.support.runtime.searches import Searches

STEPS = 2 * contest.WARM + 2 * contest.ROUNDS * contest.BLOCK


class Model(nn.Module):
    """A region in the forward graph, one in the backward graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(48, 48), nn.LayerNorm(48)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(nn.functional.gelu(self.linear(x)) + x).square().mean()


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch, db: str) -> Iterator[Searches]:
    made = Searches()
    monkeypatch.setattr(search, "Searcher", made)
    monkeypatch.setattr(options, "_spent_s", 0.0)
    monkeypatch.setattr(search, "_contest", None)
    yield made
    torch._dynamo.reset()


def faster(monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    """Set the result of contests, which must not depend on the host's load."""
    real = contest.judge
    monkeypatch.setattr(contest, "judge", lambda before, after: replace(real(before, after), kept=kept))
    monkeypatch.setattr(contest, "LEAST_US", 0.0)  # no step is short


def train(steps: int = 1, **options: Any) -> tuple[list[float], Model]:
    """Losses of so many steps, and the model they trained."""
    torch.manual_seed(0)
    model, x = Model(), torch.randn(64, 48)
    run = torch.compile(model, backend=dynamo_backend, options=options or None)
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(steps):
        loss = run(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def eager(steps: int) -> list[float]:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(64, 48)
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(steps):
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_both_graphs_are_searched_and_the_program_continues_with_the_winner(
    searches: Searches, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    faster(monkeypatch, kept=True)
    losses, _ = train(STEPS + 2, search=100)
    (labels,) = searches.labels
    assert any("backward" in label for label in labels)
    assert not all("backward" in label for label in labels)
    assert losses == pytest.approx(eager(STEPS + 2), rel=1e-4)
    counted = autotune.counters()
    # The code before the search, which missed all of them, does not count: other code runs now.
    assert (counted.graphs, counted.hits, counted.misses) == (2, len(labels), 0)
    rows = [row for row in autotune.coverage().rows if row.what in labels]
    assert [row.stored for row in rows] == [True] * len(labels)
    said = capsys.readouterr().err
    assert f"searching {len(labels)} regions on" in said
    assert ": they are used" in said


def test_the_next_process_searches_nothing(searches: Searches, monkeypatch: pytest.MonkeyPatch, db: str) -> None:
    faster(monkeypatch, kept=True)
    train(STEPS + 2, search=100)
    with Store.open(db) as store:
        state = store.state()
    torch._dynamo.reset()
    before = autotune.counters().hits
    train(1, search=100)
    assert len(searches.labels) == 1
    assert autotune.counters().hits == before + len(searches.labels[0])
    with Store.open(db) as store:
        assert store.state() == state, "torch's caches keep the code of the first process"


def test_a_larger_budget_searches_the_rest(
    searches: Searches, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    searches.most = 1
    for seconds, searched in ((100, 1), (120, 1), (200, 2)):
        monkeypatch.setattr(options, "_spent_s", 0.0)
        train(1, search=seconds)
        torch._dynamo.reset()
        assert len(searches.labels) == searched, seconds
        assert ("1 not reached: give more seconds" in capsys.readouterr().err) == (seconds == 100)


def test_a_search_that_reached_no_region_is_repeated_by_the_next_process(searches: Searches) -> None:
    searches.most = 0
    losses, _ = train(2, search=100)
    assert losses == pytest.approx(eager(2), rel=1e-4)
    reasons = [row.why for row in autotune.coverage().rows]
    assert reasons.count("not searched within the budget") == 2
    assert not {"there is no database", "not tuned on this device"} & {*reasons}
    torch._dynamo.reset()
    searches.most = 1000
    train(1, search=100)
    assert [len(labels) for labels in searches.labels] == [0, 2]


def test_coverage_names_the_regions_that_a_search_did_not_reach(searches: Searches) -> None:
    searches.most = 1
    train(1, search=100)
    said = "not tuned on this device", "not searched within the budget"
    rows = [row for row in autotune.coverage().rows if row.stored or row.why in said]
    assert sorted((row.stored, row.why) for row in rows) == [(False, "not searched within the budget"), (True, "")]


def test_a_small_graph_behind_a_large_one_is_left_to_inductor(searches: Searches) -> None:
    """A loss of a few operators behind a graph break, in the first process and in the next."""

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        most = torch.softmax(x * 2, -1)
        torch._dynamo.graph_break()
        return most, torch.log_softmax(y * 3, -1)

    inputs = torch.randn(2048, 1024), torch.randn(4, 8)
    for _ in range(2):
        run = torch.compile(step, backend=dynamo_backend, options={"search": 100})
        torch.testing.assert_close(run(*inputs), step(*inputs))
        rows = {row.what: (row.stored, row.why) for row in autotune.coverage().rows}
        assert len(searches.labels) == 1
        (searched,) = searches.labels[0]
        assert rows.pop(searched)[0]
        torch._dynamo.reset()
    assert (False, "too small to matter for the step") in rows.values()


@pytest.mark.parametrize(
    ("outcome", "why"),
    [("inductor", "the search found nothing faster"), ("", "none of its candidates works")],
)
def test_coverage_names_the_outcome_of_a_search_without_a_kernel(
    searches: Searches, monkeypatch: pytest.MonkeyPatch, outcome: str, why: str
) -> None:
    searches.winner = outcome
    train(1, search=100)
    (labels,) = searches.labels
    assert labels
    assert [row.why for row in autotune.coverage().rows if row.what in labels] == [why] * len(labels)
    assert autotune.counters().hits == 0


def test_a_slower_step_leaves_everything_to_inductor(
    searches: Searches, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    faster(monkeypatch, kept=False)
    train(STEPS + 2, search=100)
    assert "they are not used" in capsys.readouterr().err
    (labels,) = searches.labels
    counted = autotune.counters()
    assert (counted.graphs, counted.hits, counted.misses, counted.left) == (2, 0, 0, len(labels))
    rows = [row for row in autotune.coverage().rows if row.what in labels]
    assert [(row.stored, row.why) for row in rows] == [(False, "the whole step was faster so")] * len(labels)
    torch._dynamo.reset()
    deployment().reset_counters()
    train(1, search=100)
    assert len(searches.labels) == 1
    assert autotune.counters().hits == 0
    assert autotune.counters().left == len(searches.labels[0])


def test_without_a_budget_misses_are_recorded_as_ever(searches: Searches, db: str) -> None:
    train(1)
    assert searches.labels == []
    with Store.open(db) as store:
        assert store.misses()


def test_the_variable_asks_for_it_too(searches: Searches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_SEARCH", "100")
    train(1)
    assert len(searches.labels) == 1
    assert 50.0 <= searches.seconds[0] <= 90.0


def test_a_context_compiles_earlier_graphs_again(searches: Searches) -> None:
    model, x = Model(), torch.randn(64, 48)
    run = torch.compile(model, backend=dynamo_backend)
    run(x)
    assert searches.labels == []
    with autotune.tuning(seconds=100):
        run(x).backward()
    assert len(searches.labels) == 1


def test_a_spent_budget_leaves_the_program_as_torch_compile_has_it(
    searches: Searches, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A later process with the same budget does not search either; one with more seconds does."""
    monkeypatch.setattr(options, "_spent_s", 97.0)
    losses, _ = train(2, search=100)
    assert searches.labels == []
    assert losses == pytest.approx(eager(2), rel=1e-4)
    assert "2 regions of a later graph not reached, since its budget of 100 s is spent: give more" in caplog.text
    monkeypatch.setattr(options, "_spent_s", 0.0)
    for seconds, count in ((100, 0), (200, 1)):
        torch._dynamo.reset()
        train(1, search=seconds)
        assert len(searches.labels) == count


def test_a_budget_that_compiling_takes_still_searches(
    searches: Searches, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(search, "granted_s", lambda left, again_s, searched_s, share: search.LEAST_S)
    monkeypatch.setattr(search, "left_s", lambda seconds: search.LEAST_S)
    train(2 * contest.WARM, search=1000)  # the first steps run the code before the search
    assert len(searches.labels) == 1
    assert autotune.counters().hits == len(searches.labels[0])
    assert "after the search, more than the budget leaves" in capsys.readouterr().err


def test_a_second_compilation_that_takes_more_than_the_budget_is_left_to_the_next_process(
    searches: Searches, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(search, "_AGAIN", 1e6)
    losses, _ = train(3, search=100)
    assert losses == pytest.approx(eager(3), rel=1e-4)
    assert len(searches.labels) == 1
    assert searches.seconds == pytest.approx([50.0], abs=5.0), "half of the budget is for the search in any case"
    assert autotune.counters().hits == 0
    assert "this process runs without the new kernels, the next one with them" in capsys.readouterr().err
    assert [row.why for row in autotune.coverage().rows if row.what in searches.labels[0]] == [
        "its kernel was found after this code was compiled"
    ] * len(searches.labels[0])
    torch._dynamo.reset()
    train(1, search=100)
    assert capsys.readouterr().err == ""
    assert len(searches.labels) == 1
    assert autotune.counters().hits == len(searches.labels[0])


def test_compilers_of_a_cpu_are_not_expected_again(
    searches: Searches, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As if all of the first compilation's time was for loading code, which the second one does not need."""

    class Loading(Traced):
        @contextlib.contextmanager
        def recording(self) -> Iterator[None]:
            with super().recording():
                yield
            self.loading_s = 1e6

    monkeypatch.setattr(search, "_AGAIN", 1e6)
    monkeypatch.setattr(search, "Traced", Loading)
    train(1, search=100)
    assert autotune.counters().hits == len(searches.labels[0])
    assert "more than the budget" not in capsys.readouterr().err


def test_an_interrupt_ends_the_program_and_the_next_process_goes_on(
    searches: Searches, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches.most = 1
    searches.interrupted = True
    with pytest.raises(KeyboardInterrupt):
        train(1, search=100)
    torch._dynamo.reset()
    searches.interrupted = False
    train(1, search=100)
    assert len(searches.labels) == 2
    assert searches.labels[0] != searches.labels[1]


def test_a_search_that_fails_is_warned_of_and_the_program_trains_on(
    searches: Searches, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA out of memory")

    searches.during = fail
    losses, _ = train(3, search=100)
    assert losses == pytest.approx(eager(3), rel=1e-4)
    warned = [r.getMessage() for r in caplog.records if "the search in the program failed" in r.getMessage()]
    assert len(warned) == 1
    assert "CUDA out of memory" in warned[0]


def test_a_search_whose_process_is_killed_is_warned_of_and_the_program_trains_on(
    searches: Searches, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Dying(Child):
        def send(self, message: Any, blob: bytes = b"", timeout: float = 60.0) -> None:
            super().send(message, blob, timeout)
            os.kill(self.pid, 9)

    monkeypatch.setattr(searcher, "_Process", Dying)
    monkeypatch.setattr(search, "Searcher", searcher.Searcher)
    losses, _ = train(3, search=100)
    assert losses == pytest.approx(eager(3), rel=1e-4)
    warned = [r.getMessage() for r in caplog.records if "the search in the program failed" in r.getMessage()]
    assert len(warned) == 1
    assert "its process ended: killed by SIGKILL" in warned[0]


def test_random_numbers_of_the_program_are_those_without_a_search(searches: Searches) -> None:
    model, x = Model(), torch.randn(64, 48)
    for seeded in (random.seed, np.random.seed, torch.manual_seed):
        seeded(3)
    torch.compile(model, backend=dynamo_backend, options={"search": 100})(x)
    found = random.random(), np.random.rand(), torch.rand(1).item()
    for seeded in (random.seed, np.random.seed, torch.manual_seed):
        seeded(3)
    assert found == (random.random(), np.random.rand(), torch.rand(1).item())


def test_a_snapshot_is_deployed_from_and_nothing_is_searched(
    searches: Searches, caplog: pytest.LogCaptureFixture, tmp_path: Path, db: str
) -> None:
    train(1, search=100)
    with Store.open(db) as store:
        export_snapshot(store, tmp_path / "schedules.atdb")
    torch._dynamo.reset()
    autotune.load(tmp_path / "schedules.atdb")
    torch.compile(lambda x: torch.softmax(x, -1) * 2, backend=dynamo_backend, options={"search": 900})(
        torch.randn(8, 64)
    )
    assert len(searches.labels) == 1
    assert any(f"no search: {tmp_path / 'schedules.atdb'} cannot be written" in r.getMessage() for r in caplog.records)


def test_an_option_that_is_no_number_of_seconds_is_named(searches: Searches) -> None:
    with pytest.raises(Exception, match=r"options\['search'\]: 'long' must be a number of seconds"):
        train(1, search="long")


@pytest.mark.skipif(not hasattr(runtime_wrappers, "_AutogradBackwardCompiler"), reason="torch 2.13")
@pytest.mark.parametrize("steps", [1, STEPS + 2])
def test_graph_may_be_retained_in_the_first_backward_pass(
    searches: Searches, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, steps: int
) -> None:
    """A plain torch.compile compiles the backward graph then. The next process has torch's caches."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "caches"))
    monkeypatch.setattr(code, "_forgotten", set())
    faster(monkeypatch, kept=True)

    def both(run: Any) -> Tensor:
        x = torch.linspace(-1, 1, 64 * 48).view(64, 48).requires_grad_()
        found = run(x)
        found.backward(retain_graph=True)
        (2 * found).backward()
        assert x.grad is not None
        return x.grad

    torch.manual_seed(0)
    model = Model()
    want = both(model)
    with torch._inductor.config.patch(fx_graph_cache=True), aot_config.patch(enable_autograd_cache=True):
        for process in range(3):
            torch._dynamo.reset()
            code._forgotten.clear()
            run = torch.compile(model, backend=dynamo_backend, options={"search": 100})
            for _ in range(1 if process else steps):
                torch.testing.assert_close(both(run), want, rtol=1e-4, atol=1e-5)
    assert len(searches.labels) == 1
    assert autotune.counters().hits


def test_another_memory_format_is_searched_too(searches: Searches) -> None:
    """Its graph has the same calls, and other regions."""
    run = torch.compile(
        lambda x: nn.functional.silu(nn.functional.group_norm(x, 4)), backend=dynamo_backend, options={"search": 500}
    )
    x = torch.randn(2, 32, 16, 16)
    for one in (x, x.to(memory_format=torch.channels_last)):
        torch._dynamo.reset()
        run(one)
    first, second = searches.labels
    assert first != second


def test_a_search_without_gain_adds_one_function_to_a_graph(
    searches: Searches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short step waits for Python, so each function would make it slower than with torch.compile."""
    faster(monkeypatch, kept=False)

    def calls(steps: int, **how: Any) -> Counter[str]:
        torch._dynamo.reset()
        model, x = Model(), torch.randn(64, 48)
        run = torch.compile(model, **how)

        def step() -> None:
            run(x).backward()

        for _ in range(steps):
            step()
        return called(step)

    ours = calls(STEPS + 4, backend=dynamo_backend, options={"search": 100})
    assert searches.labels
    assert search._contest is not None
    assert search._contest.kept is False
    theirs = calls(4, backend="inductor")
    assert ours["Frame.__call__"] == 1
    # torch has another one around code whose backward graph is compiled with its forward graph.
    around = ours["SerializableCompiledFunction.__call__"] - theirs["SerializableCompiledFunction.__call__"]
    assert ours.total() <= theirs.total() + 1 + around, (ours - theirs, theirs - ours)


@pytest.mark.parametrize("option", ["emulate_precision_casts", "aot_inductor.use_runtime_constant_folding"])
def test_what_an_option_excluded_is_searched_without_it(searches: Searches, option: str) -> None:
    train(1, search=100, **{option: True})
    assert searches.labels == []
    torch._dynamo.reset()
    train(1, search=100)
    assert [len(labels) for labels in searches.labels] == [2]


def test_a_graph_that_ranks_did_not_look_at_counts_as_not_searched(
    searches: Searches, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as differing:
        differing.setattr(verdict, "ranks_agree", lambda graph, inputs: False)
        train(1, search=100)
    assert searches.labels == []
    torch._dynamo.reset()
    train(1, search=100)
    assert [len(labels) for labels in searches.labels] == [2]


def test_a_graph_of_any_number_of_rows(searches: Searches, monkeypatch: pytest.MonkeyPatch) -> None:
    faster(monkeypatch, kept=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(48), nn.GELU(), nn.Softmax(-1))
    run = torch.compile(model, backend=dynamo_backend, options={"search": 300})
    for step in range(STEPS + 4):
        x = torch.randn(64 + 16 * (step % 3), 48)
        torch._dynamo.mark_dynamic(x, 0)
        with torch.no_grad():
            torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)
    assert len(searches.labels) == 1
    assert autotune.counters().hits


def test_a_database_that_is_unusable_costs_no_search(
    searches: Searches, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "broken.db"
    file.write_bytes(b"no database" * 1000)
    monkeypatch.setenv("AUTOTUNE_DB", str(file))
    losses, _ = train(3, search=100)
    assert losses == pytest.approx(eager(3), rel=1e-4)
    assert searches.labels == []
    assert len([r for r in caplog.records if "no schedule is looked up" in r.getMessage()]) == 1
    assert "search in the program failed" not in caplog.text


def test_two_models_share_one_contest(searches: Searches, monkeypatch: pytest.MonkeyPatch) -> None:
    faster(monkeypatch, kept=True)
    torch.manual_seed(0)
    first, second, x = Model(), nn.Sequential(nn.Linear(48, 48), nn.LayerNorm(48), nn.Softmax(-1)), torch.randn(64, 48)
    runs = [torch.compile(m, backend=dynamo_backend, options={"search": 300}) for m in (first, second)]
    for _ in range(STEPS + 3):
        got = [run(x) for run in runs]
    assert search._contest is not None
    assert len(search._contest.frames) == 2
    assert not search._contest.running
    torch.testing.assert_close(got[0], first(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got[1], second(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("verify", [None, "never"])
def test_a_reset_of_dynamo_cancels_the_comparison(searches: Searches, verify: Any, db: str) -> None:
    model, x = Model(), torch.randn(64, 48)
    compiled = autotune.compile(model, verify=verify, options={"search": 100})
    compiled(x).backward()
    running = search._contest
    assert running is not None
    (frame,) = running.frames
    codes = weakref.ref(frame.before), weakref.ref(frame.after)
    assert codes[0]() is not codes[1]()
    del frame, running
    torch._dynamo.reset()
    gc.collect()
    assert [code() for code in codes] == [None, None]
    assert search._contest is None
    compiled(x).backward()  # the schedules are stored, and nothing is searched or compared
    assert search._contest is None
    assert len(searches.labels) == 1


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_reset_of_dynamo_resets_cuda_graphs(monkeypatch: pytest.MonkeyPatch, mode: str | None) -> None:
    from torch._inductor import cudagraph_trees

    resets: list[str] = []
    torch.compile(torch.nn.Identity(), backend="autotune", mode=mode)
    for asked in ("is_available", "is_initialized"):  # torch 2.15 asks the second one
        monkeypatch.setattr(torch.cuda, asked, lambda: True)
    monkeypatch.setattr(cudagraph_trees, "reset_cudagraph_trees", lambda: resets.append("trees"))
    torch._dynamo.reset()
    assert resets == ["trees"], "torch resets the trees of every backend"


def test_parameters_are_shared_by_both_codes(searches: Searches) -> None:
    _, model = train(5, search=100)
    trained = [p.detach().clone() for p in model.parameters()]
    torch._dynamo.reset()
    _, again = train(5)
    for a, b in zip(trained, again.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
