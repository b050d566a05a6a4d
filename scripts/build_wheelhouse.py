"""Collect the wheels that an offline GPU host lacks into one small folder.

A GPU host without a network usually has an image with PyTorch and the CUDA libraries, without the packages that
autotune adds. This downloads them: the dependencies of ``pyproject.toml`` (with the extra ``cuda-host``), followed
through the metadata of the installed packages and pinned to their versions, without PyTorch, its own dependencies
and NVIDIA's libraries. Run it where there is a network and an environment made by ``make venv``; see
docs/how-to/offline-gpu-host.md.

    python scripts/build_wheelhouse.py --python 3.12 --out .wheelhouse
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parent.parent
HOST_HAS = ("torch", "triton", "cuda-toolkit", "nvidia-")
"""Names (or, ending in a dash, prefixes) that a PyTorch CUDA image carries; hundreds of megabytes each."""


Known = tuple[str, list[str]]
"""A package's version, and its requirements."""


def installed(requirement: Requirement) -> Known:
    """Of a package that is installed here.

    Raises:
        SystemExit: it is not, so its version and dependencies are unknown.
    """
    name = requirement.name
    try:
        return metadata.version(name), metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        sys.exit(f"build_wheelhouse: {name} is not installed here; run `make venv` and use .venv/bin/python")


def installed_or_newest(requirement: Requirement) -> Known:
    """Of a package installed here, else of the newest that fits, as pip finds it; nothing is installed.

    Raises:
        SystemExit: pip finds none.
    """
    try:
        return metadata.version(requirement.name), metadata.requires(requirement.name) or []
    except metadata.PackageNotFoundError:
        pass
    wanted = f"{requirement.name}{requirement.specifier}"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"]
    answer = subprocess.run([*command, "--report", "-", wanted], capture_output=True, text=True, check=False)
    if answer.returncode:
        why = (answer.stderr.strip().splitlines() or ["no reason given"])[-1]
        sys.exit(f"build_wheelhouse: {wanted} is neither installed here nor found by pip: {why}")
    found = json.loads(answer.stdout)["install"][0]["metadata"]
    return found["version"], found.get("requires_dist", [])


def closure(
    requirements: list[str],
    python: str,
    left_out: tuple[str, ...] = HOST_HAS,
    known: Callable[[Requirement], Known] = installed,
) -> dict[str, str]:
    """Name to version of all that ``requirements`` need on Linux with ``python``, less ``left_out``.

    Args:
        known: version and requirements of a package.

    Raises:
        SystemExit: as of ``known``.
    """
    environment = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux",
                   "platform_system": "Linux", "platform_machine": "x86_64", "implementation_name": "cpython",
                   "platform_python_implementation": "CPython", "os_name": "posix"}  # fmt: skip

    def host_has(name: str) -> bool:
        return any(name == skip or (skip.endswith("-") and name.startswith(skip)) for skip in left_out)

    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    queue = [(Requirement(text), "") for text in requirements]
    while queue:
        requirement, extra = queue.pop()
        name = canonicalize_name(requirement.name)
        if host_has(name) or (requirement.marker and not requirement.marker.evaluate({**environment, "extra": extra})):
            continue
        fresh = [wanted for wanted in ("", *requirement.extras) if (name, wanted) not in seen]
        if fresh:
            seen.update((name, wanted) for wanted in fresh)
            found[name], needs = known(requirement)
            queue += [(Requirement(text), wanted) for wanted in fresh for text in needs]
    return found


def project_requirements() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["cuda-host"]]


def download(pins: dict[str, str], python: str, glibc: int, out: Path) -> None:
    """Fetch one x86-64 CPython wheel for each pin; pip matches a manylinux tag exactly, so every older one is named."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(glibc, 4, -1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(out),
    ]
    command += ["--python-version", python, "--implementation", "cp"]
    for abi in (f"cp{python.replace('.', '')}", "abi3", "none"):
        command += ["--abi", abi]
    for platform in platforms:
        command += ["--platform", platform]
    subprocess.run([*command, *(f"{name}=={version}" for name, version in sorted(pins.items()))], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default="3.12", help="the host's Python (default: %(default)s)")
    parser.add_argument(
        "--glibc", type=int, default=28, metavar="N", help="the host's glibc is 2.N or newer (default: 28)"
    )
    parser.add_argument("--out", type=Path, default=ROOT / ".wheelhouse", help="folder to fill (default: .wheelhouse)")
    about = "one more package and what it needs, such as liger-kernel; the newest where it is not installed here"
    parser.add_argument("--extra", action="append", default=[], metavar="PKG", help=about)
    about = "leave out a package that the host has in a version that fits (llvmlite alone is 57 MiB)"
    parser.add_argument("--host-has", action="append", default=[], metavar="PKG", help=about)
    parser.add_argument("--project", action="store_true", help="build autotune's own wheel into the folder as well")
    args = parser.parse_args()

    args.out.mkdir(parents=True, exist_ok=True)
    for old in args.out.glob("*.whl"):  # two versions of one package would stop the whole install
        old.unlink()
    left_out = (*HOST_HAS, *map(canonicalize_name, args.host_has))
    pins = closure(args.extra, args.python, left_out, installed_or_newest)
    pins |= closure(project_requirements(), args.python, left_out)
    download(pins, args.python, args.glibc, args.out)
    if args.project:
        build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(args.out), str(ROOT)]
        subprocess.run(build, check=True, stdout=subprocess.DEVNULL)

    wheels = sorted(args.out.glob("*.whl"))
    got = {parse_wheel_filename(wheel.name)[0] for wheel in wheels}
    if missing := set(pins) - got:
        sys.exit(f"build_wheelhouse: pip gave no wheel of {', '.join(sorted(missing))}")
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 2**20:8.2f} MiB  {wheel.name}")
    print(f"{sum(wheel.stat().st_size for wheel in wheels) / 2**20:8.2f} MiB  in {args.out}")
    print("On the host:")
    print(f"  python{args.python} -m pip install --no-index --no-deps --upgrade --target DIR {args.out.name}/*.whl")
    print("  export PYTHONPATH=DIR")
    return 0


if __name__ == "__main__":
    sys.exit(main())
