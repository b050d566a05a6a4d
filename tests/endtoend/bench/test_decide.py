"""Which families a step leaves to Inductor: the search for them on steps of known times, and a real step on the CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import compile_fx, config

import autotune
from autotune import api
from autotune.bench import decide
from autotune.domains.fusion.program_spec import workloads_of
from autotune.measure.policy import default_policy
from autotune.runtime.deployment import Deployment, deployment, use
from autotune.runtime.inductor import region_call
from autotune.runtime.inductor.verdict import Family, Trial
from autotune.store import Store, Verdict
from autotune.tuner.result import Result
from tests.support.clock import Clock, read_samples
from tests.support.deployment import Tune

COMPILED_US = 100.0


class Steps:
    """A step in which each family brings a known time, and alone seems to gain a known fraction; rewritten attention
    brings ``attention``, unless that is 0."""

    mode, device, others = "default", "cpu", 0.0

    def __init__(
        self, brings: Mapping[str, float], alone: Mapping[str, float] | None = None, attention: float = 0.0
    ) -> None:
        self.brings, self.alone, self.attention = brings, alone or {}, attention

    def compiled(self, backend: Trial | None = None) -> Callable[[], object]:
        for name in self.brings if backend is not None and not backend.left else ():
            gain = self.alone.get(name, 0.3)
            backend.graphs[f"graph {name[0]}", "cpu"] = {}  # type: ignore[union-attr, assignment]
            backend.families[name] = Family(name, name, 10.0, 10.0 * (1 + gain), ())  # type: ignore[union-attr]
        for graph, _ in backend.graphs if backend is not None else ():
            counted = {n: 1 for n in self.brings if n[0] == graph[-1]}
            backend.graphs[graph, "cpu"].update(counted)  # type: ignore[union-attr]
        if backend is not None:
            backend.attention = int(self.attention != 0)
        return _Step(None if backend is None else self.brings.keys() - backend.left)

    def times(self, steps: Mapping[str, Any]) -> dict[str, list[float]]:
        return {name: [self._us(step)] * 5 for name, step in steps.items()}

    def _us(self, step: _Step) -> float:
        rewritten = COMPILED_US - (0.0 if step.kept is None else self.attention)
        return rewritten - sum(self.brings[name] for name in step.kept or ())


class _Step:
    def __init__(self, kept: Any) -> None:
        self.kept = kept

    def __call__(self) -> object:
        return None


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> Callable[..., decide.Decision]:
    def run(*args: Any, limit_s: float = 1e9) -> decide.Decision:
        monkeypatch.setattr(decide, "trial_backend", lambda trial: trial)
        found = decide._decided(Steps(*args), time.monotonic(), limit_s)  # type: ignore[arg-type]
        assert found is not None
        return found

    return run


GOOD = dict.fromkeys(("a1", "a2", "a3", "b1", "b2", "b3", "b4"), 5.0)


def test_a_step_that_is_as_fast_keeps_every_kernel(decided: Callable[..., decide.Decision]) -> None:
    found = decided({**GOOD, "a4": -20.0})
    assert (found.left, found.tries, found.autotune_us) == (frozenset(), 0, 85.0)
    assert "every stored kernel is used" in found.text


def test_the_family_that_costs_the_step_is_found_and_it_alone_is_left(decided: Callable[..., decide.Decision]) -> None:
    found = decided({**GOOD, "a4": -50.0})
    assert found.left == {"a4"}
    assert (found.all_us, found.autotune_us) == (115.0, 65.0)
    assert found.ratio == pytest.approx(100 / 65)
    assert "without 1 of 8 families" in found.text
    assert [f["label"] for f in found.record()["families"] if not f["kept"]] == ["a4"]


def test_small_gains_are_left_out_first_and_put_back_where_they_pay(decided: Callable[..., decide.Decision]) -> None:
    alone = {"a1": 0.01, "a2": 0.02, "b1": 0.04}
    found = decided({**GOOD, "a2": -50.0}, alone)
    assert found.left == {"a2"}
    assert found.tries == 5, "the three of small gain together, then who of them pays"


def test_a_step_that_is_slower_in_any_case_is_left_to_inductor(decided: Callable[..., decide.Decision]) -> None:
    found = decided({"a1": -5.0, "a2": -1.0, "b1": -3.0})
    assert found.left == {"a1", "a2", "b1"}
    assert found.autotune_us is None or found.autotune_us == COMPILED_US
    only = decided({"a1": -5.0})
    assert only.left == {"a1"}
    assert "the only family is left to Inductor" in only.text


def test_no_try_is_begun_that_the_time_does_not_suffice_for(decided: Callable[..., decide.Decision]) -> None:
    found = decided({**GOOD, "a4": -50.0}, limit_s=0.0)
    assert (found.tries, found.cut, found.autotune_us) == (0, True, None)
    assert found.left == {*GOOD, "a4"}, "what was not measured to pay is not used"
    assert "autotune 115 us with every stored kernel (median ratio 0.870x); all 8 families are left to" in found.text
    assert "the time was up before any of them was left out" in found.text


def test_the_gain_of_attention_does_not_hide_the_loss_of_a_family(decided: Callable[..., decide.Decision]) -> None:
    found = decided({"a1": 5.0, "a4": -8.0}, None, 30.0)
    assert found.left == {"a4"}
    assert (found.compile_us, found.attention_us, found.all_us, found.autotune_us) == (100.0, 70.0, 73.0, 65.0)
    assert (found.ratio, found.kernels_ratio) == pytest.approx((100 / 65, 70 / 65))
    assert "torch.compile 100 us, 70 us with attention rewritten, autotune 73 us with every" in found.text
    assert "65 us (median ratio 1.077x over that) without 1 of 2 families" in found.text
    assert found.record()["attention_us"] == 70.0


def test_a_step_of_which_attention_alone_is_kept(decided: Callable[..., decide.Decision]) -> None:
    found = decided({"a1": -5.0, "b1": -2.0}, None, 30.0)
    assert found.left == {"a1", "b1"}
    assert (found.autotune_us, found.ratio) == (70.0, pytest.approx(100 / 70))
    assert "all 2 families are left to Inductor" in found.text


def test_attention_that_is_slower_is_said(decided: Callable[..., decide.Decision]) -> None:
    found = decided({"a1": 20.0}, None, -10.0)
    assert (found.attention_us, found.autotune_us, found.left) == (110.0, 90.0, frozenset())
    assert "110 us with attention rewritten (slower; AUTOTUNE_ATTENTION=keep disables the rewriting)" in found.text
    assert "slower" not in decided({"a1": 20.0}, None, 10.0).text


# A real step


class Block(nn.Module):
    """Two regions with a library call between them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1.0, 1.0, 16 * 16).reshape(16, 16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(torch.tanh(x) @ self.weight, -1)


def slow(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a kernel that takes 5 ms by the clock of samples, which takes 10 us for a look; all else takes no time."""
    ready, clock = region_call._ready, Clock(look_us=10.0)
    read_samples(clock, monkeypatch.setattr)

    def waiting(call: region_call.RegionCall) -> Callable[..., None]:
        run = ready(call)

        def late(*tensors: Any) -> None:
            clock.busy(5000)
            run(*tensors)

        return late if which in call.label else run

    monkeypatch.setattr(region_call, "_ready", waiting)


def test_a_slow_kernel_is_left_by_the_step_and_stays_left(
    tune: Tune,
    db: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = Block(), torch.randn(8, 16)
    workloads = tune(model, (x,))
    (tanh,) = [w.fingerprint for w in workloads if "tanh" in w.label]
    slow("tanh", monkeypatch)
    quick = dataclasses.replace(default_policy("cpu", "warm"), final_rounds=5, quiet_s=0.0)
    monkeypatch.setattr(decide, "default_policy", lambda *_: quick)
    said: list[str] = []
    with Store.open(db) as store:
        note = {"target": "Block", "command": "a test"}
        (found,) = decide.decide_and_store(
            store,
            model,
            (x,),
            {},
            train=False,
            device="cpu",
            modes=["default"],
            limit_s=600,
            note=note,
            say=said.append,
        )
        assert tanh in found.left
        assert (found.compile_us, found.all_us) == (10.0, 5010.0)
        (stored,) = store.verdicts()
        assert set(stored.left) == found.left
        assert stored.record["target"] == "Block"
        assert len([line for line in said if "processors busy" not in line]) == 1  # others may disturb the test
        use(Deployment())
        compiled = autotune.compile(model)
        torch.testing.assert_close(compiled(x), model(x))
        counters = autotune.counters()
        assert counters.left == len(found.left)
        assert counters.hits == 2 - len(found.left)
        assert counters.misses == 0


def test_a_verdict_of_a_busy_machine_does_not_replace_one_of_a_quiet_machine(
    tune: Tune, db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Block(), torch.randn(8, 16)
    tune(model, (x,))
    with deployment().deploying_from(db):
        true = decide.decide(model, (x,), train=False, device="cpu", limit_s=30)
    assert true is not None
    said: list[str] = []

    def again(others: float, left: frozenset[str]) -> list[Verdict]:
        found = dataclasses.replace(true, others=others, left=left)
        monkeypatch.setattr(decide, "decide", lambda *args, **options: found)
        with Store.open(db) as store:
            decide.decide_and_store(
                store, model, (x,), {}, train=False, device="cpu", modes=["default"], limit_s=30, note={},
                say=said.append,
            )  # fmt: skip
            return store.verdicts()

    every = frozenset(true.families)
    (first,) = again(1.3, every)
    assert (set(first.left), first.busy) == (every, True)
    assert said[-1] == (
        "WARNING: step, mode default: other processes kept 1.3 processors busy; search again on a quiet machine"
    )
    (second,) = again(0.1, frozenset())
    assert (second.left, second.busy) == ((), False)
    assert "WARNING" not in said[-1]
    (third,) = again(1.3, every)
    assert third == second
    assert "the earlier verdict stays; search again" in said[-1]
    (fourth,) = again(0.0, every)
    assert set(fourth.left) == every


class Attention(nn.Module):
    """One region, and attention under a mask that hides nothing."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool)
        out = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        return torch.softmax(out.transpose(1, 2).reshape(x.shape[0], -1) * 2.0, -1)


def test_a_real_step_with_attention(tune: Tune, db: str) -> None:
    model, x = Attention(), torch.randn(2, 3, 8, 16)
    assert tune(model, (x,))
    with deployment().deploying_from(db):
        found = decide.decide(model, (x,), train=False, device="cpu")
    assert found is not None
    assert found.attention_us is not None
    assert found.attention_us > 0
    assert "with attention rewritten" in found.text
    autotune.configure(attention="keep")
    try:
        with deployment().deploying_from(db):
            found = decide.decide(model, (x,), train=False, device="cpu")
    finally:
        use(Deployment())
    assert found is not None
    assert found.attention_us is None


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(131), nn.Linear(131, 131)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = F.gelu(self.linear(self.norm(x))).sum()
        return made


def test_regions_that_the_step_has_otherwise_than_the_search_saw_are_said(
    tune: Tune, db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Inductor does on a GPU, what the forward pass keeps gets rows of whole lines of memory."""
    monkeypatch.setattr(compile_fx, "maybe_disable_comprehensive_padding", lambda inputs: contextlib.nullcontext())
    model, x = Wide(), torch.randn(8, 131, requires_grad=True)
    stored = [
        w.fingerprint for w in tune(model, (x,), select=lambda w: "gelu" in w.label and "backward" not in w.label)
    ]
    searched = {w.fingerprint for w, _ in workloads_of(model, (x,), train=True)}
    assert stored
    assert searched > set(stored)
    said: list[str] = []
    with Store.open(db) as store, config.patch(padding_stride_threshold=64):
        how = {"train": True, "device": "cpu", "modes": ["default"], "limit_s": 30.0, "note": {}, "say": said.append}
        (decision,) = decide.decide_and_store(store, model, (x,), {}, **how, searched=searched)  # type: ignore[arg-type]
        others = decision.missed.keys() - searched
        assert {miss.workload for miss in store.misses()} == others
        padded = [store.get_workload(name) for name in others]
    assert decision.missed.keys() & searched, "that the search had no time for is missed too, and not told here"
    assert all(
        w is not None and any(136 in i["strides"] or 160 in i["strides"] for i in w.source["inputs"]) for w in padded
    )
    assert said[-1].endswith("another memory layout than the search saw: recorded for `autotune search --missed`")


def test_a_step_without_stored_kernels_or_that_fails_is_said(db: str) -> None:
    def fails(x: Tensor) -> Tensor:
        raise RuntimeError("not my day\nand more")

    said: list[str] = []
    with Store.open(db) as store:
        for fn in (Block(), fails):
            found = decide.decide_and_store(
                store, fn, (torch.ones(8, 16),), {}, train=False, device="cpu", modes=["default"], limit_s=60,
                note={}, say=said.append,
            )  # fmt: skip
            assert found == []
        assert store.verdicts() == []
    assert "no stored kernel" in said[0]
    assert said[1].startswith("WARNING")
    assert "not my day" in said[1]
    assert all("\n" not in line for line in said)


@pytest.mark.parametrize(
    ("target", "inputs", "options", "times"),
    [
        (Block(), torch.ones(8, 16), {}, 1),
        (Block(), torch.ones(8, 16), {"step": False}, 0),
        ("tests.endtoend.cli.test_decided:program", "tests.endtoend.cli.test_decided:inputs", {}, 1),
        ("layer_norm", None, {}, 0),
    ],
)
def test_a_search_from_python_of_a_program_ends_with_its_step(
    target: Any,
    inputs: Any,
    options: dict[str, Any],
    times: int,
    db: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def found(workloads: Any, *args: Any, **options: Any) -> list[Result]:
        return [Result(w.fingerprint, w.label, w.kind, "cpu", "p", winner="autotune") for w in workloads]

    monkeypatch.setattr(api, "tune_workloads", found)
    monkeypatch.setattr(decide, "decide_and_store", lambda *args, **options: asked.append((args, options)))
    assert api.search(target, inputs, device="cpu", db=db, **options)
    assert len(asked) == times
    for (_, fn, args, kwargs), told in asked:
        assert callable(fn)
        assert (len(args), kwargs) == (1, {})
        assert (told["modes"], told["limit_s"], told["train"]) == (["default"], 120.0, False)
