"""Mutated databases, rows and snapshots: each is refused in one line, or read rightly.

    python -m tests.fuzz --cases 10000

A case changes one sound file at random and does with it what a user would. It fails where anything but a UserError
comes out, the line is more than a line, it takes more than a second of processor time, a refused file changed a
database, a row that was taken in is damaged, a program is started, a file is written elsewhere, or a look-up finds a
kernel whose launch data are not those that its configuration compiles to.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import random
import shutil
import sqlite3
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from autotune.compiler.assemble import foreign
from autotune.compiler.schedules.configurations import improper
from autotune.device import environment, identify
from autotune.domain import open_task
from autotune.domains.fusion.task import FusionTask
from autotune.errors import LONGEST, UserError, safe_line
from autotune.ir.graph import Graph
from autotune.runtime.ladder import Level
from autotune.runtime.match import match
from autotune.store import Calibration, Effort, Key, Measurement, Schedule, Store, Verdict
from autotune.store.codec import artifact_json
from autotune.store.models import VERSION_TABLE
from autotune.store.upkeep import damage
from autotune.task import Status
from autotune.tuner.seeds import winners
from tests.fuzz.values import altered, as_text, flipped, hostile
from tests.support.hostile import softmax, workload_of
from tests.support.rows import ENVIRONMENT, GPU
from tests.support.snapshots import import_file

LIMIT_S = 1.0


@dataclass
class Tally:
    """The outcomes of the cases, by kind; ``faults`` is empty if all are right."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


