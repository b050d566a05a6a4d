"""``autotune.overlap`` on two ranks: look-ups, results, and faults without hanging."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.device import environment
from autotune.domains.c3.scenario import Gemm, Scenario
from autotune.domains.c3.strategy import HostStrategy
from autotune.domains.c3.task import identity_of
from autotune.store import Store
from autotune.store.records import Key, Schedule
from autotune.task import Artifact, Config
from tests.support import ROOT
from tests.support.runtime.overlap_checks import ROWS
from tests.support.runtime.ranks import Ranks

NBYTES = 2 * ROWS * 5 * 4
MM = Scenario(Gemm(64, 48, 32, "f32"), "all_gather", NBYTES, 2, "f32")
COPY = HostStrategy(order="gemm_first", engine="copy", copies=2).config()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(tmp_path_factory.mktemp("ranks"), first_imports=True) as started:
        yield started


@pytest.fixture
def run(ranks: Ranks, db: str) -> Any:
    """``run(name, *args)``: a function of ``overlap_checks`` on both ranks, with the test's database."""
    return lambda name, *args: ranks.run("tests.support.runtime.overlap_checks", name, db, *args)


def put(db: str, scenario: Scenario, config: Config | None, winner: str = "autotune") -> None:
    workload = scenario.workload()
    with Store.open(db) as store:
        device = store.put_device(identity_of(workload, "cpu"))
        key = Key(store.put_workload(workload), device, store.put_environment(environment("cpu")), "by hand")
        artifact = None if config is None else Artifact("cpu", ())
        schedule = Schedule(key, config, 9.0, {"sequential": 10.0}, artifact, winner, workload.family, workload.extent)
        store.put_schedule(schedule)


def test_exact(run: Any, db: str) -> None:
    put(db, MM, COPY)
    for level, label, reason, scenario, counts in run("levels"):
        assert (level, label, reason) == ("exact", "copy gemm_first copies=2", "")
        assert scenario == MM.to_json()
        assert "overlaps=1, overlap_hits=1" in counts
    with Store.open(db) as store:
        assert not store.misses()


def test_nearest_is_a_miss_too(run: Any, db: str) -> None:
    near = replace(MM, compute=Gemm(96, 40, 32, "f32", "nt"), nbytes=NBYTES // 2)
    put(db, near, COPY)
    for level, label, reason, _, _ in run("levels"):
        assert (level, label) == ("nearest", "copy gemm_first copies=2")
        assert near.label in reason
    with Store.open(db) as store:
        (miss,) = store.misses()
        assert miss.workload == MM.workload().fingerprint
        assert miss.device == identity_of(MM.workload(), "cpu").fingerprint
        assert miss.count == 1, "rank 0 looks up for all"


def test_default_without_a_database(run: Any, db: str) -> None:
    for level, label, reason, _, counts in run("levels"):
        assert (level, label) == ("default", "gloo comm_first")
        assert "not tuned" in reason or "no database" in reason
        assert "overlap_hits" not in counts
    assert Path(db).exists(), "the miss was recorded"


def test_a_broken_database_is_no_obstacle(run: Any, db: str) -> None:
    Path(db).write_bytes(b"no database at all")
    assert {answer[0] for answer in run("levels")} == {"default"}


@pytest.mark.parametrize("collective", ["all_gather", "all_to_all", "reduce_scatter", "all_reduce"])
@pytest.mark.parametrize(
    "config",
    [HostStrategy(order="comm_first").config(), COPY, {**COPY, "threads": 1, "order": "comm_first"}, None],
    ids=["gloo", "copy", "threads", "sequential"],
)
def test_training_loop(run: Any, db: str, collective: str, config: Config | None) -> None:
    nbytes = NBYTES if collective == "all_gather" else NBYTES // 2
    put(
        db,
        replace(MM, compute=Gemm(10, 8, 16, "f32", "nt"), collective=collective, nbytes=nbytes),
        config,
        "sequential",
    )
    kind = HostStrategy.of(config or {}).label
    assert run("steps", collective) == [kind, kind]


def test_products(run: Any, db: str) -> None:
    put(db, replace(MM, compute=Gemm(128, 48, 32, "f32")), {**COPY, "panels": 2})  # as an earlier version stored it
    run("products")


def test_autograd(run: Any) -> None:
    run("autograd")


def test_gradients_through_collectives(run: Any) -> None:
    run("gradients")


def test_two_in_flight(run: Any) -> None:
    run("in_flight")


def test_mistakes(run: Any) -> None:
    run("mistakes")


def test_other_types(run: Any) -> None:
    run("other_types")


def test_a_rank_that_cannot(run: Any, db: str) -> None:
    put(db, replace(MM, compute=Gemm(64, 64, 64, "f32")), COPY)
    for level, engine, reason, faults, told in run("fallback"):
        assert (level, engine, faults) == ("default", "gloo", 2)
        assert "no such memory (rank 1)" in reason
        assert len(told) == 1
        assert "copy gemm_first" in told[0]


def test_captured(run: Any) -> None:
    run("captured")


def test_torch_compile(run: Any) -> None:
    assert run("compiled") == [3, 3], "before the call, within it, and after it"


_EXAMPLE = """
import pickle, runpy, sys, torch.multiprocessing

def spawn(rank_main, args, ranks):
    pickle.dumps((rank_main, args))
    torch.multiprocessing.start_processes(rank_main, args, ranks, start_method="fork")

torch.multiprocessing.spawn = spawn
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_the_example(db: str) -> None:
    """Its ranks are forked here; pickling their arguments shows that they could be spawned."""
    put(db, replace(MM, compute=Gemm(64, 48, 32, "f32", "nt"), nbytes=4096), COPY)
    example = ROOT / "examples" / "overlap.py"
    words = ["--device", "cpu", "--gemm", "64x48x32", "--bytes", "4KiB"]
    done = subprocess.run(
        [sys.executable, "-c", _EXAMPLE, str(example), *words], capture_output=True, text=True, check=False, timeout=550
    )
    assert done.returncode == 0, done.stderr
    assert "exact, copy gemm_first copies=2" in done.stdout
    assert "overlapped: " in done.stdout


def test_without_a_process_group() -> None:
    import torch

    import autotune
    from autotune.errors import UserError

    with pytest.raises(UserError, match="init_process_group"):
        autotune.overlap(torch.mm, "all_gather")((torch.ones(2, 2), torch.ones(2, 2)), torch.ones(4))


_ENDS = """
import atexit, pathlib

@atexit.register
def count():
    names = [(task / "comm").read_text().strip() for task in pathlib.Path("/proc/self/task").iterdir()]
    print(before, sum("gloo_runloop" in name for name in names))

import torch, torch.distributed as dist
from autotune.domains.c3.group import deploy_group
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
deploy_group(None, torch.device("cpu")).barrier()
before = sum("gloo_runloop" in (t / "comm").read_text() for t in pathlib.Path("/proc/self/task").iterdir())
if {destroyed}:
    dist.destroy_process_group()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
@pytest.mark.parametrize("destroyed", [True, False])
def test_the_threads_of_a_destroyed_group_end_before_the_interpreter(destroyed: bool) -> None:
    """Exit functions run in reverse order: one registered first finds none of gloo's threads any more."""
    code = [sys.executable, "-c", _ENDS.format(destroyed=destroyed)]
    done = subprocess.run(code, capture_output=True, text=True, check=True, timeout=550)
    before, left = map(int, done.stdout.split())
    assert before > 0
    assert (left == 0) == destroyed
