"""The benchmark of real models, on a CPU: small versions of the models, and the handling of their measurements."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autotune.bench import step
from autotune.bench.step import Comparison, Step, step_of, trainable
from benchmarks import form, real_models
from benchmarks import table as documents
from benchmarks.real import liger, measure, table
from benchmarks.real.families import DEFAULT, FAMILIES, NAMES
from benchmarks.real.measure import ATTENTION, LIGER, OVERHEAD, Options, times
from benchmarks.real.models import _no_zeros, make

HERE = {"transformers": importlib.util.find_spec("transformers"), "timm": importlib.util.find_spec("timm")}
COMPILE = torch.compile
needs_transformers = pytest.mark.skipif(not HERE["transformers"], reason="transformers is not installed (extra bench)")
needs_timm = pytest.mark.skipif(not HERE["timm"], reason="timm is not installed (extra bench)")


def made_here(name: str) -> Any:
    """A parameter of a test, skipped where the model's library is missing."""
    library = FAMILIES[name.rpartition("_")[0]].library
    return pytest.param(name, marks=needs_transformers if library == "transformers" else needs_timm)


# Models


def test_default_models_cover_every_family() -> None:
    assert set(DEFAULT) <= set(NAMES)
    assert {name.rpartition("_")[0] for name in DEFAULT} == set(FAMILIES), "every family"
    assert sum(name.endswith("_train") for name in DEFAULT) >= 10
    assert any(name.endswith("_decode") for name in DEFAULT)
    assert all(f.why for f in FAMILIES.values() if f.cut), "a cut in depth is said"


@pytest.mark.parametrize("name", [made_here(name) for name in NAMES])
def test_a_small_version_takes_a_step(name: str) -> None:
    made = make(name, "cpu", tiny=True)
    again = make(name, "cpu", tiny=True)
    run = step_of(made.module, (), made.inputs, trainable(made.module, (), made.inputs) if made.train else ())
    torch.manual_seed(0)
    first = run()
    torch.manual_seed(0)
    second = step_of(again.module, (), again.inputs, trainable(again.module, (), again.inputs) if made.train else ())()
    results = [first[0], *first[1]] if made.train else [first]  # type: ignore[index]
    repeated = [second[0], *second[1]] if made.train else [second]  # type: ignore[index]
    for a, b in zip(results, repeated, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b), "weights and inputs are the same every time"
    assert made.layers < FAMILIES[name.rpartition("_")[0]].layers
    assert results[0].isfinite().all()
    assert results[0].abs().max() > 0
    if made.train:
        assert results[0].dim() == 0
        assert all(p.requires_grad for p in made.module.parameters())
    else:
        assert results[0].dim() >= 2
        assert not any(p.requires_grad for p in made.module.parameters())


@pytest.mark.parametrize("name", [made_here(name) for name in NAMES])
def test_a_twin_for_liger_has_the_very_weights(name: str) -> None:
    made = make(name, "cpu", tiny=True)
    module, inputs = made.module.eval(), made.inputs
    twin = liger.sharing(module)
    for (known, a), (there, b) in zip(module.named_parameters(), twin.named_parameters(), strict=True):
        assert known == there
        assert a is b
    assert all(a is not b for a, b in zip(module.modules(), twin.modules(), strict=True))
    with torch.no_grad():
        assert torch.equal(twin(**inputs), module(**inputs))


@needs_transformers
@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("_decode")])
def test_every_step_of_decoding_is_the_same(name: str) -> None:
    made = make(name, "cpu", tiny=True)
    run = step_of(made.module, (), made.inputs)
    first = run()
    for _ in range(20):  # more than the cache has room for
        assert torch.equal(run(), first)  # type: ignore[arg-type]
    assert isinstance(first, Tensor)
    assert first.shape[1] == 1


