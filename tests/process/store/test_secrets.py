"""No secret part of a database's URL is ever printed, in any form and by any operation."""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import os
import random
import sqlite3
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest

from autotune.cli import app
from autotune.errors import UserError
from autotune.runtime.deployment import Deployment, deployment, use
from autotune.store import Measurement, Store
from autotune.store.merge import merge
from autotune.store.snapshot_writer import export_snapshot
from autotune.task import Status
from tests.process.store.test_schedules import schedule
from tests.support.rows import GPU, put_key, workload

SECRETS = ("hunter2x", "p@ss:w/rd?x", "ünï%40cöde", "a b&c=d#e", "'quo\"ted'", "x" * 300)
HOST = "127.0.0.1:1"


def forms(secret: str) -> Iterator[str]:
    """URLs, and similar texts, that contain a secret in the spellings of users."""
    for text in dict.fromkeys((quote(secret, safe=""), quote_plus(secret), secret)):
        yield f"postgresql://u:{text}@{HOST}/x"
        yield f"postgres://u:{text}@{HOST}/x"
        yield f"postgresql+psycopg://u:{text}@{HOST}/x?sslmode=disable"
        yield f"postgresql://:{text}@{HOST}/x"
        for option in ("password", "PASSWORD", "sslpassword", "passfile", "service", "options", "no_such", "sslkey"):
            if option != "service":  # its name is no secret
                yield f"postgresql://u@{HOST}/x?{option}={text}"
        yield f"postgresql://u@{HOST}/x?password={text}&password={text}"
        yield f"postgresql://u:{text}@/x?host=127.0.0.1&port=1"
        yield f"postgresql://u:{text}@127.0.0.1:port/x"
        yield f"postgresql://u:{text}@[::1/x"
        yield f"postgresql:/u:{text}@{HOST}/x"
        yield f"postgresql//u:{text}@{HOST}/x"
        yield f"u:{text}@{HOST}/x"
        yield f"host=127.0.0.1 port=1 user=u password={text}"
        yield f"mysql://u:{text}@{HOST}/x"
        yield f"sqlite://u:{text}@h/x"
        yield f"sqlite:///x.db?password={text}"


COMMANDS = (
    ("show",), ("show", "--json"), ("db", "current"), ("db", "upgrade"), ("db", "stats", "--json"), ("db", "verify"),
    ("db", "export", "x.zip"), ("db", "import", "x.zip"), ("db", "forget"), ("db", "prune", "--runs"),
    ("db", "prune", "--runs", "--yes"),
)  # fmt: skip


def parts(secret: str) -> set[str]:
    """Texts that would reveal a secret: any spelling of it, and a long piece of it."""
    ways = {secret, quote(secret, safe=""), quote_plus(secret), repr(secret)[1:-1]}
    return ways | {secret[:6], secret[-6:]}


@pytest.mark.parametrize("secret", SECRETS, ids=range(len(SECRETS)))
def test_commands_tell_no_secret(
    secret: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every form once, with a command and by a way that change from form to form."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.zip").write_bytes(b"PK")
    logging.getLogger("autotune").setLevel(logging.DEBUG)
    chance = random.Random(secret)
    for url, command in zip(forms(secret), itertools.cycle(COMMANDS), strict=False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if chance.random() < 0.5 and "\0" not in url:
                monkeypatch.setenv("AUTOTUNE_DB", url)
                code = app.main([*command])
            else:
                monkeypatch.delenv("AUTOTUNE_DB", raising=False)
                code = app.main([*command, "--db", url])
        out, err = capfd.readouterr()
        assert code == 2, (url, out, err)
        assert err.count("\n") == 1, err
        given = [p for p in parts(secret) if p in out + err]
        assert not given, (url, command, err)
    assert {p.name for p in tmp_path.iterdir()} == {"x.zip"}


@pytest.mark.parametrize("secret", SECRETS[:4], ids=range(4))
def test_deployments_log_no_secret(
    secret: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.DEBUG)
    for url in forms(secret):
        try:
            assert deployment().store(url) is None
            assert deployment().record_misses([(workload(), "why")], "cpu", url, identity=GPU) == 0
            with contextlib.suppress(UserError):
                Store.attach(str(tmp_path / "x.db"), url)
        finally:
            use(Deployment())
    given = [p for p in parts(secret) if p in caplog.text]
    assert not given, caplog.text[:2000]


def test_tracebacks_of_a_program_tell_no_secret() -> None:
    """A user's own log of an uncaught error."""
    for url in forms("hunter2x"):
        with pytest.raises(UserError) as e:
            Store.open(url)
        told = io.StringIO()
        traceback.print_exception(e.value, file=told)
        lines = [line for line in told.getvalue().splitlines() if "hunter2x" in line]
        assert not lines, (url, lines)


def test_rows_snapshots_and_dumps_hold_no_secret(postgres_url: str, tmp_path: Path) -> None:
    """A password that is not used must not be stored either."""
    secret = "hunter2x"
    url = postgres_url.replace("autotune@", f"autotune:{secret}@")
    assert secret in url
    with Store.open(url) as store:
        run = store.start_run("autotune search fusion layer_norm")
        key = put_key(store)
        store.put_schedule(schedule(key))
        store.add_measurement(Measurement(key, {"a": 1}, Status.OK, latency_us=1.0))
        store.finish_run(run.id, summary={"database": store.name})
        assert secret not in store.name + repr(store) + str(store.stats())
        export_snapshot(store, tmp_path / "s.atdb", programs=True)
        with Store.open(tmp_path / "copy.db") as copy:
            assert secret not in repr(merge(copy, store))
    dump = "\n".join(sqlite3.connect(tmp_path / "copy.db").iterdump())
    assert "autotune search fusion" in dump
    assert secret not in dump
    assert secret.encode() not in (tmp_path / "s.atdb").read_bytes()


def test_a_service_file_is_read_and_its_name_told(
    postgres_server: str, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    name = postgres_url.split("@/")[1].split("?")[0]
    (tmp_path / "services").write_text(
        f"[tuned]\nhost={postgres_server}\nuser=autotune\ndbname={name}\npassword=hunter2x\n"
    )
    monkeypatch.setenv("PGSERVICEFILE", os.fspath(tmp_path / "services"))
    assert app.main(["db", "upgrade", "--db", "postgresql://?service=tuned"]) == 0
    assert app.main(["db", "stats", "--db", "postgresql://?service=tuned"]) == 0
    assert app.main(["db", "stats", "--db", "postgresql://?service=other"]) == 2
    out, err = capfd.readouterr()
    assert "service=tuned" in out
    assert "service=other" in err
    assert "hunter2x" not in out + err
