"""``autotune watch`` and ``autotune dashboard``, as processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.cli.app import main
from autotune.store import Measurement, Store
from autotune.task import Status
from tests.support import ROOT
from tests.support.rows import put_key, workload


@pytest.fixture
def database(tmp_path: Path) -> Path:
    Store.open(tmp_path / "t.db").close()
    return tmp_path / "t.db"


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "autotune", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def ended(process: subprocess.Popen[str]) -> int:
    process.send_signal(signal.SIGINT)
    return process.wait(550)


def test_watch_follows_a_search_of_another_process(database: Path) -> None:
    with (
        Store.open(database) as store,
        started("watch", "--db", str(database), "--json", "--interval", "0.1") as process,
    ):
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["runs"] == []
        run = store.start_run("autotune search fusion layer_norm")
        key = put_key(store, workload())
        for threads, us in ((1, 40.0), (2, 20.0)):
            store.add_measurement(Measurement(key, {"threads": threads}, Status.OK, latency_us=us, run=run.id))
        for line in process.stdout:
            runs = json.loads(line)["runs"]
            if runs and runs[0]["measured"] == 2:
                break
        assert runs[0]["workloads"][0]["best_us"] == 20.0
        store.finish_run(run.id)
        for line in process.stdout:
            if json.loads(line)["runs"][0]["state"] == "done":
                break
        assert ended(process) == 0


def test_watch_once_prints_a_table(database: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", "--once", "--db", str(database)]) == 0
    assert "No search has run" in capsys.readouterr().out
    with Store.open(database) as store:
        run = store.start_run("autotune search [red]x[/red]")
        store.add_measurement(
            Measurement(put_key(store, workload()), {"t": 1}, Status.TIMEOUT, reason="slow", run=run.id)
        )
    assert main(["watch", "--once", "--db", str(database)]) == 0
    out = capsys.readouterr().out
    assert "1 workload begun, 1 candidate measured, 1 failed" in out
    assert "autotune search '[red]x[/red]'" in out
    assert "layer_norm f32 64x8" in out


def test_the_dashboard_serves_this_machine_only(database: Path) -> None:
    pytest.importorskip("optuna_dashboard", reason="optuna-dashboard is not installed")
    with Store.open(database) as store:
        key = put_key(store, workload())
        store.add_measurement(Measurement(key, {"threads": 1}, Status.OK, latency_us=40.0))
    with started("dashboard", "--port", "0", "--db", str(database)) as process:
        assert process.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:(\d+)/", process.stdout.readline())
        assert found
        with urllib.request.urlopen(f"{found[0]}api/studies", timeout=550) as answer:
            (study,) = json.load(answer)["study_summaries"]
        assert study["study_name"].startswith(f"{workload().label} on ")
        with Store.open(database) as store:  # a search goes on
            store.add_measurement(Measurement(key, {"threads": 2}, Status.OK, latency_us=20.0))
        with urllib.request.urlopen(f"{found[0]}api/studies/{study['study_id']}", timeout=550) as answer:
            detail = json.load(answer)
        assert [t["values"] for t in detail["trials"]] == [[40.0], [20.0]]
        assert [t["number"] for t in detail["best_trials"]] == [1]
        request = urllib.request.Request(f"{found[0]}api/studies", headers={"Host": "evil.example"})
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=550)
        assert refused.value.code == 403
        taken = subprocess.run(
            [sys.executable, "-m", "autotune", "dashboard", "--port", found[1], "--db", str(database)],
            capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=550,
        )  # fmt: skip
        assert taken.returncode == 2
        assert "the port is in use" in taken.stderr
        assert ended(process) == 0


def test_without_the_dashboard_one_line_names_the_package(
    database: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "optuna_dashboard", None)
    assert main(["dashboard", "--db", str(database)]) == 2
    assert "pip install 'autotune-torch[dashboard]'" in capsys.readouterr().err
