"""The toy domain registered, a policy whose deadlines suit tests, and searches in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from autotune import task
from autotune.measure.outcome import Outcome
from autotune.measure.policy import Policy
from autotune.measure.worker import Contender, Worker
from autotune.store import Store

from . import toy_domain

ROOT = Path(__file__).resolve().parents[2]
QUICK = Policy(
    method="cpu",
    warmup=1,
    screen_repeats=3,
    repeat_repeats=5,
    final_rounds=7,
    final_s=1.0,
    cold_bytes=1 << 16,  # too little for torch to use threads, which would wait for each other on a loaded machine
    timeout_s=2.0,
    startup_s=120.0,
    build_s=3.0,
    load_s=2.0,
    baseline_s=20.0,
    quiet_s=0.0,
)


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the toy domain; children are told by whoever spawns them."""
    monkeypatch.setitem(task.DOMAINS, toy_domain.KIND, toy_domain.__name__)


class Busy:
    """How many processors others keep busy, as far as final comparisons are told."""

    others: float | None = 0.0


@pytest.fixture(autouse=True)
def busy(monkeypatch: pytest.MonkeyPatch) -> Busy:
    """A machine that calls itself quiet whatever else runs on it, until a test sets ``busy.others``."""
    state, compare = Busy(), Worker.compare

    def told(self: Worker, contenders: Sequence[Contender], *, seed: int) -> dict[str, Outcome]:
        outcomes = compare(self, contenders, seed=seed)
        self.others = state.others
        return outcomes

    monkeypatch.setattr(Worker, "compare", told)
    return state


@pytest.fixture
def policy() -> Policy:
    return QUICK


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'tune.db'}"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url) as opened:
        yield opened


_SEARCH = """
import json, sys
from autotune import task
task.DOMAINS["toy"] = {module!r}
from {package}.conftest import QUICK
from {module} import workload
from autotune.api import tune_workloads
from autotune.store import Store

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

        tests = str(Path(toy_domain.__file__).parents[len(toy_domain.__name__.split(".")) - 1])
        process: subprocess.Popen[str] = subprocess.Popen(
            [sys.executable, "-c", code, url, json.dumps(spec), json.dumps(options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([tests, str(ROOT)])},
        )
        started.append(process)
        return process

    return start
