"""The rungs of a look-up: replacements, their settings, and messages."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import autotune
from autotune.cli import app
from autotune.device import environment, identify
from autotune.errors import UserError
from autotune.runtime.deployment import Deployment, use
from autotune.runtime.ladder import Level, Outcome
from autotune.runtime.lookup import lookup_stored
from autotune.runtime.match import match
from autotune.runtime.settings import Settings
from autotune.store import Snapshot, Store
from autotune.store.snapshot_writer import export_snapshot
from tests.endtoend.runtime.test_backend import close, compiled
from tests.support import ROOT
from tests.support.deployment import Tune


def softmax(x: torch.Tensor) -> torch.Tensor:
    return F.softmax(x * 3, -1)


X = torch.randn(32, 48, generator=torch.Generator().manual_seed(1))


def moved(db: str, **changes: Any) -> None:
    """Pretend that what is stored was tuned on another device, or with other software."""
    with Store.open(db) as store:
        device, env = identify("cpu"), environment("cpu")
        names = {f for f in changes if f in Settings.__dataclass_fields__}
        assert not names
        other = replace(device, **{k: v for k, v in changes.items() if hasattr(device, k)})
        soft = replace(env, **{k: v for k, v in changes.items() if hasattr(env, k) and not hasattr(device, k)})
        store.put_device(other)
        store.put_environment(soft)
        for s in store.schedules(artifacts=True):
            key = replace(s.key, device=other.fingerprint, environment=soft.strict)
            with store.writing() as c:
                c.exec_driver_sql("DELETE FROM autotune_schedules WHERE workload = ?", (s.key.workload,))
            store.put_schedule(replace(s, key=key))


def level() -> Level:
    return autotune.lookup(softmax, (X,)).level


def test_other_rows_have_a_limit(tune: Tune) -> None:
    tune(softmax, (X,))
    far = torch.randn(32 * 17, 48)
    found = autotune.lookup(softmax, (far,))
    assert found.level is Level.NONE
    assert "17 times off, beyond 16" in found[0].reason
    autotune.configure(rows=17)
    assert autotune.lookup(softmax, (far,)).level is Level.OTHER_ROWS
    autotune.configure(rows=1.5)
    assert autotune.lookup(softmax, (torch.randn(16, 48),)).level is Level.NONE


def test_symbolic_sizes_have_none(tune: Tune) -> None:
    """The alternative there are operators one by one."""
    tune(softmax, (X,))
    run, near, far = compiled(softmax), torch.randn(32, 48), torch.randn(32 * 100, 48)
    torch._dynamo.mark_dynamic(near, 0)
    close(run(near), softmax(near))
    close(run(far), softmax(far))
    assert autotune.counters().hits_other_rows >= 1
    assert autotune.counters().fallbacks == autotune.counters().misses == 0


def test_another_device_of_the_architecture(tune: Tune, db: str, caplog: pytest.LogCaptureFixture) -> None:
    tune(softmax, (X,))
    moved(db, units=identify("cpu").units + 1, name="another CPU")
    assert level() is Level.NONE, "refused by default"
    close(compiled(softmax)(X), softmax(X))
    assert autotune.counters().hits == 0
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []
    autotune.configure(other_device="warn")
    torch._dynamo.reset()
    assert level() is Level.OTHER_DEVICE
    close(compiled(softmax)(X), softmax(X))
    assert autotune.counters().hits == 1
    (told,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "another device" in told
    assert "name another CPU" in told
    assert "units" in told
    with Store.open(db) as store:
        assert [m.device for m in store.misses()] == [identify("cpu").fingerprint], "a search is to measure it here"


@pytest.mark.parametrize("field", ["capability", "count", "links", "kind"])
def test_never_another_architecture(tune: Tune, db: str, field: str) -> None:
    (stored,) = tune(softmax, (X,))
    device, env = identify("cpu"), environment("cpu")
    other: Any = {"capability": "riscv", "count": 2, "links": "NV18", "kind": "cuda"}
    with Store.open(db) as store:
        found = match(stored, store, replace(device, **{field: other[field]}), env, rules=Settings(other_device="warn"))
    assert found.level is Level.NONE


def test_other_software(tune: Tune, db: str, caplog: pytest.LogCaptureFixture) -> None:
    tune(softmax, (X,))
    moved(db, numba="0.1.2")
    assert level() is Level.EXACT
    for _ in range(2):
        torch._dynamo.reset()
        close(compiled(softmax)(X), softmax(X))
    (told,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "numba 0.1.2" in told
    assert "AUTOTUNE_ENVIRONMENT=strict" in told
    autotune.configure(environment="strict")
    assert level() is Level.NONE


def test_software_of_another_minor_version(tune: Tune, db: str, caplog: pytest.LogCaptureFixture) -> None:
    tune(softmax, (X,))
    moved(db, torch="1.2.3")
    assert level() is Level.NONE
    autotune.configure(environment="ignore")
    assert level() is Level.EXACT
    close(compiled(softmax)(X), softmax(X))
    assert autotune.counters().hits == 1
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_equal_software_is_preferred(tune: Tune, db: str) -> None:
    tune(softmax, (X,))
    with Store.open(db) as store:
        (own,) = store.schedules(artifacts=True)
    moved(db, numba="0.1.2")
    with Store.open(db) as store:
        store.put_schedule(replace(own, latency_us=12.0, when=1.0))
        (workload,) = store.get_workloads([own.key.workload]).values()
        for how in ("strict", "loose", "ignore"):
            rules = Settings(environment=how)
            found = match(workload, store, identify("cpu"), environment("cpu"), rules=rules)
            assert found.schedule is not None
            assert found.schedule.latency_us == 12.0
            assert found.proven


def rungs(region: Any) -> dict[str, Outcome]:
    return {step.rung: step.outcome for step in region.ladder}


def test_the_ladder_is_reported(tune: Tune, db: str, capsys: pytest.CaptureFixture[str]) -> None:
    tune(softmax, (X,))
    (found,) = autotune.lookup(softmax, (X,), explain=True)
    assert list(rungs(found).values()) == [Outcome.TAKEN, *[Outcome.NOT_ASKED] * 5]
    (found,) = autotune.lookup(softmax, (torch.randn(64, 48),), explain=True)
    assert list(rungs(found).values()) == [Outcome.EMPTY, Outcome.EMPTY, Outcome.TAKEN, *[Outcome.NOT_ASKED] * 3]
    (found,) = autotune.lookup(softmax, (torch.randn(32 * 64, 48),), explain=True)
    assert list(rungs(found).items()) == [
        ("exact", Outcome.EMPTY), ("heuristic", Outcome.EMPTY), ("other_rows", Outcome.REFUSED),
        ("other_device", Outcome.EMPTY), ("packaged", Outcome.EMPTY), ("none", Outcome.TAKEN),
    ]  # fmt: skip
    assert "64 times off" in found.ladder[2].why
    moved(db, name="another CPU", torch="1.2.3")
    (found,) = autotune.lookup(softmax, (X,), explain=True)
    assert rungs(found) == {
        "exact": Outcome.EMPTY, "heuristic": Outcome.EMPTY, "other_rows": Outcome.EMPTY,
        "other_device": Outcome.REFUSED, "packaged": Outcome.EMPTY, "none": Outcome.TAKEN,
    }  # fmt: skip
    step = found.ladder[3]
    assert [(d.field, d.tuned) for d in step.differences] == [("name", "another CPU")]
    moved(db, name=identify("cpu").name)
    (found,) = autotune.lookup(softmax, (X,), explain=True)
    assert found.level is Level.EXACT
    moved(db, torch="1.2.3", driver="9")
    (found,) = autotune.lookup(softmax, (X,), explain=True)
    assert found.ladder[0].outcome is Outcome.REFUSED
    assert [(d.field, d.tuned) for d in found.ladder[0].differences] == [("torch", "1.2.3"), ("driver", "9")]
    assert found.to_json()["ladder"][0]["differences"][0]["here"] == version("torch")


def test_without_a_database(db: str) -> None:
    (found,) = autotune.lookup(softmax, (X,), explain=True)
    assert found.ladder[0].why == "there is no database"
    Store.open(db).close()
    (found,) = autotune.lookup(softmax, (X,), explain=True)
    assert [s.outcome for s in found.ladder] == [*[Outcome.EMPTY] * 5, Outcome.TAKEN]


def test_a_snapshot_is_deployed(tune: Tune, db: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune(softmax, (X,))
    file = tmp_path / "frozen.atdb"
    with Store.open(db) as store:
        export_snapshot(store, file)
    Path(db).unlink()
    monkeypatch.delenv("AUTOTUNE_DB")
    assert level() is Level.NONE
    snapshot = autotune.load(file)
    assert isinstance(snapshot, Snapshot)
    assert level() is Level.EXACT
    for x, hits in ((X, 1), (torch.randn(64, 48), 2), (torch.randn(64, 56), 2)):
        torch._dynamo.reset()
        close(compiled(softmax, dynamic=False)(x), softmax(x))
        assert autotune.counters().hits == hits
    assert autotune.counters().misses == 1
    assert list(Path(os.environ["XDG_DATA_HOME"]).rglob("*.db")) == [], "nor is a database made for the miss"
    with pytest.raises(UserError, match="there is no snapshot"):
        autotune.load(tmp_path / "other.atdb")
    assert level() is Level.EXACT, "what was loaded stays"


def test_a_snapshot_by_the_environment(tune: Tune, db: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                       caplog: pytest.LogCaptureFixture) -> None:  # fmt: skip
    tune(softmax, (X,))
    file = tmp_path / "frozen.atdb"
    with Store.open(db) as store:
        export_snapshot(store, file)
    monkeypatch.setenv("AUTOTUNE_DB", str(file))
    close(compiled(softmax)(X), softmax(X))
    assert autotune.counters().hits == 1
    file.write_bytes(file.read_bytes()[:-9])
    use(Deployment())
    torch._dynamo.reset()
    for _ in range(2):
        close(compiled(softmax)(X), softmax(X))
    (told,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "cut short" in told
    assert autotune.counters().hits == 0


def test_the_command_line(tune: Tune, db: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tune(softmax, (X,))
    file = str(tmp_path / "frozen.atdb")
    assert app.main(["export", file, "--device", "cpu", "--domain", "fusion", "--only-best"]) == 0
    assert "1 schedule" in capsys.readouterr().out
    assert app.main(["import", file, "--db", str(tmp_path / "other.db")]) == 0
    assert "1 schedule, 1 stored" in capsys.readouterr().out
    target = ["fusion", "tests.endtoend.runtime.test_ladder:softmax", "--inputs",
              "tests.endtoend.runtime.test_ladder:inputs", "--device", "cpu"]  # fmt: skip
    assert app.main(["lookup", *target, "--db", file, "--explain"]) == 0
    out = capsys.readouterr().out
    assert "exact         taken: tuned for it on this device" in out
    assert "other_rows    not looked up" in out
    assert app.main(["lookup", *target, "--db", file, "--explain", "--json"]) == 0
    assert '"outcome": "taken"' in capsys.readouterr().out
    for more, found in (((), 1), (("--train",), 2)):  # the inputs require no gradient by themselves
        assert app.main(["lookup", *target, "--db", file, "--json", *more]) == 0
        assert len(json.loads(capsys.readouterr().out)["workloads"]) == found
    for wrong, text in (
        (["export", file, "--device", "H200"], "no schedules of such a device, only of"),
        (["export", file, "--domain", "gelu"], "unknown domain 'gelu'"),
        (["export", file, "--sign", "nothing.pem"], "cannot read the key nothing.pem"),
        (["import", str(tmp_path / "nothing.atdb")], "there is no snapshot"),
        (["import", str(tmp_path)], "frozen"),
        (["search", *target, "--db", file], "is a snapshot"),
    ):
        assert app.main(wrong) == 2 if text != "frozen" else True
        err = capsys.readouterr().err
        assert text == "frozen" or (text in err and err.count("\n") == 1), err


def inputs() -> tuple[torch.Tensor]:
    return (X,)


def test_a_stored_workload_is_looked_up_by_its_id_without_torch(tune: Tune, tmp_path: Path) -> None:
    tune(softmax, (X,))
    db = os.environ["AUTOTUNE_DB"]
    frozen = tmp_path / "s.atdb"
    with Store.open(db) as store:
        (workload,) = store.find_workloads()
        export_snapshot(store, frozen)
    name = workload.fingerprint[:12]
    full = autotune.lookup(softmax, (X,), explain=True)
    found = lookup_stored(name, device="cpu", explain=True)
    assert (found[0].schedule, found[0].ladder) == (full[0].schedule, full[0].ladder)
    assert lookup_stored(name, device="cpu", db=str(frozen))[0].level is Level.EXACT
    with pytest.raises(UserError, match="no stored region has this id: `autotune show`"):
        lookup_stored("0" * 12, device="cpu")
    with pytest.raises(UserError, match="no database to look it up in"):
        lookup_stored(name, device="cpu", db=str(tmp_path / "none.db"))
    code = (
        "import sys; from autotune.cli.app import main; code = main(sys.argv[1:]); print('torch' in sys.modules, code)"
    )
    for database in (db, str(frozen)):
        words = ("lookup", "fusion", name, "--device", "cpu", "--db", database, "--json")
        done = subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True, cwd=ROOT
        )
        answer, last = done.stdout.splitlines()
        assert last == "False 0"
        assert json.loads(answer)["workloads"][0]["workload"] == workload.fingerprint
        assert json.loads(answer)["match"] == "exact"


@pytest.mark.slow
def test_rows_that_were_searched_are_the_buckets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the command to the look-up: each size finds the nearest that was measured, by ratio."""
    (tmp_path / "rows_module.py").write_text(
        "import torch\ndef fn(x): return torch.softmax(x * 3, -1)\ndef inputs(): return torch.randn(32, 48)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["search", "fusion", "rows_module:fn", "--inputs", "rows_module:inputs", "--device", "cpu", "--trials", "1"]
    assert app.main([*words, "--rows", "4,512,32", "--no-step"]) == 0
    asked = {4: 4, 32: 32, 512: 512, 9: 4, 13: 32, 100: 32, 200: 512}
    for rows, nearest in asked.items():
        (found,) = autotune.lookup(softmax, (torch.randn(rows, 48),))
        assert found.tuned is not None
        assert found.tuned.extent == nearest, rows
        assert found.level == ("exact" if rows == nearest else "other_rows")
    for bad in ("0", "4,x", ""):
        with pytest.raises(SystemExit):
            app.main([*words, "--rows", bad])
    assert app.main(["search", "--missed", "--rows", "4", "--device", "cpu"]) == 2
