"""The measuring worker and the compile pool survive what candidates do to them, and say what it was."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from autotune import numerics, task
from autotune.errors import BuildError
from autotune.measure.child import Reader, artifact_from_wire, artifact_to_wire, pack, ready
from autotune.measure.policy import Policy
from autotune.measure.pool import CompilePool, default_processes
from autotune.measure.quiet import device_lock
from autotune.measure.server import classify
from autotune.measure.worker import Contender, Worker, WorkerFault
from autotune.task import Artifact, Config, Kernel, Status
from autotune.workload import Workload
from tests.support.clock import Patience
from tests.support.locks import awaited
from tests.support.toy import toy_domain
from tests.support.toy.policy import QUICK
from tests.support.toy.toy_domain import workload

ARTIFACT = Artifact("cpu", (Kernel("toy"),))
GOOD: Config = {"how": "rows", "block": 8}


@pytest.fixture(scope="module")
def shared() -> Iterator[Worker]:
    """One worker for the tests of this module: each must leave it usable for the next."""
    task.DOMAINS["toy"] = toy_domain.__name__
    with Worker(workload(bad=True), "cpu", QUICK) as worker:
        yield worker
    del task.DOMAINS["toy"]


def test_a_good_candidate_is_verified_and_timed(shared: Worker) -> None:
    outcome = shared.measure(GOOD, ARTIFACT, stage="screen", seed=1)
    assert outcome.status is Status.OK, outcome.reason
    assert len(outcome.samples) == 3
    assert outcome.error is not None
    assert outcome.error <= 1
    assert len(shared.measure(GOOD, ARTIFACT, stage="repeat", seed=1).samples) == 5
    assert shared.restarts == 0
    assert shared.bytes_moved == (64 * 256 + 64) * 4


def test_a_candidate_is_measured_under_the_settings_of_the_search(
    tmp_path: Path, default_numerics: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(task.DOMAINS, "toy", toy_domain.__name__)
    torch.set_float32_matmul_precision("medium")
    torch.use_deterministic_algorithms(True)
    with Worker(workload(numerics=str(tmp_path / "found")), "cpu", QUICK) as worker:
        assert worker.measure(GOOD, ARTIFACT, stage="screen", seed=1).status is Status.OK
    found = json.loads((tmp_path / "found").read_text())
    assert found == numerics.read()
    assert (found["float32_matmul_precision"], found["deterministic_debug_mode"]) == ("medium", 2)


def test_a_worker_opens_its_workload_before_the_first_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(task.DOMAINS, "toy", toy_domain.__name__)
    with Worker(workload(), "cpu", QUICK) as worker:
        assert worker._child is not None
        ready([worker._child])  # its answer, for which nothing waits yet
        assert worker.measure(GOOD, ARTIFACT, stage="screen", seed=1).ok
    with Worker(workload(), "cpu", QUICK) as worker:
        worker.open(workload(rows=32))
        assert worker.measure(GOOD, ARTIFACT, stage="screen", seed=1).ok
        assert worker.bytes_moved == (32 * 256 + 32) * 4


def test_settings_that_change_before_the_first_job_apply(
    tmp_path: Path, default_numerics: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(task.DOMAINS, "toy", toy_domain.__name__)
    with Worker(workload(numerics=str(tmp_path / "found")), "cpu", QUICK) as worker:
        torch.set_float32_matmul_precision("medium")
        assert worker.measure(GOOD, ARTIFACT, stage="screen", seed=1).ok
        assert worker.restarts == 0
    assert json.loads((tmp_path / "found").read_text())["float32_matmul_precision"] == "medium"


def test_a_worker_that_cannot_warm_up_measures_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(task.DOMAINS, "toy", toy_domain.__name__)
    with Worker(None, "cpu", QUICK) as worker:
        worker.warm(Workload("fusion", {"damaged": True}))
        worker.open(workload())
        assert worker.measure(GOOD, ARTIFACT, stage="screen", seed=1).ok


@pytest.mark.parametrize(
    ("how", "status", "words", "replaced"),
    [
        ("hang", Status.TIMEOUT, "no answer after", True),
        ("segfault", Status.CRASHED, "killed by SIGSEGV in verification", True),
        ("exit", Status.CRASHED, "exited with code 3", True),
        ("memory", Status.LAUNCH_ERROR, "MemoryError", True),
        ("wrong", Status.WRONG_RESULT, "times the tolerance", True),
        ("raise", Status.LAUNCH_ERROR, "too many resources requested for launch", False),
    ],
)
def test_a_bad_candidate_is_named_and_the_next_is_measured(
    shared: Worker, how: str, status: Status, words: str, replaced: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    before = shared.restarts
    outcome = shared.measure({"how": how, "block": 8}, ARTIFACT, stage="screen", seed=1)
    assert outcome.status is status
    assert words in outcome.reason
    assert "\n" not in outcome.reason
    assert outcome.samples == ()
    assert shared.restarts - before == replaced
    assert shared.measure(GOOD, ARTIFACT, stage="screen", seed=1).status is Status.OK
    assert capfd.readouterr() == ("", "")  # nothing of it on the user's terminal


def test_comparison_goes_on_without_those_that_fail(shared: Worker) -> None:
    contenders = [
        Contender("good", GOOD, ARTIFACT),
        Contender("wrong", {"how": "wrong", "block": 1}, ARTIFACT),
        Contender("hang", {"how": "hang", "block": 1}, ARTIFACT),
    ]
    assert shared.baseline_s == 0.0
    outcomes = shared.compare(contenders, seed=5)
    assert shared.baseline_s > 0.0
    assert {name: str(o.status) for name, o in outcomes.items()} == {
        "good": "ok",
        "wrong": "wrong_result",
        "hang": "timeout",
        "eager": "ok",
        "inductor": "launch_error",
        "crashing": "crashed",
    }
    assert len(outcomes["good"].samples) == len(outcomes["eager"].samples) >= 5
    assert "no C++ compiler" in outcomes["inductor"].reason


def test_one_process_serves_several_workloads(shared: Worker) -> None:
    before = shared.restarts
    shared.open(workload(rows=8))
    assert shared.measure(GOOD, ARTIFACT, stage="screen", seed=1).ok
    assert shared.bytes_moved == (8 * 256 + 8) * 4
    shared.open(workload(bad=True))
    assert shared.measure(GOOD, ARTIFACT, stage="screen", seed=1).ok
    assert shared.restarts == before


def test_a_killed_worker_is_started_again(shared: Worker) -> None:
    assert shared._child is not None
    os.kill(shared._child.pid, signal.SIGKILL)
    outcomes = [shared.measure(GOOD, ARTIFACT, stage="screen", seed=1) for _ in range(2)]
    assert outcomes[1].ok
    assert outcomes[0].ok or "killed by SIGKILL" in outcomes[0].reason


def test_a_program_may_have_a_thousand_open_files(policy: Policy) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard), hard))
    opened = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while opened[-1] < 1024:  # beyond the descriptors that select() takes
            opened.append(os.dup(opened[0]))
        with Worker(workload(), "cpu", policy) as worker:
            assert worker.measure(GOOD, ARTIFACT, stage="screen", seed=1).status is Status.OK
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("new_interpreters")
def test_torchs_debugging_is_about_the_program(policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_COMPILE_DEBUG", "1")
    monkeypatch.setenv("TORCH_TRACE", str(tmp_path / "trace"))
    with Worker(workload(), "cpu", policy) as worker:
        assert worker.measure(GOOD, ARTIFACT, stage="screen", seed=1).ok
        assert worker._child is not None
        inherited = Path(f"/proc/{worker._child.pid}/environ").read_bytes().split(b"\0")
    assert not [text for text in inherited if text.startswith((b"TORCH_COMPILE_DEBUG", b"TORCH_TRACE"))]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("new_interpreters")
def test_files_in_the_working_directory_do_not_replace_modules(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("queue", "token", "random", "types"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('the user has a file of this name')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])  # "" is the working directory
    with Worker(workload(), "cpu", policy) as worker:
        assert worker.measure(GOOD, ARTIFACT, stage="screen", seed=1).ok


def test_closing_leaves_no_process_behind(policy: Policy) -> None:
    with Worker(workload(), "cpu", policy) as worker:
        assert worker.measure(GOOD, ARTIFACT, stage="screen", seed=1).ok
        assert worker._child is not None
        pid = worker._child.pid
    assert not psutil.pid_exists(pid)


def test_a_worker_that_cannot_open_its_workload_is_a_fault(policy: Policy) -> None:
    with Worker(workload(columns=-1), "cpu", policy) as worker, pytest.raises(WorkerFault, match="cannot be opened"):
        worker.measure(GOOD, ARTIFACT, stage="screen", seed=1)


def test_a_worker_that_does_not_start_in_time_is_a_fault(policy: Policy) -> None:
    worker = Worker(workload(never=True), "cpu", replace(policy, startup_s=7.0))
    with worker, pytest.raises(WorkerFault, match="does not start: no answer after 7 s"):
        worker.measure(GOOD, ARTIFACT, stage="screen", seed=1)


def test_children_do_not_outlive_a_parent_that_is_killed() -> None:
    code = (
        "import time; from autotune.measure.child import Child\n"
        "child = Child('autotune.measure.pool'); print(child.pid, flush=True)\n"
        "child.send({'workload': {}}); child.receive(time.monotonic() + 600)\n"  # it has asked to die with its parent
        "print('prepared', flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    assert parent.stdout.readline() == "prepared\n"
    child.suspend()  # or it would end with its pipe
    parent.kill()
    parent.communicate()
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.05)  # until pytest's limit


@pytest.mark.parametrize(
    ("error", "status", "restart"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered"), Status.CRASHED, True),
        (RuntimeError("CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure"), Status.CRASHED, True),
        (RuntimeError("CUDA error: device-side assert triggered"), Status.CRASHED, True),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB"), Status.LAUNCH_ERROR, True),
        (MemoryError(), Status.LAUNCH_ERROR, True),
        (RuntimeError("CUDA_ERROR_INVALID_VALUE: too much shared memory"), Status.LAUNCH_ERROR, False),
        (BuildError("does not compile"), Status.COMPILE_ERROR, False),
    ],
)
def test_errors_are_distinguished(error: Exception, status: Status, restart: bool) -> None:
    assert classify(error) == (status, restart)


def test_pool_builds_and_fails_one_at_a_time(policy: Policy) -> None:
    with CompilePool(2, timeout_s=3.0) as pool:
        futures = {
            how: pool.submit(workload(bad=True), "cpu", {"how": how, "block": 4})
            for how in ("build_error", "build_hang", "rows", "build_crash", "vector")
        }
        wait(futures.values())
        built = {how: f.result(0) for how, f in futures.items()}
    assert {how for how, b in built.items() if b.artifact} == {"rows", "vector"}
    assert built["rows"].artifact == Artifact("cpu", (Kernel("toy", b"", {"block": 4}),), generator="toy")
    assert built["build_error"].reason == "needs 512 KiB of shared memory, the device has 227"
    assert built["build_crash"].reason == "the compiling process exited with code 7"
    assert built["build_hang"].reason == "no answer after 3600 s of compiling"  # the hour of a stuck process
    assert not any(b.fault for b in built.values())


def test_pool_tells_a_fault_from_a_bad_candidate() -> None:
    task.DOMAINS["broken"] = "no_such_module"
    try:
        with CompilePool(1) as pool:
            built = pool.submit(replace(workload(), kind="broken"), "cpu", GOOD).result()
    finally:
        del task.DOMAINS["broken"]
    assert built.fault
    assert "no_such_module" in built.reason


def test_pool_starts_its_processes_before_their_first_jobs(patience: Patience) -> None:
    with patience.endless(), CompilePool(2, timeout_s=60) as pool:
        pool.start()
        pool.start()
        while len(pool._children) < 2:
            time.sleep(0.01)
        before = {child.pid for child in pool._children.values()}
        assert pool.submit(workload(), "cpu", GOOD).result().artifact is not None
        assert {child.pid for child in pool._children.values()} == before


def test_closing_the_pool_drops_running_builds(patience: Patience) -> None:
    with patience.endless(), CompilePool(1, timeout_s=60) as pool:
        hanging = pool.submit(workload(bad=True), "cpu", {"how": "build_hang", "block": 4})
        queued = pool.submit(workload(), "cpu", GOOD)
        while not hanging.running():
            time.sleep(0.01)
    assert hanging.done()
    assert queued.cancelled()
    assert 1 <= default_processes() <= 16
    assert default_processes(1000) == 1


def test_frames_are_assembled_from_pieces() -> None:
    artifact = Artifact(
        "sm_90",
        (Kernel("a", b"\0\1", {"grid": [1]}, {"registers": 4}), Kernel("b"), Kernel("c", b"xyz")),
        (("float32", 8), ("int32", 1)),
        "g",
    )
    head, blob = artifact_to_wire(artifact)
    stream = pack(head, blob) + pack({"n": 1})
    reader, frames = Reader(), []
    for i in range(0, len(stream), 5):
        reader.feed(stream[i : i + 5])
        while (frame := reader.next()) is not None:
            frames.append(frame)
    assert artifact_from_wire(*frames[0]) == artifact
    assert frames[1:] == [({"n": 1}, b"")]
    reader.feed(b"Traceback (most recent call last)")
    with pytest.raises(ValueError, match="not a frame"):
        reader.next()


def test_device_lock_excludes_and_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with device_lock("cuda:0", 60) as first, device_lock("cuda:0", 0.05) as second, device_lock("cuda:1", 60) as other:
        assert (first, second, other) == (True, False, True)
    with device_lock("cuda:0", 60) as again:
        assert again


def test_a_waiting_process_gets_the_device_before_its_last_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    order = list[str]()

    def other() -> None:
        with device_lock("cuda:0", 60):
            order.append("other")

    with device_lock("cuda:0", 60):
        (queue,) = tmp_path.glob("*.next")
        thread = threading.Thread(target=other)
        thread.start()
        while not awaited(queue):
            time.sleep(0.01)
    with device_lock("cuda:0", 60):
        order.append("again")
    thread.join()
    assert order == ["other", "again"]
