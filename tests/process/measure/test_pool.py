"""Candidates that are compiled ahead of requests."""

from __future__ import annotations

import tempfile
import time
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from autotune import task
from autotune.measure.pool import BaselinePool, Built, CompilePool
from autotune.task import Config
from tests.support.clock import Patience
from tests.support.toy.toy_domain import workload

HANG: Config = {"how": "build_hang", "block": 4}


def rows(block: int) -> Config:
    return {"how": "rows", "block": block}


def ahead_of(pool: CompilePool) -> list[Future[Built]]:
    return list(pool._prefetched.values())


def test_awaited_builds_go_first(patience: Patience) -> None:
    bad, order = workload(bad=True), list[str]()
    with CompilePool(1, timeout_s=3.0) as pool:
        with patience.endless():
            hanging = pool.submit(bad, "cpu", HANG)
            for block in (1, 2, 4):
                pool.prefetch(bad, "cpu", rows(block))
            one, two, four = ahead_of(pool)
            other = pool.submit(bad, "cpu", rows(8))
            asked = pool.submit(bad, "cpu", rows(4))  # was meant to be built last
            assert four.cancelled()
            futures = {"one": one, "asked": asked, "other": other, "two": two, "hanging": hanging}
            for name, future in futures.items():
                future.add_done_callback(lambda _, name=name: order.append(name))  # type: ignore[misc]
        wait(futures.values())
    assert order == ["hanging", "other", "asked", "one", "two"]
    assert all(f.result(0).artifact for f in (one, two, other, asked))


def test_builds_ahead_are_not_repeated() -> None:
    with CompilePool(1, timeout_s=60) as pool:
        pool.prefetch(workload(), "cpu", rows(4))
        pool.prefetch(workload(), "cpu", rows(4))
        (early,) = ahead_of(pool)
        wait([early])
        assert pool.submit(workload(rows=32), "cpu", rows(4)) is not early
        assert pool.submit(workload(), "cpu", rows(4)) is early
        assert pool.submit(workload(), "cpu", rows(4)) is not early  # it is handed out once


def begun(future: Future[Built]) -> None:
    """Wait until a build is under way."""
    while not future.running():
        time.sleep(0.01)


def test_a_build_under_way_is_waited_for(patience: Patience) -> None:
    with CompilePool(1, timeout_s=0.5) as pool:
        with patience.endless():
            pool.prefetch(workload(bad=True), "cpu", HANG)
            (early,) = ahead_of(pool)
            begun(early)
            assert pool.submit(workload(bad=True), "cpu", HANG) is early
        assert "no answer" in early.result().reason


def test_a_fault_of_the_machine_is_no_answer() -> None:
    broken = replace(workload(), kind="broken")
    task.DOMAINS["broken"] = "no_such_module"
    try:
        with CompilePool(1) as pool:
            pool.prefetch(broken, "cpu", rows(4))
            (early,) = ahead_of(pool)
            assert early.result().fault
            task.DOMAINS["broken"] = task.DOMAINS["toy"]
            assert pool.submit(broken, "cpu", rows(4)).result().artifact
    finally:
        del task.DOMAINS["broken"]


def test_forgotten_candidates_are_not_built_and_not_kept(patience: Patience) -> None:
    bad, other = workload(bad=True), workload(rows=32)
    with CompilePool(1, timeout_s=3.0) as pool:
        pool.prefetch(other, "cpu", rows(2))
        (built,) = ahead_of(pool)
        assert built.result().artifact
        with patience.endless():
            hanging = pool.submit(bad, "cpu", HANG)
            for work in (workload(), other):
                pool.prefetch(work, "cpu", rows(4))
            _, kept, dropped = ahead_of(pool)
            pool.forget({other.fingerprint})
        assert ahead_of(pool) == [kept]
        assert dropped.cancelled()
        assert not kept.cancelled()
        assert hanging.result().artifact is None
        assert pool.submit(other, "cpu", rows(2)) is not built


def test_pool_keeps_returned_builds_that_have_begun(patience: Patience) -> None:
    bad = workload(bad=True)
    with patience.endless(), CompilePool(1, timeout_s=3.0) as pool:
        done = pool.submit(bad, "cpu", rows(2))
        assert done.result().artifact
        running = pool.submit(bad, "cpu", HANG)
        pending = pool.submit(bad, "cpu", rows(4))
        begun(running)
        for config, future in ((rows(2), done), (HANG, running), (rows(4), pending)):
            pool.keep(bad, "cpu", config, future)
        assert pending.cancelled()
        assert pool.submit(bad, "cpu", rows(2)) is done
        assert pool.submit(bad, "cpu", HANG) is running
        assert pool.submit(bad, "cpu", rows(4)) is not pending
        pool.keep(bad, "cpu", rows(2), done)
        pool.forget({bad.fingerprint})
        assert ahead_of(pool) == []


def test_awaited_candidates_are_not_built_ahead_as_well(patience: Patience) -> None:
    with CompilePool(1, timeout_s=3.0) as pool:
        with patience.endless():
            hanging = pool.submit(workload(bad=True), "cpu", HANG)
            waiting = pool.submit(workload(), "cpu", rows(4))
            pool.prefetch(workload(), "cpu", rows(4))
            assert ahead_of(pool) == []
        assert hanging.result().artifact is None
        assert waiting.result().artifact


def test_nothing_is_built_ahead_once_it_is_closed(patience: Patience) -> None:
    with patience.endless(), CompilePool(1, timeout_s=60) as pool:
        pool.submit(workload(bad=True), "cpu", HANG)
        pool.prefetch(workload(), "cpu", rows(4))
        (early,) = ahead_of(pool)
    assert early.cancelled()
    pool.prefetch(workload(), "cpu", rows(8))
    assert ahead_of(pool) == [early]


@pytest.mark.parametrize(
    ("kind", "device", "config", "nicer"),
    [
        (CompilePool, "cuda:0", rows(4), 5),
        (CompilePool, "cpu", rows(4), 0),  # it measures nothing meanwhile
        (BaselinePool, "cpu", {}, 5),  # the program compiles meanwhile
    ],
)
def test_compile_processes_have_a_lower_priority(
    kind: type[CompilePool], device: str, config: Config, nicer: int
) -> None:
    with kind(1, timeout_s=60) as pool:
        assert pool.submit(workload(), device, config).result().artifact
        (child,) = pool._children.values()
        assert psutil.Process(child.pid).nice() == min(19, psutil.Process().nice() + nicer)


def test_a_pool_uses_the_folder_of_its_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "given").mkdir()
    monkeypatch.setenv(task.SHARED_BUILDS, str(tmp_path / "given"))
    with CompilePool(1), BaselinePool(1):
        assert [folder.name for folder in tmp_path.iterdir()] == ["given"]
    assert (tmp_path / "given").exists()
    monkeypatch.delenv(task.SHARED_BUILDS)
    with CompilePool(1):
        assert len(list(tmp_path.iterdir())) == 2
    assert len(list(tmp_path.iterdir())) == 1
