"""The rank processes survive what a candidate does to one of them, and all ranks give one verdict."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from autotune.domains.c3.measuring import crew, ranks
from autotune.domains.c3.measuring.crew import Crew, merge
from autotune.domains.c3.measuring.ranks import Ranks
from autotune.measure.child import ready
from autotune.measure.policy import Policy
from autotune.measure.worker import Contender, Measurer, WorkerFault
from autotune.task import Artifact, Config, Kernel, Status
from tests.support import ROOT
from tests.support.brief import PATIENT
from tests.support.c3 import toy_ranks
from tests.support.c3.toy_ranks import workload
from tests.support.clock import Patience

ARTIFACT = Artifact("cpu", (Kernel("toy"),))
GOOD: Config = {"how": "good"}
BENCH = toy_ranks.__name__
QUICK = Policy(
    method="ranks-cpu",
    warmup=1,
    screen_repeats=5,
    repeat_repeats=7,
    final_rounds=6,
    final_s=1.0,
    cold_bytes=1 << 16,
    **PATIENT,
    quiet_s=0.0,
)


@pytest.fixture(scope="module", autouse=True)
def own_lock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The ranks' lock of the device is their own, and nobody else on the machine keeps these tests waiting."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("locks")))
        yield


@pytest.fixture(scope="module")
def shared(own_lock: None) -> Iterator[Ranks]:
    """Three ranks for the tests of this module: each must leave them usable for the next."""
    with Ranks(workload(3), "cpu", QUICK, bench=BENCH) as ranks:
        yield ranks


@pytest.fixture
def hours(patience: Patience, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines pass where a rank is stuck and every other one has answered, or waits for it in timing."""
    hear, read = Crew._hear, Crew._read

    def read_whole(self: Crew, *given: Any) -> None:
        with patience.endless():  # a phase whose frame is being read is not in its seat yet
            read(self, *given)

    def heard(self: Crew, *given: Any) -> Any:
        def settled() -> bool:
            if ready([seat.child for seat in self._seats], 0.0):
                return False  # a rank has reached a phase that is not heard of yet
            (stuck,) = (seat for seat in self._seats if patience.is_stuck(seat.child.pid))
            return all(not seat.busy or seat is stuck or seat.phase == stuck.phase == "time" for seat in self._seats)

        patience.settled = settled
        patience.awaited(*(seat.child.pid for seat in self._seats))
        try:
            return hear(self, *given)
        finally:
            patience.awaited()

    def looks(ends: Any, seconds: float) -> Any:
        return ready(ends, min(seconds, 0.02))

    monkeypatch.setattr(Crew, "_hear", heard)
    monkeypatch.setattr(Crew, "_read", read_whole)
    monkeypatch.setattr(crew, "ready", looks)
    for module in (crew, ranks):
        monkeypatch.setattr(module, "time", patience)


def measure(ranks: Ranks, **config: Any) -> Any:
    return ranks.measure(config, ARTIFACT, stage="screen", seed=1)


def test_a_good_candidate_is_verified_and_timed_on_all_ranks(shared: Ranks) -> None:
    measurer: Measurer = shared
    outcome = measurer.measure(GOOD, ARTIFACT, stage="screen", seed=1)
    assert outcome.status is Status.OK, outcome.reason
    assert len(outcome.samples) == 5
    assert outcome.error == 0.75  # the largest: that of rank 2
    assert len(shared.measure(GOOD, ARTIFACT, stage="repeat", seed=1).samples) == 7
    assert len(shared.measure(GOOD, ARTIFACT, stage="screen", seed=1, limit_us=0.001).samples) == 3
    assert shared.restarts == 0
    assert shared.bytes_moved == 4096


def test_the_slowest_rank_counts(shared: Ranks) -> None:
    outcome = measure(shared, how="slow", rank=1)
    assert outcome.ok, outcome.reason
    assert set(outcome.samples) == {20_000.0}


