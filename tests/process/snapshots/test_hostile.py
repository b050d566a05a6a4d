"""Damaged, truncated, hostile and newer files: refused whole, in one line, or read rightly."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.cli.app import main
from autotune.errors import UserError
from autotune.store import Schedule, Snapshot, Store, snapshot
from autotune.store.opening import attach
from autotune.store.snapshot import packed
from autotune.store.snapshot_form import SEAL_BYTES
from tests.support.rows import ENVIRONMENT, GPU, NEAR, OTHER_GPU, workload
from tests.support.snapshots import CODE, import_file, resealed, split

SEED = int(os.environ.get("AUTOTUNE_MUTANTS_FIRST", "0"))
CASES = int(os.environ.get("AUTOTUNE_MUTANTS", "300"))


def everything(path: Path) -> list[Schedule | None]:
    """Every look-up's result in a snapshot. Raises only UserError."""
    snapshot = Snapshot(path)
    found = []
    for device in (GPU, OTHER_GPU):
        for env in (ENVIRONMENT, NEAR):
            for rows in (7, 32, 64, 512):
                found.append(snapshot.get_schedule(workload(rows).fingerprint, device.fingerprint, env, match="loose"))
                snapshot.get_workload(workload(rows).fingerprint)
            snapshot.nearest("f" * 64, device.fingerprint, env, 40, limit=4)
            snapshot.family_schedules("f" * 64, device.fingerprint, env)
            snapshot.get_verdict("g" * 64, device.fingerprint, env, "default")
    snapshot.tuned_under(workload(32).fingerprint)
    snapshot.close()
    return found


def mutants(data: bytes, count: int) -> list[bytes]:
    rng = random.Random(SEED)
    made = []
    for n in range(count):
        at, size = rng.randrange(len(data)), rng.choice((1, 1, 8, 600))
        kind = n % 6
        if kind == 0:
            made.append(data[:at])
        elif kind == 1:
            made.append(data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :])
        elif kind == 2:
            made.append(data[:at] + rng.randbytes(size) + data[at + size :])
        elif kind == 3:
            made.append(data[:at] + data[at + size :])
        elif kind == 4:
            made.append(data[:at] + rng.randbytes(size) + data[at:])
        else:
            other = rng.randrange(len(data))
            made.append(data[:at] + data[other : other + size] + data[at + size :])
    return made


def test_mutants_are_refused_in_one_line_or_read_rightly(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "autotune")
    data, truth = file.read_bytes(), everything(file)
    bad = file.with_name("bad.atdb")
    refused: list[str] = []
    for n, mutant in enumerate(mutants(data, CASES)):
        bad.write_bytes(mutant)
        began = time.process_time()
        try:
            found = everything(bad)
        except UserError as e:
            refused.append(str(e))
        else:
            for ours, right in zip(found, truth, strict=True):
                assert ours is None or ours == right, f"mutant {n} of seed {SEED}"
        assert time.process_time() - began < 5.0, "of this process: a second"
    assert len(refused) > CASES / 4
    assert all(str(bad) in text and "\n" not in text for text in refused)
    assert sorted(p.name for p in file.parent.iterdir()) == ["bad.atdb", file.name, "tuned.db", "tuned.db-shm",
                                                            "tuned.db-wal"]  # fmt: skip


def test_no_mutant_is_imported_in_part(file: Path, tmp_path: Path) -> None:
    data = file.read_bytes()
    bad = file.with_name("bad.atdb")
    with Store.open(tmp_path / "other.db") as other:
        empty = other.state()
        for mutant in mutants(data, 60):
            if mutant == data:
                continue
            bad.write_bytes(mutant)
            with pytest.raises(UserError):
                import_file(other, bad)
            assert other.state() == empty


