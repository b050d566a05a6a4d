"""Variations of a group's configuration in a stored plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autotune.domains.fusion.task import FusionTask
from autotune.errors import UserError
from autotune.store import Store
from benchmarks.group_variations import main, start, variations
from tests.support.zoo import Case, T, workloads_of

CASE = Case("", lambda x, w: ((x * w).sum(0), torch.softmax(x * w, -1)), (T(512, 256), T(256)))


def test_each_candidate_differs_and_is_legal() -> None:
    (work,) = workloads_of(CASE)
    task = FusionTask(work, "cuda:0", target="sm_90", sms=132)
    found = list(variations(task, task.default()))
    assert found[0] == ("start", task.default())
    configs = [config for _, config in found]
    assert all(config not in configs[:n] for n, config in enumerate(configs))
    assert not any(task.reject(config) for config in configs)
    said = {name.partition(": ")[2] for name, _ in found}
    assert "seed 0" in said
    assert any(name.startswith("blocks_per_sm=") for name in said)


def test_it_starts_with_one_named_region(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (work,) = workloads_of(CASE)
    db = f"{tmp_path}/some.db"
    with Store.open(db) as store:
        store.put_workload(work)
        assert start(store, work.fingerprint[:9], "cpu") == (work, FusionTask(work, "cpu").default())
        with pytest.raises(UserError, match="not the beginning of one region's fingerprint"):
            start(store, "no", "cpu")
    assert main(["--db", db, "--workloads", "no", "--device", "cpu"]) == 2
    assert main(["--db", f"{tmp_path}/none.db", "--workloads", "no", "--device", "cpu"]) == 2
    assert "nothing is stored there" in capsys.readouterr().err
