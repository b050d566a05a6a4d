"""The form of a result file: writing, reading and validation.

A result file is one JSON object as measured on one machine, kept under ``benchmarks/results/<device>/``:

============  ========================================================================================================
``device``    the model and its size, such as ``NVIDIA H200 (132 SMs, 140 GiB)``
``versions``  package or driver name to version; at least ``python`` and ``torch``
``commit``    the measured commit, hexadecimal; with ``-dirty`` if files other than results were
                            changed. An installed package has no commit and writes its version, such as ``v0.1.0``
``command``   the command that makes the file again
``when``      ISO 8601 with a time zone
``cases``     a list of objects, one a case, names unique; empty only if ``failed`` has the reason
============  ========================================================================================================

A case has ``name``, ``bytes`` (in and out of a perfect implementation) and times in microseconds: ``floor_us``
(``bytes`` over the copy bandwidth measured in the same run), ``eager_us``, ``inductor_us``, ``inductor_best_us``,
``xla_us`` (these null where not run) and ``autotune_us``. More fields may follow, of the file and of a case; a case's
that ends in ``_us`` is a time or null. Files whose ``suite`` is "c3" have cases of their own:
:mod:`benchmarks.c3.case`. Of cases of further suites only names and times are checked.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from autotune.errors import UserError, requoted_command
from autotune.files import commit
from benchmarks.c3.case import c3_problems, is_positive

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

ALWAYS = ("floor_us", "autotune_us")
"""Times a case cannot do without."""
WHERE_RUN = ("eager_us", "inductor_us", "inductor_best_us", "xla_us")
"""Times that must be there and are null where the peer was not run."""
COMMIT = re.compile(r"[0-9a-f]{7,40}(-dirty)?|v\d+(\.\w+)+")
"""What ``commit`` may be."""


def problems(data: object) -> list[str]:
    """Faults of a result file's content, a line each; empty if it is of the form."""
    if not isinstance(data, Mapping):
        return ["it is not one JSON object"]
    found = [
        f"{key} is missing" for key in ("device", "versions", "commit", "command", "when", "cases") if key not in data
    ]
    if found:
        return found
    for key in ("device", "command"):
        if not _text(data[key]):
            found.append(f"{key} is not a text")
    versions = data["versions"]
    if not isinstance(versions, Mapping) or not all(_text(v) for v in versions.values()):
        found.append("versions does not map names to versions")
    else:
        found += [f"versions lacks {name}" for name in ("python", "torch") if name not in versions]
    if not COMMIT.fullmatch(str(data["commit"])):
        found.append("commit is neither a commit's hexadecimal name nor a version")
    if not _is_time(data["when"]):
        found.append("when is not an ISO 8601 time with a time zone")
    cases = data["cases"]
    if not isinstance(cases, list) or not (cases or data.get("failed")):
        return [*found, "cases is not a list with a case in it"]
    checks: Mapping[object, Callable[[object], list[str]]] = {
        None: _case_problems,
        "fusion": _case_problems,
        "c3": c3_problems,
    }
    check = checks.get(data.get("suite"), _named_problems)
    for number, case in enumerate(cases):
        found += [f"case {number}: {fault}" for fault in check(case)]
    names = [case.get("name") for case in cases if isinstance(case, Mapping)]
    found += [f"case {name!r} is there more than once" for name in dict.fromkeys(names) if names.count(name) > 1]
    return found


def _case_problems(case: object) -> list[str]:
    if not isinstance(case, Mapping):
        return ["it is not an object"]
    wanted = ("name", "bytes", *ALWAYS, *WHERE_RUN)
    found = [f"{key} is missing" for key in wanted if key not in case]
    if "name" in case and not _text(case["name"]):
        found.append("name is not a text")
    if "bytes" in case and (type(case["bytes"]) is not int or case["bytes"] <= 0):
        found.append("bytes is not a whole number above 0")
    for key, value in case.items():
        if key.endswith("_us") and not is_positive(value) and (value is not None or key in ALWAYS):
            found.append(f"{key} is not a time above 0")
    return found


def _named_problems(case: object) -> list[str]:
    if not isinstance(case, Mapping) or not _text(case.get("name")):
        return ["it is not an object with a name"]
    times = {k: v for k, v in case.items() if k.endswith(("_us", "_ms")) or k == "ms"}
    return [
        f"{key} is not a time above 0" for key, value in times.items() if value is not None and not is_positive(value)
    ]


def _text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_time(value: object) -> bool:
    try:
        return datetime.fromisoformat(str(value)).tzinfo is not None
    except ValueError:
        return False


def read(path: Path) -> dict[str, Any]:
    """The content of a result file.

    Raises:
        ValueError: it is not JSON or not of the form; the message names the file and every fault.
    """
    try:
        data = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if found := problems(data):
        raise ValueError(f"{path}: {'; '.join(found)}")
    return dict(data)


def write(
    path: Path,
    device: str,
    cases: Sequence[Mapping[str, Any]],
    versions: Mapping[str, str] | None = None,
    *,
    command: str = "",
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write a result file for the program that is running; commit and time are filled in. Readers never see half of it.

    Args:
        versions: more than the packages' own, such as ``{"cuda": "13.0", "driver": "580.159"}``.
        command: how to make the file again; the running program's own command line if empty.
        extra: more fields of the file.

    Returns:
        What was written.

    Raises:
        ValueError: the result would not be of the form.
    """
    packages = ("torch", "triton", "numba", "numba-cuda", "numpy", "jax", "transformers", "timm", "liger-kernel")
    data = {
        "device": device,
        "versions": {"python": platform.python_version(), **_installed(packages), **(versions or {})},
        "commit": commit(),
        "command": command or _command(),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        **(extra or {}),
        "cases": list(cases),
    }
    if found := problems(data):
        raise ValueError(f"{path}: {'; '.join(found)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    partial.write_text(json.dumps(data, indent=2, allow_nan=False) + "\n")
    partial.replace(path)
    return data


def _installed(names: Sequence[str]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _command() -> str:
    module = sys.modules["__main__"].__spec__
    program = ["python", "-m", module.name] if module else ["python", sys.argv[0]]
    return shlex.join([*program, *sys.argv[1:]])


def check_commit() -> None:
    """Find out before anything is measured whether the result will say what was measured.

    Raises:
        UserError: the commit is unknown.
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


def measured_by(data: Mapping[str, Any]) -> str:
    """The command of a result file as Markdown, with its present name where 0.3.0 renamed it."""
    command = requoted_command(data["command"])
    renamed = re.match(r"autotune bench (fusion|c3)\b", command)
    return f"`{command}`" + (f" (since 0.3.0: `python -m benchmarks.{renamed[1]}`)" if renamed else "")
