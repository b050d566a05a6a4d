"""A stored artifact is launched as its workload and configuration require, or not at all. The tests need no GPU."""

from __future__ import annotations

import copy
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.compiler.assemble import BOUND, bind, foreign
from autotune.compiler.schedules.cuda.columns import reorders_columns
from autotune.compiler.targets.cuda import GENERATOR
from autotune.device import DeviceIdentity, Environment
from autotune.domains.fusion.task import FusionTask
from autotune.errors import Unsupported
from autotune.runtime.fitting import foreign_kernels
from autotune.runtime.ladder import Level, Match
from autotune.runtime.launch.cuda import LaunchError, check_rule
from autotune.runtime.launch.executor import load_executor
from autotune.runtime.launch.prepared import RegionTensors, TensorSpec
from autotune.runtime.match import deployed, match
from autotune.store import Key, Schedule, Store
from autotune.store.codec import artifact_id, artifact_json
from autotune.task import Artifact, Config
from autotune.workload import Workload
from tests.support.cuda_schedules import built, cut
from tests.support.hostile import execute
from tests.support.zoo import F16, Case, T, workloads_of

GPU = DeviceIdentity("cuda", "NVIDIA Test", 132, 143360, "9.0")
ENV = Environment("cuda", torch="2.11.0", numba="0.68.1", numba_cuda="0.30.4", cuda="13.0", driver="580.1")


def stored(db: Path, workload: Workload, config: Config, artifact: Artifact) -> None:
    with Store.open(db) as store:
        key = Key(store.put_workload(workload), store.put_device(GPU), store.put_environment(ENV), "by hand")
        schedule = Schedule(key, config, 10.0, {"eager": 20.0}, artifact, "autotune", workload.family, workload.extent)
        store.put_schedule(schedule)


def rewritten(db: Path, change: Any) -> None:
    """Change an artifact as an informed attacker would: under a new and right SHA-256."""
    with Store.open(db) as store:
        (schedule,) = store.schedules(artifacts=True)
        assert schedule.artifact is not None
        data = copy.deepcopy(artifact_json(schedule.artifact))
    change(data)
    name = artifact_id(data)
    values = (name, data["target"], data["generator"], json.dumps(data["kernels"]), json.dumps(data["scratch"]), 0.0)
    columns = "fingerprint, target, generator, kernels, scratch, created"
    execute(db, f"INSERT INTO autotune_artifacts ({columns}) VALUES (?, ?, ?, ?, ?, ?)", values)
    execute(db, "UPDATE autotune_schedules SET artifact = ?", (name,))


def look_up(db: Path, workload: Workload) -> Match:
    with Store.open(db) as store:
        return match(workload, store, GPU, ENV)


CHANGES: dict[str, Any] = {
    "block": 1024,
    "shared": 1,
    "inner": 1 << 40,
    "per_block": 7,
    "cap": 100_000,
    "dynamic": None,
    "group": 3,
    "args": [["input", 0], ["input", 0]],
    "align": [1, 1],
    "grid": 1,
    "cluster": 8,
    "wide": True,
    "blocks_per_sm": 31,
}


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_changed_launch_data_are_no_hit(name: str, db: Path) -> None:
    task, config, artifact = built()
    stored(db, task.workload, config, artifact)
    assert look_up(db, task.workload).level is Level.EXACT
    rewritten(db, lambda data: data["kernels"][0]["launch"].update({name: CHANGES[name]}))
    found = look_up(db, task.workload)
    assert found.level is Level.NONE
    assert "damaged" in found.reason


@pytest.mark.parametrize("change", ["more", "size", "fewer kernels", "resources", "entry", "no code"])
def test_changed_scratch_kernels_and_resources_are_no_hit(change: str, db: Path) -> None:
    def apply(data: dict[str, Any]) -> None:
        if change == "more":
            data["scratch"].append(["float32", 1 << 50])
        elif change == "size":
            data["scratch"] = [[s, 1] for s, _ in data["scratch"]]
        elif change == "fewer kernels":
            data["kernels"].pop()
        elif change == "resources":
            data["kernels"][0]["resources"]["shared"] += 1 << 16
        elif change == "entry":
            data["kernels"][0]["entry"] = "another"
        else:
            data["kernels"][0]["sha256"] = None

    task, config, artifact = cut()
    assert artifact.scratch
    stored(db, task.workload, config, artifact)
    assert look_up(db, task.workload).level is Level.EXACT
    rewritten(db, apply)
    assert look_up(db, task.workload).level is Level.NONE


