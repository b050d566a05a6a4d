"""Code in torch's caches: its file has the kernels of a GPU and their prepared launches, without a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.runtime import cache_dir_utils

from autotune.runtime.deployment import Deployment, deployment, use
from autotune.runtime.inductor import code
from autotune.runtime.inductor.code import Code, stored_code
from autotune.runtime.inductor.verdict import Surveyed
from autotune.runtime.ladder import Level, Match
from autotune.runtime.launch.prepared import RegionTensors, TensorSpec, prepare
from autotune.store import Store
from autotune.store.records import Schedule
from tests.support.cuda_schedules import cut
from tests.support.rows import put_key

X = TensorSpec((64, 256), (256, 1), torch.float32)


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Code:
    """The code of a graph with one region, whose schedule is stored."""
    monkeypatch.setenv("AUTOTUNE_DB", str(tmp_path / "tuned.db"))
    monkeypatch.setattr(cache_dir_utils, "cache_dir", lambda: str(tmp_path))
    use(Deployment())
    task, config, artifact = cut()
    with Store.open(tmp_path / "tuned.db") as store:
        schedule = Schedule(put_key(store, task.workload), config, 10.0, {"inductor": 15.0}, artifact)
        store.put_schedule(schedule)
    deployment().keep_match("cuda:0", Match(Level.EXACT, schedule, task.workload))
    made = prepare(task.graph, schedule, RegionTensors((0,), (0,), [X], [X]), "cuda")
    key: Any = task.workload.fingerprint, "region"
    deployment().prepared[key] = made
    graph = Surveyed("a" * 64, "default", (("cuda:0", task.workload),) * 2, frozenset())
    found = Code.of("name", [graph], code.scope_of([graph]), compile_s=1.0, budget_s=60.0)
    found.write("graph", "default")
    return found


def test_the_next_process_has_the_launches_without_a_database(written: Code) -> None:
    use(Deployment())
    found = stored_code("graph", "default")
    assert found == written
    found.load()
    ((_, device), match), *_ = deployment().kept_matches().items()
    assert (device, match) == ("cuda:0", written.matches[0][1])
    (made,) = deployment().prepared.values()
    assert made.plan is None
    assert len(made.launches) > 1
    assert made.scratch
    assert not deployment()._databases


def test_another_schedule_of_the_region_ends_it(written: Code, tmp_path: Path) -> None:
    assert written.scope is not None
    with Store.open(tmp_path / "tuned.db") as store, store.writing() as c:
        c.exec_driver_sql("UPDATE autotune_schedules SET created = created + 1")
    use(Deployment())
    assert stored_code("graph", "default") is None


def test_a_damaged_file_is_no_code(written: Code, tmp_path: Path) -> None:
    (file,) = (tmp_path / "autotune").iterdir()
    file.write_bytes(file.read_bytes()[:-50])
    assert stored_code("graph", "default") is None
