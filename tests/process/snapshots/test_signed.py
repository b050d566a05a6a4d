"""With a pinned key nothing of a snapshot is used but what was signed."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.store import Snapshot, Store
from autotune.store.snapshot_form import checksum
from autotune.store.snapshot_writer import export_snapshot
from tests.support.rows import ENVIRONMENT, GPU, OTHER_GPU, workload
from tests.support.snapshots import CODE, as_form_2, filled, import_file, joined, keys, resealed, split

PAGE = 4096
MANY = tuple(range(32, 64))
"""Rows enough for a file of many pages."""


@pytest.fixture
def signed(tmp_path: Path) -> tuple[Path, str, Path]:
    """A signed snapshot, the public key, and an older snapshot that the same key signed."""
    mine, theirs = keys(tmp_path)
    file, older = tmp_path / "signed.atdb", tmp_path / "older.atdb"
    with Store.open(tmp_path / "big.db") as store:
        filled(store, MANY)
        export_snapshot(store, older, key=mine, device=lambda device: device == GPU)
        export_snapshot(store, file, key=mine)
    return file, str(theirs), older


def answers(file: Path, key: str | None) -> tuple[list[object], Snapshot]:
    snapshot = Snapshot(file, key=key)
    found: list[object] = []
    for device in (GPU, OTHER_GPU):
        for n in MANY:
            found.append(snapshot.get_schedule(workload(n).fingerprint, device.fingerprint, ENVIRONMENT, match="loose"))
            found.append(snapshot.get_workload(workload(n).fingerprint))
        found.append(snapshot.get_verdict("g" * 64, device.fingerprint, ENVIRONMENT, "default"))
    return found, snapshot


@pytest.mark.parametrize("form", [2, 3])
def test_it_answers_as_without_a_key(signed: tuple[Path, str, Path], form: int) -> None:
    file, key, _ = signed
    truth, _ = answers(file, None)
    if form == 2:
        as_form_2(file, file.with_name("key.pem"))
    ours, snapshot = answers(file, key)
    assert ours == answers(file, None)[0] == truth
    assert sum(found is not None for found in ours) > len(MANY)
    assert snapshot.trusted
    assert not snapshot.lost
    snapshot.check()
    child = os.fork()
    if not child:
        os._exit(0 if snapshot.get_schedule(workload(32).fingerprint, GPU.fingerprint, ENVIRONMENT) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    snapshot.close()
    with Store.open(file.with_name("to.db")) as store:
        assert import_file(store, file, key=key).stored == len(MANY) + 3


def _swapped(data: bytes, a: int, b: int) -> bytes:
    parts = [data[n : n + PAGE] for n in range(0, len(data), PAGE)]
    parts[a], parts[b] = parts[b], parts[a]
    return b"".join(parts)


def _other_code(body: bytes, _: bytes) -> bytes:
    at = body.index(CODE)
    return body[:at] + b"\0" + body[at + 1 :]


CHANGED: dict[str, Callable[[bytes, bytes], bytes]] = {
    "a byte of a cubin": _other_code,
    "a page of zeros": lambda body, old: body[: 2 * PAGE] + bytes(PAGE) + body[3 * PAGE :],
    "pages in each other's place": lambda body, old: _swapped(body, 2, 3),
    "a page twice": lambda body, old: body[: 2 * PAGE] + body[PAGE : 2 * PAGE] + body[3 * PAGE :],
    "a page of an older snapshot": lambda body, old: next(
        changed
        for at in range(0, len(old), PAGE)
        if (changed := body[:at] + old[at : at + PAGE] + body[at + PAGE :]) != body
    ),
    "the last byte": lambda body, old: body[:-1] + bytes([body[-1] ^ 1]),
    "half of an older snapshot": lambda body, old: old[: len(old) // 2] + body[len(old) // 2 :],
}


@pytest.mark.parametrize("form", [2, 3])
@pytest.mark.parametrize("what", CHANGED)
def test_changes_behind_an_intact_seal_are_found(what: str, signed: tuple[Path, str, Path], form: int) -> None:
    file, key, older = signed
    if form == 2:
        for path in (file, older):
            as_form_2(path, file.with_name("key.pem"))
    answers(file, key)[1].close()
    whole, body = file.read_bytes(), split(file)[0]
    changed = CHANGED[what](body, split(older)[0])
    assert changed != body
    assert len(changed) == len(body)
    time = os.stat(file).st_mtime_ns
    with file.open("r+b") as out:  # the same inode, size and time: a process that opened it before compares it again
        out.write(changed + whole[len(body) :])
    os.utime(file, ns=(time, time))
    with Store.open(file.with_name("to.db")) as other, pytest.raises(UserError) as error:
        import_file(other, file, key=key)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=r"damaged|does not match its seal"):
        Snapshot(file, key=key)


def test_another_seal_is_not_the_one_that_was_signed(signed: tuple[Path, str, Path]) -> None:
    file, key, older = signed
    body, seal = split(file)

    def refused(data: bytes, text: str) -> None:
        bad = file.with_name("bad.atdb")
        bad.write_bytes(data)
        with pytest.raises(UserError, match=text) as error:
            Snapshot(bad, key=key)
        assert "\n" not in str(error.value)

    changed = _other_code(body, b"")
    right = checksum(io.BytesIO(changed), len(changed))
    refused(changed + seal.packed(), "does not match its seal")
    refused(changed + replace(seal, checksum=right).packed(), "its signature is wrong")
    joined(file.with_name("own.atdb"), changed)
    refused(file.with_name("own.atdb").read_bytes(), "is not signed")
    theirs, other = split(older)
    refused(body + other.packed(), "seal is of another file|does not match its seal")
    refused(theirs + seal.packed(), "seal is of another file|cut short|does not match its seal")
    refused(body[:-PAGE] + seal.packed(), "cut short")
    refused(body[:-PAGE] + replace(seal, length=seal.length - PAGE).packed(), "damaged|cut short")
    refused(body + replace(seal, form=2).packed(), "cut short")
    resealed(file, lambda c: c.execute("DELETE FROM schedules"))
    refused(file.read_bytes(), "is not signed")


def test_a_file_that_is_changed_while_it_is_open_gives_no_other_answer(signed: tuple[Path, str, Path]) -> None:
    """Rows have their own checksums."""
    file, key, _ = signed
    truth, _ = answers(file, key)
    snapshot = Snapshot(file, key=key)
    body = split(file)[0]
    with file.open("r+b") as out:
        out.write(body[: 2 * PAGE] + bytes(len(body) - 2 * PAGE))
    found = [snapshot.get_schedule(workload(n).fingerprint, GPU.fingerprint, ENVIRONMENT) for n in MANY]
    assert all(s is None or s in truth for s in found)
    assert None in found
    assert snapshot.lost