@pytest.mark.parametrize(
    ("config", "status", "words", "replaced"),
    [
        ({"how": "wrong", "rank": 1}, Status.WRONG_RESULT, "rank 1: a number is off", False),
        ({"how": "wrong", "rank": 2, "error": float("inf")}, Status.WRONG_RESULT, "rank 2: a number is off", True),
        ({"how": "raise", "when": "load"}, Status.LAUNCH_ERROR, "rank 0: RuntimeError: no luck on rank 0", False),
        ({"how": "raise", "when": "time"}, Status.LAUNCH_ERROR, "rank 0: RuntimeError: no luck on rank 0", False),
        ({"how": "die", "rank": 2, "when": "time"}, Status.CRASHED, "rank 2 killed by SIGKILL", True),
        ({"how": "exit", "rank": 0, "when": "verify"}, Status.CRASHED, "rank 0 exited with code 3 in verif", True),
        ({"how": "hang", "rank": 1, "when": "load"}, Status.TIMEOUT, "of rank 1 after 600 s in loading", True),
        ({"how": "hang", "rank": 1, "when": "close"}, Status.TIMEOUT, "of rank 1 after 600 s in closing", True),
    ],
)
@pytest.mark.usefixtures("hours")
def test_a_bad_candidate_is_named_and_the_next_is_measured(
    shared: Ranks, config: Config, status: Status, words: str, replaced: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    before = shared.restarts
    outcome = measure(shared, **config)
    assert outcome.status is status, outcome.reason
    assert words in outcome.reason
    assert "\n" not in outcome.reason
    assert outcome.samples == ()
    assert shared.restarts - before == replaced
    assert measure(shared, how="good").status is Status.OK
    assert [a["left"] for a in shared.call(f"{BENCH}:whoami", {"word": ""}, 600)] == [0, 0, 0]  # all of it is closed
    assert shared.restarts - before == replaced
    assert capfd.readouterr() == ("", "")  # nothing of it on the user's terminal


def test_a_rank_that_fails_alone_does_not_wait_for_the_others_deadline(
    shared: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.domains.c3.measuring.crew._PEERS_S", 0.3)
    monkeypatch.setattr(shared, "_policy", replace(QUICK, timeout_s=1e6))
    assert measure(shared, how="good").ok
    outcome = measure(shared, how="raise", rank=1, when="time")  # the others are left in a collective call
    assert outcome.status is Status.LAUNCH_ERROR
    assert outcome.reason == "rank 1: RuntimeError: no luck on rank 1"


def test_a_rank_killed_while_it_is_timed_costs_one_candidate(shared: Ranks) -> None:
    assert measure(shared, how="good").ok
    assert shared._crew is not None
    before, victim = shared.restarts, shared._crew._seats[1]

    def kill() -> None:
        while victim.phase != "time":
            time.sleep(0.01)
        os.kill(victim.child.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    outcome = shared.measure({"how": "hang", "rank": 1, "when": "time"}, ARTIFACT, stage="repeat", seed=1)
    killer.join()
    assert outcome.status is Status.CRASHED
    assert outcome.reason.startswith("rank 1 killed by SIGKILL")
    assert outcome.reason.endswith("in timing")
    assert measure(shared, how="good").ok
    assert shared.restarts - before == 1


def test_a_rank_killed_between_two_candidates_costs_none(shared: Ranks) -> None:
    assert measure(shared, how="good").ok
    assert shared._crew is not None
    os.kill(shared._crew._seats[2].child.pid, signal.SIGKILL)
    assert measure(shared, how="good").ok


@pytest.mark.usefixtures("hours")
def test_comparison_goes_on_without_those_that_fail(shared: Ranks) -> None:
    contenders = [
        Contender("good", GOOD, ARTIFACT),
        Contender("wrong", {"how": "wrong", "rank": 1}, ARTIFACT),
        Contender("hang", {"how": "hang", "rank": 2, "when": "time"}, ARTIFACT),
        Contender("raise", {"how": "raise", "rank": 0, "when": "load"}, ARTIFACT),
    ]
    outcomes = shared.compare(contenders, seed=5)
    assert {name: str(o.status) for name, o in outcomes.items()} == {
        "good": "ok",
        "wrong": "wrong_result",
        "hang": "timeout",
        "raise": "launch_error",
        "sequential": "ok",
        "naive": "launch_error",
        "=compute": "ok",
        "=comm:toy": "crashed",
    }
    assert (
        len(outcomes["good"].samples) == len(outcomes["sequential"].samples) == len(outcomes["=compute"].samples) == 6
    )
    assert shared.references == {"compute": outcomes["=compute"].latency_us}
    assert "rank 1 killed by SIGKILL" in outcomes["=comm:toy"].reason
    assert shared.others is not None
    assert shared.others >= 0


def test_functions_are_called_on_every_rank(shared: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.domains.c3.measuring.crew._PEERS_S", 0.3)
    answers = shared.call(f"{BENCH}:whoami", {"word": "here"}, 600)
    assert [a["rank"] for a in answers] == [0, 1, 2]
    assert {(a["word"], a["largest"]) for a in answers} == {("here", 2.0)}
    before = shared.restarts
    with pytest.raises(WorkerFault, match=r"toy_ranks:fail failed: rank 1: RuntimeError: no such thing"):
        shared.call(f"{BENCH}:fail", {"rank": 1}, 600)
    assert shared.restarts - before == 1
    assert len(shared.call(f"{BENCH}:whoami", {"word": "again"}, 600)) == 3


def test_ranks_turn_to_another_scenario_and_another_number(shared: Ranks) -> None:
    before = shared.restarts
    shared.open(workload(3, 8192))
    assert measure(shared, how="good").ok
    assert shared.bytes_moved == 8192
    shared.open(workload(2))
    assert measure(shared, how="good").error == 0.5
    assert shared.ranks == 2
    assert shared.restarts == before
    shared.open(workload(2, 4))
    with pytest.raises(WorkerFault, match="cannot be opened on 2 ranks of cpu: rank 0: Unsupported: four bytes"):
        measure(shared, how="good")
    shared.open(workload(3))
    assert measure(shared, how="good").error == 0.75


def test_closing_leaves_no_process_and_no_file_behind() -> None:
    with Ranks(None, "cpu", QUICK, ranks=2, bench=BENCH) as ranks:
        answers = ranks.call(f"{BENCH}:whoami", {"word": "x"}, 600)
        assert [a["opened"] for a in answers] == [0, 0]  # no scenario, no bench
        assert ranks._crew is not None
        pids, folder = [seat.child.pid for seat in ranks._crew._seats], Path(ranks._crew._folder)
        assert folder.is_dir()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not folder.exists()


def test_ranks_that_do_not_start_in_time_are_a_fault() -> None:
    with (
        Ranks(workload(2), "cpu", replace(QUICK, startup_s=-1.0), bench=BENCH) as late,
        pytest.raises(WorkerFault, match="2 ranks on cpu do not start: no answer after -1 s"),
    ):
        measure(late, how="good")


def test_one_verdict_for_all() -> None:
    def check(status: str, error: float | None, reason: str = "", restart: bool = False) -> dict[str, Any]:
        return {"status": status, "samples": [], "error": error, "reason": reason, "restart": restart}

    assert merge([check("ok", 0.1), check("ok", 0.3), check("ok", None)])["error"] == 0.3
    bad = merge([check("ok", 0.1), check("wrong_result", 7.0, "x", True), check("wrong_result", 9.0, "y")])
    assert (bad["status"], bad["reason"], bad["error"], bad["restart"]) == ("wrong_result", "rank 1: x", 9.0, True)


_SEARCH = """
import json, sys
from tests.process.domains.test_ranks import ARTIFACT, BENCH, QUICK
from tests.support.c3.toy_ranks import workload
from autotune.domains.c3.measuring.agents import serve_agent
from autotune.domains.c3.measuring.ranks import Ranks

if not serve_agent():
    with Ranks(workload(2), "cpu", QUICK, bench=BENCH) as ranks:
        for how in ("good", "die", "good"):
            outcome = ranks.measure({"how": how, "rank": 1, "when": "time"}, ARTIFACT, stage="screen", seed=1)
            print("TOLD", outcome.status, outcome.reason, flush=True)
        parents = ranks.call(f"{BENCH}:parent", {}, 600)
        print("PARENTS", len(set(parents)), flush=True)
print("DONE", flush=True)
"""


def test_under_torchrun_each_process_owns_a_rank(tmp_path: Path) -> None:
    script = tmp_path / "search.py"
    script.write_text(_SEARCH)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
        capture_output=True, text=True, timeout=550, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    told = [line for line in lines if line.startswith("TOLD")]
    assert told[0] == told[2] == "TOLD ok "
    assert told[1].startswith("TOLD crashed rank 1 killed by SIGKILL")
    assert "PARENTS 2" in lines
    assert lines.count("DONE") == 2
