"""Help texts fit a terminal of 80 columns, and all messages use plain words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import autotune
from autotune.cli import app
from autotune.cli.options import every_domain

UNCLEAR = re.compile(
    r"\b(tells?|told|knows?|says?|said|stands?|lies?|lying|anew|beside|besides|otherwise than|in vain)\b", re.I
)
"""Words of another language's order, and acts of people that no program does."""


def helps(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The help of every command, and of the commands of each domain."""
    each = [["db", name] for name in ("export", "import", "forget", "merge", "prune", "stats", "upgrade", "verify")]
    each += [[name] for name in re.findall(r"^ {4}(\w+)", app.build_parser().format_help(), re.M)]
    each += [[name, domain] for name in ("search", "lookup") for domain in every_domain()]
    found = {"": app.build_parser().format_help()}
    for words in each:
        with pytest.raises(SystemExit) as ended:
            app.main([*words, "--help"])
        assert ended.value.code == 0
        found[" ".join(words)] = capsys.readouterr().out
    return found


def test_help_texts_fit_and_are_plain(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = helps(capsys)
    assert len(found) > 25
    assert [(name, line) for name, text in found.items() for line in text.splitlines() if len(line) > 80] == []
    assert {name: words for name, text in found.items() if (words := UNCLEAR.findall(text))} == {}


CALLS = {"UserError", "Unsupported", "Damaged", "BuildError", "ArgumentTypeError", "print", "warn", "warning"} | {
    "warn_once", "say", "tell", "Step", "Match"
}  # fmt: skip
"""Functions and classes whose literal arguments a user reads."""


def messages(path: Path) -> Iterator[str]:
    """The literal texts of a module's messages."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        if (node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")) in CALLS:
            for part in (found for argument in node.args for found in ast.walk(argument)):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value


def test_messages_are_plain() -> None:
    found = {path: list(messages(path)) for path in sorted(Path(autotune.__file__).parent.rglob("*.py"))}
    assert sum(map(len, found.values())) > 1000
    assert {(str(path), text) for path, texts in found.items() for text in texts if UNCLEAR.search(text)} == set()
