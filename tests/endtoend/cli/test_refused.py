"""Invalid input of users: one line, without passwords and terminal commands, and no change."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import benchmarks.c3.__main__ as c3_suite
import benchmarks.fusion.__main__ as fusion_suite
from autotune.cli import app
from autotune.device import DeviceIdentity, Environment
from autotune.errors import LONGEST, UserError, mask_passwords, safe_line
from autotune.store import Key, Schedule, Store
from autotune.store.connection.urls import for_command, parse_url, show_url
from autotune.store.opening import attach
from autotune.store.snapshot_writer import export_snapshot
from autotune.workload import Workload
from tests.support.snapshots import filled

SECRET = "hunter2x"


def autotune(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "autotune", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, timeout=550)


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://u:{SECRET}@127.0.0.1:1/x",
        f"postgresql://u@127.0.0.1:1/x?password={SECRET}",
        f"postgresql://127.0.0.1:1/x?user=u&sslpassword={SECRET}",
        f"postgresql://127.0.0.1:1/x?no_such_option={SECRET}",
        "postgresql://127.0.0.1:1/x?connect_timeout=soon",
        f"postgresql://u:{SECRET}@127.0.0.1:port/x",
        f"postgresql://u:{SECRET}@127.0.0.1:99999999/x",
        f"postgresql://u:{SECRET}/@127.0.0.1/x",
        f"postgresql:/u:{SECRET}@h/db",
        f"postgresql:u:{SECRET}@h/db",
        f"postgres//u:{SECRET}@h/db",
        f"u:{SECRET}@h/db",
        f"host=127.0.0.1 user=u password={SECRET} dbname=x",
        f"mysql://u:{SECRET}@h/db",
        f"sqlite://u:{SECRET}@h/db",
        f"sqlite:///x.db?password={SECRET}",
        f"://u:{SECRET}@h",
        f"postgresql://u:{SECRET}@127.0.0.1:1/x?host=a&port=1,2,3",
    ],
)
def test_no_password_is_ever_reported(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in (["show"], ["show", "--json"], ["db", "current"], ["db", "upgrade"], ["db", "import", "x.zip"]):
        assert app.main([*command, "--db", url]) == 2
        out, err = capfd.readouterr()
        assert SECRET not in out + err
        assert err.count("\n") == 1
        assert err.startswith("autotune: ")
    if "no_such_option" not in url:
        with pytest.raises(SystemExit):
            app.main(["show", url])
        assert SECRET not in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == [], "no folder of that name was made"


def test_show_url_hides_passwords_and_options() -> None:
    url = parse_url(
        f"postgresql://u:{SECRET}@h:1/db?host=/run&sslmode=require&password={SECRET}&options=-c%20x={SECRET}"
    )
    shown = show_url(url)
    assert SECRET not in shown
    assert "host=/run" in shown
    assert "sslmode=require" in shown
    assert "password=***" in shown
    for text in (f"postgresql://h/x?password={SECRET}", f"postgresql:/u:{SECRET}@h/db"):
        assert for_command(text) == "URL"
    assert for_command("a b.db") == "a b.db"
    assert mask_passwords(f'cannot connect to postgresql://u:{SECRET}@h/x: password = "{SECRET}"').count("***") == 2


@pytest.mark.parametrize(
    ("path", "words"),
    [("x" * 5000, "File name too long"), ("~no_such_user_at_all/x.db", "no such user")],
)
def test_paths_that_cannot_be(path: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=words):
        Store.open(path)
    with pytest.raises(UserError, match="zero byte"):
        Store.open("a\0b")
    assert list(tmp_path.iterdir()) == []


def test_an_errors_line_is_of_a_sane_length() -> None:
    line = safe_line("begin\n" + "x" * 100_000 + "\x1b[31m end")
    assert len(line) <= LONGEST
    assert line.startswith("begin x")
    assert line.endswith("\\x1b[31m end")


def test_a_terminal_is_not_commanded_by_a_database(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\u202elabel"
    with Store.open(tmp_path / "x.db") as store:
        w = Workload("fusion", {"a": 1}, label=evil)
        device = DeviceIdentity("cuda", evil, 1, 1024)
        key = Key(
            store.put_workload(w), store.put_device(device), store.put_environment(Environment("cuda", "2", "0")), "p"
        )
        store.put_schedule(Schedule(key, None, 1.0, {evil: 2.0}, winner=evil[:32]))
        store.add_miss(w, device.fingerprint, evil)
        assert "\x1b" not in device.label
        found = store.get_workload(w.fingerprint)
        assert found is not None
        assert "\x1b" not in found.label
    for command in (["show"], ["show", "--json"], ["db", "stats"]):
        assert app.main([*command, "--db", str(tmp_path / "x.db")]) == 0
        out, err = capsys.readouterr()
        assert not set("\x1b\x07\u202e") & set(out + err)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
@pytest.mark.parametrize("args", [["workloads", "--json"], ["workloads"]])
def test_a_full_output(args: list[str], tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "autotune", *args], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert done.stderr == "autotune: cannot write the output: No space left on device\n"


@pytest.mark.parametrize("suite", [fusion_suite, c3_suite], ids=lambda module: str(module.__name__))
@pytest.mark.parametrize(
    ("out", "words"),
    [
        ("/proc/nowhere/x.json", "No such file"),
        ("file/x.json", "File exists|Not a directory"),
        ("link.json", "is a link"),
        ("folder.json", "is a folder"),
        ("table.json", "the table beside it, table.md is a folder"),
        ("fifo.json", "a device or a pipe"),
    ],
)
def test_a_result_file_is_refused_before_measuring(
    suite: ModuleType,
    out: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import re

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(suite, "run_suite", lambda settings: pytest.fail("it was measured"))
    Path("file").touch()
    Path("target").write_text("mine")
    Path("link.json").symlink_to("target")
    for name in ("folder.json", "table.md"):
        Path(name).mkdir()
    os.mkfifo("fifo.json")
    assert suite.main(["--device", "cpu", "--out", out]) == 2
    err = capsys.readouterr().err
    assert re.search(words, err), err
    assert err.count("\n") == 1
    assert Path("target").read_text() == "mine"


@pytest.mark.parametrize("text", ["a = " + "[" * 20_000, f"a = {'9' * 5000}", "x" * 5_000_000])
def test_toml_that_cannot_be_held(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.toml"
    file.write_text(text)
    for main, args in (
        (app.main, ["search", "fusion", "softmax", "--device", "cpu", "--space", str(file)]),
        (c3_suite.main, ["--list", "--scenarios", str(file)]),
    ):
        assert main(args) == 2
        err = capsys.readouterr().err
        assert str(file) in err
        assert err.count("\n") == 1


@pytest.mark.parametrize("size", ["9" * 400, "9" * 5000, "0." + "1" * 400 + "GiB", "9" * 18 + "GiB"])
def test_bytes_of_many_digits(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["lookup", "c3", "--gemm", "64x64x64", "--collective", "all_gather", "--device", "cpu", "--bytes", size]
    assert app.main(args) == 2
    err = capsys.readouterr().err
    assert "--bytes" in err
    assert err.count("\n") == 1
    assert len(err) < 3000
    args[args.index("64x64x64")] = f"{'9' * 5000}x1x1"
    assert app.main(args) == 2
    assert "--gemm" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told_so"),
    [
        (["show", "layer_norm"], "autotune show: unrecognized arguments: layer_norm (see autotune show --help)"),
        (
            ["db", "current", "--jsn"],
            "autotune db current: unrecognized arguments: --jsn (see autotune db current --help)",
        ),
    ],
)
def test_the_command_that_a_word_is_too_much_for_is_named(
    words: list[str], told_so: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        app.main(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"{told_so}\n"


@pytest.mark.parametrize("named", ["mine.py:block", "./mine.py:block", "inner/mine.py:block", "inner/mine:block"])
def test_a_file_in_the_place_of_a_module_is_told_its_module(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert app.main(["plan", "fusion", named, "--inputs", "mine:inputs", "--device", "cpu"]) == 2
    module = "inner.mine" if "inner" in named else "mine"
    told_so = f"{named}: {named.partition(':')[0]} names a file; give its module, such as {module}"
    assert capsys.readouterr().err == f"autotune: {told_so}\n"


@pytest.mark.parametrize(
    "words",
    [
        ["lookup", "fusion", "layer_norm"],
        ["lookup", "fusion", "0123456789", "--device", "cpu"],
        ["lookup", "c3", "ag-equal-proj", "--device", "cpu"],
        ["compare", "fusion", "layer_norm", "--device", "cpu"],
        ["plan", "fusion", "layer_norm", "--device", "cpu"],
        ["search", "--missed", "--device", "cpu"],
        ["search", "c3", "--missed", "--device", "cpu"],
    ],
)
def test_a_database_that_is_missing_is_reported_and_nothing_is_made(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert app.main([*words, "--db", "typo.db"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "there is no database" in err
    assert not list(tmp_path.iterdir())


NOT_UTF8 = "caf\udce9"


@pytest.fixture
def latin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose name is not UTF-8, with a database and a snapshot in it; the working folder."""
    folder = tmp_path / NOT_UTF8
    folder.mkdir()
    monkeypatch.chdir(folder)
    with Store.open("t.db") as store:
        filled(store)
        export_snapshot(store, folder / "s.atdb")
        store.start_run(f"autotune search fusion {NOT_UTF8}:f")
    return folder


