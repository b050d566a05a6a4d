"""Creating and upgrading tables: many processes at once, with Optuna's tables, and in step with the models."""

from __future__ import annotations

import hashlib
import logging
import subprocess
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from autotune.cli import app
from autotune.errors import UserError
from autotune.runtime.deployment import Deployment, deployment, use
from autotune.store import Effort, Store
from autotune.store.connection import migrate
from autotune.store.connection.engine import create_engine
from autotune.store.connection.urls import parse_url
from autotune.store.models import SCHEMA_REVISION, TABLE_PREFIX, VERSION_TABLE, Base
from tests.process.store.test_schedules import schedule
from tests.support import ROOT
from tests.support.rows import put_key

pytestmark = pytest.mark.usefixtures("migrated_anew")


def test_upgrade_and_current(url: str) -> None:
    assert migrate.current(url) is None
    assert migrate.upgrade(url) == SCHEMA_REVISION
    assert migrate.current(url) == SCHEMA_REVISION
    assert migrate.upgrade(url) == SCHEMA_REVISION  # again: nothing to do


def test_current_creates_no_file(tmp_path: Path) -> None:
    assert migrate.current(tmp_path / "none.db") is None
    assert list(tmp_path.iterdir()) == []


def test_schema_revision_is_the_newest_migration() -> None:
    assert migrate.head() == SCHEMA_REVISION


RELEASED = {
    "0001_first_tables.py": "7f1351d92e377d1cacb07bb7c916756fb610deb61df2c8dc26961d6fe660022a",
    "0002_one_form.py": "eb8d900e787aa5efecc6edb0a215cd9cf49a0297d9916d805430f0c9700e4e5f",
    "0003_verdicts.py": "d99e491a1c00d25dfad2a973d7aef0a4052a5d8bc20acb2cfe340c9c0fae1272",
    "0004_metrics.py": "3e845c06ae067e7426bd0ebda5d0409da15cc28ede10199ec2a468312e6d7af0",
    "0005_savings.py": "564901a4b74b0a5fba7602e592bcf646d9ab354d2cf74f6487606d572c7eaa55",
}


def test_released_revisions_never_change() -> None:
    """A database notes that a revision was applied, not its text: a change needs a new revision."""
    found = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in (ROOT / "db" / "versions").glob("*.py")}
    assert found == RELEASED


FORMS = {
    "others": ["ALTER TABLE autotune_schedules DROP COLUMN others", "ALTER TABLE autotune_schedules DROP COLUMN space",
               "DROP TABLE autotune_efforts", "DROP TABLE autotune_calibrations"],
    "space": ["ALTER TABLE autotune_schedules DROP COLUMN space", "DROP TABLE autotune_efforts",
              "DROP TABLE autotune_calibrations"],
    "efforts": ["DROP TABLE autotune_efforts", "DROP TABLE autotune_calibrations"],
    "last": [],
}  # fmt: skip
"""What each form of revision 0001 lacked of the last one, by the first thing that it lacked."""


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_first_revision_is_upgraded(url: str, form: str) -> None:
    from alembic import command

    parsed = parse_url(url)
    engine = create_engine(parsed)
    with engine.execution_options(autotune_write=True).begin() as c:
        config = migrate._config()
        config.attributes["connection"] = c
        command.upgrade(config, "0001")
    with engine.begin() as c:
        for statement in (
            "INSERT INTO autotune_workloads VALUES ('w', 'fusion', '{}', 'f', 1, 'label', '{}', 1.0)",
            "INSERT INTO autotune_devices VALUES ('d', 'cuda', 'name', '{}', 1.0)",
            "INSERT INTO autotune_environments VALUES ('e', 'l', '{}', 1.0)",
            "INSERT INTO autotune_schedules VALUES ('w', 'd', 'e', 'p', NULL, NULL, 2, '{}', 'x', 'f', 1, 0.5, 's', 3)",
            *FORMS[form],
        ):
            c.execute(sa.text(statement))
    with pytest.raises(UserError, match="autotune db upgrade"):
        Store.open(url, migrate=False)
    assert migrate.upgrade(url) == SCHEMA_REVISION
    with engine.connect() as c:
        context = MigrationContext.configure(c, opts={"version_table": VERSION_TABLE, "include_name": _ours})
        assert compare_metadata(context, Base.metadata) == []
        row = c.execute(sa.text("SELECT latency_us, others, space FROM autotune_schedules")).one()
    assert tuple(row) == (2.0, None if form == "others" else 0.5, "s" if form in ("efforts", "last") else "")
    with engine.begin() as c, pytest.raises(sa.exc.IntegrityError):
        c.execute(sa.text("UPDATE autotune_schedules SET space = NULL"))
    engine.dispose()
    with Store.open(url, migrate=False) as store:
        key = put_key(store)
        store.add_effort(Effort(key, "s", 1.0, 2.0, True))
        assert store.put_schedule(schedule(key))


def _ours(name: str | None, kind: str, parents: object) -> bool:
    return kind != "table" or (name or "").startswith(TABLE_PREFIX)


def test_migrations_make_the_tables_of_the_models(url: str) -> None:
    migrate.upgrade(url)
    engine = create_engine(parse_url(url))
    with engine.connect() as c:
        options = {"version_table": VERSION_TABLE, "include_name": _ours}
        context = MigrationContext.configure(c, opts=options)
        assert compare_metadata(context, Base.metadata) == []
        # The comparison can fail: a table the models do not have is found.
        c.execute(sa.text("CREATE TABLE autotune_extra (id INTEGER PRIMARY KEY)"))
        found = compare_metadata(context, Base.metadata)
        assert [f[0] for f in found] == ["remove_table"]
    engine.dispose()


