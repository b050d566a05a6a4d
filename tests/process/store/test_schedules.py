"""Schedules, artifacts and misses: deployment's reads, and its reaction to damage."""

from __future__ import annotations

import dataclasses
import logging
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from autotune.store import Key, Run, Schedule, Store, Verdict
from autotune.store.codec import Damaged, artifact_blobs, artifact_from, artifact_id, artifact_json
from autotune.store.models import ArtifactRow, BlobRow, ConfigRow, ScheduleRow
from autotune.store.reading import Scope
from autotune.store.tables import schedules as store_schedules
from autotune.task import Artifact, Kernel
from tests.support.rows import ENVIRONMENT, FAR, GPU, NEAR, OTHER_GPU, put_key, workload

CODE = bytes(range(256)) * 8
ARTIFACT = Artifact(
    target="sm_90",
    kernels=(
        Kernel("first", CODE, {"grid": ["rows", 4], "block": [128, 1, 1]}, {"registers": 40}),
        Kernel("second", CODE, {"grid": [1]}),
        Kernel("third", CODE[::-1]),
    ),
    scratch=(("float32", 4096),),
    generator="autotune 0.1",
)
GRAPH = "a" * 64
CPU_ARTIFACT = Artifact("cpu", (Kernel("rows", b"", {"threads": 2}),))


def schedule(key: Key, us: float = 10.0, **changes: object) -> Schedule:
    base = Schedule(
        key, {"threads": 32}, us, {"eager": 40.0, "inductor": 15.0}, ARTIFACT, family="f" * 64, extent=64, when=100.0
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def test_every_change_of_a_deployment_changes_the_state(store: Store, key: Key) -> None:
    states = [store.state()]
    store.put_schedule(schedule(put_key(store, workload(128)), extent=128, when=1000.0))
    states.append(store.state())
    store.put_schedule(schedule(key))
    states.append(store.state())
    assert store.state() == states[-1]
    assert store.put_schedule(schedule(key, 5.0, config={"threads": 64}, when=50.0)), "an older one, of a snapshot"
    states.append(store.state())
    with store.writing() as c:
        c.execute(sa.delete(ScheduleRow).where(ScheduleRow.workload == key.workload))
    states.append(store.state())
    assert states[4] == states[1]
    assert len({*states}) == 4


@pytest.mark.parametrize("by_family", [True, False])
def test_the_state_of_a_part_changes_with_that_part_alone(store: Store, key: Key, by_family: bool) -> None:
    part = Scope(("f" * 64 if by_family else key.workload,), (GRAPH,))
    states = [store.state(part)]
    others = {"family": "e" * 64, "extent": 128}
    store.put_schedule(schedule(put_key(store, workload(128)), **others))
    store.put_verdicts([Verdict("b" * 64, key.device, key.environment, "default")])
    assert store.state(part) == states[-1]
    store.put_schedule(schedule(key))
    states.append(store.state(part))
    store.put_verdicts([Verdict(GRAPH, key.device, key.environment, "default")])
    states.append(store.state(part))
    assert len({*states}) == 3


def test_a_touch_changes_the_state_at_any_time(store: Store, key: Key) -> None:
    """In whole milliseconds, of which a touch is a little less than one, it passed unseen once in forty times."""
    store.put_schedule(schedule(put_key(store, workload(128)), extent=128, when=1.8e9))
    touched = sa.update(ScheduleRow).where(ScheduleRow.workload == key.workload)
    store.put_schedule(schedule(key, when=1.7e9))
    states = [store.state()]
    for _ in range(128):
        with store.writing() as c:
            c.execute(touched.values(created=ScheduleRow.created + store_schedules.TOUCH))
        states.append(store.state())
    assert len({*states}) == len(states)


@pytest.mark.parametrize("artifact", [ARTIFACT, CPU_ARTIFACT, None], ids=["cubin", "cpu", "none"])
def test_a_schedule_comes_back_as_it_was(store: Store, key: Key, artifact: Artifact | None) -> None:
    s = schedule(key, artifact=artifact)
    assert store.put_schedule(s)
    assert store.get_schedule(key.workload, key.device) == s
    assert store.schedules(artifacts=True) == [s]
    assert store.schedules() == [dataclasses.replace(s, artifact=None)]
    assert store.get_schedule(key.workload, "0" * 64) is store.get_schedule("0" * 64, key.device) is None


def test_a_busy_machine_is_known_with_the_schedule(store: Store, key: Key) -> None:
    s = schedule(key, others=0.26)
    store.put_schedule(s)
    assert store.get_schedule(key.workload, key.device) == s
    assert s.busy
    assert not schedule(key, others=0.25).busy
    assert not schedule(key, others=None).busy
    store.put_schedule(schedule(put_key(store, workload(128)), 20.0, others=0.1, extent=128))
    stats = store.stats()
    assert (stats["schedules"], stats["busy"]) == (2, 1)
    assert stats["speedup_geomean"] == stats["speedup_best"] == pytest.approx(15 / 20)  # without the busy one's 1.5


def test_the_schedule_of_a_key_is_that_of_no_other(store: Store, key: Key) -> None:
    """One row is read for it, however many are stored."""
    keys = [
        key,
        put_key(store, workload(128)),
        put_key(store, device=OTHER_GPU),
        put_key(store, env=NEAR),
        dataclasses.replace(key, policy="q" * 64),
    ]
    assert store.schedule_of(key) is None
    for n, one in enumerate(keys):
        store.put_schedule(schedule(one, 10.0 - n))
    rows: list[int] = []
    decode = store_schedules.schedule_from
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_schedules, "schedule_from", lambda *args: (rows.append(1), decode(*args))[1])
        found = [store.schedule_of(one) for one in keys]
    assert found == [schedule(one, 10.0 - n, artifact=None) for n, one in enumerate(keys)]
    assert len(rows) == len(keys)