@needs_transformers
def test_depth_batch_and_random_numbers() -> None:
    torch.manual_seed(3)
    want = torch.rand(2)
    torch.manual_seed(3)
    made = make("bert_large_train", "cpu", tiny=True, layers=1, batch=3)
    assert torch.equal(torch.rand(2), want), "the caller's random numbers go on"
    assert (made.layers, made.shape.batch, made.inputs["input_ids"].shape) == (1, 3, (3, 16))
    kept = made.inputs["labels"] != -100
    assert 0 < kept.sum() < kept.numel()
    assert torch.equal(made.inputs["labels"][kept], made.inputs["input_ids"][kept])


def test_weights_of_zeros_are_none() -> None:
    head, norm, kept = nn.Linear(3, 2), nn.LayerNorm(3), nn.Linear(3, 2)
    with torch.no_grad():
        head.weight.zero_()
        norm.weight.zero_()
    before = kept.weight.clone()
    _no_zeros(nn.Sequential(head, norm, kept))
    assert head.weight.all()
    assert torch.equal(norm.weight, torch.ones(3))
    assert not norm.bias.any()
    assert torch.equal(kept.weight, before)


def test_a_library_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match="timm"):
        make("resnet50_train", "cpu", tiny=True)
    with pytest.raises(ValueError, match="unknown model"):
        make("bert_large", "cpu")


# Liger Kernel


def rotate(x: Tensor) -> Tensor:
    return x * 2.0


class Model(nn.Module):
    """Calls a function of this Python module, as models of transformers do."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type=kind)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return rotate(self.layer(x))


class Outer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model = Model(kind)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x)
        return out


@pytest.fixture
def liger_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Liger Kernel that exchanges a function of the model's Python module and a method of the instance."""

    def apply(model: nn.Module) -> None:
        globals()["rotate"] = lambda x: x * 3.0
        model.layer.forward = lambda x: nn.functional.linear(x, model.layer.weight)  # type: ignore[union-attr, arg-type]

    package, patches = ModuleType("liger_kernel.transformers"), ModuleType("liger_kernel.transformers.monkey_patch")
    package._apply_liger_kernel_to_instance = apply  # type: ignore[attr-defined]
    patches.MODEL_TYPE_TO_APPLY_LIGER_FN = {"known": apply}  # type: ignore[attr-defined]
    for name, there in (
        ("liger_kernel", ModuleType("liger_kernel")),
        ("liger_kernel.transformers", package),
        ("liger_kernel.transformers.monkey_patch", patches),
    ):
        monkeypatch.setitem(sys.modules, name, there)
    monkeypatch.setattr(torch, "compile", lambda fn, **options: fn)


def test_liger_leaves_the_model_as_it_was(liger_here: None) -> None:
    module, x = Outer("known"), torch.ones(2, 4)
    weight, bias = module.model.layer.weight, module.model.layer.bias
    plain, before = module(x), rotate
    run = liger.compiled(module)
    assert rotate is before
    patched = run(x)
    assert rotate is before
    assert torch.equal(module(x), plain)
    torch.testing.assert_close(patched, 3.0 * (x @ weight.t()))
    patched.sum().backward()
    assert weight.grad is not None, "the weights are the very same"
    assert bias.grad is None