HOSTILE: dict[str, Callable[[sqlite3.Connection], object]] = {
    "a trigger": lambda c: c.execute("CREATE TRIGGER t AFTER INSERT ON about BEGIN SELECT 1; END"),
    "a view": lambda c: c.execute("CREATE VIEW v AS SELECT load_extension('/tmp/x')"),
    "another table": lambda c: c.execute("CREATE TABLE studies (name TEXT)"),
    "no table": lambda c: c.execute("DROP TABLE verdicts"),
    "a view in a table's place": lambda c: (
        c.execute("DROP TABLE code"),
        c.execute("CREATE VIEW code AS SELECT '' AS sha256, zeroblob(1000000000) AS bytes"),
    ),
    "a device that is none": lambda c: c.execute("UPDATE devices SET identity = '[]'"),
    "a device under another's name": lambda c: c.execute(
        "UPDATE devices SET fingerprint = ? WHERE number = 1", ("a" * 64,)
    ),
    "software that is none": lambda c: c.execute("UPDATE environments SET versions = 'null'"),
    "deep JSON": lambda c: c.execute("UPDATE devices SET identity = ?", ("[" * 100_000,)),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_file_that_is_not_ours_is_not_opened(file: Path, what: str) -> None:
    resealed(file, HOSTILE[what])
    with pytest.raises(UserError, match="damaged") as error:
        Snapshot(file)
    assert "\n" not in str(error.value)


def _row(change: Callable[[dict[str, object]], object]) -> Callable[[sqlite3.Connection], None]:
    """Change the rows of schedules, with right checksums."""

    def run(c: sqlite3.Connection) -> None:
        for (text,) in c.execute("SELECT data FROM schedules").fetchall():
            data = json.loads(text)
            change(data)
            new = json.dumps(data)
            c.execute(
                "UPDATE schedules SET data = ?, sha256 = ? WHERE data = ?",
                (new, hashlib.sha256(new.encode()).hexdigest(), text),
            )

    return run


BAD_ROWS: dict[str, Callable[[sqlite3.Connection], object]] = {
    "without a checksum": lambda c: c.execute("UPDATE schedules SET sha256 = ''"),
    "of another key": lambda c: c.execute("UPDATE schedules SET policy = policy || 'x'"),
    "of another family": lambda c: c.execute("UPDATE schedules SET family = 'other'"),
    "of a device that is not there": lambda c: (
        c.execute("INSERT INTO devices SELECT number + 10, fingerprint, identity FROM devices"),
        c.execute("UPDATE schedules SET device = device + 10"),
        c.execute("DELETE FROM devices WHERE number > 10"),
    ),
    "with a number for a text": lambda c: c.execute("UPDATE schedules SET data = 7, sha256 = 7"),
    "of no object": lambda c: c.execute(
        "UPDATE schedules SET data = '[]', sha256 = ?", (hashlib.sha256(b"[]").hexdigest(),)
    ),
    "with NaN": _row(lambda d: d.update(latency_us=float("nan"))),
    "with an infinite latency": _row(lambda d: d.update(latency_us=float("inf"))),
    "with a negative latency": _row(lambda d: d.update(latency_us=-1)),
    "with a list for a configuration": _row(lambda d: d.update(config=[1])),
    "with a nested configuration": _row(lambda d: d.update(config={"a": {"b": 1}})),
    "without an artifact's name": _row(lambda d: d.pop("artifact")),
    "with baselines of text": _row(lambda d: d.update(baselines={"eager": "fast"})),
    "whose artifact is missing": lambda c: c.execute("DELETE FROM artifacts"),
    "whose code is missing": lambda c: c.execute("DELETE FROM code"),
    "whose code was swapped": lambda c: c.execute("UPDATE code SET bytes = ?", (CODE,)),
    "whose code is a text": lambda c: c.execute("UPDATE code SET bytes = 'text'"),
    "whose artifact is a bomb": lambda c: c.execute(
        "UPDATE artifacts SET data = ?", (packed({"kernels": "a" * (80 << 20)}),)
    ),
    "whose artifact is no JSON": lambda c: c.execute("UPDATE artifacts SET data = ?", (b"PK",)),
}


@pytest.mark.parametrize("what", BAD_ROWS)
def test_a_damaged_row_condemns_the_file(file: Path, what: str, caplog: pytest.LogCaptureFixture) -> None:
    resealed(file, BAD_ROWS[what])
    began = time.process_time()
    snapshot = Snapshot(file)
    for _ in range(3):
        for rows in (32, 64, 512):
            found = snapshot.get_schedule(workload(rows).fingerprint, GPU.fingerprint, ENVIRONMENT, match="loose")
            assert found is None
    assert snapshot.lost or what == "of a device that is not there"
    assert snapshot.get_device(GPU.fingerprint) is not None
    told = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(told) == bool(snapshot.lost)
    assert time.process_time() - began < 2.0
    with Store.open(file.with_name("other.db")) as other:
        empty = other.state()
        with pytest.raises(UserError) as error:
            import_file(other, file)
        assert "\n" not in str(error.value)
        assert other.state() == empty


@pytest.mark.parametrize("record", [{"compile_us": -5}, {"families": 5}, {"train": [1]}, {"target": "\ud800"}])
def test_a_verdict_whose_record_is_damaged_condemns_the_file(file: Path, record: dict[str, object]) -> None:
    def change(c: sqlite3.Connection) -> None:
        (text,) = c.execute("SELECT data FROM verdicts").fetchone()
        new = json.dumps({**json.loads(text), "record": record})
        c.execute("UPDATE verdicts SET data = ?, sha256 = ?", (new, hashlib.sha256(new.encode()).hexdigest()))

    assert Snapshot(file).get_verdict("g" * 64, GPU.fingerprint, ENVIRONMENT, "default") is not None
    resealed(file, change)
    snapshot = Snapshot(file)
    assert snapshot.get_verdict("g" * 64, GPU.fingerprint, ENVIRONMENT, "default") is None
    assert snapshot.lost
    with Store.open(file.with_name("other.db")) as other, pytest.raises(UserError, match="damaged"):
        import_file(other, file)


def test_versions_and_ends(file: Path, tmp_path: Path) -> None:
    data = file.read_bytes()

    def refused(changed: bytes, text: str) -> None:
        bad = tmp_path / "changed.atdb"
        bad.write_bytes(changed)
        with pytest.raises(UserError, match=text):
            Snapshot(bad)

    refused(data[:60] + (4).to_bytes(4, "big") + data[64:], "format 4.*upgrade autotune")
    refused(data[:60] + (2).to_bytes(4, "big") + data[64:], "damaged or cut short")
    refused(data[:60] + (1).to_bytes(4, "big") + data[64:], "format 1.*export it again")
    refused(data[:-SEAL_BYTES], "cut short")
    refused(data[:4096], "cut short")
    refused(data[:50], "is not a snapshot")
    refused(b"", "is not a snapshot")
    refused(data + b"more", "cut short")
    refused(data[:18] + b"\2\2" + data[20:], "damaged")  # it would need a write-ahead log
    with pytest.raises(UserError, match="is not a file"):
        Snapshot(Path("/dev/zero"))


def test_a_journal_of_the_file_is_not_applied(file: Path) -> None:
    """A file that somebody puts there would change what SQLite reads."""
    for suffix in ("-journal", "-wal"):
        file.with_name(file.name + suffix).write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + bytes(1000))
    assert any(everything(file))


