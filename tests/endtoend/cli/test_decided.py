"""The end of ``autotune search`` on a program: its step, and the verdict in ``show`` and ``compare``."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import autotune
from autotune import numerics
from autotune.bench import decide
from autotune.bench.decide import Decision
from autotune.cli.app import main
from autotune.cli.searching import tune
from autotune.cli.step_verdicts import lines
from autotune.device import identify
from autotune.domains.fusion.program_spec import workloads_of
from autotune.errors import UserError
from autotune.runtime.inductor.verdict import Family
from autotune.store import Store, Verdict
from autotune.workload import Workload

HERE = "tests.endtoend.cli.test_decided"


def program(x: Tensor) -> Tensor:
    return torch.softmax(x * 2.0, -1)


def inputs() -> Tensor:
    return torch.linspace(-1.0, 1.0, 4 * 32).reshape(4, 32)


def decision(mode: str) -> Decision:
    families = {name: Family(name, f"{name} f32", 10.0, 12.0, ()) for name in ("tanh", "softmax")}
    return Decision(
        mode=mode, compile_us=100.0, attention_us=None, all_us=120.0, autotune_us=90.0, ratio=100 / 90,
        kernels_ratio=100 / 90, noise=0.01, tries=2, seconds=3.0, cut=False, others=0.0, left=frozenset({"tanh"}),
        families=families, counts=Counter(tanh=1, softmax=3),
        gains={"tanh": 2.0, "softmax": 6.0}, in_step=frozenset({"softmax"}),
        missed={}, graphs={("a" * 64, "cpu"): {"tanh": 1, "softmax": 2}, ("b" * 64, "cpu"): {"softmax": 1}},
    )  # fmt: skip


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Arguments of the step's comparisons; the first mode is decided, others fail."""
    found: list[dict[str, Any]] = []

    def fake(fn: Any, args: Any, kwargs: Any, **options: Any) -> Decision:
        found.append({**options, "under": numerics.read(["cpu"])})
        if options["mode"] != "default":
            raise UserError("it does not compile")
        return decision(options["mode"])

    monkeypatch.setattr(decide, "decide", fake)
    return found


def command(name: str, db: Path, *more: str) -> list[str]:
    words = [name, "fusion", f"{HERE}:program", "--inputs", f"{HERE}:inputs", "--device", "cpu"]
    return [*words, "--db", str(db), *more]


