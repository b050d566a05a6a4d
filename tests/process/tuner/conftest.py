"""The toy domain registered, a policy whose deadlines suit tests, and searches in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from autotune.measure.outcome import Outcome
from autotune.measure.worker import Contender, Worker
from autotune.store import Store
from tests.support import ROOT
from tests.support.clock import Clock, paced
from tests.support.toy import toy_domain
from tests.support.toy.policy import Busy


@pytest.fixture(autouse=True)
def busy(monkeypatch: pytest.MonkeyPatch) -> Busy:
    """A machine that calls itself quiet whatever else runs on it, until a test sets ``busy.others``."""
    state, compare = Busy(), Worker.compare

    def told(self: Worker, contenders: Sequence[Contender], *, seed: int, **more: Any) -> dict[str, Outcome]:
        outcomes = compare(self, contenders, seed=seed, **more)
        self.others = state.others
        return outcomes

    monkeypatch.setattr(Worker, "compare", told)
    return state


@pytest.fixture
def half_a_second_each(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of searches, by which each measured candidate takes half a second and nothing else takes any time."""
    return paced(0.5, monkeypatch.setattr)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'tune.db'}"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url) as opened:
        yield opened


_SEARCH = """
import json, os, sys
from autotune import task
task.DOMAINS["toy"] = {module!r}
from autotune.tuner.threads import Interrupt
from {package}.policy import QUICK
from {module} import workload
from autotune.api import tune_workloads
from autotune.store import Store

handle = Interrupt._handle

def noted(*given):
    handle(*given)
    os.write(1, b"interrupted\\n")

Interrupt._handle = noted
url, spec, options = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
print("started", flush=True)
with Store.open(url) as store:
    results = tune_workloads(
        [workload(**spec)], "cpu", store, policy=QUICK,
        progress=lambda p: print(p.phase, p.measured, flush=True), **options,
    )
print("RESULT", json.dumps(results[0].to_json()))
"""


@pytest.fixture
def search(url: str, started: list[subprocess.Popen[str]]) -> Callable[..., subprocess.Popen[str]]:
    """Start a search of a toy workload in another process; whatever is left of it is killed at the end."""
    code = _SEARCH.format(module=toy_domain.__name__, package=toy_domain.__name__.rpartition(".")[0])

    def start(spec: dict[str, object], **options: object) -> subprocess.Popen[str]:
        import json

        process: subprocess.Popen[str] = subprocess.Popen(
            [sys.executable, "-c", code, url, json.dumps(spec), json.dumps(options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        started.append(process)
        return process

    return start
