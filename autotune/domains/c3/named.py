"""Named scenarios, from a TOML file in the format of ``benchmarks/c3_scenarios.toml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.domains.c3.scenario import COLLECTIVES, Compute, Gemm, Program, Scenario, parse_bytes, parse_gemm
from autotune.errors import UserError
from autotune.files import read_toml, resource_dir
from autotune.words import closest

CLASSES = ("compute", "equal", "communication")
"""The side that was expected to take longer when the list was made."""
VERSION = 1

_KEYS = ("gemm", "compute", "inputs", "bytes", "dtype", "layout")


@dataclass(frozen=True)
class Entry:
    """A named scenario without a number of ranks.

    Attributes:
        expected: one of :data:`CLASSES`.
        dtype: dtype of the collective and of the GEMM; "" selects it by device.
    """

    name: str
    collective: str
    expected: str
    compute: Compute
    nbytes: int
    dtype: str = ""

    @property
    def label(self) -> str:
        size = f"{self.nbytes / 2**20:g} MiB"
        extents = self.compute.label
        if isinstance(self.compute, Gemm):
            extents = f"{self.compute.m}x{self.compute.n}x{self.compute.k}"
        return f"{extents} beside {self.collective} of {size}"

    def scenario(self, ranks: int, dtype: str) -> Scenario:
        """The scenario on ``ranks`` ranks, with ``dtype`` for both parts.

        Raises:
            UserError: its bytes are not divisible among that many ranks.
        """
        compute = replace(self.compute, dtype=dtype) if isinstance(self.compute, Gemm) else self.compute
        try:
            return Scenario(compute, self.collective, self.nbytes, ranks, dtype)
        except UserError as error:
            raise UserError(f"{self.name}: {error}") from None


def load(file: str | Path | None = None) -> dict[str, Entry]:
    """The scenarios of ``file`` by name, in file order; None for the project's own list.

    Raises:
        UserError: the file cannot be read or has an invalid format; a one-line message with the location.
    """
    path = resource_dir("benchmarks") / "c3_scenarios.toml" if file is None else Path(file).expanduser()
    data = read_toml(path, "file of scenarios")
    if data.pop("version", VERSION) != VERSION:
        raise UserError(f"{path}: this autotune reads version {VERSION}")
    dtype = data.pop("dtype", "")
    found: dict[str, Entry] = {}
    for collective, classes in data.items():
        if collective not in COLLECTIVES or not isinstance(classes, dict):
            raise UserError(f"{path}: [{collective}] is not a collective: use {', '.join(COLLECTIVES)}")
        for expected, entries in classes.items():
            if expected not in CLASSES or not isinstance(entries, dict):
                raise UserError(f"{path}: [{collective}.{expected}] is not a class: use {', '.join(CLASSES)}")
            for name, entry in entries.items():
                if name in found:
                    raise UserError(f"{path}: {name} is defined more than once")
                found[name] = _entry(f"{path}: {name}", name, collective, expected, entry, dtype)
    if not found:
        raise UserError(f"{path}: the file has no scenarios")
    return found


def find(name: str) -> Entry:
    """A scenario of the project's own list; raises UserError."""
    entries = load()
    if name not in entries:
        raise UserError(f"unknown scenario {name!r}; {hint(name, entries)}")
    return entries[name]


def hint(name: str, entries: Mapping[str, Entry]) -> str:
    """A scenario with a similar name, or the command that lists all."""
    return closest(name, entries) or "`python -m benchmarks.c3 --list` lists them"


def _entry(where: str, name: str, collective: str, expected: str, entry: object, dtype: object) -> Entry:
    if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
        raise UserError(f'{where}: write {name} = {{ gemm = "MxNxK", bytes = "512MiB" }}')
    for key in entry:
        if key not in _KEYS:
            raise UserError(f"{where}: unknown key {key!r}: use {', '.join(_KEYS)}")
    if ("gemm" in entry) == ("compute" in entry) or "bytes" not in entry:
        raise UserError(f"{where}: a scenario needs bytes, and either gemm or compute")
    kind = str(entry.get("dtype", dtype))
    try:
        if "gemm" in entry:
            compute: Compute = parse_gemm(entry["gemm"], kind or "bf16", entry.get("layout", "nn"))
        else:
            compute = Program(entry["compute"], entry.get("inputs", ""))
        found = Entry(name, collective, expected, compute, parse_bytes(entry["bytes"]), kind)
        Scenario(compute, collective, found.nbytes, 2, kind or "bf16")  # raises on errors for any number of ranks
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return found
