"""Calls of a tunable kernel: keys, what they find, and that they are as quick as a look-up in a dictionary."""

from __future__ import annotations

import math
import timeit
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import autotune
from autotune.device import environment, identify
from autotune.domains.kernel.kernel import KeyReader, extent_of, log_distance, words
from autotune.domains.kernel.tunable import Tunable, find
from autotune.errors import UserError
from autotune.runtime.deployment import Deployment, use
from autotune.store import Snapshot, Store
from autotune.store.records import Key, Schedule
from autotune.store.snapshot import packed
from autotune.store.snapshot_writer import export_snapshot
from autotune.task import Config
from tests.support.snapshots import import_file, resealed

SIGNATURE = {"x": None, "y": None, "n": 3}


def both(reader: KeyReader, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
    return reader.raw(args, kwargs), reader.read(args, kwargs)


def test_key_reader_reads_the_named_parameters() -> None:
    x, y = np.zeros((4, 8), np.float32), torch.zeros(3, dtype=torch.bfloat16)
    reader = KeyReader(SIGNATURE, ["x", "n"], "k")
    assert reader.read((x, y), {}) == {"x": [4, 8], "x.dtype": "float32", "y.dtype": "bfloat16", "n": 3}
    assert words(reader.read((x, y), {})) == "x=4x8 n=3 float32 bfloat16"
    assert KeyReader(SIGNATURE, ["n"], "k").read((1.5, "a"), {"n": True}) == {"n": True}
    assert KeyReader(SIGNATURE, None, "k").read((1.5, None), {}) == {"x": 1.5, "y": None, "n": 3}


def test_calls_that_differ_have_keys_that_differ() -> None:
    reader = KeyReader(SIGNATURE, ["x", "n"], "k")
    x = np.zeros((4, 8), np.float32)
    calls: list[Any] = [
        (x, 0),
        (x.T, 0),
        (x.astype(np.float64), 0),
        (x, 0, 4),
        (x, 0, 4.0),
        (x, 0, True),
        (torch.zeros(4, 8), 0),
        (x, x),
        (4, 0),
        ("4", 0),
    ]
    raws = [reader.raw(call, {}) for call in calls]
    assert len(set(raws)) == len(calls)
    assert [reader.raw(call, {}) for call in calls] == raws
    assert reader.raw((x,), {"y": 0, "n": 3}) == raws[0]


def test_a_callable_makes_the_key() -> None:
    reader = KeyReader(SIGNATURE, lambda x, y, n=3: {"rows": len(x), "type": x.dtype, "shape": y.shape}, "k")
    raw, key = both(reader, np.zeros(5, np.int8), torch.zeros(2, 3))
    assert key == {"rows": 5, "type": "int8", "shape": [2, 3]}
    hash(raw)
    assert both(KeyReader(None, lambda n: n, "k"), 4) == ((4,), {"0": 4})
    assert both(KeyReader(None, lambda n: (n, [n]), "k"), 4) == (((4, (4,)),), {"0": 4, "1": [4]})
    with pytest.raises(UserError, match="key= failed: ZeroDivisionError"):
        KeyReader(None, lambda n: 1 / n, "k").read((0,), {})
    with pytest.raises(UserError, match="the key's 0 is a object"):
        KeyReader(None, lambda n: object(), "k").read((0,), {})


def test_distance_is_of_the_largest_ratio() -> None:
    a = {"n": 64, "shape": [8, 16], "type": "float32"}
    assert log_distance(a, {**a, "n": 128, "shape": [32, 16]}) == 2
    assert log_distance(a, a) == 0
    for other in ({"n": 64}, {**a, "type": "int8"}, {**a, "shape": [8]}, {**a, "n": -64}, {**a, "n": True}):
        assert log_distance(a, other) == math.inf


def test_an_extent_is_the_product_of_sizes() -> None:
    assert extent_of({"x": [4, 8], "n": 3, "x.dtype": "float32", "flag": True, "f": 0.5, "zero": 0}) == 96
    assert extent_of({"n": 1 << 60, "m": 8}) == 1 << 62


def kernel(x: Any, n: int = 1, *, block: int = 16) -> Any:
    return block


def declare(db: Path, **how: Any) -> Tunable:
    given = {"space": {"block": [16, 32, 64]}, "key": ["n"], "db": str(db), **how}
    return autotune.tunable(**given)(kernel)


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "k.db"
    with Store.open(path):
        pass
    yield path
    use(Deployment())


def put(tunable: Tunable, key: dict[str, Any], config: Config | None, winner: str = "autotune", **source: Any) -> None:
    """Store what a search would."""
    assert tunable.db is not None
    workload = tunable.kernel.workload(key, **source)
    where, env = identify("cpu"), environment("cpu")
    with Store.open(tunable.db) as store:
        store.put_workload(workload)
        store.put_device(where)
        at = Key(workload.fingerprint, where.fingerprint, store.put_environment(env), "0" * 64)
        store.put_schedule(Schedule(at, config, 5.0, {"default": 6.0}, winner=winner, family=workload.family))


def test_levels(db: Path) -> None:
    tuned = declare(db)
    put(tuned, {"n": 64}, {"block": 64})
    x = [0]
    assert [tuned(x, n) for n in (64, 128, 2)] == [64, 64, 16]
    levels = [tuned.lookup(x, n) for n in (64, 128, 2)]
    assert [str(m.level) for m in levels] == ["exact", "nearest", "default"]
    assert [m.distance for m in levels] == [0, 1, None]
    assert (levels[0].reason, levels[1].tuned) == ("", {"n": 64})
    assert "n=64 is the nearest tuned" in levels[1].reason
    assert "near enough" in levels[2].reason
    assert (tuned(x, 64, block=32), tuned(x, 64, block=16)) == (32, 16)  # the caller's own values
    put(tuned, {"n": 2}, {"block": 32})
    assert tuned(x, 2) == 16
    tuned.refresh()
    assert tuned(x, 2) == 32


def test_the_users_distance_counts(db: Path) -> None:
    far = declare(db, distance=lambda a, b: abs(a["n"] - b["n"]))
    for n, block in ((64, 64), (70, 32)):
        put(far, {"n": n}, {"block": block})
    assert (far([], 2), far([], 69)) == (64, 32)
    assert declare(db, distance=lambda a, b: math.inf)([], 65) == 16
    broken = declare(db, distance=lambda a, b: a["m"])
    assert broken([], 65) == 16  # a call never fails for it
    with Store.open(db) as store, pytest.raises(UserError, match="distance= failed: KeyError"):
        find(broken.kernel, {"n": 65}, store, identify("cpu"), environment("cpu"))


@pytest.mark.parametrize(
    "config", [{"block": 48}, {"block": 64, "more": 1}, {}, {"block": "64"}, {"__class__": "os.system"}]
)
def test_tunable_refuses_a_stored_configuration_outside_its_space(db: Path, config: Config) -> None:
    tuned = declare(db)
    put(tuned, {"n": 64}, config)
    assert tuned([], 64) == 16
    assert "what is stored cannot be used: it is not in the space" in tuned.lookup([], 64).reason


def test_tunable_refuses_a_stored_configuration_against_a_constraint(db: Path) -> None:
    put(declare(db), {"n": 64}, {"block": 64})
    assert declare(db, constraints=["block < n"])([], 64) == 16


def test_winning_default_keeps_its_stored_configuration(db: Path) -> None:
    put(declare(db), {"n": 64}, None, winner="default", default={"block": 16})
    later = declare(db, default={"block": 32})
    assert [later([], 64), later([], 2)] == [16, 32]
    for n, (then, runs) in enumerate((({}, 32), ({"default": [16]}, 32), ({"default": {"block": [16]}}, 32)), 70):
        put(declare(db), {"n": n}, None, winner="default", **then)
        assert declare(db, default={"block": 32}, within=0.0)([], n) == runs
    put(declare(db), {"n": 65}, None, winner="eager")
    assert "winner 'eager' is not known" in declare(db, within=0.0).lookup([], 65).reason


def test_winning_default_keeps_its_configuration_in_a_snapshot(db: Path, tmp_path: Path) -> None:
    put(
        declare(db),
        {"n": 64},
        None,
        winner="default",
        default={"block": 16},
        target="mine:fn",
        file="/home/ada/mine.py",
    )
    frozen, again = tmp_path / "k.atdb", tmp_path / "again.db"
    with Store.open(db) as store:
        export_snapshot(store, frozen)
    with Store.open(again) as store:
        import_file(store, frozen)
    for file in (frozen, again):
        later = declare(file, default={"block": 32})
        assert later([], 64) == 16
        assert str(later.lookup([], 64).level) == "exact"
    (workload,) = Snapshot(frozen).get_workloads(Snapshot(frozen).fingerprints("", 2)).values()
    assert workload.source == {"default": {"block": 16}}, "nothing of where it lay"


def test_a_snapshot_of_before_tells_no_default(db: Path, tmp_path: Path) -> None:
    put(declare(db), {"n": 64}, None, winner="default", default={"block": 16})
    file = tmp_path / "k.atdb"
    with Store.open(db) as store:
        export_snapshot(store, file)
        (workload,) = store.get_workloads(store.fingerprints("", 2)).values()
    data = {name: value for name, value in workload.to_json().items() if name != "source"}
    resealed(file, lambda c: c.execute("UPDATE workloads SET data = ?", (packed(data),)))
    assert declare(file, default={"block": 32})([], 64) == 32
    Snapshot(file).check()


def test_an_edited_kernel_is_not_served_old_answers(
    db: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(declare(db), {"n": 64}, {"block": 64})
    edited = declare(db)
    edited.kernel.__dict__["source"] = "f" * 64
    assert [edited([], 64), edited([], 65)] == [16, 16]
    match = edited.lookup([], 64)
    assert (match.changed, "the kernel changed since it was tuned" in match.reason) == (True, True)
    assert sum("the kernel changed" in r.message for r in caplog.records) == 1


def test_nothing_is_stored_and_calls_work(tmp_path: Path) -> None:
    tuned = declare(tmp_path / "none.db")
    assert tuned([], 64) == 16
    assert tuned.lookup([], 64).reason == "there is no database"
    (tmp_path / "broken.db").write_text("this is no database, and longer than a header of one would be" * 20)
    assert declare(tmp_path / "broken.db")([], 64) == 16


def test_tuned_parameters_may_be_given_by_position(tmp_path: Path) -> None:
    def middle(x: int, block: int = 16, n: int = 1) -> tuple[int, int, int]:
        return x, block, n

    made = autotune.tunable(space={"block": [16, 32]}, key=["n"], db=str(tmp_path / "n.db"))(middle)
    assert (made(1), made(1, 32), made(1, 32, 5), made(1, n=5)) == ((1, 16, 1), (1, 32, 1), (1, 32, 5), (1, 16, 5))


def test_misses_are_recorded_where_there_are_inputs(db: Path) -> None:
    tuned = declare(db, inputs=lambda n: {"x": 0, "n": n})
    for _ in range(3):
        tuned([], 7)
    declare(db)([], 8)
    with Store.open(db) as store:
        (miss,) = store.misses()
        workload = store.get_workload(miss.workload)
    assert workload is not None
    assert workload.spec["key"] == {"n": 7}


def test_a_known_key_costs_microseconds(db: Path) -> None:
    """A call is a few look-ups in dictionaries: within 40 of the emptiest Python calls on any machine."""
    tuned, x = declare(db, key=["x", "n"]), np.zeros(4)
    tuned(x, 4)

    def empty() -> None:
        pass

    ours = min(timeit.repeat(lambda: tuned(x, 4), number=2000, repeat=15))
    least = min(timeit.repeat(empty, number=2000, repeat=15))
    assert ours < 100 * least
