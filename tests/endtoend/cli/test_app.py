"""The command line for a new user: help at once, mistakes in one line, exit codes."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.cli import app
from autotune.cli.commands import show
from autotune.errors import UserError

COMMAND = [sys.executable, "-m", "autotune"]


def autotune(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *args], capture_output=True, text=True, check=False, cwd=cwd, timeout=550)


@pytest.mark.parametrize("args", [["--help"], ["search", "--help"], ["compare", "--help"], ["--version"]])
def test_help_and_version_load_nothing_heavy(args: list[str]) -> None:
    code = (
        "import sys\nfrom autotune.cli.app import main\n"
        f"try:\n    main({args!r})\nexcept SystemExit as exit:\n    assert exit.code == 0\n"
        "heavy = {'torch', 'numpy', 'numba', 'sqlalchemy', 'optuna', 'alembic', 'rich', 'psutil'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_no_parser_takes_abbreviated_options(capsys: pytest.CaptureFixture[str]) -> None:
    parsers: list[argparse.ArgumentParser] = [app.build_parser()]
    for parser in parsers:
        assert not parser.allow_abbrev, parser.prog
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
    assert len(parsers) > 20
    for words in (
        ["--versio", "show"],
        ["show", "--lim", "5"],
        ["db", "stats", "--js"],
        ["search", "fusion", "x", "--tri", "1"],
    ):
        with pytest.raises(SystemExit) as ended:
            app.main(words)
        assert ended.value.code == 2
        assert "unrecognized arguments: --" in capsys.readouterr().err


def test_every_command_is_in_the_help() -> None:
    text = autotune("--help").stdout
    for name in ("search", "lookup", "compare", "plan", "show", "workloads", "db"):
        assert name in text


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "COMMAND"),
        (["serach"], "invalid choice: 'serach'"),
        (["search", "layer_norm"], "invalid choice: 'layer_norm'"),
        (["search", "fusion", "layer_norm", "--trials", "0"], "'0' is not a whole number of 1 or more"),
        (["search", "fusion", "layer_norm", "--trials", "ten"], "'ten' is not a whole number"),
        (["search", "fusion", "layer_norm", "--timeout", "-3"], "'-3' is not a number of seconds above 0"),
        (["search", "fusion", "layer_norm", "--timeout", "inf"], "'inf' is not a number of seconds"),
        (["search", "fusion", "layer_norm", "--timeout", "nan"], "'nan' is not a number of seconds"),
        (["search", "fusion", "layer_norm", "--seed", "-1"], "'-1' is not a whole number from 0"),
        (["search", "fusion", "layer_norm", "--sampler", "annealing"], "invalid choice: 'annealing'"),
        (["search", "fusion"], "name a target"),
        (["search"], "name a target"),
        (["search", "fusion", "layer_norm", "--missed"], "leave out TARGET"),
        (["lookup", "fusion"], "required: TARGET"),
        (["search", "fusion", "layer_norm", "--device", "tpu"], "unknown device 'tpu'"),
        (["search", "fusion", "layer_norm", "--device", "cpu,cpu"], "a list of devices cannot include a CPU"),
        (
            ["lookup", "fusion", "layer_norm", "--device", "cuda:all"],
            "is a list of devices: only `autotune search fusion`",
        ),
        (["search", "c3", "ag-equal-proj", "--device", "cuda:0,cuda:1"], "is a list of devices"),
        (["search", "fusion", "layer_norm", "--device", "cpu", "--space", "no/such.toml"], "no/such.toml"),
        (["search", "fusion", "layer_norm", "--device", "cpu", "--db", "mongo://x"], "mongo"),
        (["lookup", "fusion", "layer_nrom", "--device", "cpu"], "did you mean 'layer_norm'"),
        (["lookup", "c3", "ag-equal-proj", "--train", "--device", "cpu"], "unrecognized arguments: --train"),
        (
            ["lookup", "fusion", "0123456789ab", "--train", "--device", "cpu"],
            "--train goes with a target to trace",
        ),
        (["lookup", "fusion", "no.such.module:f", "--inputs", "os:getcwd", "--device", "cpu"], "no.such.module"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    args: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code = app.main(args)
    except SystemExit as end:  # argparse's way
        code = end.code  # type: ignore[assignment]
    assert (code, *capsys.readouterr()) == (2, "", said_once(said))
    assert list(tmp_path.iterdir()) == []


def said_once(words: str) -> object:
    """An object that equals a line of autotune's with ``words``."""

    class Line:
        def __eq__(self, text: object) -> bool:
            return isinstance(text, str) and text.startswith("autotune") and words in text and text.count("\n") == 1

        def __repr__(self) -> str:
            return f"<a line with {words!r}>"

    return Line()


@pytest.mark.parametrize("args", [["serach"], ["lookup", "fusion", "layer_nrom", "--device", "cpu"]])
def test_the_process_ends_with_that_code(args: list[str], tmp_path: Path) -> None:
    done = autotune(*args, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith("autotune")


def raising(error: BaseException) -> Callable[[argparse.Namespace], int]:
    def run(args: argparse.Namespace) -> int:
        raise error

    return run


def test_exceptions_of_a_command_become_exit_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(show, "run_workloads", raising(UserError("no such thing: name another")))
    assert app.main(["workloads"]) == 2
    assert capsys.readouterr() == ("", "autotune: no such thing: name another\n")

    monkeypatch.setattr(show, "run_workloads", raising(KeyboardInterrupt()))
    assert app.main(["workloads"]) == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert "all measurements are stored" in err

    monkeypatch.setattr(show, "run_workloads", raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):  # a fault of ours is not dressed up as the user's
        app.main(["workloads"])


def test_a_reader_that_stops_reading_is_no_error() -> None:
    command = " ".join([*COMMAND, "workloads", "|", "true;", "exit", "${PIPESTATUS[0]}"])
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