def test_paths_that_are_not_utf8_are_paths_like_others(latin: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["show", "--db", "t.db"], ["show", "--db", str(latin / "s.atdb")], ["db", "verify", "--db", "t.db"],
        ["watch", "--once", "--db", "t.db"], ["watch", "--once", "--json", "--db", str(latin / "t.db")],
        ["export", "--db", "t.db", f"{NOT_UTF8}.atdb"], ["db", "export", "--db", "t.db", f"{NOT_UTF8}.zip"],
        ["import", str(latin / "s.atdb"), "--db", f"{NOT_UTF8}.db"],
        ["db", "merge", "--db", "new.db", f"{NOT_UTF8}.db"],
        ["import", f"{NOT_UTF8}.zip", "--db", str(latin / "new.db")],
        ["report", "--db", f"{NOT_UTF8}.db", "-o", f"{NOT_UTF8}-site", "--title", NOT_UTF8],
    ):  # fmt: skip
        assert app.main([*words]) == 0, words
    assert "damaged" not in capsys.readouterr().err
    assert "caf\\udce9" in (latin / f"{NOT_UTF8}-site" / "index.html").read_text()
    with Store.open(f"{NOT_UTF8}.db") as store, Store.open(store.url) as same:
        assert len(same.schedules()) == len(store.schedules()) > 0
    frozen = attach(str(latin / "s.atdb"))
    assert frozen is not None
    assert frozen.schedules()
    frozen.close()


def test_db_forget_refuses_a_name_that_is_no_utf8(latin: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["db", "forget", "--workload", NOT_UTF8, "--db", "t.db"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("domain", ["c3", "kernel"])
def test_a_domain_without_a_cost_model_is_not_calibrated(
    domain: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert app.main(["calibrate", domain, "--db", "t.db"]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"autotune: {domain} has no cost model to calibrate; `autotune calibrate` takes fusion\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("variable", ["AUTOTUNE_DB", "AUTOTUNE_DB_READ"])
@pytest.mark.parametrize("command", ["lookup", "compare", "plan"])
def test_the_environment_names_a_database_as_an_option_does(
    command: str, variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, str(tmp_path / "typo.db"))
    assert app.main([command, "fusion", "softmax", "--device", "cpu"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"there is no database {tmp_path / 'typo.db'}" in err
    assert not list(tmp_path.iterdir())
