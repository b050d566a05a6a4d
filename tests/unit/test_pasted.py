"""Commands that are printed to be pasted: a shell takes each word as the one word that it was."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest
import sqlalchemy as sa

from autotune.domains.c3.cli import check_program
from autotune.domains.c3.scenario import Program, Scenario
from autotune.errors import UserError, quoted_command, requoted_command, safe_line
from autotune.report.database import pages
from autotune.store import Store, Verdict
from autotune.store.connection.faults import reason
from autotune.store.snapshot_form import opened
from autotune.workload import Workload
from tests.support.rows import put_key

EVIL = (
    "$(touch X):f", "`touch X`", "a;touch X", "a\ntouch X", "'$(touch X)'", '"$(touch X)"', "a b", "-x", "", "*", "~",
    "password='$(touch X)", "a:'@;touch X;'", "\x1b[2Jx", "\udce9", "\u202egnp", "pwd=\"$(touch X)", "pwd='",
    "token = '`touch X`",
)  # fmt: skip


def run(line: str, folder: Path) -> list[str]:
    """The words that a shell makes of a line, whose first word is a program."""
    argv = subprocess.run(
        ["bash", "-c", f"autotune() {{ printf '%s\\0' autotune \"$@\"; }}\n{line}"],
        cwd=folder, capture_output=True, check=True,
    ).stdout.decode().split("\0")[:-1]  # fmt: skip
    assert list(folder.iterdir()) == []
    return argv


@pytest.mark.parametrize("word", EVIL)
def test_a_word_stays_one_word_or_is_left_out(word: str, tmp_path: Path) -> None:
    line = safe_line(f"search it by hand: {quoted_command('autotune', 'search', word, '--inputs', 'm:f')}").partition(
        ": "
    )[2]
    assert run(line, tmp_path) in (["autotune", "search", kept, "--inputs", "m:f"] for kept in (word, "..."))


def test_masked_commands_stay_quoted_for_a_shell(tmp_path: Path) -> None:
    chance = random.Random(0)
    alphabet = ["'", '"', "$(touch X)", ":", "@", "=", " ", "password", "token", "secret=", "\\", "`touch X`", ";", "&"]
    words = [["".join(chance.choices(alphabet, k=chance.randrange(1, 9))) for _ in "ab"] for _ in range(2000)]
    lines = [safe_line(quoted_command("autotune", *pair)) for pair in words]
    assert sum("***" in line for line in lines) > 20, "words that become a password together"
    run("\n".join(lines), tmp_path)


def command_in(text: str) -> str:
    """The command between backticks in an error's line; "" where a password ends in its place."""
    shown = safe_line(text)
    return "autotune " + shown.rpartition("`autotune ")[2].rpartition("`")[0] if "`autotune " in shown else ""


@pytest.mark.parametrize("word", EVIL)
def test_every_command_with_something_foreign_in_it_is_quoted(word: str, tmp_path: Path) -> None:
    scenario = Scenario(Program(word, ()), "all_gather", 1 << 20, 2, "f32")
    with pytest.raises(UserError) as by_hand:
        check_program(scenario)
    assert len(run(safe_line(by_hand.value).partition("yours, run: ")[2], tmp_path)) == 15
    with pytest.raises(UserError) as no_snapshot:
        opened(Path("nowhere") / f"{word}.atdb")
    no_tables = reason(sa.URL.create("sqlite", database=word), Exception("no such table: x"))
    for text, words in ((str(no_snapshot.value), 3), (no_tables, 5)):
        command = command_in(text)
        assert len(run(command, tmp_path)) in ((words,) if command else (0,))
        assert command or any(f"={quote}" in word.replace(" ", "") for quote in "'\""), "it reads as a password"


def test_a_stored_command_is_quoted_again(tmp_path: Path) -> None:
    with Store.open(tmp_path / "t.db") as store:
        key = put_key(store, Workload("fusion", {}))
        record = {"target": "m:f", "command": "autotune search fusion m:f; touch X $(touch X)"}
        store.put_verdicts([Verdict("a" * 64, key.device, key.environment, "default", (), record)])
        (page,) = (page for page in pages(store) if page.kind == "model")
    line = dict(page.facts)["command"]
    (tmp_path / "empty").mkdir()
    assert run(line, tmp_path / "empty") == ["autotune", "search", "fusion", "m:f;", "touch", "X", "$(touch", "X)"]
    assert requoted_command("rm -rf /") == "'rm -rf /'"
    assert requoted_command("autotune search 'a") == "'autotune search '\"'\"'a'"
    assert requoted_command("autotune search fusion 'a b'") == "autotune search fusion 'a b'"