def test_a_baseline_may_win(store: Store, key: Key) -> None:
    s = schedule(key, 15.0, config=None, artifact=None, winner="inductor")
    store.put_schedule(s)
    assert store.get_schedule(key.workload, key.device, ENVIRONMENT) == s


def test_equal_code_is_kept_once(store: Store, key: Key) -> None:
    every = [
        schedule(key),
        schedule(put_key(store, workload(2))),
        schedule(put_key(store, workload(3)), artifact=dataclasses.replace(ARTIFACT, target="sm_90a")),
    ]
    for s in every:
        store.put_schedule(s)
    rows = store.stats()["rows"]
    assert (rows["autotune_artifacts"], rows["autotune_blobs"]) == (2, 2)
    assert [store.get_schedule(s.key.workload, s.key.device) for s in every] == every


def test_a_schedule_gives_way_to_a_faster_one_only(store: Store, key: Key) -> None:
    assert store.put_schedule(schedule(key, 10.0, config={"a": 1}))
    assert not store.put_schedule(schedule(key, 11.0, config={"a": 2}, when=200.0))
    assert not store.put_schedule(schedule(key, 10.5, config=None, artifact=None, winner="inductor", when=200.0))
    assert not store.put_schedule(schedule(key, 10.0, config={"a": 2}, when=200.0))
    stored = store.get_schedule(key.workload, key.device)
    assert stored is not None
    assert (stored.config, stored.latency_us) == ({"a": 1}, 10.0)
    assert store.put_schedule(schedule(key, 9.0, config={"a": 3}))
    assert store.put_schedule(schedule(key, 20.0, config={"a": 4}), replace=True)
    stored = store.get_schedule(key.workload, key.device)
    assert stored is not None
    assert (stored.config, stored.latency_us) == ({"a": 4}, 20.0)


def test_the_policy_that_decided_last_decides(store: Store, key: Key) -> None:
    newer = dataclasses.replace(key, policy="q" * 64)
    store.put_schedule(schedule(key, 10.0, when=100.0))
    assert store.get_schedule(key.workload, key.device, ENVIRONMENT) == schedule(key, 10.0, when=100.0)
    decided = schedule(newer, 12.0, config=None, artifact=None, winner="eager", when=200.0)
    store.put_schedule(decided)
    near = dataclasses.replace(decided, key=dataclasses.replace(put_key(store, env=NEAR), policy="q" * 64), when=150.0)
    store.put_schedule(dataclasses.replace(near, latency_us=11.0))
    for match in ("strict", "loose"):
        assert store.get_schedule(key.workload, key.device, ENVIRONMENT, match=match) == decided
    found = store.get_schedule(key.workload, key.device)
    assert found is not None
    assert found.latency_us == 11.0  # the fastest of the newer policy's
    assert store.family_schedules("f" * 64, key.device, ENVIRONMENT) == [decided]
    store.put_schedule(schedule(key, 10.5, when=300.0), replace=True)
    found = store.get_schedule(key.workload, key.device, ENVIRONMENT)
    assert found is not None
    assert found.latency_us == 10.5


