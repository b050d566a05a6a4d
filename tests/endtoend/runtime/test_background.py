"""Misses tuned while a program runs: started on request, on an idle device, and ended with the program."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import autotune
from autotune.cli.commands import background as command
from autotune.device import identify
from autotune.errors import UserError
from autotune.measure import quiet
from autotune.runtime import background
from autotune.runtime.deployment import deployment
from autotune.runtime.ladder import Level
from autotune.runtime.lookup import lookup_stored
from autotune.store import Store
from tests.support import ROOT
from tests.support.headers import share_headers
from tests.support.hostile import softmax, workload_of

PROGRAM = """
import sys, time, psutil, torch, autotune
from autotune.runtime.deployment import deployment
def scaled(x):
    return torch.softmax(x * 3, -1) + x
x = torch.randn(64, 256)
wanted = scaled(x)
torch.testing.assert_close(torch.compile(scaled, backend="autotune")(x), wanted)
assert autotune.counters().misses == 1, autotune.counters()
beside = deployment().background.process.pid
assert beside in [p.pid for p in psutil.Process().children()]
nice = psutil.Process(beside).nice
end = time.monotonic() + 500
while autotune.lookup(scaled, x).level != "exact" and time.monotonic() < end:
    time.sleep(0.5)
torch._dynamo.reset()
torch.testing.assert_close(torch.compile(scaled, backend="autotune")(x), wanted)
found = autotune.counters()
print(beside, nice(), found.hits, found.misses)
"""


def await_end(pid: int) -> None:
    """Until pytest's limit."""
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.1)


def environ(tmp_path: Path, **more: str) -> dict[str, str]:
    own = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "AUTOTUNE_DB": str(tmp_path / "b.db"),
        "AUTOTUNE_CACHE_DIR": str(tmp_path / "cache"),
    }
    # The lock of background searches is in the temporary directory: other tests have theirs.
    return {**os.environ, **own, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT), **more}


