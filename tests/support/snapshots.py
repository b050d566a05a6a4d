"""Databases with schedules of several devices and programs, to be frozen; and keys to sign with."""

from __future__ import annotations

import hashlib
import io
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from autotune.device import DeviceIdentity, Environment
from autotune.store import Calibration, Key, Schedule, Store, Verdict
from autotune.store.merge import checked
from autotune.store.snapshot_form import Seal, checksum, opened, signed
from autotune.task import Artifact, Kernel
from tests.support.rows import ENVIRONMENT, GPU, NEAR, OTHER_GPU, workload

CODE = b"\x7fELF" + bytes(range(256)) * 8


def artifact(code: bytes = CODE) -> Artifact:
    kernel = Kernel("autotune_softmax", code, {"block": 128, "args": [["input", 0]], "grid": 4}, {"registers": 40})
    return Artifact("sm_90", (kernel,), (("float32", 64),), "cuda-test")


def filled(store: Store, rows: tuple[int, ...] = (32, 64, 512)) -> list[Schedule]:
    """Schedules of a family for each number of rows on a GPU, one of them with nearly equal software too, one on
    another GPU, and one whose baseline won; a verdict and a calibration."""
    made = []

    def put(
        n: int, us: float, device: DeviceIdentity = GPU, env: Environment = ENVIRONMENT, kernels: bool = True
    ) -> None:
        w = workload(n)
        key = Key(store.put_workload(w), store.put_device(device), store.put_environment(env), "p" * 64)
        s = Schedule(
            key,
            {"threads": 32 + n, "vector": 4} if kernels else None,
            us,
            {"eager": 40.0, "inductor": 15.0},
            artifact(CODE + bytes([n % 251])) if kernels else None,
            "autotune" if kernels else "inductor",
            w.family,
            n,
            1000.0 + n,
        )
        store.put_schedule(s)
        made.append(s)

    for n in rows:
        put(n, 10.0 + n)
    put(rows[0], 9.0, env=NEAR)
    put(rows[0], 20.0, device=OTHER_GPU)
    put(7, 5.0, kernels=False)
    left = (workload(rows[0]).fingerprint,)
    record = {
        "target": "/home/ada/model.py:net", "command": "autotune search", "compile_us": 9.0, "families": [],
        "numerics": {"cuda.matmul.fp32_precision": "tf32"},
    }  # fmt: skip
    store.put_verdicts([Verdict("g" * 64, GPU.fingerprint, ENVIRONMENT.strict, "default", left, record, 50.0)])
    store.put_calibration(Calibration(GPU.fingerprint, "fusion", {"copy_gbs": 4000.0}, 60.0))
    return made


def split(path: Path) -> tuple[bytes, Seal]:
    """The pages of a snapshot, and the seal."""
    file, seal = opened(path)
    with file:
        file.seek(0)
        return file.read(seal.length), seal


def joined(path: Path, pages: bytes, seal: Seal | None = None) -> None:
    """Write a snapshot of these pages; with a right seal that nobody signed, where none is given."""
    path.write_bytes(pages + (seal or Seal(len(pages), checksum(io.BytesIO(pages), len(pages)))).packed())


def as_form_2(path: Path, key: Path | None = None) -> None:
    """Convert a snapshot to the previous form: digests of its parts are behind the pages, and are sealed."""
    pages = bytearray(split(path)[0])
    pages[60:64] = (2).to_bytes(4, "big")
    parts = [hashlib.sha256(pages[at : at + 16384]).digest() for at in range(0, len(pages), 16384)]
    seal = Seal(len(pages), hashlib.sha256(b"".join(parts)).digest(), form=2)
    path.write_bytes(bytes(pages) + b"".join(parts) + (seal if key is None else signed(seal, key)).packed())


def resealed(path: Path, change: Callable[[sqlite3.Connection], object], *, vacuum: bool = True) -> None:
    """Change a snapshot's tables as an informed attacker would: with a right seal behind them."""
    pages = path.with_suffix(".pages")
    pages.write_bytes(split(path)[0])
    try:
        with closing(sqlite3.connect(pages, isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode = OFF")
            change(connection)
            if vacuum:
                connection.execute("VACUUM")
        joined(path, pages.read_bytes())
    finally:
        pages.unlink()


def keys(folder: Path, name: str = "key") -> tuple[Path, Path]:
    """A private key and its public half, as files."""
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    private = Ed25519PrivateKey.generate()
    mine, theirs = folder / f"{name}.pem", folder / f"{name}.pub"
    mine.write_bytes(private.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()))
    theirs.write_bytes(private.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo))
    return mine, theirs


def faster(s: Schedule, us: float) -> Schedule:
    """Another configuration for the same key."""
    return replace(s, config={"threads": 999}, latency_us=us, when=s.when + 1, artifact=artifact(CODE + b"other"))


class Imported(NamedTuple):
    """Schedules in a file, those of them that the database took over, and conflicts."""

    schedules: int
    stored: int
    conflicts: list[str]


def import_file(store: Store, file: Path, *, key: str | None = None) -> Imported:
    """The effect of ``autotune import`` on an open database."""
    incoming = checked(file, key=key)
    found = incoming.into(store)
    return Imported(incoming.schedules, found.rows["schedules"], found.conflicts)