def test_a_new_measurement_of_the_same_winner_replaces_its_number(store: Store, key: Key) -> None:
    assert store.put_schedule(schedule(key, 10.0))
    assert store.put_schedule(schedule(key, 11.0, when=200.0))
    assert not store.put_schedule(schedule(key, 12.0, when=150.0))  # an older one, from a snapshot
    stored = store.get_schedule(key.workload, key.device)
    assert stored is not None
    assert stored.latency_us == 11.0


def test_environments_match_strictly_or_loosely(store: Store) -> None:
    key = put_key(store, env=ENVIRONMENT)
    near = put_key(store, env=NEAR)
    store.put_schedule(schedule(key, 10.0))
    w, d = key.workload, key.device

    def latency(env: object, match: str = "strict") -> float | None:
        found = store.get_schedule(w, d, env, match=match)  # type: ignore[arg-type]
        return found.latency_us if found else None

    assert latency(ENVIRONMENT) == latency(ENVIRONMENT.strict) == latency(None) == 10.0
    assert latency(NEAR) is None
    assert latency(NEAR, "loose") == latency(NEAR.strict, "loose") == 10.0
    assert latency(FAR, "loose") is None
    assert latency("0" * 64, "loose") is None
    store.put_schedule(schedule(near, 12.0))
    assert latency(NEAR, "loose") == 12.0  # equal software before faster
    assert latency(None) == 10.0


def test_family_schedules(store: Store) -> None:
    for rows, us in ((128, 9.0), (64, 5.0)):
        store.put_schedule(schedule(put_key(store, workload(rows)), us, extent=rows))
    store.put_schedule(schedule(put_key(store, workload(64), env=FAR), 4.0, extent=64))
    store.put_schedule(schedule(put_key(store, workload(32), OTHER_GPU), 1.0, extent=32))
    store.put_schedule(schedule(put_key(store, workload(7, family="g" * 64)), 1.0, family="g" * 64, extent=7))
    found = store.family_schedules("f" * 64, GPU.fingerprint, ENVIRONMENT)
    assert [(s.extent, s.latency_us, s.artifact) for s in found] == [(64, 5.0, ARTIFACT), (128, 9.0, ARTIFACT)]
    found = store.family_schedules("f" * 64, GPU.fingerprint, artifacts=False)
    assert [(s.extent, s.latency_us, s.artifact) for s in found] == [(64, 4.0, None), (128, 9.0, None)]
    assert store.family_schedules("", GPU.fingerprint) == []


def test_a_schedule_needs_the_rows_of_its_key(store: Store, key: Key) -> None:
    with pytest.raises(ValueError, match="put the workload"):
        store.put_schedule(schedule(dataclasses.replace(key, device="0" * 64)))
    assert store.schedules() == []