def missed(db: Path) -> str:
    with Store.open(db) as store:
        workload = workload_of(softmax, torch.ones(64, 256))
        store.add_miss(workload, store.put_device(identify("cpu")), "missed workload")
    return workload.fingerprint


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_program_deploys_schedules_found_in_the_background(tmp_path: Path) -> None:
    options = "--always --timeout 3 --interval 0.5"
    env = environ(tmp_path, AUTOTUNE_BACKGROUND="1", AUTOTUNE_BACKGROUND_OPTIONS=options)
    share_headers(tmp_path)
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr
    beside, nice, hits, misses = map(int, done.stdout.split())
    assert (nice, hits, misses) == (19, 1, 1)
    await_end(beside)  # it ends with the program
    assert "1 missed region" in (tmp_path / "cache" / "background" / "log").read_text()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[list[str], dict[str, Any]]]:
    """The processes that are begun, none of which is."""
    seen: list[tuple[list[str], dict[str, Any]]] = []

    class Process:
        pid = 0

        def __init__(self, words: list[str], **how: Any) -> None:
            seen.append((words, how))

        def terminate(self) -> None:
            pass

    monkeypatch.setattr(background.subprocess, "Popen", Process)
    monkeypatch.setenv("AUTOTUNE_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("AUTOTUNE_BACKGROUND", raising=False)
    return seen


def test_it_is_begun_once_where_it_is_wanted(
    started: list[tuple[list[str], dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment().background.begin("cpu")
    assert started == [], "nobody asked for it"
    monkeypatch.setenv("AUTOTUNE_BACKGROUND", "yes")
    with pytest.raises(UserError, match="AUTOTUNE_BACKGROUND: 'yes' must be 0, 1 or a device"):
        deployment().background.begin("cpu")
    with pytest.raises(UserError, match="background: 'gpu'"):
        autotune.configure(background="gpu")
    autotune.configure(background="cuda:3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    deployment().background.begin("cuda:0")
    assert started == [], "the first rank of a host does"
    monkeypatch.setenv("LOCAL_RANK", "0")
    for _ in range(2):
        deployment().background.begin("cuda:0", "postgresql://u:secret@h/d")
    ((words, how),) = started
    assert words[1:] == ["-P", "-m", "autotune", "background", "--with-parent", "--device", "cuda:3"]
    assert (how["env"]["AUTOTUNE_DB"], how["env"]["AUTOTUNE_BACKGROUND"]) == ("postgresql://u:secret@h/d", "0")
    assert how["start_new_session"]
    autotune.configure(background=False)
    assert deployment().background.wanted is False


def watcher(tmp_path: Path, *words: str) -> subprocess.Popen[str]:
    all_words = [sys.executable, "-m", "autotune", "background", "--device", "cpu", "--interval", "0.2", *words]
    return subprocess.Popen(all_words, env=environ(tmp_path), stderr=subprocess.PIPE, text=True)


def test_it_leaves_a_busy_device_alone_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    missed(tmp_path / "b.db")
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            process = watcher(tmp_path)
            assert process.stderr is not None
            assert "waiting for misses" in process.stderr.readline()
            other = watcher(tmp_path)  # for the same device: it waits for its turn
            time.sleep(4)
            for each in (other, process):
                assert each.poll() is None
                each.send_signal(signal.SIGINT)
            assert "missed region" not in process.communicate(timeout=550)[1]
            assert process.returncode == 130
            assert "waiting for" not in other.communicate(timeout=550)[1]
        finally:
            busy.kill()
    with Store.open(tmp_path / "b.db") as store:
        assert len(store.misses()) == 1
        assert store.measurements() == []


@pytest.mark.slow
def test_it_searches_misses_and_ends_on_request(tmp_path: Path) -> None:
    name = missed(tmp_path / "b.db")
    process = watcher(tmp_path, "--always", "--timeout", "3", "--once")
    _, err = process.communicate(timeout=550)
    assert process.returncode == 0, err
    assert lookup_stored(name, db=str(tmp_path / "b.db"), device="cpu").level is Level.EXACT
    with Store.open(tmp_path / "b.db") as store:
        assert store.misses() == []


@pytest.mark.parametrize("how", ["other programs compute", "the program has ended"])
def test_a_search_gives_way(
    how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is interrupted as by Ctrl-C, which keeps what it measured, and taken down where that does not end it."""
    begun, mark = tmp_path / "begun", tmp_path / "interrupted"
    code = (
        f"import time, pathlib\ntry:\n pathlib.Path({str(begun)!r}).touch()\n time.sleep(600)\n"
        f"except KeyboardInterrupt: pathlib.Path({str(mark)!r}).touch()"
    )
    monkeypatch.setattr(command, "_arguments", lambda args, device: ["-c", code])
    monkeypatch.setattr(command, "_LOOK_S", 1.0)
    monkeypatch.setattr(quiet.Meter, "lap", lambda self: 2.0 * (how == "other programs compute" and begun.exists()))
    args = argparse.Namespace(always=False, busy=0.25, db=None, timeout=60.0)
    assert command._search(args, "cpu", lambda: how != "other programs compute" and begun.exists()) == 130
    assert mark.exists()
    assert capsys.readouterr().err == f"autotune: {how}: the search is interrupted\n"


def test_one_round_needs_a_database(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="there is no database"):
        command._missed(str(tmp_path / "none.db"), "d", wait=False)
    for _ in range(2):
        assert command._missed(str(tmp_path / "none.db"), "d") == frozenset()
    assert capsys.readouterr().err.count("there is no database") == 1


@pytest.mark.parametrize("content", [b"", b"no database at all, but long enough to be read as the head of one" * 9])
def test_a_file_that_cannot_be_read_is_not_waited_for_for_ever(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "t.db"
    file.write_bytes(content)
    args = argparse.Namespace(always=True, busy=0.25, db=str(file), timeout=1.0, interval=0.01, once=False)
    begin = time.monotonic()
    with pytest.raises(UserError, match=r"no autotune tables|not a database"):
        command._watch(args, "cpu", identify("cpu"), lambda: time.monotonic() > begin + 20)


def test_a_file_that_is_mended_in_time_is_read(tmp_path: Path) -> None:
    file = tmp_path / "t.db"
    file.touch()
    args = argparse.Namespace(always=True, busy=0.25, db=str(file), timeout=1.0, interval=0.01, once=False)
    looks: list[int] = []

    def alone() -> bool:
        looks.append(1)
        if len(looks) == 4:
            Store.open(file).close()
        return len(looks) > 40

    assert command._watch(args, "cpu", identify("cpu"), alone) == 0


def test_unsearchable_misses_are_not_tried_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    asked: list[int] = []
    sets = [frozenset({("a", 1)})] * 6 + [frozenset({("a", 2)})] * 6

    def missed_now(db: str | None, device: str, wait: bool = True) -> frozenset[tuple[str, int]]:
        asked.append(1)
        return sets[min(len(asked) - 1, len(sets) - 1)]

    monkeypatch.setattr(command, "_missed", missed_now)
    monkeypatch.setattr(command, "_search", lambda args, device, alone: tried.append(1) or 1)
    args = argparse.Namespace(always=True, busy=0.25, db=None, timeout=1.0, interval=0.01, once=False)
    assert command._watch(args, "cpu", identify("cpu"), lambda: len(asked) > 12) == 0
    assert len(tried) == 2, "once for each set of misses"


def test_others_are_those_that_are_not_ours() -> None:
    """A child's time, and that of its children, is ours, while it lives and once it has ended."""
    spin = "import time\nwhile time.process_time() < 0.4: pass"
    twice = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {spin!r}])\nsys.stdin.read()"
    before = quiet._clocks(family=True)
    with subprocess.Popen([sys.executable, "-c", twice], stdin=subprocess.PIPE) as child:
        while quiet._clocks(family=True)[2] - before[2] < 0.4:
            assert child.poll() is None
            time.sleep(0.1)
    after = quiet._clocks(family=True)
    assert after[2] - before[2] >= 0.4
    assert after[1] - before[1] >= after[2] - before[2] - 0.1, "of everybody's"
    with subprocess.Popen([sys.executable, "-c", spin], start_new_session=True) as child:
        meter = quiet.Meter(family=True)
        child.wait()
        busy = meter.others()
    assert 0.0 <= busy <= (os.cpu_count() or 1)


def test_a_gpu_that_tells_nothing_is_not_taken_for_idle() -> None:
    with pytest.raises(UserError, match=r"cannot measure whether cuda:0 is idle .* --always"):
        quiet.gpu_use("cuda:0")
