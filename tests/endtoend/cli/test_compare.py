"""``autotune compare``: on the CPU from end to end, its text as of a GPU, and mistakes."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autotune
from autotune.bench import step
from autotune.bench.gate import save
from autotune.bench.step import AUTOTUNE, COMPILE, EAGER, Comparison, Step
from autotune.cli.app import build_parser, main
from autotune.cli.commands import compare
from autotune.cli.options import command_line
from autotune.device import environment, identify
from autotune.domains.fusion.program_spec import workloads_of
from autotune.measure.policy import Policy, default_policy
from autotune.runtime.coverage import Coverage, Row
from autotune.runtime.deployment import deployment
from autotune.store import Store, Verdict
from autotune.store.connection.urls import parse_url
from tests.support.deployment import Tune

HERE = "tests.endtoend.cli.test_compare"
X = torch.linspace(-1.0, 1.0, 8 * 16).reshape(8, 16)


class Block(nn.Module):
    """Two regions with a library call between them; nothing requires grad unless asked to train."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1.0, 1.0, 16 * 16).reshape(16, 16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(torch.tanh(x) @ self.weight, -1)


def inputs() -> Tensor:
    return X.clone()


def numbers() -> Tensor:
    return torch.arange(4)


def fails(x: Tensor) -> Tensor:
    raise RuntimeError("this is not my day\nand more")


def to_text(x: Tensor) -> str:
    return "no tensor"