def test_ligers_loss_is_called_and_not_traced(liger_here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    functional = ModuleType("liger_kernel.transformers.functional")
    traced = []

    def loss(x: Tensor, *, softcap: float | None = None) -> Tensor:
        traced.append(torch.compiler.is_compiling())
        return x.sum()

    setattr(functional, liger.LOSS, loss)
    monkeypatch.setitem(sys.modules, functional.__name__, functional)
    monkeypatch.setattr(sys.modules["liger_kernel.transformers"], "functional", functional, raising=False)
    for _ in range(2):
        liger.keep_the_loss_out()
    there = getattr(functional, liger.LOSS)
    assert "softcap" in inspect.signature(there).parameters, "Liger asks for them"
    compiled = COMPILE(lambda x: there(x * 2.0) + 1.0, backend="eager")
    assert compiled(torch.ones(3)).item() == 7.0
    assert traced == [False]


def test_liger_fails_within_and_leaves_the_model_as_it_was(liger_here: None) -> None:
    before, run = rotate, liger.compiled(Outer("known"))
    with pytest.raises(RuntimeError):
        run(torch.ones(2, 5))
    assert rotate is before


def test_models_that_liger_does_not_have(liger_here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (Outer("another"), nn.Linear(2, 2)):
        with pytest.raises(liger.NoLiger, match="does not have"):
            liger.compiled(module)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    with pytest.raises(liger.NoLiger, match="cannot be imported"):
        liger.compiled(Outer("known"))


# What is made of measurements


def taken(us: float, memory: float = 0.0, peak: int | None = None, library: float = 0.0) -> Step:
    kernels = {"memory_intensive": 3, "library": 2, "memory_intensive_us": memory, "library_us": library}
    return Step(us, 0.01, True, 2.0, 1e-3, 4.0, kernels if memory else None, peak)


def compared(modes: Sequence[str] = ("default", "max-autotune-no-cudagraphs")) -> Comparison:
    steps = {
        "eager": taken(900.0, 500.0, 1 << 33, 390.0),
        "torch.compile default": taken(600.0, 250.0, 1 << 32, 340.0),
        "torch.compile max-autotune-no-cudagraphs": taken(500.0, 200.0, 1 << 32, 290.0),
        "autotune default": taken(400.0, 100.0, 1 << 31, 290.0),
        "autotune max-autotune-no-cudagraphs": taken(450.0, 110.0, 1 << 31, 300.0),
        LIGER: taken(550.0),
        OVERHEAD: taken(480.0),
        ATTENTION: taken(500.0),
    }
    if len(modes) == 1:
        steps = {"eager": steps["eager"], "torch.compile": taken(600.0), "autotune": taken(400.0)}
    return Comparison(steps, {}, "cuda:0", modes, {"hits": 7}, False, {}, 0.0)


DESCRIBED = {"layers": 24, "published_layers": 24, "regions": 9, "seconds": {"all": 3.0}, "bytes": 1,
             "searched": {"busy": False}}  # fmt: skip


def test_a_case_has_the_results_of_the_modes() -> None:
    case = times(compared(), ("default", "reduce-overhead", "max-autotune"), 80.0)
    assert case["default"] == {
        "compile_us": 600.0, "compile_library_us": 340.0, "compile_memory_us": 250.0, "compile_library_kernels": 2,
        "compile_memory_kernels": 3, "compile_peak_bytes": 1 << 32, "autotune_us": 400.0, "autotune_library_us": 290.0,
        "autotune_memory_us": 100.0, "autotune_library_kernels": 2, "autotune_memory_kernels": 3,
        "autotune_peak_bytes": 1 << 31, "floor_us": 80.0,
    }  # fmt: skip
    assert case["max-autotune"]["autotune_us"] == 450.0
    assert (case["eager_us"], case["liger_us"], case["reduce_overhead_us"]) == (900.0, 550.0, 480.0)
    assert case["attention_us"] == 500.0
    alone = times(compared(["default"]), ("default",), 80.0)
    assert alone["max-autotune"] is None
    assert alone["liger_us"] is None
    assert alone["attention_us"] is None
    assert (alone["default"]["compile_us"], alone["default"]["compile_library_us"]) == (600.0, None)
    json.dumps(alone, allow_nan=False)


def test_a_peer_with_wrong_results_has_no_time() -> None:
    found = compared()
    steps = {**found.steps, LIGER: dataclasses.replace(found.steps[LIGER], difference=0.3)}
    case = times(dataclasses.replace(found, steps=steps), ("default", "max-autotune"), 1.0)
    assert case["liger_us"] is None
    assert case["missing"] == {LIGER: "results 0.3 from eager's, where torch.compile's are 0.001"}
    assert case["reduce_overhead_us"] == 480.0


def test_a_contender_that_failed_is_null_and_told() -> None:
    found = compared()
    steps = {k: v for k, v in found.steps.items() if k not in ("autotune default", LIGER)}
    failed = {"autotune default": "E: why", LIGER: "NoLiger: none"}
    case = {
        "name": "m",
        **DESCRIBED,
        **times(Comparison(steps, failed, "cuda:0", found.modes, {}, False, {}, 0.0), ("default", "max-autotune"), 1.0),
    }
    assert case["missing"] == failed
    assert case["default"]["autotune_us"] is None
    assert table.speedup(case, "default") is None
    assert table.over_best(case) == pytest.approx(480.0 / 450.0)
    assert "1.111x" in table.text([case])  # max-autotune: 500 / 450


def case(name: str, layers: int = 24) -> dict[str, Any]:
    found = times(compared(), ("default", "reduce-overhead", "max-autotune"), 80.0)
    return {"name": name, **DESCRIBED, "layers": layers, **found}


def test_the_table_tells_means_and_totals() -> None:
    slower = case("slower", layers=8)
    slower["default"] = {**slower["default"], "autotune_us": 1200.0}
    text = table.text([case("a"), slower], {"broken": "E: why"})
    assert "slower (8 of 24 layers)" in text
    mean = "over torch.compile, default: 0.866x in the geometric mean of 2 models; worst slower 0.500x, best a 1.500x"
    assert mean in text
    assert "each at its best: 1.131x" in text  # 480 / 400 and 480 / 450
    assert "over Liger Kernel: 1.296x" in text
    assert "memory-intensive kernels, default: 0.2 ms of torch.compile's 0.5 ms" in text
    assert "library kernels, max-autotune: 0.6 ms of torch.compile's 0.6 ms" in text
    assert "0.25 -> 0.10" in text
    assert "4.0 -> 2.0" in text
    assert "busy" not in text
    assert text.endswith("broken failed: E: why")
    disturbed = {**slower, "searched": {"busy": True}}
    assert "other processes disturbed slower;" in table.text([case("a"), disturbed])
    assert table.text([], {"broken": "E: why"}) == "broken failed: E: why"


def test_steps_timed_without_a_lead_are_marked() -> None:
    now = case("a")
    assert (now["lead_s"], "*" in table.text([now])) == (0.3, False)
    then = {**now, "lead_s": None}
    later = {**then, "runs": {"max-autotune": {"lead_s": 0.3}}}
    lines = table.text([then, later]).splitlines()
    assert [cell for cell in lines[1].split() if "x" in cell] == ["1.500x*", "1.111x*", "1.200x"]
    assert [cell for cell in lines[2].split() if "x" in cell] == ["1.500x*", "1.111x", "1.200x"]
    assert table.RESTED in lines


def test_regions_that_a_step_has_and_no_search_captures_are_told() -> None:
    from tests.support.rows import workload

    counted, missed = (
        [(workload(8), 3), (workload(9), 1)],
        {w.fingerprint: ("cpu", w) for w in (workload(9), workload(32))},
    )
    compared = Comparison({}, {}, "cpu", ["default"], {}, False, {}, 0.0, missed)
    assert measure._not_captured(counted, compared) == [workload(32).label]
    told = table.text([{**case("vit_base_train"), "not_captured": ["sum f32 8"]}])
    assert "vit_base_train: 1 regions of the step are none that a search captures: sum f32 8" in told
    assert "captures" not in table.text([{**case("vit_base_train"), "not_captured": []}])


def test_a_later_run_brings_its_peers_where_it_has_their_mode() -> None:
    first = {**case("vit_base_train"), "attention_us": 10.0, "liger_us": 20.0}
    mode = first["default"]
    both = {"default": mode, "max-autotune": None, "attention_us": 30.0, "liger_us": None, "lead_s": 0.3}
    anew = measure.merged(first, both)
    assert (anew["attention_us"], anew["liger_us"]) == (30.0, None), "no ratios across runs"
    assert anew["runs"]["default"]["lead_s"] == 0.3
    other = measure.merged(first, {**both, "default": None, "max-autotune": mode})
    assert (other["attention_us"], other["liger_us"]) == (10.0, 20.0)


def test_columns_that_nothing_fills_are_left_out() -> None:
    small = {"name": "a", **DESCRIBED, **times(compared(["default"]), ("default",), 80.0)}
    head = table.text([small]).splitlines()[0]
    assert head.split() == ["model", "eager", "compile", "autotune", "default", "best"]


def test_result_files_are_documents_tables_too(tmp_path: Path) -> None:
    extra = {"suite": "real_models", "tiny": False, "failed": {}}
    data = form.write(tmp_path / "real.json", "a GPU", [case("a")], {"torch": "2.11"}, command="c", extra=extra)
    assert form.read(tmp_path / "real.json") == data
    text = documents.render(data)
    assert "| a | 0.90 | 0.48 | 0.50 | 0.55 | 0.40 | 1.500x |" in text
    assert "a GPU, torch 2.11" in text


# The command


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, says in [
        (["--models", "bert_lage"], "unknown model 'bert_lage'"),
        (["--modes", "fast"], "unknown mode fast"),
        (["--modes", "reduce-overhead"], "--modes needs one of default, max-autotune"),
        (["--search", "-1"], "--search"),
        (["--step-timeout", "inf"], "--step-timeout is a number of seconds"),
        (["--layers", "0"], "--layers"),
    ]:
        with pytest.raises(SystemExit) as stop:
            real_models.main(arguments)
        assert stop.value.code == 2
        assert says in capsys.readouterr().err
    assert real_models.main(["--device", "cuda:99", "--models", "bert_large_train"]) == 2
    assert "cuda:99" in capsys.readouterr().err
    assert real_models.main(["--device", "cpu", "--tiny", "--search", "0"]) == 2  # would measure Inductor with itself
    assert "--search 0 deploys what --db holds, which is nothing" in capsys.readouterr().err


def test_models_option_expands_a_family() -> None:
    assert real_models.parse(["--models", "bert_large,vit_base_infer,bert_large_train"]).models == [
        "bert_large_train", "bert_large_infer", "vit_base_infer",
    ]  # fmt: skip


def test_all_models_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert real_models.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in NAMES:
        (line,) = [line for line in lines if f" {name} " in line]
        assert line.startswith("*") == (name in DEFAULT)
    assert any("8 of 32" in line for line in lines)


Measured = Callable[[str, Options, float], tuple[dict[str, Any] | None, str]]


def run_with(monkeypatch: pytest.MonkeyPatch, out: Path, arguments: Sequence[str], measured: Measured) -> int:
    monkeypatch.setattr(real_models, "measured", measured)
    return real_models.main(["--device", "cpu", "--tiny", "--out", str(out), *arguments])


def test_a_run_goes_on_where_another_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, asked, broken = tmp_path / "deep" / "real.json", list[str](), {"t5_base_train"}

    def measured(name: str, options: Options, limit: float) -> tuple[dict[str, Any] | None, str]:
        asked.append(name)
        assert (options.device, options.tiny, options.search, list(options.modes)) == ("cpu", True, 5.0, ["default"])
        return (None, "OutOfMemoryError: why") if name in broken else (case(name), "")

    models = ["--models", "t5_base,gpt2_medium"]
    assert run_with(monkeypatch, out, models, measured) == 1
    data = form.read(out)
    assert [c["name"] for c in data["cases"]] == ["gpt2_medium_train"]
    assert data["failed"] == {"t5_base_train": "OutOfMemoryError: why"}
    assert "t5_base_train failed: OutOfMemoryError: why" in capsys.readouterr().out
    assert run_with(monkeypatch, out, [*models[:1], models[1] + ",vit_base_train"], measured) == 0
    assert asked == ["t5_base_train", "gpt2_medium_train", "vit_base_train"]
    assert "gpt2_medium_train: is there already" in capsys.readouterr().err
    broken.clear()
    assert run_with(monkeypatch, out, [*models, "--retry"], measured) == 0
    data = form.read(out)
    assert [c["name"] for c in data["cases"]] == ["gpt2_medium_train", "vit_base_train", "t5_base_train"]
    assert data["failed"] == {}
    assert "over torch.compile, default: 1.500x" in capsys.readouterr().out
    assert not list(out.parent.glob("*.tmp"))


def test_a_first_model_that_fails_is_kept_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "real.json"
    assert run_with(monkeypatch, out, ["--models", "t5_base"], lambda *_: (None, "E: why")) == 1
    assert form.read(out)["cases"] == []
    assert run_with(monkeypatch, out, ["--models", "t5_base"], lambda *_: pytest.fail("skipped")) == 0


def test_files_of_other_runs_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "real.json"
    form.write(out, "another machine", [case("a")], extra={"suite": "real_models", "tiny": True})
    before = out.read_bytes()
    assert run_with(monkeypatch, out, [], lambda *_: pytest.fail("nothing is measured")) == 2
    assert "another machine" in capsys.readouterr().err
    out.write_text("{")
    assert run_with(monkeypatch, out, [], lambda *_: pytest.fail("nothing is measured")) == 2
    assert before


def test_an_interrupt_keeps_finished_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "real.json"

    def measured(name: str, options: Options, limit: float) -> tuple[dict[str, Any] | None, str]:
        if name == "gpt2_medium_train":
            raise KeyboardInterrupt
        return case(name), ""

    assert run_with(monkeypatch, out, ["--models", "t5_base,gpt2_medium"], measured) == 130
    assert [c["name"] for c in form.read(out)["cases"]] == ["t5_base_train"]
    assert "interrupted; the same command goes on" in capsys.readouterr().err


def test_no_model_is_begun_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    clock = iter(range(0, 1000, 50))
    monkeypatch.setattr(real_models, "time", SimpleNamespace(monotonic=lambda: next(clock)))

    def measured(name: str, options: Options, limit: float) -> tuple[dict[str, Any] | None, str]:
        asked.append(name)
        return case(name), ""

    run_with(monkeypatch, tmp_path / "real.json", ["--until", "120"], measured)
    assert asked == list(DEFAULT[:2])


def test_models_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meet, locks = threading.Barrier(2), set[str]()

    def measured(name: str, options: Options, limit: float) -> tuple[dict[str, Any] | None, str]:
        meet.wait(250)  # for another that runs meanwhile
        locks.add(options.one_search)
        return case(name), ""

    models = ["--models", "t5_base,gpt2_medium,vit_base,resnet50", "--beside", "2"]
    assert run_with(monkeypatch, tmp_path / "real.json", models, measured) == 0
    assert len(form.read(tmp_path / "real.json")["cases"]) == 4
    (lock,) = locks
    assert lock, "one search at a time"
    monkeypatch.undo()
    started = subprocess.Popen
    code = [sys.executable, "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(real_models.subprocess, "Popen", lambda command, **how: started(code, **how))
    options = Options("cpu", "unused")

    def one(name: str) -> tuple[dict[str, Any] | None, str]:
        return (None, "at once") if name == "a" else real_models.measured(name, options, 600.0)

    loop = real_models.side_by_side(one, ["a", "b", "c"], 2)
    assert next(loop) == ("a", (None, "at once"))
    loop.close()  # as an interrupt does, which ends what runs


def test_a_model_that_runs_out_of_memory_among_others_is_measured_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def measured(name: str, options: Options, limit: float) -> tuple[dict[str, Any] | None, str]:
        asked.append(name)
        crowded = name == "vit_base_train" and asked.count(name) == 1
        hopeless = name == "t5_base_train"
        return (None, "OutOfMemoryError: CUDA out of memory") if crowded or hopeless else (case(name), "")

    models = ["--models", "t5_base,vit_base,resnet50", "--beside", "3"]
    assert run_with(monkeypatch, tmp_path / "real.json", models, measured) == 1
    told = capsys.readouterr().err
    assert sorted(asked[3:]) == ["t5_base_train", "vit_base_train"], "each once more"
    assert asked.count("resnet50_train") == 1
    assert "vit_base_train: no memory beside the others" in told
    assert "t5_base_train: failed: OutOfMemoryError" in told
    assert {c["name"] for c in form.read(tmp_path / "real.json")["cases"]} == {"vit_base_train", "resnet50_train"}


def test_a_process_that_hangs_or_dies_is_one_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    options, start = Options("cpu", "unused"), subprocess.Popen

    def instead(code: str) -> None:
        def begin(command: object, **how: Any) -> Any:
            return start([sys.executable, "-c", code], **how)

        monkeypatch.setattr(real_models.subprocess, "Popen", begin)

    instead("import time; time.sleep(600)")
    assert real_models.measured("t5_base_train", options, 0.5) == (None, "took more than 0.5 s")
    instead("import os; os.abort()")
    assert real_models.measured("t5_base_train", options, 280.0) == (None, "the process ended with -6")
    instead("print('noise'); print('{\"failed\": \"E: why\"}')")
    assert real_models.measured("t5_base_train", options, 280.0) == (None, "E: why")


def test_a_failure_inside_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(*args: object) -> None:
        raise step.NotCompared("OutOfMemoryError: CUDA out of memory")

    monkeypatch.setattr(real_models, "measure", fails)
    assert real_models.measured_here("t5_base_train", Options("cpu", "unused")) == 1
    told = json.loads(capsys.readouterr().out)
    assert told == {"failed": "it fails as it is: OutOfMemoryError: CUDA out of memory"}


def test_the_step_decides_as_at_the_end_of_a_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def decided(store: Any, fn: Any, args: Any, kwargs: Any, **how: Any) -> list[Any]:
        asked.update(how, fn=fn)
        return [SimpleNamespace(record=lambda: {"mode": "default"})]

    monkeypatch.setattr("autotune.bench.decide.decide_and_store", decided)
    made: Any = SimpleNamespace(module="module", inputs={}, train=True, name="x")
    options = Options("cpu", str(tmp_path / "real.db"), step=5.0, modes=("default", "reduce-overhead"))
    seconds: dict[str, float] = {}
    assert measure._decide(made, options, seconds, lambda what, since: 0.5) == [{"mode": "default"}]
    assert (asked["fn"], asked["train"], asked["modes"], asked["limit_s"]) == ("module", True, ["default"], 5.0)
    assert seconds == {"step": 0.5}
    assert measure._decide(made, replace(options, step=0.0), {}, lambda what, since: 0.5) == []


@pytest.mark.slow
@needs_transformers
def test_end_to_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, db = tmp_path / "real.json", tmp_path / "real.db"
    arguments = ["--tiny", "--device", "cpu", "--layers", "1", "--search", "2", "--rounds", "3", "--seconds", "1"]
    arguments += ["--models", "llama32_1b_infer", "--db", str(db), "--out", str(out), "--step-timeout", "30"]
    assert real_models.main(arguments) == 0
    (found,) = form.read(out)["cases"]
    assert (found["layers"], found["published_layers"], found["cut"]) == (1, 16, "asked for")
    counted = found["counters"]  # a verdict of a busy host may leave all regions to Inductor
    assert sum(counted.get(name, 0) for name in ("hits", "misses", "left")) > 0
    assert found["searched"]["decided"] > 0
    assert {verdict["mode"] for verdict in found["verdicts"]} <= {"default"}
    assert found["seconds"]["step"] > 0
    assert found["default"]["compile_us"] > 0
    assert found["default"]["autotune_us"] > 0
    assert found["default"]["floor_us"] > 0
    assert found["differences"]["autotune"] < 1e-3
    assert "llama32_1b_infer (1 of 16 layers)" in capfd.readouterr().out