def test_a_search_ends_with_the_step_and_its_verdict_is_reported(
    tmp_path: Path, asked: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    db = tmp_path / "t.db"
    tuned: list[Any] = []

    def once(*args: Any, **options: Any) -> Any:
        tuned.append(tuned[0] if tuned else tune(*args, **options))
        return tuned[0]

    monkeypatch.setattr("autotune.cli.commands.search.tune", once)  # the second search would find what the first did
    assert main(command("search", db, "--trials", "1", "--no-step")) == 0
    assert asked == []
    with Store.open(db) as store:
        assert store.verdicts() == []
    assert "torch.compile(model, backend='autotune') uses these results" in capsys.readouterr().err
    assert len(tuned) == 1

    modes = ("--mode", "reduce-overhead,max-autotune", "--step-timeout", "7")
    assert main(command("search", db, "--trials", "1", *modes, "--json")) == 0
    out, err = capsys.readouterr()
    assert [(a["mode"], a["limit_s"], a["train"]) for a in asked] == [
        ("default", 7.0, False),
        ("max-autotune-no-cudagraphs", 7.0, False),
    ]
    (step,) = json.loads(out)["steps"]
    assert step["autotune_us"] == 90.0
    assert "90 us (median ratio 1.111x) without 1 of 2 families" in err
    assert "WARNING: step, mode max-autotune-no-cudagraphs: no verdict: it does not compile" in err
    with Store.open(db) as store:
        assert {v.graph[0]: v.left for v in store.verdicts()} == {"a": ("tanh",), "b": ()}

    assert main(["show", "--db", str(db), "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)["steps"]
    assert (shown["target"], shown["mode"], shown["graphs"]) == (f"{HERE}:program", "default", 2)
    assert {f["label"]: (f["count"], f["gain_us"], f["gain_of"], f["kept"]) for f in shown["families"]} == {
        "tanh f32": (1, 2.0, "alone", False),
        "softmax f32": (3, 6.0, "step", True),
    }
    assert main(["show", "--db", str(db)]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "100 us" in line]
    assert row.split()[-7:] == ["100", "us", "90", "us", "1.11x", "1", "1"]

    assert main(command("lookup", db)) == 0
    told = capsys.readouterr().out
    assert "1 are left to Inductor" in told
    assert any(line.split()[:3] == ["left", "+2", "us"] for line in told.splitlines())
    assert main(command("lookup", db, "--train")) == 0
    assert "left to Inductor" not in capsys.readouterr().out, "the step of inference is another one"

    monkeypatch.setattr(torch, "compile", lambda fn, **kwargs: fn)
    monkeypatch.setattr(autotune, "compile", lambda fn, **kwargs: fn, raising=False)
    assert main(command("compare", db, "--rounds", "2")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "verdict, mode default: torch.compile 100 us, autotune 90 us; 1 of 2 families" in "".join(lines)
    assert any(line.split()[:3] == ["left", "+2", "us"] and line.endswith("1 x tanh f32") for line in lines)
    assert any("in the step" in line and line.endswith("3 x softmax f32") for line in lines)
    assert main(command("compare", db, "--rounds", "2", "--mode", "max-autotune", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["verdicts"] == []


@pytest.mark.usefixtures("default_numerics")
def test_the_step_is_decided_under_the_precision_of_its_module_or_of_the_option(
    tmp_path: Path, asked: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "precise.py").write_text(
        "import torch\ntorch.set_float32_matmul_precision('high')\n"
        "def program(x): return torch.softmax(x * 2.0, -1)\n"
        "def inputs(): return torch.linspace(-1.0, 1.0, 4 * 32).reshape(4, 32)\n"
    )
    target = ["fusion", "precise:program", "--inputs", "precise:inputs", "--device", "cpu", "--db", "t.db"]
    high, medium = {"mkldnn.matmul.fp32_precision": "tf32"}, {"mkldnn.matmul.fp32_precision": "bf16"}
    assert main(["search", *target, "--trials", "1"]) == 0
    assert main(["search", *target, "--trials", "1", "--matmul-precision", "medium"]) == 0
    assert [found["under"] for found in asked] == [high, medium]
    assert "; timed with mkldnn.matmul.fp32_precision=bf16\n" in capsys.readouterr().err
    with Store.open("t.db") as store:
        assert [run.summary["numerics"]["float32_matmul_precision"] for run in store.runs()[::-1]] == ["high", "medium"]
        assert "--matmul-precision medium" in store.runs()[0].command
        assert [v.record["numerics"] for v in store.verdicts()[::2]] == [medium]  # the fake has one graph for both
    capsys.readouterr()
    for option, told in (("medium", True), ("high", False)):
        assert main(["lookup", *target, "--matmul-precision", option]) == 0
        out = capsys.readouterr().out
        assert ("left to Inductor" in out) is told
        assert ("timed with mkldnn.matmul.fp32_precision=bf16" in out) is told
    assert main(["show", "--db", "t.db"]) == 0
    assert "precise:program (mkldnn.matmul.fp32_precision=bf16)" in " ".join(capsys.readouterr().out.split())

    monkeypatch.setattr(torch, "compile", lambda fn, **kwargs: fn)
    monkeypatch.setattr(autotune, "compile", lambda fn, **kwargs: fn, raising=False)
    rounds = ["--rounds", "6"]
    assert main(["compare", *target, *rounds, "--matmul-precision", "medium", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["numerics"], len(found["verdicts"])) == (medium, 1)
    assert main(["compare", *target, *rounds, "--matmul-precision", "high", "--save", "record.json"]) == 0
    out = capsys.readouterr().out
    assert "\nwith mkldnn.matmul.fp32_precision=tf32\n" in out
    assert "verdict, mode" not in out
    for against, why in (
        ("record.json", "precise:program(precise:inputs) was timed with mkldnn.matmul.fp32_precision=tf32, not with"),
        ("t.db", "no verdict on this step, device, mode and precision"),
    ):
        assert main(["compare", *target, *rounds, "--matmul-precision", "highest", "--against", against]) == 2
        assert why in capsys.readouterr().err
    assert main(["search", "fusion", "--missed", "--matmul-precision", "high", "--db", "t.db"]) == 2
    assert "leave out TARGET, --inputs, --train, --precision and --matmul-precision" in capsys.readouterr().err


def two_regions(x: Tensor) -> Tensor:
    return torch.tanh(torch.softmax(x * 2.0, -1) @ x.T) * 3.0


def other() -> Workload:
    ((found, _),) = workloads_of(lambda x: torch.exp(x).sum(-1), (torch.randn(4, 40),))
    return found


def deciding(monkeypatch: pytest.MonkeyPatch, missed: dict[str, Any]) -> list[str]:
    """Steps have ``missed`` each time; returns the modes that were decided."""
    decided: list[str] = []

    def fake(*args: Any, mode: str, **options: Any) -> Any:
        decided.append(mode)
        return replace(decision(mode), missed=missed)

    monkeypatch.setattr(decide, "decide", fake)
    return decided


def of_two_regions(db: Path, *more: str) -> list[str]:
    words = command("search", db, "--trials", "1", *more)
    return [f"{HERE}:two_regions" if word == f"{HERE}:program" else word for word in words]


def test_other_layouts_of_the_step_are_searched_and_the_step_decided_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = [w for w, _ in workloads_of(two_regions, (inputs(),))]
    missed = {w.fingerprint: ("cpu", w) for w in (other(), *captured)}
    assert len(missed) == 3
    decided, db = deciding(monkeypatch, missed), tmp_path / "t.db"
    given: list[list[str]] = []

    def first_alone(args: Any, devices: Any, store: Any, workloads: Any, *rest: Any, **options: Any) -> Any:
        """The time ends before the second captured region; the step misses that region too, without a message."""
        given.append([w.fingerprint for w in workloads])
        found = tune(args, devices, store, workloads, *rest, **options)[:1]
        return [replace(result, winner="autotune") for result in found]

    monkeypatch.setattr("autotune.cli.commands.search.tune", first_alone)
    assert main(of_two_regions(db, "--json")) == 0
    out, told = capsys.readouterr()
    assert "1 region of the step has another memory layout than the search saw: recorded for" in told
    assert f"autotune: {other().label}, with the step's memory layout:" in told
    assert [set(names) for names in given] == [{w.fingerprint for w in captured}, {other().fingerprint}]
    assert decided == ["default", "default"]
    answer = json.loads(out)
    assert [result["workload"] for result in answer["in_step"]] == [other().fingerprint]
    assert len(answer["steps"]) == 1
    assert {region["workload"] for region in answer["workloads"]} <= {w.fingerprint for w in captured}
    with Store.open(db) as store:
        assert store.misses() == []


def test_where_inductor_stays_the_step_is_not_decided_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    decided = deciding(monkeypatch, {other().fingerprint: ("cpu", other())})

    def inductor(*args: Any, **options: Any) -> Any:
        return [replace(result, winner="inductor") for result in tune(*args, **options)]

    monkeypatch.setattr("autotune.cli.commands.search.tune", inductor)
    assert main(of_two_regions(tmp_path / "t.db")) == 0
    assert "with the step's memory layout:" in capsys.readouterr().err
    assert decided == ["default"]


def test_step_on_several_devices_records_other_devices_misses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    decided = deciding(monkeypatch, {other().fingerprint: ("cpu:1", other())})
    cpu = identify("cpu")
    monkeypatch.setattr("autotune.device.identify", lambda where: cpu)
    assert main(of_two_regions(tmp_path / "t.db", "--json")) == 0
    out, told = capsys.readouterr()
    assert "recorded for `autotune search --missed`" in told
    assert json.loads(out)["in_step"] == []
    assert decided == ["default"]
    with Store.open(tmp_path / "t.db") as store:
        assert [miss.workload for miss in store.misses()] == [other().fingerprint]


def test_modes_are_looked_at_before_the_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command("search", tmp_path / "t.db", "--mode", "fastest")) == 2
    assert "torch.compile has no mode 'fastest'" in capsys.readouterr().err
    assert not (tmp_path / "t.db").exists()


def test_a_step_of_which_nothing_is_kept_tells_how_near_it_came() -> None:
    families = [{"label": "tanh f32", "count": 1, "gain_us": gain, "kept": False} for gain in (7030.8, -4.2)]
    record = {"compile_us": 412252.0, "autotune_us": None, "ratio": 0.97, "families": families, "tries": 3}
    head, one, two = lines(Verdict("a", "d", "e", "default", (), record))
    assert "torch.compile 412 ms, autotune 0.970x at best; 0 of 2 families" in head
    assert one.split()[:3] == ["left", "+7.03", "ms"]
    assert two.split()[:3] == ["left", "-4.2", "us"]
    record |= {"tries": 0, "cut": True, "others_busy": 1.2}
    head, busy, *_ = lines(Verdict("a", "d", "e", "default", (), record))
    assert "autotune 0.970x with every stored kernel; 0 of 2 families" in head
    assert head.endswith("2 are left to Inductor (the time was up before all were tried)")
    assert busy.strip().startswith("busy: other processes disturbed")


def test_a_verdict_has_the_gain_of_attention() -> None:
    record = {"compile_us": 109.2, "attention_us": 46.8, "autotune_us": 43.6, "ratio": 2.5, "families": []}
    (head,) = lines(Verdict("a", "d", "e", "default", (), record))
    assert "torch.compile 109 us, 46.8 us with attention rewritten, autotune 43.6 us; 0 of 0" in head
