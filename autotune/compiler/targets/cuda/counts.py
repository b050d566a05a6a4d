"""Width of counters of rows, columns and packs in a CUDA kernel: 32 bits, or 64 for large numbers.

Offsets into tensors have 64 bits in every kernel, because Numba widens sums and products. Counters have 32 bits, since
a 64-bit division takes several times as long. The width depends on the largest count, not on the offsets: 2**31
elements in rows of 4096 are counted in 32 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.compiler.kernel.nodes import Cast, Const, Expr, Intrinsic
from autotune.compiler.targets.cuda.device import EXTENT
from autotune.errors import Unsupported

LIMIT = (1 << 31) - (1 << 22)
"""The first number that takes 64 bits: below 2**31 by more than a block covers, since the last one counts past the
end."""
MOST_BLOCKS = (1 << 31) - 1
"""Most blocks of one launch."""
MOST_IN_TURN = 1 << 16
"""Most rows that a thread adds in sequence to one fp32 accumulator without a check of the error by a search: of a
million equal numbers one in a hundred is lost."""


@dataclass(frozen=True)
class Counts:
    """The width of one kernel's counters."""

    wide: bool = False

    @classmethod
    def of(cls, *most: int) -> Counts:
        """As wide as the largest of these numbers needs."""
        return cls(max(most) >= LIMIT)

    @property
    def type(self) -> str:
        return "int64" if self.wide else "int32"

    @property
    def udiv(self) -> str:
        return "udiv64" if self.wide else "udiv"

    @property
    def urem(self) -> str:
        return "urem64" if self.wide else "urem"

    def number(self, x: Expr) -> Cast:
        """``x`` as a count."""
        return Cast(self.type, x)

    def quotient(self, x: Expr, n: int) -> Intrinsic:
        return Intrinsic(self.udiv, (x, Const(n)), self.type)

    def remainder(self, x: Expr, n: int) -> Intrinsic:
        return Intrinsic(self.urem, (x, Const(n)), self.type)

    def launch(self) -> dict[str, Any]:
        """The kernel's launch data; empty for 32 bits."""
        return {"wide": True} if self.wide else {}


@dataclass(frozen=True)
class Units:
    """The units of work of a kernel, which its blocks share.

    Attributes:
        inner: units for each step along the axis of open extent; all units if none is ``dynamic``.
        per_block: units that a block takes at a time.
    """

    inner: int
    per_block: int = 1
    dynamic: bool = False

    def total(self, counts: Counts) -> Cast:
        return counts.number(EXTENT * self.inner if self.dynamic else Const(self.inner))


def check_launch(rule: Mapping[str, Any], extent0: int) -> None:
    """Check that a kernel with this launch data can run at this extent of axis 0.

    Raises Unsupported if its 32-bit counters overflow, if it needs too many blocks, or if its sums over the rows of a
    block are too long.
    """
    units = (extent0 if rule.get("dynamic") else 1) * int(rule["inner"])
    if units >= LIMIT and not rule.get("wide"):
        raise Unsupported("more rows than the kernel's 32-bit counters hold")
    if "grid" in rule:
        blocks = int(rule["grid"]) // int(rule.get("tiles", 1))
        if "tiles" in rule and -(-units // (int(rule["per_block"]) * max(1, blocks))) > MOST_IN_TURN:
            raise Unsupported(f"more than {MOST_IN_TURN} rows for each accumulator of a kernel")
        return
    blocks = -(-units // int(rule["per_block"])) * int(rule.get("cluster", 1))
    if blocks > MOST_BLOCKS and not int(rule["blocks_per_sm"]):
        raise Unsupported(f"{blocks} blocks in one launch, which has {MOST_BLOCKS} at most")
