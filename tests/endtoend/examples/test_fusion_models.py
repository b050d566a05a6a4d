"""The benchmark of whole models, without the parts that take a GPU or minutes."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from autotune import device
from autotune.bench import kernels, step
from benchmarks import form, fusion_models
from examples.models import make


def case(name: str, best: float, ours: float, kernels: tuple[int, int] | None = None) -> dict[str, object]:
    counted = None
    if kernels:
        both = zip(("inductor", "autotune"), kernels, strict=True)
        counted = {who: {"memory_intensive": n, "library": 2 * n} for who, n in both}
    times = {"eager_us": 900.0, "inductor_best_us": best, "autotune_us": ours}
    return {"name": name, **times, "kernels": counted, "counters": {"hits": 3}, "regions": 4}


def test_table_tells_means_and_kernels() -> None:
    text = fusion_models.table([case("a", 400.0, 200.0, (10, 4)), case("b", 100.0, 200.0, (6, 3))])
    assert "2.000x" in text
    assert "geometric mean 1.000x; slowest b 0.500x" in text
    assert "10+20 -> 4+8" in text
    assert "7 of Inductor's 16; with those of libraries 21 of 48" in text
    assert "-" in fusion_models.table([case("a", 400.0, 200.0)])


def test_depths_reach_the_search_and_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXAMPLE_LAYERS", "7")  # of the caller's shell, and not meant here
    args = fusion_models.parse(["--device", "cpu", "--steps", "2", "--db", "m.db"])
    assert fusion_models.depth(args) == {"steps": 2}
    found = fusion_models.environment(args)
    assert found["EXAMPLE_STEPS"] == "2"
    assert "EXAMPLE_LAYERS" not in found


def test_regions_and_operators_outside() -> None:
    found = fusion_models.regions_of(make("llama_infer", "cpu", "cpu"))
    assert found["regions"] >= found["different_regions"] > 0
    assert found["bytes"] > 0
    assert found["outside"]["mm"] == 6


def test_a_model_that_takes_too_long_is_stopped() -> None:
    args = fusion_models.parse(["--device", "cpu"])
    args.db = "unused"
    code, _ = fusion_models.run([sys.executable, "-c", "import time; time.sleep(600)"], args, 1.0)
    assert code == 124
    assert fusion_models.run([sys.executable, "-c", "print(7)"], args, 280.0) == (0, "7\n")


def test_unknown_models_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        fusion_models.parse(["--models", "bert_train,gpt"])
    assert stop.value.code == 2
    assert "unknown models gpt" in capsys.readouterr().err


def test_models_side_by_side(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    searching: list[str] = []
    together = threading.Barrier(2)  # broken, and so a model left out, if one is measured after the other

    def search(name: str, args: argparse.Namespace, limit: float) -> dict[str, object]:
        assert not searching, "half as many as jobs"
        searching.append(name)
        time.sleep(0.01)
        searching.remove(name)
        return {"search_s": 1.0, "search_code": 0}

    def measured(
        name: str, args: argparse.Namespace, searched: dict[str, object], end: float
    ) -> dict[str, object] | None:
        if name == "dien_train":
            return None
        together.wait(timeout=250)
        return {**case(name, 300.0, 200.0), "name": name}

    monkeypatch.setattr(device, "identify", lambda name: SimpleNamespace(label="a GPU"))
    monkeypatch.setattr(device, "environment", lambda name: SimpleNamespace(cuda="13.0", driver=None))
    monkeypatch.setattr(fusion_models, "search", search)
    monkeypatch.setattr(fusion_models, "measured", measured)
    written: list[list[str]] = []
    monkeypatch.setattr(form, "write", lambda out, label, cases, versions: written.append([c["name"] for c in cases]))
    names = "bert_train,bert_infer,dien_train,llama_train,llama_infer"
    out = str(tmp_path / "m.json")
    assert fusion_models.main(["--models", names, "--jobs", "2", "--db", "m.db", "--out", out]) == 1
    assert sorted(written[-1]) == sorted(set(names.split(",")) - {"dien_train"})
    assert [len(w) for w in written] == [1, 2, 3, 4]
    assert "geometric mean 1.500x" in capsys.readouterr().out


@pytest.mark.parametrize("text", [["--jobs", "0"], ["--jobs", "2", "--device", "cpu"]])
def test_jobs_that_make_no_sense(text: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        fusion_models.parse(text)
    assert "--jobs" in capsys.readouterr().err


def test_a_case_has_the_fields_of_the_committed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(us: float) -> step.Step:
        counted = kernels.summed([(0.0, 2.0, "triton_poi_fused_add_0"), (2.5, 5.0, "nvjet_tst_128x64")])
        return step.Step(us, 0.01, True, 7.5, 1e-3, 2.0, counted)

    def compare(module: object, inputs: object, **options: object) -> step.Comparison:
        assert (options["train"], options["mode"], options["device"]) == (False, modes, "cpu")
        names = [name for kind in step.CONTENDERS for name in step.contenders(kind, modes)]
        steps = {who: found(us) for who, us in zip(names, times_us, strict=True) if who not in failed}
        times = {"timing": 1.0, "kernels": 0.5}
        return step.Comparison(steps, failed, "cpu", modes, {"hits": 11}, False, times, 0.0)

    failed: dict[str, str] = {}
    modes, times_us = ["max-autotune-no-cudagraphs"], [900.0, 400.0, 300.0]
    monkeypatch.setattr(step, "compare", compare)
    arguments = ["--measure", "llama_infer", "--device", "cpu", "--size", "cpu", "--layers", "1"]
    args = fusion_models.parse([*arguments, "--mode", "max-autotune-no-cudagraphs"])
    made = fusion_models.measure(args)
    committed = form.read(form.RESULTS / "h200" / "models.json")["cases"][0]
    added = {"search_s", "search_code", "commit", "when", "steps", "modes"}  # by others, or younger than the file
    assert set(made) | added == set(committed) | added
    for nested in ("kernels", "graph", "seconds"):
        assert set(made[nested]) == set(committed[nested])
    assert set(made["kernels"]["autotune"]) >= set(committed["kernels"]["autotune"])
    assert (made["eager_us"], made["inductor_best_us"], made["autotune_us"]) == (900.0, 400.0, 300.0)
    assert made["inductor_us"] is None
    assert made["seconds"]["compile_autotune"] == 7.5
    failed["autotune"] = "E: why"
    with pytest.raises(SystemExit, match="no figures of autotune"):
        fusion_models.measure(args)
    failed.clear()
    modes[:], times_us[:] = ["default", "max-autotune-no-cudagraphs"], [900.0, 500.0, 400.0, 280.0, 300.0]
    args = fusion_models.parse([*arguments, "--mode", "default,max-autotune-no-cudagraphs"])
    made = fusion_models.measure(args)
    assert (made["inductor_us"], made["inductor_best_us"], made["autotune_us"]) == (500.0, 400.0, 280.0)
    assert made["modes"]["max-autotune-no-cudagraphs"] == {"inductor_us": 400.0, "autotune_us": 300.0}
    failed["autotune default"] = "E: why"  # one of both modes may fail
    assert fusion_models.measure(args)["autotune_us"] == 300.0
