"""Short walks that store integers run to ends that LLVM does not know.

LLVM makes one vector of a loop with fewer rounds than ``_TINY``, and masks the lanes beyond its end. Where the mask is
known and leaves one lane (the last of 9 elements in vectors of 8), its code for processors with AVX-512 is wrong (LLVM
22): of an integer that is cut to fewer bits and stored so, it stores all the bits. The last uint8 of a tensor then
zeroes three bytes behind it, which are another tensor's, or a row of another thread. An end that is not known leaves
the elements beyond whole vectors to a loop without masks.

Which integers are cut is not to be seen here: LLVM itself makes a comparison with 0 a shift, of which one bit is kept.
So all stores of integers count that are narrower than the widest compute type.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from autotune.compiler.kernel.nodes import Body, Const, Expr, For, If, Intrinsic, Stmt, Store, walk
from autotune.compiler.targets.cpu.nodes import Loop
from autotune.compiler.targets.cpu.rows import COLUMNS

_TINY = 16  # LLVM's vectorizer-min-trip-count
_WHOLE = ("float32", "float16", "int64")
"""Storage types whose stores cut nothing; the narrower floats are put together as integers."""


def hide_ends(body: Iterable[Stmt]) -> Body:
    """``body`` with the ends hidden of all loops that LLVM may find tiny and that store what may be cut.

    Not ``columns``, which is hidden already, but for what divides it.
    """
    return tuple(_hidden(s) for s in body)


def _hidden(s: Stmt) -> Stmt:
    if isinstance(s, For):
        inside = hide_ends(s.body)
        stop = s.stop if _long(s) or s.stop == COLUMNS or not _cuts(s.body) else Intrinsic("hidden", (s.stop,), "int64")
        return replace(s, stop=stop, body=inside)
    if isinstance(s, If):
        return replace(s, then=hide_ends(s.then), other=hide_ends(s.other))
    return replace(s, body=hide_ends(s.body)) if isinstance(s, Loop) else s


def _long(s: For) -> bool:
    ends: list[Expr] = [s.start, s.stop, s.step]
    start, stop, step = (int(x.value) if isinstance(x, Const) else None for x in ends)
    return start is not None and stop is not None and step is not None and stop - start >= _TINY * step


def _cuts(body: Body) -> bool:
    return any(isinstance(s, Store) and s.storage not in _WHOLE for s in walk(body))
