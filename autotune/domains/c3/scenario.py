"""The workload of C3: a computation that overlaps a collective, on a number of ranks.

All collectives use the same convention for sizes: ``nbytes`` is the size of the larger of a rank's two buffers. That is
the output of an all-gather, and the input of an all-to-all, a reduce-scatter or an all-reduce.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.errors import UserError
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