def test_downgrade_leaves_other_tables(url: str) -> None:
    from alembic import command

    optuna.storages.RDBStorage(_optuna(url)).engine.dispose()
    migrate.upgrade(url)
    engine = create_engine(parse_url(url))
    with engine.execution_options(autotune_write=True).begin() as c:
        config = migrate._config()
        config.attributes["connection"] = c
        command.downgrade(config, "base")
    tables = set(sa.inspect(engine).get_table_names())
    engine.dispose()
    assert {t for t in tables if t.startswith(TABLE_PREFIX)} == {VERSION_TABLE}
    assert {"studies", "trials", "alembic_version"} <= tables


def test_alembic_command_in_a_checkout_finds_no_difference(
    sqlite_file: Path, spawn: Callable[..., subprocess.Popen[str]]
) -> None:
    code = "import sys; from alembic.config import main; main(argv=sys.argv[1:])"
    ini = ["-c", str(ROOT / "alembic.ini"), "-x", f"db={sqlite_file}"]
    for command in (["upgrade", "head"], ["check"]):
        process = spawn(code, *ini, *command)
        out, error = process.communicate(timeout=550)
        assert process.returncode == 0, out + error


def _optuna(url: str) -> str:
    """The URL for Optuna, without opening the store: it may have to come second."""
    return parse_url(url).render_as_string(hide_password=False)


@pytest.mark.parametrize("first", ["autotune", "optuna"])
def test_optuna_shares_the_database_in_either_order(url: str, first: str) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)

    def study() -> optuna.Study:
        return optuna.create_study(storage=_optuna(url), study_name="s", load_if_exists=True)

    if first == "optuna":
        study()
    with Store.open(url) as store:
        s = study()
        s.optimize(lambda t: t.suggest_float("x", 0, 1), n_trials=2)
        assert len(study().trials) == 2
        assert store.stats()["rows"]["autotune_workloads"] == 0
    assert migrate.upgrade(url) == SCHEMA_REVISION
    assert len(study().trials) == 2
    tables = set(sa.inspect(create_engine(parse_url(url))).get_table_names())
    assert {"alembic_version", VERSION_TABLE, "studies", "autotune_measurements"} <= tables


OPEN = """
import sys, time, os, pathlib
import alembic.command
from autotune.store import Effort, Store
from autotune.store.connection import migrate
flags = pathlib.Path(sys.argv[2]); (flags / str(os.getpid())).touch()
while len(list(flags.iterdir())) < int(sys.argv[3]): time.sleep(0.005)
with Store.open(sys.argv[1]) as store: print(store.stats()["revision"])
"""


def test_eight_processes_start_on_one_empty_database(
    url: str, tmp_path: Path, spawn: Callable[..., subprocess.Popen[str]]
) -> None:
    flags = tmp_path / "ready"
    flags.mkdir()
    processes = [spawn(OPEN, url, str(flags), "8") for _ in range(8)]
    for process in processes:
        out, error = process.communicate(timeout=550)
        assert (process.returncode, out.strip()) == (0, SCHEMA_REVISION), error
    engine = create_engine(parse_url(url))
    with engine.connect() as c:
        assert c.execute(sa.text(f"SELECT version_num FROM {VERSION_TABLE}")).all() == [(SCHEMA_REVISION,)]
    engine.dispose()


def test_a_database_of_a_newer_version_is_refused(url: str) -> None:
    migrate.upgrade(url)
    engine = create_engine(parse_url(url))
    with engine.begin() as c:
        c.execute(sa.text(f"UPDATE {VERSION_TABLE} SET version_num = '9999'"))
    engine.dispose()
    for options in ({}, {"migrate": False}, {"readonly": True}):
        with pytest.raises(UserError, match=r"newer (than revision|autotune)") as e:
            Store.open(url, **options)
        assert "\n" not in str(e.value)


def test_without_migrating_tables_must_exist(url: str) -> None:
    if url.startswith("sqlite"):
        Path(url.removeprefix("sqlite:///")).touch()
    with pytest.raises(UserError, match="autotune db upgrade"):
        Store.open(url, migrate=False)


def test_a_deployment_from_an_earlier_revision_names_the_command(
    sqlite_file: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    url = str(sqlite_file)
    migrate.upgrade(url)
    engine = create_engine(parse_url(url))
    with engine.execution_options(autotune_write=True).begin() as c:
        c.execute(sa.text(f"UPDATE {VERSION_TABLE} SET version_num = '0001'"))
    engine.dispose()
    try:
        with caplog.at_level(logging.WARNING, logger="autotune"):
            assert deployment().store(url) is None
            assert deployment().store(url) is None
            assert deployment().state(url) == b"none"
    finally:
        use(Deployment())
    (warned,) = [r.getMessage() for r in caplog.records if r.name == "autotune"]
    assert f"at revision 0001, not {SCHEMA_REVISION}: run `autotune db upgrade --db {url}`" in warned
    assert app.main(["show", "--db", url]) == 2
    assert f"run `autotune db upgrade --db {url}`" in capsys.readouterr().err