def swapped(data: bytes, one: int, other: int, page: int = 4096) -> bytes:
    """A file with two pages in each other's place; pages count from 0."""
    pages = [data[at : at + page] for at in range(0, len(data), page)]
    pages[one], pages[other] = pages[other], pages[one]
    return b"".join(pages)


def test_no_reader_takes_a_file_with_swapped_pages_for_one_that_lacks_rows(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every row that such a file still has is sound by its own checksum."""
    data, bad = file.read_bytes(), file.with_name("bad.atdb")
    length = split(file)[1].length // 4096
    for one in range(1, length):
        bad.write_bytes(swapped(data, one, (one % (length - 1)) + 1))
        for words in (["show"], ["show", "--json"]):
            assert main([*words, "--db", str(bad)]) == 2
            said = capsys.readouterr()
            assert (said.out, len(said.err.splitlines())) == ("", 1)
        for opened in (lambda: Snapshot(bad), lambda: attach(str(bad))):
            with pytest.raises(UserError, match=r"does not match its seal|damaged"):
                opened()


def test_a_file_is_compared_once_in_a_process_and_again_where_it_was_changed(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []
    monkeypatch.setattr(snapshot, "compare", lambda *args: compared.append(args))
    Snapshot(file).close()
    Snapshot(file).close()
    assert len(compared) == 1
    os.utime(file, ns=(1, 1))
    Snapshot(file).close()
    assert len(compared) == 2
