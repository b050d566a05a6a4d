"""Cases measured side by side: turns on the device, lanes that die, are interrupted or resumed."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from autotune.bench.contenders import ProcessLock, inductor_takes_lock
from autotune.device import identify
from autotune.measure.policy import default_policy
from autotune.measure.quiet import device_lock
from benchmarks import form
from benchmarks.fusion import instrument, lane, suite
from benchmarks.fusion import run as runs
from benchmarks.fusion.__main__ import main
from benchmarks.fusion.entry import Entries, Plan
from benchmarks.fusion.run import Settings
from tests.support import odd_lane

QUICK = replace(default_policy("cpu"), quiet_s=0.0, cold_bytes=1 << 16, warmup=1, final_s=0.05)
HOLD = """
import os, time
from pathlib import Path
from autotune.measure.quiet import device_lock
from tests.support.locks import awaited
with device_lock("cpu", 600) as held:
    print(held, flush=True)
    (queue,) = Path(os.environ["TMPDIR"]).glob("*-cpu.next")
    while not awaited(queue):
        time.sleep(0.01)
    time.sleep(0.2)
    print(time.monotonic(), flush=True)
"""


@pytest.fixture(autouse=True)
def own_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else's measuring holds this up, in children neither."""
    (tmp_path / "locks").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "locks"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "locks"))


def free(device: str = "cpu") -> bool:
    """True if the device's lock is free now."""
    with device_lock(device, 0) as held:
        return held


def test_who_has_a_turn_may_ask_again_and_others_wait() -> None:
    lock = ProcessLock("cpu", 1e6)  # a process that waits for itself would wait so long
    with lock.exclusive():
        with lock.exclusive():
            assert not free()
        assert not free()
        assert free("cuda:0")
    assert free()
    before = lock.waited_s
    with subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        with lock.exclusive():
            got = time.monotonic()
            assert not free()
        released = float(other.stdout.readline())
    assert got > released
    assert lock.waited_s - before >= 0.2


def test_threads_of_a_process_share_its_turn() -> None:
    """The first thread may be waiting for the second, as a step waits for its backward pass: nobody waits in turn."""
    lock, may_end = ProcessLock("cpu", 600), threading.Event()
    inside, ended = threading.Event(), threading.Event()

    def backward() -> None:
        with lock.exclusive():
            inside.set()
            may_end.wait(250)
        ended.set()

    with lock.exclusive():
        thread = threading.Thread(target=backward, daemon=True)
        thread.start()
        assert inside.wait(250)
    assert not free()  # until the last thread is done
    may_end.set()
    assert ended.wait(250)
    assert free()


def test_a_backward_pass_that_is_compiled_while_a_step_is_timed_takes_no_second_turn() -> None:
    """Inductor times in autograd's thread, while the first thread holds the turn and waits for that thread."""
    from torch._inductor.runtime.benchmarking import benchmarker

    lock, seen = ProcessLock("cpu", 600), list[bool]()

    class Timed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, given: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            thread = threading.Thread(target=time_one, daemon=True)  # a CPU's backward runs in the caller's thread
            thread.start()
            thread.join(250)
            return given

    def time_one() -> None:
        benchmarker.benchmark(lambda v: seen.append(free()), (torch.ones(4),), {}, warmup=1, rep=1)

    x = torch.ones(3, requires_grad=True)
    with inductor_takes_lock(lock), lock.exclusive():
        Timed.apply(x).sum().backward()  # type: ignore[no-untyped-call]
    assert seen
    assert not any(seen)


def test_a_lane_that_does_not_take_its_case_is_reported() -> None:
    class Silent:
        def kill(self) -> None: ...

    silent: Any = Silent()
    busy = {silent: suite.CASES["rope"]}
    assert lane._end(silent, busy, lane.ChildSilent()).missing == "the process that measured it did not answer"
    assert not busy


def test_an_error_ends_a_turn() -> None:
    lock = ProcessLock("cpu", 5)
    with pytest.raises(ZeroDivisionError), lock.exclusive():
        _ = 1 / 0
    assert free()
    with lock.exclusive():
        assert not free()


def test_inductor_times_in_turn_and_as_before_afterwards() -> None:
    from torch._inductor.runtime.benchmarking import benchmarker

    kind, held = type(benchmarker), list[bool]()
    before = {name: (kind.__dict__.get(name), getattr(kind, name, None)) for name in dir(kind)}
    with inductor_takes_lock(ProcessLock("cpu", 5)):
        x = torch.ones(4)
        benchmarker.benchmark(lambda v: held.append(free()), (x,), {}, warmup=1, rep=1)
        assert free()
    assert held
    assert not any(held)
    assert {name: (kind.__dict__.get(name), getattr(kind, name, None)) for name in dir(kind)} == before
    held.clear()
    benchmarker.benchmark(lambda v: held.append(free()), (x,), {}, warmup=1, rep=1)
    assert all(held)


def measured_by_inductor(found: list[bool]) -> None:
    """Note if the lock is free while Inductor times code."""
    from torch._inductor.runtime.benchmarking import benchmarker

    benchmarker.benchmark(lambda v: found.append(free()), (torch.ones(4),), {}, warmup=1, rep=1)


