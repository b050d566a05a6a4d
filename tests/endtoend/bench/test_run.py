"""The suite run end to end on the CPU, and its summary."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from autotune import __version__, files
from benchmarks import form
from benchmarks.form import check_commit
from benchmarks.fusion import report
from benchmarks.fusion.__main__ import main
from benchmarks.fusion.measure import NotMeasured

CASES: list[dict[str, Any]] = [
    {"name": "a", "bytes": 100 << 20, "floor_us": 8.0, "eager_us": 40.0, "inductor_us": 22.0, "inductor_best_us": 20.0,
     "inductor_options": {"combo": 20.0}, "xla_us": 24.0, "autotune_us": 10.0, "autotune_kernels_us": 8.0,
     "kernels": {"eager": 4, "inductor": 2, "inductor_best": 1, "xla": 3, "autotune": 1},
     "ablations": {"greedy": 15.0}},
    {"name": "b", "bytes": 8, "floor_us": 1.0, "eager_us": 8.0, "inductor_us": 5.0, "inductor_best_us": 5.0,
     "inductor_options": {"combo": 5.0}, "xla_us": None, "autotune_us": 10.0, "ablations": {}},
]  # fmt: skip


def test_means_are_of_the_cases_that_have_both() -> None:
    found = report.summary(CASES)
    best = found["inductor_best"]
    assert best["geometric_mean"] == 1.0  # of 2 and 1/2
    assert best["arithmetic_mean"] == 1.25
    assert (best["best_case"], best["worst_case"]) == ("a", "b")
    assert found["xla"] == {
        "cases": 1, "geometric_mean": 3.0, "arithmetic_mean": 3.0, "best": 3.0, "best_case": "a", "worst": 3.0,
        "worst_case": "a",
    }  # by the same instrument: 24 over 8, not over 10  # fmt: skip
    assert found["copy_share"] == {"cases": 1, "geometric_mean": 0.8}
    nothing = report.summary([{**CASES[1], "inductor_best_us": None, "eager_us": None}])
    assert nothing["inductor_best"] is None
    assert nothing["eager"] is None
    assert report.summary_lines(nothing) == []


def test_tables_have_the_figures() -> None:
    data = {"cases": CASES, "device": "a GPU", "versions": {"torch": "2.11"}, "when": "2026-01-02T00", "command": "c"}
    table = report.render(data)
    row = "| a | 8.00 | 40.0 | 22.0 | 20.0 | 24.0 | 10.0 | 2.00x | 3.00x | 80% | 4, 1, 3, 1 |"
    assert row in table
    assert "| b | 1.00 | 8.00 | 5.00 | 5.00 | – | 10.0 | 0.50x | – | 10% | – |" in table
    assert "80% of the copy bandwidth" in table
    parts = report.render_ablations(data, {"greedy": "largest groups"})
    assert "| a | 10.0 | 15.0 |" in parts
    assert "| times as long, geometric mean | 1.00x | 1.50x |" in parts
    assert "`greedy`: largest groups." in parts
    with pytest.raises(ValueError, match="no ablations"):
        report.render_ablations({**data, "cases": CASES[1:]}, {})


@pytest.mark.slow
@pytest.mark.usefixtures("threads")
def test_cases_are_searched_measured_and_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results" / "cpu.json"
    command = ["--device", "cpu", "--db", str(tmp_path / "t.db"), "--out", str(out)]
    limits = ["--trials", "2", "--timeout", "5"]
    assert main([*command, *limits, "--cases", "mixed_axes_small"]) == 0
    data = form.read(out)
    (case,) = data["cases"]
    assert case["case"] == "mixed_axes_small"
    assert case["eager_us"] > 0
    assert case["inductor_us"] == case["inductor_best_us"] > 0
    assert case["xla_us"] is None
    assert case["counted"]["hits"] == len(case["searches"]["full"]["regions"])
    assert case["bytes"] == 4 * (256 * 128 * 2 + 2 * 128 + 256)
    assert case["input_sets"] == 4
    assert data["summary"]["eager"]["cases"] == 1
    assert "t.db" not in data["command"]
    assert report.render(data) == out.with_suffix(".md").read_text()
    assert report.render(data).splitlines()[0] in capsys.readouterr().out

    more = [*command, "--no-search", "--resume", "--peers", "eager", "--cases", "mixed_axes_small,softmax_backward"]
    assert main([*more, "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["cases"][1] == case  # kept as it was, in the suite's order
    assert again["cases"][0]["case"] == "softmax_backward"
    assert again["cases"][0]["inductor_us"] is None
    assert again["cases"][0]["counted"]["misses"] == 1
    assert form.read(out) == again


@pytest.mark.usefixtures("threads")
def test_a_case_that_cannot_be_measured_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: Any) -> Any:
        raise NotMeasured("autotune and eager disagree: result 0 differs")

    monkeypatch.setattr("benchmarks.fusion.entry.measure", broken)
    monkeypatch.setattr("benchmarks.fusion.run.copy_bandwidth", lambda policy, device: 1e4)
    out = tmp_path / "x.json"
    assert main(["--device", "cpu", "--no-search", "--cases", "rope", "--out", str(out)]) == 1
    assert "NOT MEASURED: rope bf16 256x32x128: autotune and eager disagree" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cases", "nope"], "the suite has no case 'nope'"),
        (["--peers", "tvm"], "there is no peer 'tvm'"),
        (["--ablation", "nope"], "there is no ablation 'nope'"),
        (["--out", "x.txt"], "ends in .json"),
        (["--resume", "--out", "other.json"], "name another --out"),
        (["--resume", "--out", "broken.json"], "not JSON"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.json").write_text("{")
    form.write(tmp_path / "other.json", "another device", [{**CASES[1]}], command="c")
    assert main(["--device", "cpu", *words]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_results_that_are_measured_again_leave_the_commit_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> str:
        who = ["-c", "user.name=x", "-c", "user.email=x"]
        return subprocess.run(["git", "-C", str(tmp_path), *who, *words], capture_output=True, text=True).stdout.strip()

    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    for file in (results / "a.json", tmp_path / "pyproject.toml"):
        file.write_text("x")
    git("init")
    git("add", "-A")
    git("commit", "-m", "x")
    monkeypatch.setattr(files, "_ROOT", tmp_path)
    head = git("rev-parse", "HEAD")
    assert len(head) == 40
    assert files.commit() == head
    (results / "a.json").write_text("y")
    assert files.commit() == head
    (tmp_path / "pyproject.toml").write_text("y")
    assert files.commit() == f"{head}-dirty"


def test_a_tree_without_a_commit_is_reported_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(files, "_ROOT", tmp_path)
    assert files.commit() == f"v{__version__}"  # an installed package
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert main(["--device", "cpu", "--out", str(tmp_path / "x.json")]) == 2
    assert "which commit" in capsys.readouterr().err
    (tmp_path / "COMMIT").write_text("0123abcd\n")
    check_commit()


def test_the_cases_can_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert "adamw_odd" in listed
    assert "dual-axis 32-block amax scaling bf16 8192x8192" in listed


def test_documents_take_the_suites_tables(tmp_path: Path) -> None:
    from benchmarks.table import refresh

    data = form.write(tmp_path / "f.json", "a GPU", CASES, command="c", extra={"suite": "fusion"})
    text = (
        "<!-- results: f.json -->\n<!-- end results -->\nand\n<!-- ablations: f.json -->\nold\n<!-- end ablations -->\n"
    )
    fresh = refresh(text, tmp_path)
    assert report.render(data) in fresh
    assert "| times as long, geometric mean | 1.00x | 1.50x |" in fresh
    assert "old" not in fresh
    assert refresh(fresh, tmp_path) == fresh