def dropped(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    def policy(rounds: int | None, device: str) -> Policy:
        return dataclasses.replace(default_policy(device), final_rounds=rounds or 5, cold_bytes=0, quiet_s=0.0)

    monkeypatch.setattr(compare, "_policy", policy)


@pytest.fixture
def in_eager(monkeypatch: pytest.MonkeyPatch, db: str) -> None:
    """An empty database, and compilers that compile nothing."""
    Store.open(db).close()
    monkeypatch.setattr(torch, "compile", lambda fn, **kwargs: fn)
    monkeypatch.setattr(autotune, "compile", lambda fn, **kwargs: fn, raising=False)


def command(target: str = "Block", given: str = "inputs", *more: str) -> list[str]:
    return ["compare", "fusion", f"{HERE}:{target}", "--inputs", f"{HERE}:{given}", "--device", "cpu", *more]


# From end to end


def test_a_forward_step(tune: Tune, db: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(tune(Block(), (X,))) == 2
    assert main(command()) == 0
    title, heads, *rows = capsys.readouterr().out.splitlines()
    assert title.startswith(f"{HERE}:Block, a forward step on ")
    assert title.endswith(", mode default")
    assert heads.split() == ["step", "speedup"], "no kernels on a CPU"
    assert [row.split()[0] for row in rows[:3]] == [EAGER, COMPILE, AUTOTUNE]
    assert rows[1].endswith(" 1.00x")
    assert rows[3] == "2 of 2 regions have a schedule"
    assert not any("differ" in row or "NOT" in row for row in rows)


def test_a_training_step_half_of_which_was_searched(
    tune: Tune,
    db: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trained = Block()
    trained.weight.requires_grad_(True)
    stored = tune(trained, (X,), select=lambda w: "tanh" in w.label)
    monkeypatch.delenv("AUTOTUNE_DB")
    assert main(command("Block", "inputs", "--train", "--json", "--db", db)) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert [line.partition(":")[0] for line in err.splitlines()] == [EAGER, COMPILE, AUTOTUNE, "timing"]
    assert found["target"] == f"{HERE}:Block"
    assert (found["train"], found["device"], found["modes"], found["random"]) == (True, "cpu", ["default"], False)
    assert found["counters"]["hits"] == len(stored) > 0
    assert found["counters"]["misses"] > 0
    assert set(found["steps"]) == {EAGER, COMPILE, AUTOTUNE}
    for one in found["steps"].values():
        assert one["difference"] < 1e-5
        assert one["us"] > 0
        assert (one["kernels"], one["captured"], one["disagrees"]) == (None, False, False)
    assert found["speedup"] == found["steps"][COMPILE]["us"] / found["steps"][AUTOTUNE]["us"]
    assert found["steps"][AUTOTUNE]["speedup"] == found["speedup"]
    assert found["environment"]["torch"] == version("torch")
    assert found["failed"] == {}
    with Store.open(db) as store:
        assert store.misses() == []


def test_misses_of_a_step_are_reported_and_not_recorded(db: str) -> None:
    Store.open(db).close()
    with deployment().deploying_from(db):
        found = step.compare(Block(), (X,), train=False, device="cpu", policy=compare._policy(None, "cpu"))
    assert set(found.missed) == {workload.fingerprint for workload, _ in workloads_of(Block(), (X,))}
    assert len(found.missed) == 2
    with Store.open(db) as store:
        assert store.misses() == []


def test_a_built_in_workload_and_rounds(in_eager: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "fusion", "layer_norm", "--device", "cpu", "--rounds", "6", "--mode", "max-autotune"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("layer_norm, a forward step on ")
    assert "mode max-autotune\n" in out
    assert "the step has no region that this version can tune" in out


def test_no_database_is_needed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert "AUTOTUNE_DB" not in os.environ
    assert main(command("Block", "inputs", "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["steps"]) == {EAGER, COMPILE, AUTOTUNE}
    assert found["counters"]["misses"] == 2
    assert found["verdicts"] == []
    assert not Path(str(parse_url(None).database)).exists(), "and none is made"


@pytest.mark.parametrize("command_name", ["lookup", "compare"])
def test_a_copy_alone_is_looked_up_in(
    command_name: str, tune: Tune, db: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tune(Block(), (X,))
    monkeypatch.delenv("AUTOTUNE_DB")
    assert main([command_name, *command()[1:], "--db-read", db, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    if command_name == "lookup":
        assert [region["match"] for region in found["workloads"]] == ["exact", "exact"]
    else:
        assert found["counters"]["hits"] == 2


def test_rounds_are_run_however_long_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    policy = compare._policy(7, "cpu")
    assert (policy.final_rounds, policy.final_s) == (7, math.inf)
    assert compare._policy(None, "cuda:0") == default_policy("cuda:0")


@pytest.mark.parametrize(
    ("target", "more", "said"),
    [
        ("Block", ["--mode", "max-atuotune"], "no mode 'max-atuotune'; its modes are default, "),
        ("Block", ["--rounds", "0"], "'0' is not a whole number of 1 or more"),
        ("Blok", [], "did you mean 'Block'"),
        ("Block", ["--db", "no_such.db"], "there is no database"),
        ("to_text", ["--train"], "no result of the step has a gradient"),
    ],
)
def test_a_mistake_is_one_line(
    target: str, more: list[str], said: str, in_eager: None, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(command(target, "inputs", *more))
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert said in err
    assert err.count("\n") == 1


def test_compare_refuses_a_target_without_gradients(in_eager: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command("dropped", "numbers", "--train")) == 2
    assert "cannot be trained" in capsys.readouterr().err


def test_only_fusion_has_steps(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["compare", "c3", "x"])
    assert "invalid choice: 'c3'" in capsys.readouterr().err


@pytest.mark.parametrize("json", [[], ["--json"]])
def test_a_target_that_fails(json: list[str], in_eager: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command("fails", "inputs", *json)) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"autotune: {HERE}:fails fails in eager mode: RuntimeError: this is not my day\n"


def test_a_contender_that_fails(
    in_eager: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(fn: Callable[..., Any], **kwargs: Any) -> Any:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", broken)
    assert main(command()) == 0
    out = capsys.readouterr().out
    assert "torch.compile failed: RuntimeError: no compiler here" in out
    assert out.splitlines()[3].split() == [COMPILE, "–", "–"]
    monkeypatch.setattr(autotune, "compile", broken, raising=False)
    assert main(command("Block", "inputs", "--json")) == 1
    found = json_of(capsys)
    assert set(found["failed"]) == {COMPILE, AUTOTUNE}
    assert (list(found["steps"]), found["speedup"], found["steps"][EAGER]["speedup"]) == ([EAGER], None, None)


def json_of(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


# Messages


def kernels(many: int, us: float, library: int, library_us: float) -> dict[str, Any]:
    return {"memory_intensive": many, "memory_intensive_us": us, "library": library, "library_us": library_us}


def on_a_gpu(ours: float = 1520.0, **changes: Any) -> Comparison:
    def one(us: float, counted: dict[str, Any], apart: float) -> Step:
        return Step(us, 0.01, True, 1.0, apart, 2.5, counted)

    steps = {
        EAGER: one(2450.0, kernels(141, 1250.0, 49, 1140.0), 1e-7),
        COMPILE: one(1620.0, kernels(78, 577.0, 47, 1040.0), 3e-3),
        AUTOTUNE: one(ours, kernels(55, 493.0, 45, 1020.0), 4e-3),
    }
    counters = {"graphs": 2, "hits": 24, "baseline_wins": 2}
    found = Comparison(steps, {}, "cuda:0", ["default"], counters, False, {}, 0.0)
    return dataclasses.replace(found, **changes)


def test_operators_that_inductor_compiles_are_a_table_with_reasons() -> None:
    rows = [Row("softmax", True, "", 3, 9 << 20), Row("cumsum", False, "an operator without a rule", 2, 1 << 20)]
    lines = list(compare.uncovered(on_a_gpu(coverage=Coverage(rows))))
    assert lines[0] == lines[-1] == ""
    assert lines[2].split("  ")[0] == "cumsum"
    assert lines[2].endswith("an operator without a rule")
    assert list(compare.uncovered(on_a_gpu(coverage=Coverage(rows[:1])))) == []


def in_two_modes() -> Comparison:
    one = on_a_gpu()
    fast = {who: dataclasses.replace(one.steps[who], us=us) for who, us in ((COMPILE, 1400.0), (AUTOTUNE, 1600.0))}
    steps = {
        EAGER: one.steps[EAGER],
        f"{COMPILE} default": one.steps[COMPILE],
        f"{COMPILE} max-autotune": fast[COMPILE],
        f"{AUTOTUNE} default": one.steps[AUTOTUNE],
        f"{AUTOTUNE} max-autotune": fast[AUTOTUNE],
    }
    return dataclasses.replace(one, modes=["default", "max-autotune"], steps=steps)


def test_the_fastest_mode_counts_on_both_sides() -> None:
    found = in_two_modes()
    assert [line.split("  ")[0] for line in compare.table(found)[1:]] == list(found.steps)
    assert found.over_compile(f"{COMPILE} default") == pytest.approx(1400 / 1620)
    assert found.fastest(AUTOTUNE) == f"{AUTOTUNE} default"
    assert "autotune is SLOWER than torch.compile, 0.92x" in notes(found)
    wrong = notes(edited(found, f"{AUTOTUNE} max-autotune", difference=math.inf))
    assert "autotune max-autotune's RESULTS ARE NOT EAGER'S" in wrong
    failed = dataclasses.replace(found, failed={f"{AUTOTUNE} default": "E: why"})
    assert "autotune default failed: E: why" in notes(failed)


def edited(found: Comparison, who: str, **changes: Any) -> Comparison:
    return dataclasses.replace(found, steps={**found.steps, who: dataclasses.replace(found.steps[who], **changes)})


def test_the_table_of_a_gpu() -> None:
    assert compare.table(on_a_gpu()) == [
        "                  step  speedup  kernels  memory-intensive      library",
        "eager          2.45 ms    0.66x      190      141  1.25 ms  49  1.14 ms",
        "torch.compile  1.62 ms    1.00x      125       78   577 us  47  1.04 ms",
        "autotune       1.52 ms    1.07x      100       55   493 us  45  1.02 ms",
    ]
    assert compare.notes(on_a_gpu(), "c") == [
        "24 of 24 regions have a schedule, 2 of which run the code of Inductor or of eager mode"
    ]


def test_kernels_that_were_not_seen() -> None:
    lines = compare.table(edited(on_a_gpu(), COMPILE, kernels=None))
    assert lines[2].split() == [COMPILE, "1.62", "ms", "1.00x", "–", "–", "–"]
    assert lines[1].endswith("190      141  1.25 ms  49  1.14 ms")


def notes(found: Comparison) -> str:
    return "\n".join(compare.notes(found, "autotune search this"))


def test_regions_that_an_option_leaves_to_inductor() -> None:
    counters = {"left_by_options": 2}
    with torch._inductor.config.patch(emulate_precision_casts=True):
        text = notes(on_a_gpu(counters=counters))
        assert text.startswith(
            "2 regions are left to Inductor, since an option requires other results: emulate_precision_casts requires"
            " values that are rounded to 16 bits after each operator"
        )
        assert "no region" not in text
        assert "2 of 3 regions have a schedule" in notes(on_a_gpu(counters={**counters, "hits": 2, "misses": 1}))


def test_regions_left() -> None:
    text = notes(on_a_gpu(counters={"hits": 23, "misses": 19, "hits_other_rows": 1, "fallbacks": 3}))
    assert "23 of 42 regions have a schedule, 1 of which was tuned for another number of rows" in text
    assert "19 of 42 regions were not searched on this device: `autotune search this` searches them" in text
    assert "3 regions ran without the stored kernel" in text
    left = notes(on_a_gpu(counters={"hits": 7, "misses": 13, "left": 6, "baseline_wins": 6}))
    assert (
        "13 of 26 regions have a schedule, 6 of which run the code of Inductor or of eager mode, 6 of which are left"
        in left
    )
    assert "13 of 26 regions were not searched" in left
    assert "1 of 2 regions was not searched" in notes(on_a_gpu(counters={"hits": 1, "misses": 1}))
    assert "0 of 1 region has a schedule" in notes(on_a_gpu(counters={"misses": 1}))


def test_attention_that_was_rewritten_is_reported() -> None:
    assert "24 calls of attention rewritten" in notes(on_a_gpu(counters={"hits": 1, "attention": 24}))
    assert "1 call of attention rewritten" in notes(on_a_gpu(counters={"misses": 1, "attention": 1}))
    assert "attention" not in notes(on_a_gpu(counters={"hits": 1}))


def test_a_slower_step_is_reported_plainly() -> None:
    slow = on_a_gpu(1620.0 / 0.925)
    assert "autotune is SLOWER than torch.compile, 0.93x: run `autotune search this` with more --timeout" in notes(slow)
    left = dataclasses.replace(slow, counters={"hits": 23, "misses": 19})
    assert "0.93x: search the other regions, or do without autotune in this step" in notes(left)
    assert "SLOWER" not in notes(on_a_gpu(1630.0)), "a tie"
    unsure = notes(edited(slow, COMPILE, noise=0.3))
    assert "autotune was slower than torch.compile, 0.93x, but samples vary by 30%: compare again" in unsure
    assert "SLOWER" not in unsure
    assert "SLOWER" in notes(edited(slow, COMPILE, noise=0.1))


def test_results_that_are_further_off_than_inductors() -> None:
    far = edited(on_a_gpu(), AUTOTUNE, difference=0.02)
    said = "autotune's results differ from eager's by 0.02 of their root mean square, torch.compile's by 0.003"
    assert said in notes(far)
    assert "differ" not in notes(edited(far, EAGER, difference=0.015)), "eager's own runs are as far apart"
    tiny = edited(edited(on_a_gpu(), COMPILE, difference=1e-8), AUTOTUNE, difference=1e-6)
    assert "differ" not in notes(tiny)
    alone = dataclasses.replace(far, steps={who: s for who, s in far.steps.items() if who != COMPILE})
    assert "by 0.02 of their root mean square\n" in notes(alone) + "\n"
    wrong = notes(edited(on_a_gpu(), AUTOTUNE, difference=math.inf))
    assert "autotune's RESULTS ARE NOT EAGER'S" in wrong
    assert "differ" not in wrong
    moving = notes(edited(edited(on_a_gpu(), EAGER, difference=0.3), AUTOTUNE, difference=math.inf))
    assert "each call of the step returns others" in moving
    assert "NOT EAGER'S" not in moving
    none = {who: dataclasses.replace(s, difference=None) for who, s in on_a_gpu().steps.items()}
    assert "random numbers" in notes(on_a_gpu(steps=none, random=True))


def test_compare_notes_captures_failures_and_busy_devices() -> None:
    loose = edited(edited(on_a_gpu(), EAGER, captured=False), AUTOTUNE, captured=False)
    assert "eager, autotune: the step cannot be captured in a CUDA graph" in notes(loose)
    assert "CUDA graph" not in notes(dataclasses.replace(loose, device="cpu"))
    assert "autotune failed: E: why" in notes(on_a_gpu(failed={AUTOTUNE: "E: why"}))
    assert compare.BUSY_NOTE in notes(on_a_gpu(others=1.3))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (["bert_layer"], "autotune search fusion bert_layer"),
        (
            ["m:f", "--inputs", "m:i", "--train", "--device", "cuda:1", "--db", "my db"],
            "autotune search fusion m:f --inputs m:i --train --device cuda:1 --db 'my db'",
        ),
        (["m:f", "--db", "postgresql://me:secret@host/db"], "autotune search fusion m:f --db URL"),
    ],
)
def test_the_search_that_goes_on(given: list[str], wanted: str) -> None:
    text = command_line("search", build_parser().parse_args(["compare", "fusion", *given]))
    assert text == wanted
    assert build_parser().parse_args(text.replace("'", "").replace("my db", "my").split()[1:]).target == given[0]


# The gate


def work(x: Tensor) -> Tensor:
    for _ in range(60):
        x = torch.tanh(x)
    return x


def many() -> Tensor:
    return torch.linspace(-1.0, 1.0, 1 << 12)


def timed_as(slowdown: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples as of a quiet machine, with autotune's step slower by so much: what a busy one takes is chance."""

    def timed(steps: Any, policy: Policy, device: str, plain: Any = ()) -> Any:
        chance = random.Random(str(slowdown))
        us = {EAGER: 100.0, COMPILE: 80.0, AUTOTUNE: 50.0 * (1 + slowdown)}
        samples = {who: [us[who] * math.exp(0.02 * chance.gauss(0, 1)) for _ in range(60)] for who in steps}
        return step._Timed(samples, frozenset(), {}, 0.0)

    monkeypatch.setattr(step, "timed", timed)


@pytest.mark.usefixtures("in_eager")
@pytest.mark.parametrize("way", ["relative", "absolute"])
def test_a_planted_slowdown_is_caught_and_an_unchanged_step_passes(
    db: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "record.json"
    given = command("work", "many", "--db", db)
    timed_as(0.0, monkeypatch)
    assert main([*given, "--save", str(file)]) == 0
    assert "saved in" in capsys.readouterr().out
    timed_as(0.001, monkeypatch)
    assert main([*given, "--against", str(file), "--gate", way]) == 0
    assert re.search(r"autotune .* ok\n", capsys.readouterr().out)
    timed_as(0.1, monkeypatch)
    assert main([*given, "--against", str(file), "--gate", way]) == 3
    assert re.search(r"autotune .* \+\d+\.\d% .* SLOWER\n", capsys.readouterr().out)
    assert main([*given, "--against", str(file), "--gate", way, "--tolerance", "0.2"]) == 0
    capsys.readouterr()
    assert main([*given, "--against", str(file), "--gate", way, "--json"]) == 3
    (change,) = json.loads(capsys.readouterr().out)["against"]
    assert change["slower"]
    assert change["change"] == pytest.approx(0.1, abs=0.02)


@pytest.mark.usefixtures("in_eager")
def test_a_stored_verdict_is_a_record_too(
    db: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"target": f"{HERE}:work", "inputs": f"{HERE}:many", "train": False}
    record = {**names, "autotune_us": 50.0, "compile_us": 80.0, "ratio": 1.6, "noise": 0.02}
    with Store.open(db) as store:
        device, env = store.put_device(identify("cpu")), store.put_environment(environment("cpu"))
        store.put_verdicts([Verdict("a" * 64, device, env, "default", (), record)])
    given = command("work", "many", "--db", db, "--against", db)
    for slowdown, code, said in ((0.0, 0, "ok"), (0.1, 3, "SLOWER")):
        timed_as(slowdown, monkeypatch)
        assert main(given) == code
        assert re.search(rf"autotune .* {said}\n", capsys.readouterr().out)


@pytest.mark.usefixtures("in_eager")
def test_compare_ignores_records_timed_without_a_lead(
    db: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "record.json"
    given = command("work", "many", "--db", db)
    timed_as(0.0, monkeypatch)
    assert main([*given, "--save", str(file)]) == 0
    names = {"target": f"{HERE}:work", "inputs": f"{HERE}:many", "train": False}
    record = {**names, "autotune_us": 50.0, "compile_us": 80.0, "ratio": 1.6, "noise": 0.02}
    with Store.open(db) as store:
        device, env = store.put_device(identify("cpu")), store.put_environment(environment("cpu"))
        store.put_verdicts([Verdict("a" * 64, device, env, "default", (), record)])
    monkeypatch.setattr(step, "lead_s", lambda device: 0.3)  # as of a GPU
    capsys.readouterr()
    for against, mend in ((str(file), "replace it with --save"), (db, "search the target again")):
        assert main([*given, "--against", against]) == 2
        assert mend in capsys.readouterr().err
    assert main([*given, "--save", str(file)]) == 0
    assert main([*given, "--against", str(file)]) == 0


@pytest.mark.usefixtures("in_eager")
@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--against", "none.json"], "no such file: write one with --save"),
        (["--against", "none.db"], "there is no database"),
        (["--gate", "relative"], "need --against"),
        (["--against", "other.json"], "is not a file that"),
        (["--against", "deep.json"], "is not a file that"),
        (["--against", "/dev/zero"], "is a device or a pipe"),
        (["--against", ""], "need a file name, which is empty"),
        (["--save", "other.json"], "is not a file that"),
        (["--against", "known.json"], "no record of step"),
        (["--against", "empty.db"], "has no verdict on this step"),
        (["--tolerance", "2"], "is not a share"),
    ],
)
def test_a_record_that_cannot_be_used_is_one_line(
    db: str,
    more: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.json").write_text("[]")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    Store.open(tmp_path / "empty.db").close()
    save(tmp_path / "known.json", "another", {"device": "d", "samples": {}})
    try:
        code = main(command("work", "many", "--db", db, *more))
    except SystemExit as exit:  # argparse's own
        code = int(exit.code or 0)
    assert code == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.splitlines()) == 1, "nothing was measured"
    assert (tmp_path / "other.json").read_text() == "[]"
