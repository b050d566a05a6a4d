"""With a pinned key nothing of a snapshot is used but what was signed, though opening reads little of it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.store import Snapshot, Store
from autotune.store.snapshots import pages
from autotune.store.snapshots.form import CHUNK, Seal, digests_of, root_of
from autotune.store.snapshots.writer import export_snapshot
from tests.support.rows import ENVIRONMENT, GPU, OTHER_GPU, workload
from tests.support.snapshots import CODE, filled, import_file, joined, keys, resealed, split

MANY = tuple(range(32, 64))
"""Rows enough for a file of several chunks."""


@pytest.fixture(params=["as it is read", "all at once"])
def compared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How a host compares a file with its signature: with ``apsw``, and where that is not installed."""
    if request.param == "all at once":
        monkeypatch.setitem(sys.modules, "apsw", None)
    return str(request.param)


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


def test_it_answers_as_without_a_key(signed: tuple[Path, str, Path], compared: str) -> None:
    file, key, _ = signed
    assert os.stat(file).st_size > 4 * CHUNK
    ours, snapshot = answers(file, key)
    assert ours == answers(file, None)[0]
    assert sum(found is not None for found in ours) > len(MANY)
    assert snapshot.trusted
    assert not snapshot.lost
    assert (snapshot._pages is not None) == (compared == "as it is read")
    snapshot.check()
    child = os.fork()
    if not child:
        os._exit(0 if snapshot.get_schedule(workload(32).fingerprint, GPU.fingerprint, ENVIRONMENT) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    snapshot.close()


def _swapped(data: bytes, a: int, b: int) -> bytes:
    parts = [data[n : n + CHUNK] for n in range(0, len(data), CHUNK)]
    parts[a], parts[b] = parts[b], parts[a]
    return b"".join(parts)


def _other_code(body: bytes, _: bytes) -> bytes:
    at = body.index(CODE)
    return body[:at] + b"\0" + body[at + 1 :]


CHANGED: dict[str, Callable[[bytes, bytes], bytes]] = {
    "a byte of a cubin": _other_code,
    "a chunk of zeros": lambda body, old: body[: 2 * CHUNK] + bytes(CHUNK) + body[3 * CHUNK :],
    "chunks in each other's place": lambda body, old: _swapped(body, 2, 3),
    "a chunk twice": lambda body, old: body[: 2 * CHUNK] + body[CHUNK : 2 * CHUNK] + body[3 * CHUNK :],
    "a chunk of an older snapshot": lambda body, old: body[:CHUNK] + old[CHUNK : 2 * CHUNK] + body[2 * CHUNK :],
    "the last byte": lambda body, old: body[:-1] + bytes([body[-1] ^ 1]),
    "the first chunk of an older snapshot": lambda body, old: old[:CHUNK] + body[CHUNK:],
}


@pytest.mark.parametrize("what", CHANGED)
def test_what_is_changed_behind_an_intact_seal_is_found(
    what: str, signed: tuple[Path, str, Path], compared: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The digests and the seal are the signed ones: each chunk that is read is compared with its own digest."""
    file, key, older = signed
    truth, opened = answers(file, key)
    opened.close()
    whole, body = file.read_bytes(), split(file)[0]
    changed = CHANGED[what](body, split(older)[0])
    assert changed != body
    assert len(changed) == len(body)
    file.write_bytes(changed + whole[len(body) :])
    with Store.open(file.with_name("to.db")) as other, pytest.raises(UserError) as error:
        import_file(other, file, key=key)
    assert "\n" not in str(error.value)
    caplog.clear()
    if compared == "all at once" or "first chunk" in what:
        with pytest.raises(UserError, match=r"damaged|not what was sealed"):
            Snapshot(file, key=key)
        return
    found, snapshot = answers(file, key)
    assert compared == "as it is read"
    assert all(ours is None or ours == right for ours, right in zip(found, truth, strict=True))
    if not snapshot.lost:  # nothing of it was read yet: all of it is, in the end
        with pytest.raises(UserError, match="not what was sealed"):
            snapshot.check()
    else:
        assert "not what was signed" in snapshot.lost
        assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1


def test_digests_of_a_changed_file_are_not_those_that_were_signed(
    signed: tuple[Path, str, Path], compared: str
) -> None:
    file, key, older = signed
    body, digests, seal = split(file)

    def refused(data: bytes, text: str) -> None:
        bad = file.with_name("bad.atdb")
        bad.write_bytes(data)
        with pytest.raises(UserError, match=text) as error:
            Snapshot(bad, key=key)
        assert "\n" not in str(error.value)

    changed = _other_code(body, b"")
    own = file.with_name("own.atdb")
    joined(own, changed, seal)  # right digests behind the signed seal
    refused(own.read_bytes(), "not what was (signed|sealed)")
    made = digests_of(own.open("rb"), len(changed))
    forged = Seal(len(changed), root_of(made), seal.key, seal.signature)  # and a right root, under the old signature
    joined(own, changed, forged)
    refused(own.read_bytes(), "signature of the snapshot .* is wrong")
    joined(own, changed)
    refused(own.read_bytes(), "is not signed")
    theirs, _, other = split(older)
    refused(body + digests + other.packed(), "seal is of another file|cut short|not what was")
    refused(theirs + digests[: 32 * -(-len(theirs) // CHUNK)] + other.packed(), "not what was (signed|sealed)")
    refused(body[:-CHUNK] + digests + seal.packed(), "cut short")
    refused(body + digests[:-32] + seal.packed(), "cut short")
    shorter = Seal(seal.length - CHUNK, seal.root, seal.key, seal.signature)
    refused(body[:-CHUNK] + digests[:-32] + shorter.packed(), "damaged|cut short")
    resealed(file, lambda c: c.execute("DELETE FROM schedules"))
    refused(file.read_bytes(), "is not signed")


def test_a_file_that_is_changed_while_it_is_open_is_found(signed: tuple[Path, str, Path]) -> None:
    file, key, _ = signed
    snapshot = Snapshot(file, key=key)
    body = split(file)[0]
    changed = body[: 2 * CHUNK] + bytes(len(body) - 2 * CHUNK)
    with file.open("r+b") as out:
        out.write(changed)
    names = [snapshot.get_schedule(workload(n).fingerprint, GPU.fingerprint, ENVIRONMENT) for n in MANY]
    assert None in names
    assert "not what was signed" in snapshot.lost


def test_opening_reads_little(signed: tuple[Path, str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    file, key, _ = signed
    seen: list[int] = []
    real = pages.Pages._compared

    def counted(self: pages.Pages, number: int) -> bytes:
        seen.append(number)
        return real(self, number)

    monkeypatch.setattr(pages.Pages, "_compared", counted)
    snapshot = Snapshot(file, key=key)
    chunks = -(-split(file)[2].length // CHUNK)
    assert 0 < len(set(seen)) <= chunks / 2
    snapshot.get_schedule(workload(40).fingerprint, GPU.fingerprint, ENVIRONMENT)
    assert len(seen) == len(set(seen)), "a chunk is compared once"
