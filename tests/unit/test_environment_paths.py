"""Paths in the environment are those of the folder in which autotune was imported."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import autotune


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tuned.db", "{here}/tuned.db"),
        ("./runs/../tuned.db", "{here}/tuned.db"),
        ("sqlite:///tuned.db", "sqlite:///{here}/tuned.db"),
        ("sqlite:////data/tuned.db", "sqlite:////data/tuned.db"),
        ("/data/tuned.db", "/data/tuned.db"),
        ("~/tuned.db", "~/tuned.db"),
        ("package:h200", "package:h200"),
        ("postgresql://user@host/name", "postgresql://user@host/name"),
        (":memory:", ":memory:"),
        (" ", " "),
    ],
)
@pytest.mark.parametrize("name", ["AUTOTUNE_DB", "AUTOTUNE_DB_READ", "AUTOTUNE_KEY", "AUTOTUNE_CACHE_DIR"])
def test_relative_paths_become_absolute(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, text: str, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(name, text)
    autotune._make_paths_absolute()
    assert os.environ[name] == expected.format(here=tmp_path)


def test_a_removed_working_directory_leaves_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    monkeypatch.setenv("AUTOTUNE_DB", "tuned.db")
    gone.rmdir()
    autotune._make_paths_absolute()
    assert os.environ["AUTOTUNE_DB"] == "tuned.db"