class Guard:
    """Notes what a process does that no look-up may: an audit hook, armed for the time of a case."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.armed, self.seen = f"{folder}{os.sep}", False, list[str]()
        sys.addaudithook(self._event)

    def _event(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.armed:
            return
        if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.connect",
                     "socket.bind", "pickle.find_class", "os.symlink", "os.link", "shutil.rmtree"):  # fmt: skip
            self.seen.append(f"{event} {args!r:.200}")
        elif event == "open" and isinstance(args[0], (str, bytes)) and self._writes(args):
            self._path(event, os.fsdecode(args[0]))
        elif event in ("os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.chmod") and isinstance(args[0], str):
            self._path(event, args[0])
        elif event == "os.rename":
            self._path(event, os.fsdecode(args[1]))
        elif event == "sqlite3.connect" and isinstance(args[0], str):
            path = args[0].removeprefix("file:").partition("?")[0]
            self._path(event, path)
        elif event == "sqlite3.enable_load_extension":
            self.seen.append(event)

    def _writes(self, args: tuple[Any, ...]) -> bool:
        _, mode, flags = args
        return bool(mode and set(str(mode)) & set("wax+")) or bool(
            isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        )

    def _path(self, event: str, path: str) -> None:
        if not os.path.abspath(path).startswith(self._folder) and path != os.devnull and "__pycache__" not in path:
            self.seen.append(f"{event} {path!r:.200}")


class Fuzz:
    """Sound files, made once, and the checks of a mutated copy of each.

    Args:
        folder: an empty one; nothing may be written outside it.
    """

    def __init__(self, folder: Path) -> None:
        import torch

        self.folder = folder
        self.inner = folder / "case"
        self._stores: dict[Path, Store] = {}
        self._workload = workload_of(softmax, torch.ones(64, 256))
        task = FusionTask(self._workload, "cuda:0", "sm_90", 132)
        self._config = task.default()
        self._artifact = task.build(self._config)
        self._compiled = {self._launch(self._artifact)}
        self._empty, self.full = folder / "empty.db", folder / "full.db"
        Store.open(self._empty).close()
        with Store.open(self.full) as store:
            self._fill(store)
        self._columns = self._layout()
        self._kinds: dict[str, Callable[[random.Random], str]] = {
            "database rows": self._database_rows,
            "database bytes": self._database_bytes,
        }
        with contextlib.suppress(ImportError):
            from tests.fuzz.snapshots import Snapshots

            self._kinds |= Snapshots(self).kinds
        self.guard = Guard(folder)

    def _fill(self, store: Store) -> None:
        w = self._workload
        key = Key(store.put_workload(w), store.put_device(GPU), store.put_environment(ENVIRONMENT), "p" * 64)
        store.put_schedule(Schedule(key, self._config, 10.0, {"eager": 20.0}, self._artifact, "autotune", w.family, 64))
        cpu = open_task(w, "cpu")
        here = Key(
            w.fingerprint, store.put_device(identify("cpu")), store.put_environment(environment("cpu")), "q" * 64
        )
        made = cpu.build(cpu.default())
        store.put_schedule(Schedule(here, cpu.default(), 10.0, {"eager": 20.0}, made, "autotune", w.family, 64))
        for stage in ("screen", "final"):
            store.add_measurement(Measurement(key, self._config, Status.OK, stage, 10.0, (9.0, 11.0), 0.1))
        store.add_measurement(Measurement(key, {"a": 1}, Status.CRASHED, reason="why"))
        store.add_effort(Effort(key, "s" * 64, 1.0, 2.0, True))
        store.put_calibration(Calibration(key.device, "fusion", {"copy_gbs": 1.0}))
        family = {"workload": w.fingerprint, "label": "softmax", "count": 2, "gain_us": 1.0, "gain_of": "step"}
        record = {
            "compile_us": 2.0, "all_us": 2.0, "autotune_us": 1.0, "attention_us": 1.5, "ratio": 2.0, "noise": 0.1,
            "tries": 1, "cut": False, "others_busy": 0.1, "train": False, "target": "m:f", "inputs": "", "command": "c",
            "families": [{**family, "kept": True}],
        }  # fmt: skip
        store.put_verdicts([Verdict("a" * 64, key.device, key.environment, "default", (), record)])
        store.add_miss(w, key.device, "why")
        store.finish_run(store.start_run("search").id, summary={"capture": {"signature": "x", "workloads": []}})
        store.claim(key, {"a": 4}, "screen", "me", 60)

    def _layout(self) -> list[tuple[str, str]]:
        c = sqlite3.connect(self.full)
        tables = [
            r[0] for r in c.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name LIKE 'autotune%'")
        ]
        found = [(t, r[1]) for t in tables for r in c.execute(f"PRAGMA table_info({t})")]
        c.close()
        return found

    def case(self, seed: int, tally: Tally) -> None:
        """Try one case and note what became of it."""
        names = sorted(self._kinds)
        name = names[seed % len(names)]
        outcome, fault, took = self._tried(name, seed)
        if took > LIMIT_S and not fault:  # once more: on a busy machine anything is slow now and then
            outcome, fault, again = self._tried(name, seed)
            took = min(took, again)
        tally.slowest_s = max(tally.slowest_s, took)
        tally.outcomes[f"{name}: {outcome or 'fault'}"] += 1
        fault = fault or (f"took {took:.1f} s" if took > LIMIT_S else "") or "; ".join(self.guard.seen)
        stray = {p.name for p in self.folder.iterdir()} - self._known
        if fault or stray or Path("/tmp/escaped").exists():
            tally.faults.append(f"seed {seed}, {name}: {fault or f'wrote {sorted(stray)}'}")
        self.guard.seen.clear()

    def _tried(self, name: str, seed: int) -> tuple[str, str, float]:
        """Outcome, fault ("" where all is well) and processor seconds of a case."""
        chance = random.Random(seed)
        shutil.rmtree(self.inner, ignore_errors=True)
        self.inner.mkdir()
        begin = time.process_time()
        outcome, fault = "", ""
        try:
            with self._armed():
                outcome = self._kinds[name](chance)
        except UserError as e:
            outcome = "refused"
            line = safe_line(e)
            if "\n" in str(e) or len(line) > LONGEST or not line:
                fault = f"more than a line: {line[:300]!r}"
        except AssertionError as e:
            fault = str(e)
        except BaseException as e:
            if isinstance(e, KeyboardInterrupt):
                raise
            fault = f"{type(e).__name__}: {e!s:.300}"
        return outcome, fault, time.process_time() - begin

    @property
    def _known(self) -> set[str]:
        sound = {p.name for p in (self._empty, self.full, self.inner)}
        return sound | {f"{name}{end}" for name in sound for end in ("-wal", "-shm")} | {
            "cache", "s.atdb", "signed.atdb", "older.atdb", "key.pem", "key.pub"
        }  # fmt: skip

    @contextlib.contextmanager
    def _armed(self) -> Iterator[None]:
        out, err = io.StringIO(), io.StringIO()
        logging.disable(logging.CRITICAL)
        self.guard.armed = True
        try:
            own = mock.patch.dict(os.environ, AUTOTUNE_CACHE_DIR=str(self.folder / "cache"))  # for audits that passed
            with own, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            self.guard.armed = False
            logging.disable(logging.NOTSET)
        assert "Traceback" not in out.getvalue() + err.getvalue(), f"a traceback: {err.getvalue()[-300:]}"

    # What is done with a file.

    def importing(self, file: Path) -> str:
        """Import ``file`` into an empty database: all or nothing. Stored rows are sound and found by the right keys."""
        store = self._kept(self.inner / "to.db", self._empty)
        try:
            import_file(store, file)
        except UserError:
            c = sqlite3.connect(self.inner / "to.db")
            tables = {table for table, _ in self._columns if table != VERSION_TABLE}
            left = sum(c.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables)
            c.close()
            assert left == 0, f"refused, and left {left} rows"
            raise
        bad = list(damage(store))
        assert not bad, f"a damaged row was taken in: {bad[0]}"
        return self.looked_up(store)

    def _kept(self, db: Path, sound: Path | None) -> Store:
        """The store of a file that is another one each time: SQLAlchemy's statements are compiled once for all cases.

        Args:
            sound: what the file is to be; None leaves it as it is.
        """
        if (store := self._stores.get(db)) is not None:
            store.close()
        for end in ("-wal", "-shm"):
            db.with_name(db.name + end).unlink(missing_ok=True)
        if sound is not None:
            shutil.copy(sound, db)
        if store is None:
            store = self._stores[db] = Store.open(db, migrate=False)
        store._logged.clear()
        store.problems.clear()
        return store

    def looked_up(self, store: Any) -> str:
        """Look the workload up on both devices; what is found is what its configuration compiles to."""
        levels = []
        for device, env in ((GPU, ENVIRONMENT), (identify("cpu"), environment("cpu"))):
            found = match(self._workload, store, device, env)
            levels.append(found.level)
            s = found.schedule
            if found.level is Level.NONE or s is None or s.config is None:
                continue
            wrong = improper(s.config, "cuda" if device is GPU else "cpu")
            assert not wrong, f"a configuration with {wrong} was found"
            if device is GPU and found.level is Level.EXACT:
                assert s.artifact is not None
                assert not foreign(s.artifact, Graph.from_json(self._workload.spec), s.config, device.units), "foreign"
                if s.config == self._config:
                    assert self._launch(s.artifact) in self._compiled, "launch data that nothing compiles to"
        return "found" if Level.EXACT in levels else "passed over"

    @staticmethod
    def _launch(artifact: Any) -> str:
        """The launch data of an artifact: no code, and no informative fields such as ``of``."""
        data = artifact_json(artifact)
        launches = [{k: v for k, v in kernel["launch"].items() if k != "of"} for kernel in data["kernels"]]
        return json.dumps([launches, data["scratch"]], sort_keys=True)

    def using(self, db: Path, chance: random.Random) -> str:
        """Do with a database what searches, deployments and commands do."""
        from autotune.cli import app
        from autotune.report.database import pages

        whole = chance.randrange(10) == 0  # as a process does that begins
        with Store.open(db, migrate=False) if whole else contextlib.nullcontext(self._kept(db, None)) as store:
            result = self.looked_up(store)
            key = Key(self._workload.fingerprint, GPU.fingerprint, ENVIRONMENT.strict, "p" * 64)
            store.best(key)
            store.status_counts(key)
            store.measurements()
            store.neighbours(self._workload.family, key.device)
            winners(store, key)
            store.get_effort(key, "s" * 64)
            store.get_calibration(key.device, "fusion")
            store.get_verdict("a" * 64, key.device, ENVIRONMENT, "default")
            store.captured("x")
            store.misses()
            store.runs()
            store.activity()
            store.overview()
            list(pages(store))
            store.state()
            store.add_miss(self._workload, key.device, "again")
            lines = list(damage(store))
            assert all("\n" not in line and len(line) <= 500 for line in lines), "verify tells more than lines"
        if not whole:
            return result
        file = self.inner / "again.atdb"
        commands = (
            ["show"], ["show", "--json"], ["watch", "--once"], ["watch", "--once", "--json"], ["db", "stats"],
            ["db", "export", str(file)], ["db", "verify"],
        )  # fmt: skip
        command = chance.choice(commands)
        code = app.main([*command, "--db", str(db)])
        assert code in (0, 1 if command[-1] == "verify" else 2, 2), f"{command} ended with {code}"
        if file.exists():
            self.importing(file)
        return result

    # How a file is changed.

    def _database_rows(self, chance: random.Random) -> str:
        db = self.inner / "x.db"
        self._kept(db, self.full).close()
        c = sqlite3.connect(db)
        c.execute("PRAGMA foreign_keys = OFF")
        for _ in range(chance.choice((1, 1, 2, 5))):
            table, column = chance.choice(self._columns)
            rows = c.execute(f'SELECT rowid, "{column}" FROM {table}').fetchall()
            if not rows:
                continue
            row, old = chance.choice(rows)
            with contextlib.suppress(sqlite3.Error, OverflowError, UnicodeError):
                if chance.randrange(8) == 0:
                    c.execute(f"DELETE FROM {table} WHERE rowid = ?", (row,))
                else:
                    c.execute(f'UPDATE {table} SET "{column}" = ? WHERE rowid = ?', (self._value(old, chance), row))
        c.commit()
        c.close()
        return self.using(db, chance)

    @staticmethod
    def _value(old: Any, chance: random.Random) -> Any:
        """Another value for a column."""
        if isinstance(old, bytes):
            return flipped(old, chance)
        if isinstance(old, str) and chance.random() < 0.7:
            try:
                return as_text(altered(json.loads(old), chance), chance)
            except ValueError:
                return flipped(old.encode(), chance) if chance.random() < 0.5 else str(hostile(chance))
        new = hostile(chance)
        if chance.randrange(8) == 0:
            return b"\xff\x00"
        return new if isinstance(new, (str, int, float, type(None))) else json.dumps(new)

    def _database_bytes(self, chance: random.Random) -> str:
        db = self.inner / "x.db"
        self._kept(db, self.full).close()
        db.write_bytes(flipped(self.full.read_bytes(), chance))
        return self.using(db, chance)
