"""``python -m tests.support.programs``: install the programs that tests start and no Python package brings.

They come from the packages of Debian or a distribution that is made like it, and need the rights of root. Where that
is not possible, the command prints what to install, and the tests that need it are skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence

from tests.support import chromium, postgres


def _no_browser() -> bool:
    return "chrom" in chromium.missing()


PROGRAMS: dict[str, tuple[Callable[[], bool], tuple[str, ...]]] = {
    "Chromium and its driver": (_no_browser, ("chromium", "chromium-driver")),
    "PostgreSQL's server": (lambda: postgres.binaries() is None, ("postgresql",)),
    "a C++ compiler": (lambda: shutil.which("g++") is None, ("g++",)),
}
"""For each program: a function that returns True if it is missing, and its packages."""


def obstacle() -> str:
    """Why packages cannot be installed here, or ""."""
    if shutil.which("apt-get") is None:
        return "there is no apt-get"
    if os.geteuid() != 0 and (shutil.which("sudo") is None or _failure(["sudo", "-n", "true"])):
        return "that needs the rights of root, or sudo without a password"
    return ""


def _failure(words: Sequence[str]) -> str:
    """Run a command; why it failed, or ""."""
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return f"{' '.join(words)}: {done.stdout.strip()[-500:] or done.returncode}" if done.returncode else ""


def install(packages: Sequence[str]) -> str:
    """Install packages; why that failed, or ""."""
    root = () if os.geteuid() == 0 else ("sudo", "-n")
    apt = [*root, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq", "-o", "Acquire::Retries=3"]
    return _failure([*apt, "update"]) or _failure([*apt, "install", "-y", "--no-install-recommends", *packages])


def main() -> int:
    why = obstacle()
    for name, (absent, packages) in PROGRAMS.items():
        if not absent():
            continue
        if not why:
            print(f"Installing {name} from the system's packages: {' '.join(packages)}", flush=True)
        failed = why or install(packages)
        if absent():
            print(f"{name} cannot be installed, and tests of it are skipped ({failed or 'the packages lack it'}). "
                  f"Packages of Debian: {' '.join(packages)}", file=sys.stderr)  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