@pytest.mark.usefixtures("threads")
def test_a_case_is_compiled_out_of_turn_and_timed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    compiling, timing = list[bool](), list[bool]()

    def compiled(fn: Any, args: Any, options: Any = None) -> Any:
        compiling.append(free())
        measured_by_inductor(timing)
        return lambda given=args: fn(*given)

    def rotate(calls: Any, sets: Any, policy: Any) -> dict[str, list[float]]:
        timing.append(free())
        return {name: [1.0] for name in calls}

    monkeypatch.setattr("benchmarks.fusion.peers.inductor", compiled)
    monkeypatch.setattr("benchmarks.fusion.measure.rotate", rotate)
    plan = Plan("cpu", "cpu", None, QUICK, 1e4, frozenset({"inductor"}), {"set": {}}, {"full": None})
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    with Entries(plan) as entries:
        answer = entries.of(odd_lane.ODD["right"])
    assert answer.entry is not None
    assert answer.entry["inductor_options"] == {"set": 1.0}
    assert compiling == [True, True]
    assert len(timing) > 2
    assert not any(timing)
    timing.clear()
    measured_by_inductor(timing)
    assert all(timing)


def test_lane_compiles_out_of_turn_and_profiles_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    compiling, timing = list[bool](), list[bool]()

    def compiled(fn: Any, args: Any, options: Any = None) -> Any:
        compiling.append(free())
        measured_by_inductor(timing)

    def kernel_times(calls: Any) -> dict[str, Any]:
        timing.append(free())
        return {}

    monkeypatch.setattr("benchmarks.fusion.peers.inductor", compiled)
    monkeypatch.setattr("benchmarks.fusion.kernel_times.kernel_times", kernel_times)
    monkeypatch.setattr("torch.cuda.set_device", lambda device: None)
    request = {"case": "mixed_axes_small", "size": "cpu", "device": "cpu", "lock_s": 5.0, "best": {}}
    instrument.measure(request | {"contenders": ["inductor", "inductor_best"]})
    assert compiling == [True, True]
    assert len(timing) > 2
    assert not any(timing)


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Settings of a run in two lanes whose suite has a few more cases; takes their names."""
    monkeypatch.setattr(lane, "MODULE", odd_lane.__name__)
    monkeypatch.setattr(runs, "_prepare", lambda settings: (QUICK, 1e4))
    monkeypatch.setenv("ODD_PIDS", str(tmp_path / "pids"))
    monkeypatch.setattr(suite, "CASES", {**suite.CASES, **odd_lane.ODD})

    def settings(*names: str, **more: Any) -> Settings:
        base = Settings("cpu", "cpu", tmp_path / "x.json", "c", names, peers=["eager"], search=False, jobs=2)
        return replace(base, **more)

    return settings


def test_a_lane_that_dies_costs_its_case(odd: Any, capfd: pytest.CaptureFixture[str]) -> None:
    kept = {"name": "dies f32 1", "case": "rope", "eager_us": 1.0, "autotune_us": 1.0, "ablations": {}, "bytes": 4,
            "inductor_best_us": None, "inductor_us": None, "xla_us": None, "floor_us": 1.0}  # fmt: skip
    label = suite.CASES["rope"].label("cpu")
    names = ["rope", "dies", "gives_up", "wrong", "right"]
    settings = odd(*names, resume=True)
    form.write(settings.out, identify("cpu").label, [kept | {"name": label}], command="c", extra={"suite": "fusion"})
    data, missing = runs.run(settings)
    assert data is not None
    assert data == form.read(settings.out)
    assert [case["case"] for case in data["cases"]] == ["rope", "right"]  # in the suite's order
    assert data["cases"][0]["eager_us"] == 1.0  # resumed
    entry = data["cases"][1]
    assert entry["eager_us"] > 0
    assert entry["autotune_us"] > 0
    assert entry["copy_tb_s"] == 0.01
    assert entry["measure_s"] >= entry["waited_s"] >= 0
    by_name = {line.split()[0]: line for line in missing}
    assert list(by_name) == ["wrong", "dies", "gives_up"]  # in the suite's order
    assert "killed by SIGKILL" in by_name["dies"]
    assert "illegal memory access" in by_name["gives_up"]
    assert "autotune and eager disagree" in by_name["wrong"]
    out, err = capfd.readouterr()
    assert "what a compiler may print" not in out
    assert "what a compiler may print" in err
    assert "[4/4]" in err
    assert "right f32 64x32: autotune " in err
    assert "NOT MEASURED" in err


def test_an_interrupt_ends_all_lanes_and_keeps_written_cases(
    odd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = runs._write

    def interrupted(*args: Any) -> Any:
        write(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "_write", interrupted)
    settings = odd("hangs", "waits")
    with pytest.raises(KeyboardInterrupt):
        runs.run(settings)
    assert [case["case"] for case in form.read(settings.out)["cases"]] == ["waits"]
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_jobs_are_refused_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--device", "cpu", "--jobs", "2"]) == 2
    err = capsys.readouterr().err
    assert "--jobs 2: on a CPU" in err
    assert err.count("\n") == 1
