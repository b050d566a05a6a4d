"""Installation of the system's packages by ``make test-all``, and its message without permission."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support import programs


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The commands that root would have run, on a system with apt where one of two programs is missing."""
    run: list[str] = []

    def failure(words: Sequence[str]) -> str:
        run.append(" ".join(words))
        return ""

    monkeypatch.setattr(programs, "_failure", failure)
    monkeypatch.setattr(programs.os, "geteuid", lambda: 0)
    monkeypatch.setattr(programs.shutil, "which", lambda name: f"/usr/bin/{name}")
    table = {
        "a browser": (lambda: not any("browser" in c for c in run), ("browser", "driver")),
        "g++": (lambda: False, ("g++",)),
    }
    monkeypatch.setattr(programs, "PROGRAMS", table)
    return run


def test_missing_programs_are_installed(commands: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert programs.main() == 0
    update, install = commands
    assert update.endswith(" update")
    assert install.endswith(" install -y --no-install-recommends browser driver")
    assert capsys.readouterr().err == ""
    assert programs.main() == 0
    assert len(commands) == 2, "what is there is not installed again"


@pytest.mark.parametrize(("here", "user", "said"), [
    ((), 0, "there is no apt-get"),
    (("apt-get",), 1000, "that needs the rights of root"),
])  # fmt: skip
def test_where_nothing_may_be_installed_the_packages_are_named(
    here: Sequence[str], user: int, said: str, commands: list[str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(programs.shutil, "which", lambda name: name if name in here else None)
    monkeypatch.setattr(programs.os, "geteuid", lambda: user)
    assert programs.main() == 0
    assert commands == []
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"a browser cannot be installed, and tests of it are skipped ({said}")
    assert line.endswith("browser driver")


def test_a_package_that_cannot_be_had(
    commands: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(programs, "_failure", lambda words: "no such package" if "install" in words else "")
    assert programs.main() == 0
    assert "(no such package)" in capsys.readouterr().err
