"""Searches of users' kernels: stored and found results, the cost of bad kernels, modules that are never imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.domains.kernel import task as probing
from autotune.domains.kernel.declare import allow, kernel_of
from autotune.domains.kernel.domain import DOMAIN as domain
from autotune.domains.kernel.task import probe
from autotune.errors import UserError
from autotune.runtime.deployment import Deployment, use
from autotune.store import Store
from autotune.task import Status
from autotune.workload import Workload
from tests.support import ROOT
from tests.support.own import kernels
from tests.support.toy.policy import QUICK

KERNELS = "tests.support.own.kernels"


@pytest.fixture(autouse=True)
def nothing_allowed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("AUTOTUNE_KERNEL_TARGETS", "")
    yield
    use(Deployment())


def command(*words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = (sys.executable, "-m", "autotune", *words)
    return subprocess.run(words, capture_output=True, text=True, check=False, env=env, timeout=550)


@pytest.mark.slow
def test_a_kernel_is_searched_stored_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    db = str(tmp_path / "k.db")
    (result,) = kernels.scale.search(device="cpu", db=db, policy=QUICK, sampler="brute", trials=8)
    assert (result.measured, dict(result.failed)) == (5, {"invalid": 1})
    assert (result.best, set(result.metrics)) == ({"block": 256, "late": False}, {"MB/s"})
    assert set(result.baselines) == {"default"}
    assert set(result.references) == {"reference"}
    # The same again measures nothing.
    (again,) = kernels.scale.search(device="cpu", db=db, policy=QUICK, sampler="brute", trials=8)
    assert (again.measured, again.best, set(again.metrics)) == (0, result.best, {"MB/s"})
    with Store.open(db) as store:
        (workload,) = store.find_workloads("scale")
        assert workload.label == "kernels:scale x=256 float32"
        measured = store.measurements(workload.fingerprint)
    assert {m.status for m in measured} == {Status.OK, Status.INVALID}
    _metrics_are_kept(db, result.best or {})
    # A new process looks it up, and calls.
    found = command("lookup", "kernel", f"{KERNELS}:scale", "--device", "cpu", "--db", db, "--json")
    assert found.returncode == 0, found.stderr
    (key,) = json.loads(found.stdout)["keys"]
    assert (key["match"], key["config"], key["key"]) == ("exact", result.best, {"x": [256], "x.dtype": "float32"})
    # So it does in a snapshot, which answers the same word by word: of this key, and of one that was not tuned.
    frozen = str(tmp_path / "k.atdb")
    done = command("export", frozen, "--db", db)
    assert done.returncode == 0, done.stderr
    shapes = tmp_path / "shapes.toml"
    shapes.write_text("[[shapes]]\nn = 256\n\n[[shapes]]\nn = 320\n")
    asked = ("lookup", "kernel", f"{KERNELS}:scale", "--shapes", str(shapes), "--device", "cpu", "--json", "--db")
    answers = [command(*asked, file) for file in (db, frozen)]
    assert [a.returncode for a in answers] == [0, 0], answers[0].stderr + answers[1].stderr
    assert answers[0].stdout == answers[1].stdout
    assert [k["match"] for k in json.loads(answers[1].stdout)["keys"]] == ["exact", "nearest"]
    assert "is damaged" in command(*asked, _cut(frozen)).stderr
    monkeypatch.setenv("AUTOTUNE_DB", db)
    code = f"import {KERNELS} as k; x = k.make(256)['x']; k.scale(x); print(k.scale.lookup(x).level, k.scale.config(x))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split(maxsplit=1) == ["exact", f"{result.best}\n"]


def _cut(file: str) -> str:
    """A copy of a file without its end."""
    copy = Path(file).with_name("cut.atdb")
    copy.write_bytes(Path(file).read_bytes()[:-100])
    return str(copy)


def _metrics_are_kept(db: str, best: dict[str, Any]) -> None:
    """The winner's with the run, every candidate's with its measurement; ``autotune show`` prints them."""
    import sqlite3

    with Store.open(db) as store:
        measured = [m for m in store.measurements() if m.status is Status.OK]
        (line,) = store.overview()
    assert all(m.metrics["MB/s"] > 0 for m in measured)
    final = next(m for m in measured if m.stage == "final" and m.config == best)
    assert line.metrics == final.metrics
    assert f"{final.metrics['MB/s']:.4g} MB/s" in command("show", "--db", db).stdout

    with sqlite3.connect(db) as c:
        summaries = [json.loads(row[0]) for row in c.execute("SELECT summary FROM autotune_runs ORDER BY started")]
    assert summaries[0]["workloads"][0]["metrics"]["MB/s"] > 0


@pytest.mark.slow
def test_a_bad_kernel_costs_one_candidate(tmp_path: Path) -> None:
    db = str(tmp_path / "k.db")
    (result,) = kernels.odd.search(device="cpu", db=db, policy=QUICK, sampler="brute", trials=8)
    assert (result.measured, result.best, result.fault, result.error) == (7, {"how": "good"}, False, "")
    assert dict(result.failed) == {"wrong_result": 2, "launch_error": 1, "crashed": 2, "timeout": 1}
    with Store.open(db) as store:
        (workload,) = store.find_workloads("odd")
        found = {m.config["how"]: m for m in store.measurements(workload.fingerprint) if m.stage == "screen"}
    for how, said in (
        ("wrong", "result: "),
        ("unlike", "result: 2 values where 1 are expected"),
        ("raise", "ValueError: no luck"),
        ("exit", "exited with code 3"),
        ("crash", "killed by SIGSEGV"),
        ("hang", "no answer after"),
    ):
        assert said in found[how].reason
        assert "\n" not in found[how].reason
    assert found["good"].status is Status.OK


@pytest.mark.slow
def test_an_objective_of_the_users_own(tmp_path: Path) -> None:
    db = str(tmp_path / "k.db")
    (result,) = kernels.scored.search(device="cpu", db=db, policy=QUICK, sampler="brute", trials=4)
    assert (result.best, result.measured) == ({"level": 3}, 3)
    assert result.best_us == pytest.approx(1 / 30)
    assert (result.metrics, result.label) == ({"left": 97.0}, "kernels:scored x=8 float32 [points]")
    found = command("lookup", "kernel", f"{KERNELS}:scored", "--device", "cpu", "--db", db)
    assert "30 points" in found.stdout
    shown = command("show", "--db", db)
    assert "30 points" in shown.stdout
    assert " us" not in shown.stdout.replace("default 10 points", "")
    (line,) = json.loads(command("show", "--db", db, "--json").stdout)["tuned"]
    assert (line["figure"], line["metrics"]) == ({"value": pytest.approx(30.0), "unit": "points"}, {"left": 97.0})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("refuses", "kernels:refuses: the reference failed on inputs(n=4): RuntimeError: no reference today"),
        ("hangs", "the reference (n=4) took more than 2 s and was stopped"),
        ("lacks", "inputs(n=4) failed: MemoryError: 4 is too much"),
        ("dies", "making inputs (n=4): the process exited with code 7"),
        ("unfit", "does not fit the kernel: missing a required argument: 'x'"),
        ("doubly", "inputs(n=4) has the tuned parameter block"),
    ],
)
def test_inputs_and_references_that_fail_are_reported_before_a_search(
    name: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow(f"{KERNELS}:{name}", "")
    with pytest.raises(UserError) as error:
        probe(f"{KERNELS}:{name}", "", [{"n": 4}], "cpu", step_s=2 if name == "hangs" else None)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_the_steps_of_a_probe_are_bounded() -> None:
    assert 10 <= probing.STEP_S <= 600


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["search", "kernel", f"{KERNELS}:plain"], "is not tunable: decorate it"),
        (["search", "kernel", f"{KERNELS}:none"], "has no 'none'"),
        (["search", "kernel", "tests.nowhere:x"], "no module 'tests.nowhere'"),
        (["search", "kernel", "nothing"], "not of the form package.module:function"),
        (["search", "kernel", f"{KERNELS}:FACTOR"], "is a float, which cannot be called"),
        (["search", "kernel", f"{KERNELS}:scale", "--shapes", "none.toml"], "no such file of shapes"),
        (["search", "kernel", f"{KERNELS}:scale", "--space", "none.toml"], "no such file of kernels"),
        (["search", "kernel", f"{KERNELS}:scale", "--inputs", "a:b"], "--inputs does not go with kernels"),
        (["search", "kernel", f"{KERNELS}:scale", "--missed"], "has no missed key of kernels:scale"),
        (["search", "kernel", "--missed"], "name the kernel: autotune search kernel"),
        (["search", "kernel", f"{KERNELS}:refuses"], "the reference failed on inputs(n=4)"),
        (["lookup", "kernel"], "required: TARGET"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from autotune.cli.app import main

    monkeypatch.setattr(sys, "path", list(sys.path))
    code = main([*words, "--device", "cpu", "--db", str(tmp_path / "k.db")])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_missed_calls_are_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    db = str(tmp_path / "k.db")
    monkeypatch.setenv("AUTOTUNE_DB", db)
    path = tmp_path / "mine.py"
    path.write_text(
        "import autotune\n"
        "@autotune.tunable(space={'block': [1, 2]}, key=['n'], inputs=lambda n: {'n': n})\n"
        "def count(n, block=1):\n    return sum(range(0, n * block, block))\n"
        "if __name__ == '__main__':\n    print(count(50, block=2), count(50), count.lookup(50).level)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}

    def run() -> str:
        words = [sys.executable, str(path)]
        return subprocess.run(words, capture_output=True, text=True, check=True, env=env).stdout

    assert run() == "2450 1225 default\n"
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["search", "kernel", "mine:count", "--missed", "--device", "cpu", "--db", db, "--trials", "2", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "autotune", *words], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert [r["key"] for r in answer["workloads"]] == [{"n": 50}]
    # Block 2 counts double: it is no right answer, since without a reference the default is one.
    assert answer["failed"] == {"wrong_result": 1}
    assert run() == "2450 1225 exact\n"
    with Store.open(db) as store:
        assert store.misses() == []


def test_nothing_of_a_database_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = {"kernel": "evil:kernel", "source": "0" * 64, "key": {}}
    row = Workload("kernel", spec, source={"target": "evil:kernel", "file": "", "arguments": {}})
    for asked in (lambda: kernel_of(row), lambda: domain.open_task(row, "cpu"), lambda: domain.open_bench(row, "cpu")):
        with pytest.raises(UserError, match="what a database says is not imported"):
            asked()
    assert "evil" not in sys.modules
    assert "not imported" in str(domain.damage(row))
    allow("evil:kernel", "")
    assert domain.damage(row) is None
    monkeypatch.setenv("AUTOTUNE_KERNEL_TARGETS", "")
    db = str(tmp_path / "k.db")
    from autotune.device import environment, identify

    with Store.open(db) as store:
        store.put_device(identify("cpu"))
        store.put_environment(environment("cpu"))
        store.add_miss(row, identify("cpu").fingerprint, "planted")
    done = command("search", "--missed", "--device", "cpu", "--db", db)
    assert done.returncode == 2
    assert "has no missed workload" in done.stderr


def test_other_choices_are_another_search() -> None:
    allow(f"{KERNELS}:scale", "")
    workload = kernels.scale.kernel.workload({"x": [4]}, target=f"{KERNELS}:scale", file="", arguments={"n": 4})
    before = domain.confined(workload)
    assert domain.confined(workload) == before
    left = Workload("kernel", workload.spec, source={**workload.source, "left": [{"block": 16}]})
    assert domain.confined(left) != before
