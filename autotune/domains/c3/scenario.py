"""The workload of C3: a computation that overlaps a collective, on a number of ranks.

All collectives use the same convention for sizes: ``nbytes`` is the size of the larger of a rank's two buffers. That is
the output of an all-gather, and the input of an all-to-all, a reduce-scatter or an all-reduce.

Named scenarios are read from a TOML file in the format of ``benchmarks/c3_scenarios.toml``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune.errors import UserError
from autotune.files import read_toml, resource_dir
from autotune.words import closest
from autotune.workload import Workload, digest

KIND = "c3"
COLLECTIVES = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")
ITEMSIZE = {"bf16": 2, "f16": 2, "f32": 4}
LAYOUTS = ("nn", "nt", "tn", "tt")
REDUCING = ("reduce_scatter", "all_reduce")
LONG = 1.15
"""A side is long if it takes more than this many times the other side's time (ConCCL, section 3)."""

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9,
          "k": 2**10, "m": 2**20, "g": 2**30}  # fmt: skip


@dataclass(frozen=True)
class Gemm:
    """``C[m, n] = A[m, k] @ B[k, n]``.

    ``layout`` has a letter for A and one for B: stored as named (n) or transposed (t), as in BLAS. "nt" is
    ``torch.nn.Linear``.
    """

    m: int
    n: int
    k: int
    dtype: str = "bf16"
    layout: str = "nn"

    @property
    def label(self) -> str:
        layout = "" if self.layout == "nn" else f" {self.layout}"
        return f"{self.m}x{self.n}x{self.k} {self.dtype}{layout}"

    @property
    def bytes_held(self) -> int:
        return (self.m * self.k + self.k * self.n + self.m * self.n) * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class Program:
    """A user's computation.

    ``name`` is a built-in fusion workload or "package.module:callable". ``inputs`` is a "package.module:callable" that
    makes its inputs (empty for a built-in workload).
    """

    name: str
    inputs: str = ""

    @property
    def label(self) -> str:
        return self.name


Compute = Gemm | Program


@dataclass(frozen=True)
class Scenario:
    """A computation that overlaps a collective.

    Attributes:
        collective: one of :data:`COLLECTIVES`.
        nbytes: bytes of the larger of a rank's two buffers; a multiple of ranks x itemsize, for all_reduce a multiple
            of the itemsize.
        dtype: dtype of the collective's elements: "bf16", "f16" or "f32".
        ranks: number of processes, one device each.
    """

    compute: Compute
    collective: str
    nbytes: int
    ranks: int
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        if self.collective not in COLLECTIVES:
            raise UserError(f"unknown collective {self.collective!r}: use {', '.join(COLLECTIVES)}")
        if self.dtype not in ITEMSIZE:
            raise UserError(f"unknown dtype {self.dtype!r}: use {', '.join(ITEMSIZE)}")
        if self.ranks < 2:
            raise UserError(f"a collective needs 2 ranks or more, not {self.ranks}")
        unit = ITEMSIZE[self.dtype] * (1 if self.collective == "all_reduce" else self.ranks)
        if self.nbytes < unit or self.nbytes % unit:
            raise UserError(f"{self.nbytes} bytes are not divisible among {self.ranks} ranks: use a multiple of {unit}")
        if isinstance(self.compute, Gemm):
            g = self.compute
            if min(g.m, g.n, g.k) < 1:
                raise UserError(f"the extents of a GEMM must be 1 or more, not {g.m}x{g.n}x{g.k}")
            if g.dtype not in ITEMSIZE or g.layout not in LAYOUTS:
                known = f"{', '.join(ITEMSIZE)} and {', '.join(LAYOUTS)}"
                raise UserError(f"unknown dtype {g.dtype!r} or layout {g.layout!r} of a GEMM: use {known}")

    @property
    def numel(self) -> int:
        """Elements of the larger buffer."""
        return self.nbytes // ITEMSIZE[self.dtype]

    @property
    def part(self) -> int:
        """Elements of one rank's shard of the larger buffer (all_reduce: rounded up)."""
        return -(-self.numel // self.ranks)

    @property
    def bytes_held(self) -> int:
        """Bytes of a rank's buffers, plus those of a GEMM's matrices."""
        buffers = (self.input_numel + self.output_numel) * ITEMSIZE[self.dtype]
        return buffers + (self.compute.bytes_held if isinstance(self.compute, Gemm) else 0)

    @property
    def input_numel(self) -> int:
        return self.part if self.collective == "all_gather" else self.numel

    @property
    def output_numel(self) -> int:
        return self.part if self.collective == "reduce_scatter" else self.numel

    @property
    def label(self) -> str:
        return f"{self.compute.label} | {self.collective} {format_bytes(self.nbytes)} x{self.ranks}"

    def to_json(self) -> dict[str, Any]:
        """JSON object, the inverse of :meth:`from_json`."""
        if isinstance(self.compute, Gemm):
            g = self.compute
            compute: dict[str, Any] = {"op": "gemm", "m": g.m, "n": g.n, "k": g.k, "dtype": g.dtype, "layout": g.layout}
        else:
            compute = {"op": "program", "name": self.compute.name, "inputs": self.compute.inputs}
        return {"version": 1, "compute": compute, "collective": self.collective, "nbytes": self.nbytes,
                "dtype": self.dtype, "ranks": self.ranks}  # fmt: skip

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Scenario:
        """Rebuild a scenario; raises UserError if it is invalid."""
        if data.get("version") != 1:
            raise UserError(f"a C3 scenario of version {data.get('version')!r}; this autotune reads version 1")
        c = data["compute"]
        if c["op"] == "gemm":
            compute: Compute = Gemm(int(c["m"]), int(c["n"]), int(c["k"]), str(c["dtype"]), str(c["layout"]))
        else:
            compute = Program(str(c["name"]), str(c.get("inputs", "")))
        return cls(compute, str(data["collective"]), int(data["nbytes"]), int(data["ranks"]), str(data["dtype"]))

    def workload(self) -> Workload:
        """The workload. Its family omits the GEMM's extents and the bytes; ``extent`` is the bytes."""
        spec = self.to_json()
        open_ = {**spec, "nbytes": 0}
        if isinstance(self.compute, Gemm):
            open_["compute"] = {**spec["compute"], "m": 0, "n": 0, "k": 0}
        family = digest({"kind": KIND, "family": open_})
        return Workload(KIND, spec, family=family, extent=self.nbytes, label=self.label)


def parse_gemm(text: str, dtype: str = "bf16", layout: str = "nn") -> Gemm:
    """Parse "8192x28672x8192" (MxNxK); raises UserError."""
    found = re.fullmatch(r"(\d{1,12})[xX](\d{1,12})[xX](\d{1,12})", text.strip())
    if not found:
        raise UserError(f"--gemm {text!r}: write MxNxK, such as 8192x28672x8192")
    return Gemm(int(found[1]), int(found[2]), int(found[3]), dtype, layout)


def parse_bytes(text: str) -> int:
    """Parse "512MiB", "4GiB", "65536" or "100MB" to bytes; raises UserError."""
    found = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)\s*([a-zA-Z]*)", text.strip())
    unit = found[2].lower() if found else ""
    if not found or unit not in _UNITS:
        raise UserError(f"--bytes {text!r}: write a size such as 512MiB, 4GiB or 65536")
    size = float(found[1]) * _UNITS[unit]
    if size != int(size) or not 1 <= size < 2**63:
        raise UserError(f"--bytes {text!r}: write a number of bytes from 1 to 2**63 - 1")
    return int(size)


