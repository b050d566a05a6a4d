"""The form of result files, as :mod:`autotune.bench.form` has it, where the committed ones lie, and runs that go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autotune.bench.form import ALWAYS, COMMIT, WHERE_RUN, commit, problems, read, write
from autotune.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def check_commit() -> None:
    """Find out before anything is measured whether the result will say what was measured.

    Raises:
        UserError: nothing tells the commit.
    """
    if not COMMIT.fullmatch(commit()):
        raise UserError(f"nothing tells which commit this is: make {ROOT} a git checkout or write it to {ROOT}/COMMIT")


def finished(path: Path, **own: object) -> dict[str, dict[str, Any]]:
    """The cases, by name, of a result file that a run goes on with; empty where there is none.

    Args:
        own: fields of the file that the run has too, ``device`` among them.

    Raises:
        UserError: it cannot be read, or is of another run.
    """
    if not path.exists():
        return {}
    try:
        data = read(path)
    except ValueError as error:
        raise UserError(f"--resume: {error}") from None
    if any(data.get(name) != value for name, value in own.items()):
        rest = ", ".join(f"{name} {data.get(name)}" for name in own if name != "device")
        raise UserError(f"--resume: {path} is of {data['device']}, {rest}; name another --out")
    return {case["name"]: case for case in data["cases"]}


__all__ = ["ALWAYS", "RESULTS", "ROOT", "WHERE_RUN", "check_commit", "commit", "finished", "problems", "read", "write"]
