"""A mean and the variance about it in one pass over a row, with one exchange between threads instead of two.

Every thread carries the sum of its elements and the sum of their squared deviations from its own mean; two such pairs
join without loss (Chan, Golub and LeVeque, 1979). As long as both sides have equally many elements, ``n``, that is

    square = square_a + square_b + (total_a - total_b)^2 / (2 n)

Where they have not (rows that do not fill the last pack of every thread, warps that are no power of two), the count
goes along as ``nc``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.compiler.kernel.nodes import Var
from autotune.compiler.program.one_pass import Moments
from autotune.compiler.program.program import Pass, power_of_two

if TYPE_CHECKING:
    from autotune.compiler.targets.cuda.rows.kernel import Rows


BEFORE, WEIGHT = Var("rm", "float32"), Var("wm", "float32")
"""For a pack that joins a thread's: one over the elements before it (0 if none), and the weight of the difference of
means."""


class Joining:
    """What one kernel's joins need to know of counts: literal where all threads have equally many, else ``nc``."""

    def __init__(self, rows: Rows) -> None:
        self.r = rows
        self.uneven = rows.full != rows.packs or (rows.warps > 1 and power_of_two(rows.warps) != rows.warps)
        self.n = float(rows.full * rows.vec)  # elements on each side, where even

    def weights(self, k: str) -> list[str]:
        """``rm`` and ``wm`` for pack number ``k``."""
        vec = self.r.vec
        if k.isdigit():
            n = int(k)
            return [f"rm = float32({1 / (n * vec) if n else 0.0!r})", f"wm = float32({n * vec / (n + 1)!r})"]
        return [
            f"kf = float32({k})",
            f"rm = sel({k} > 0, rcp(kf * float32({vec})), float32(0))",
            f"wm = kf * float32({vec}) * rcp(kf + float32(1))",
        ]

    def begin(self) -> list[str]:
        """Once a pass is walked and before its threads are joined."""
        if not self.uneven:
            return []
        r = self.r
        if r.full == r.packs:
            return [f"nc = float32({r.full * r.vec})"]
        inside = f"{r.column(str(r.full))} < {r.p.n_cols}"
        return [f"nc = sel({inside}, float32({(r.full + 1) * r.vec}), float32({r.full * r.vec}))"]

    def exchange(self, pas: Pass, offset: int) -> list[str]:
        """One step of a butterfly among lanes."""
        if not pas.moments:
            return []
        out = [f"yn = cuda.shfl_xor_sync(0xffffffff, nc, {offset})"] if self.uneven else []
        for m in pas.moments:
            out.append(f"ys = cuda.shfl_xor_sync(0xffffffff, a{m.total}, {offset})")
            out.append(f"yq = cuda.shfl_xor_sync(0xffffffff, a{m.square}, {offset})")
            out += self.merge(m, "ys", "yq", "nc", "yn")
        return out + self.count("yn")

    def merge(self, m: Moments, ys: str, yq: str, na: str, nb: str) -> list[str]:
        """Join another side's (``ys``, ``yq``) to the accumulators; the count follows by :meth:`count`."""
        s, q = f"a{m.total}", f"a{m.square}"
        if self.uneven:
            own = f"{s} * sel({na} > float32(0), rcp({na}), float32(0))"
            other = f"{ys} * sel({nb} > float32(0), rcp({nb}), float32(0))"
            return [
                f"dm = {own} - {other}",
                f"{q} = {q} + {yq} + dm * dm * ({na} * {nb} * rcp(fmax({na} + {nb}, float32(1))))",
                f"{s} = {s} + {ys}",
            ]
        return [f"dm = {s} - {ys}", f"{q} = {q} + {yq} + dm * dm * float32({1 / (2 * self.n)!r})", f"{s} = {s} + {ys}"]

    def squares(self, m: Moments) -> str:
        """The row's squared deviations, NaN where an element is infinite. A pack of several takes an infinity from its
        own mean, which gives that; where a pack is one element they are infinite only, and the sum tells."""
        return f"a{m.square}" if self.r.vec > 1 else f"a{m.square} + a{m.total} * float32(0)"

    def count(self, nb: str) -> list[str]:
        """The counts after a join of two sides."""
        if self.uneven:
            return [f"nc = nc + {nb}"]
        self.n *= 2
        return []