def test_another_plan_with_an_intact_artifact_is_no_hit(db: Path) -> None:
    task, config, made = cut()
    assert foreign(made, task.graph, config, 132) == ""
    artifact = built("both")[2]
    stored(db, task.workload, config, artifact)
    assert "compiled for another configuration" in look_up(db, task.workload).reason
    rewritten(db, lambda data: [k["launch"].pop(BOUND) for k in data["kernels"]])
    found = look_up(db, task.workload)
    assert found.level is Level.NONE
    assert "damaged" in found.reason


@pytest.fixture
def audits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Artifact]:
    """The artifacts that are audited, under a cache of this test's own."""
    from autotune.compiler import assemble

    seen: list[Artifact] = []

    def spied(artifact: Artifact, *args: Any) -> str:
        seen.append(artifact)
        return foreign(artifact, *args)

    monkeypatch.setenv("AUTOTUNE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(assemble, "foreign", spied)
    return seen


def test_an_audit_that_passed_is_remembered_for_the_very_same_only(db: Path, audits: list[Artifact]) -> None:
    task, config, artifact = cut()
    stored(db, task.workload, config, artifact)
    for _ in range(3):
        assert look_up(db, task.workload).level is Level.EXACT
    assert len(audits) == 1
    code = artifact.kernels[0].code
    kernels = (replace(artifact.kernels[0], code=code + b"\0"), *artifact.kernels[1:])
    first = artifact.kernels[0]
    other = (replace(first, resources={**first.resources, "registers": 1}), *artifact.kernels[1:])
    asked = foreign_kernels(replace(artifact, kernels=kernels), task.workload, config, 132)
    assert (asked, len(audits)) == ("", 2), "other code is another artifact"
    foreign_kernels(replace(artifact, kernels=other), task.workload, config, 132)
    foreign_kernels(artifact, task.workload, {**config, "plan": ""}, 132)
    foreign_kernels(artifact, built()[0].workload, config, 132)
    foreign_kernels(artifact, task.workload, config, 80)
    foreign_kernels(replace(artifact, scratch=(("float32", 1),)), task.workload, config, 132)
    assert len(audits) == 7
    rewritten(db, lambda data: data["kernels"][0]["launch"].update(per_block=7))
    for _ in range(2):
        assert look_up(db, task.workload).level is Level.NONE
    assert len(audits) == 9, "a failure is not remembered"


def test_audits_are_cached_where_no_other_user_writes(
    db: Path, audits: list[Artifact], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, config, artifact = built()
    folder = tmp_path / "cache" / "audits"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert foreign_kernels(artifact, task.workload, config, 132) == ""
    assert folder.stat().st_mode & 0o022 == 0
    assert foreign_kernels(artifact, task.workload, config, 132) == ""
    assert len(audits) == 1
    real = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: real + 1)
    monkeypatch.setenv("AUTOTUNE_CACHE_DIR", str(tmp_path / "theirs"))
    for _ in range(2):
        assert foreign_kernels(artifact, task.workload, config, 132) == ""
    assert len(audits) == 3, "another user's folder is neither read nor written"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AUTOTUNE_CACHE_DIR", str(tmp_path / "file"))
    for _ in range(2):
        assert foreign_kernels(artifact, task.workload, config, 132) == ""
    assert len(audits) == 5


def test_another_workload_s_artifact_is_no_hit(db: Path) -> None:
    task, config, _ = built()
    stored(db, task.workload, config, built("normalised")[2])
    assert look_up(db, task.workload).level is Level.NONE


def test_cached_code_refuses_a_changed_schedule(db: Path) -> None:
    """Inductor's caches keep the fingerprint only: what is stored under it may have been changed meanwhile."""
    task, config, artifact = built()
    stored(db, task.workload, config, artifact)
    with Store.open(db) as store:
        found = deployed(task.workload.fingerprint, store, GPU, ENV).schedule
        assert found is not None
        assert found.artifact == artifact
    rewritten(db, lambda data: data["kernels"][0]["launch"].update(per_block=7))
    with Store.open(db) as store, pytest.raises(Unsupported, match="damaged"):
        deployed(task.workload.fingerprint, store, GPU, ENV)
    with Store.open(db) as store, pytest.raises(Unsupported, match="no longer stored"):
        deployed("0" * 64, store, GPU, ENV)


def test_the_parameters_are_bound_too(db: Path) -> None:
    """Another configuration whose launch data are the same: the kernels are not what was measured under it."""
    task, config, artifact = built()
    stored(db, task.workload, {**config, "store_hint": "evict_last"}, artifact)
    assert "compiled for another configuration" in look_up(db, task.workload).reason


def test_schedules_of_earlier_versions_are_found() -> None:
    """It does not say what it was compiled for, and another generator's launch data cannot be printed again."""
    task, config, artifact = built()
    kernels = tuple(replace(k, launch={n: v for n, v in k.launch.items() if n != BOUND}) for k in artifact.kernels)
    assert foreign(replace(artifact, kernels=kernels), task.graph, config, 132) == ""
    assert artifact.generator == GENERATOR
    odd = tuple(replace(k, launch={**k.launch, "inner": 5}) for k in kernels)
    assert foreign(replace(artifact, kernels=odd), task.graph, config, 132)
    assert foreign(replace(artifact, kernels=odd, generator="cuda-3"), task.graph, config, 132) == ""


def strips() -> Any:
    return _built_of(lambda x: torch.softmax(x, 0), T(256, 64))


def tiles() -> Any:
    return _built_of(lambda x: x + x.t(), T(128, 128))


def _built_of(fn: Any, *inputs: Any) -> Any:
    (workload,) = workloads_of(Case("", fn, inputs))
    task = FusionTask(workload, "cuda:0", target="sm_90", sms=132)
    return task, task.default(), task.build(task.default())


@pytest.mark.parametrize(
    ("made", "changes"),
    [
        (strips, {"keep": "shared", "prefetch": True, "blocks_per_sm": 1}),
        (strips, {"keep": "shared"}),
        (tiles, {"tile": 0}),
        (built, {"keep": "shared"}),
    ],
)
def test_removed_kernel_forms_are_deployed_only_with_the_record_of_their_configuration(
    made: Any, changes: dict[str, Any]
) -> None:
    """Strips copied ahead in a persistent grid (decision 016), values kept in shared memory word by word (017), a walk
    across transposed tensors (025)."""
    task, config, artifact = made()
    config = {**config, **changes}
    kernels = tuple(replace(k, launch={n: v for n, v in k.launch.items() if n != BOUND}) for k in artifact.kernels)
    unbound = replace(artifact, kernels=kernels)
    assert foreign(bind(unbound, task.graph, config), task.graph, config, 132) == ""
    assert "does not say what" in foreign(unbound, task.graph, config, 132)
    assert "compiled for another configuration" in foreign(artifact, task.graph, config, 132)


def test_columns_of_kernels_stored_before_0_3_have_another_order() -> None:
    task, config, artifact = _built_of(lambda x: x.float().sum(1).t().contiguous(), T(2, 2048, 32, d=F16))
    assert any(reorders_columns(group.graph) for group in task.plan.groups)
    assert foreign(artifact, task.graph, config, 132) == ""
    kernels = tuple(replace(k, launch={**k.launch, "grid": 7}) for k in artifact.kernels)
    assert foreign(replace(artifact, kernels=kernels), task.graph, config, 132) == ""
    unbound = tuple(replace(k, launch={n: v for n, v in k.launch.items() if n != BOUND}) for k in kernels)
    assert "does not say what" in foreign(replace(artifact, kernels=unbound), task.graph, config, 132)
    assert "compiled for another configuration" in foreign(artifact, task.graph, {**config, "unroll": 4}, 132)


@pytest.mark.parametrize(
    ("name", "value"),
    [("block", 0), ("block", 2048), ("block", 1.5), ("shared", -1), ("shared", 1 << 30), ("grid", 0), ("grid", 1 << 31),
     ("cluster", 64), ("per_block", 0), ("args", 5)],
)  # fmt: skip
def test_damaged_launch_data_is_refused_for_every_generator(name: str, value: Any) -> None:
    task, config, artifact = built()
    kernel = replace(artifact.kernels[0], launch={**artifact.kernels[0].launch, name: value})
    with pytest.raises(LaunchError, match="damaged"):
        check_rule(kernel)
    old = replace(artifact, kernels=(kernel,), generator="cuda-3")
    schedule = Schedule(Key("", "", "", ""), config, 1.0, {}, old)
    spec = TensorSpec((64, 256), (256, 1), torch.float32)
    with pytest.raises((LaunchError, TypeError), match=r"damaged|iterable"):
        load_executor(task.graph, schedule, RegionTensors([0], [0], [spec], [spec]), torch.device("cuda:0"))