DAMAGE = {
    "code flipped": (sa.update(BlobRow).values(code=b"\x7fELF something else"), "fails its SHA-256"),
    "code gone": (sa.delete(BlobRow), "is missing"),
    "launch data": (sa.update(ArtifactRow).values(scratch=[["float32", 1, False]]), "does not match its SHA-256"),
    "launch data of another type": (sa.update(ArtifactRow).values(kernels={"a": 1}), "does not match its SHA-256"),
    "configuration": (sa.update(ConfigRow).values(params={"threads": [1]}), "not a flat JSON object"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_schedule_is_passed_over_with_a_reason(
    store: Store, key: Key, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage, reason = DAMAGE[name]
    store.put_schedule(schedule(key))
    with store.writing() as c:
        c.execute(damage)
    with caplog.at_level(logging.WARNING, "autotune.store"):
        assert store.get_schedule(key.workload, key.device) is None
    assert reason in store.problems[-1]
    assert key.workload[:12] in store.problems[-1]
    assert reason in caplog.text
    assert store.family_schedules("f" * 64, key.device) == []


def test_an_artifact_of_another_form_is_distinguished_from_damage() -> None:
    data = artifact_json(ARTIFACT) | {"scratch": [["float32", 4096], ["int32", 32, True]]}
    with pytest.raises(Damaged, match="another version"):
        artifact_from(artifact_id(data), data, artifact_blobs(ARTIFACT))


def test_scratch_of_an_earlier_version_is_read() -> None:
    """Each piece had a field for the count of arrivals at a grid barrier."""
    data = artifact_json(ARTIFACT) | {"scratch": [["float32", 4096, False]]}
    assert artifact_from(artifact_id(data), data, artifact_blobs(ARTIFACT)) == ARTIFACT


def test_an_undamaged_schedule_stands_in_for_a_damaged_one(store: Store) -> None:
    key, near = put_key(store), put_key(store, env=NEAR)
    store.put_schedule(schedule(key, 10.0, artifact=Artifact("sm_90", (Kernel("k", b"abc"),))))
    store.put_schedule(schedule(near, 12.0))
    with store.writing() as c:
        c.execute(sa.update(BlobRow).where(BlobRow.code == b"abc").values(code=b"abd"))
    found = store.get_schedule(key.workload, key.device, ENVIRONMENT, match="loose")
    assert found is not None
    assert found.latency_us == 12.0


def test_storing_again_mends_damaged_code(store: Store, key: Key) -> None:
    store.put_schedule(schedule(key))
    with store.writing() as c:
        c.execute(sa.update(BlobRow).values(code=b""))
    assert store.get_schedule(key.workload, key.device) is None
    store.put_schedule(schedule(put_key(store, workload(2))))
    assert store.get_schedule(key.workload, key.device) == schedule(key)


def test_misses_count_and_go_when_tuned(store: Store) -> None:
    a, b = workload(1), workload(2)
    assert store.add_miss(a, GPU.fingerprint, "no schedule")
    for _ in range(2):
        assert store.add_miss(b, GPU.fingerprint, "row length")
    assert store.add_miss(b, OTHER_GPU.fingerprint, "x")
    found = store.misses(GPU.fingerprint)
    expected = [(b.fingerprint, 2, "row length"), (a.fingerprint, 1, "no schedule")]
    assert [(m.workload, m.count, m.reason) for m in found] == expected
    assert store.get_workload(a.fingerprint) == a
    assert store.clear_miss(a.fingerprint, GPU.fingerprint)
    assert not store.clear_miss(a.fingerprint, GPU.fingerprint)
    store.put_schedule(schedule(put_key(store, b)))
    assert [m.device for m in store.misses()] == [OTHER_GPU.fingerprint]


def test_runs(store: Store, dead_owner: str) -> None:
    killed = store.start_run("search a", owner=dead_owner)
    run = store.start_run("search b")
    store.finish_run(run.id, "done", {"best": 1.5, "worst": float("inf"), "nested": {"x": (float("nan"), 2)}})
    newest, oldest = store.runs()
    assert (newest.id, newest.state, newest.command) == (run.id, "done", "search b")
    assert newest.summary == {"best": 1.5, "worst": None, "nested": {"x": [None, 2]}}
    assert newest.finished is not None
    assert newest.finished >= newest.started > 1.7e9
    assert (oldest.id, oldest.state) == (killed.id, "interrupted")
    running = store.start_run("search c")
    store.start_run("search d")
    assert {r.id: r for r in store.runs()}[running.id].state == "running"
    assert isinstance(running, Run)


@pytest.fixture
def dead_owner(spawn) -> str:  # type: ignore[no-untyped-def]
    from autotune.store import owner_name

    process = spawn("pass")
    process.wait(550)
    host, _, rest = owner_name().partition(":")
    return f"{host}:{process.pid}:{rest.rpartition(':')[2]}"


def test_a_look_up_is_two_statements_by_index(sqlite_file: Path) -> None:
    """It takes half a millisecond at any size of the database; a limit in time would test the machine."""
    asked: list[tuple[str, Any]] = []
    with Store.open(sqlite_file) as store:
        for rows in range(1, 4):
            store.put_schedule(schedule(put_key(store, workload(rows)), extent=rows))
        wanted = workload(2).fingerprint
        engine = next(v for v in vars(store).values() if isinstance(v, sa.Engine))
        sa.event.listen(engine, "before_cursor_execute", lambda c, cursor, text, given, *_: asked.append((text, given)))
        found = store.get_schedule(wanted, GPU.fingerprint, ENVIRONMENT)
        assert found is not None
        assert found.artifact == ARTIFACT
    asked = [(text, given) for text, given in asked if text.startswith("SELECT")]
    assert len(asked) == 2  # the schedule with its artifact, and the artifact's code
    with sqlite3.connect(sqlite_file) as raw:
        steps = [row[3] for text, given in asked for row in raw.execute(f"EXPLAIN QUERY PLAN {text}", given)]
    assert sum(step.startswith("SEARCH autotune_") for step in steps) >= 4
    assert not [step for step in steps if step.startswith("SCAN autotune_")]