def format_bytes(n: int) -> str:
    """Format bytes with the largest binary unit that divides them evenly, such as "512MiB"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= size and n % size == 0:
            return f"{n // size}{unit}"
    return f"{n}B"


EXPECTED = ("compute", "equal", "communication")
"""The side that was expected to take longer when the list was made."""
FILE_VERSION = 1

_KEYS = ("gemm", "compute", "inputs", "bytes", "dtype", "layout")


@dataclass(frozen=True)
class Entry:
    """A named scenario without a number of ranks.

    Attributes:
        expected: one of :data:`EXPECTED`.
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


def named_scenarios(file: str | Path | None = None) -> dict[str, Entry]:
    """The scenarios of ``file`` by name, in file order; None for the project's own list.

    Raises:
        UserError: the file cannot be read or has an invalid format; a one-line message with the location.
    """
    path = resource_dir("benchmarks") / "c3_scenarios.toml" if file is None else Path(file).expanduser()
    data = read_toml(path, "file of scenarios")
    if data.pop("version", FILE_VERSION) != FILE_VERSION:
        raise UserError(f"{path}: this autotune reads version {FILE_VERSION}")
    dtype = data.pop("dtype", "")
    found: dict[str, Entry] = {}
    for collective, classes in data.items():
        if collective not in COLLECTIVES or not isinstance(classes, dict):
            raise UserError(f"{path}: [{collective}] is not a collective: use {', '.join(COLLECTIVES)}")
        for expected, entries in classes.items():
            if expected not in EXPECTED or not isinstance(entries, dict):
                raise UserError(f"{path}: [{collective}.{expected}] is not a class: use {', '.join(EXPECTED)}")
            for name, entry in entries.items():
                if name in found:
                    raise UserError(f"{path}: {name} is defined more than once")
                found[name] = _entry(f"{path}: {name}", name, collective, expected, entry, dtype)
    if not found:
        raise UserError(f"{path}: the file has no scenarios")
    return found


def named_scenario(name: str) -> Entry:
    """A scenario of the project's own list; raises UserError."""
    entries = named_scenarios()
    if name not in entries:
        raise UserError(f"unknown scenario {name!r}; {similar_name(name, entries)}")
    return entries[name]


def similar_name(name: str, entries: Mapping[str, Entry]) -> str:
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
