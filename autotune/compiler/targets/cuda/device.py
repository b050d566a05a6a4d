"""Nodes of CUDA kernels only: warps, shared memory, barriers, clusters; and the width of a kernel's counters.

Offsets into tensors have 64 bits in every kernel, because Numba widens sums and products. Counters of rows, columns and
packs have 32 bits, since a 64-bit division takes several times as long, or 64 for large numbers (:class:`Counts`). The
width depends on the largest count, not on the offsets: 2**31 elements in rows of 4096 are counted in 32 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from autotune.compiler.kernel.nodes import Cast, Const, Do, Expr, Intrinsic, Stmt, Tuple, Var, walk
from autotune.errors import Unsupported
from autotune.ir.graph import SHORT

HINTS = {
    "default": "d",
    "streaming": "s",
    "no_allocate": "n",
    "prefetch": "p",
    "evict_first": "e",
    "evict_last": "l",
    "coherent": "c",
}
"""Letters of cache hints in the names of accesses."""
BLOCK, BLOCKS = Var("blk", "int32"), Var("nblk", "int32")
"""Number of the block, and number of blocks: of the launch, or of a body if several bodies share the launch."""
THREAD = Var("tid", "int32")
"""Number of the thread, in kernels that assign it to this variable."""
EXTENT = Var("n0", "int64")
"""Extent of axis 0, in kernels with this argument."""


@dataclass(frozen=True, slots=True)
class ThreadIndex(Expr):
    """Number of the thread in its block."""

    dtype: ClassVar[str] = "int32"


@dataclass(frozen=True, slots=True)
class Shared(Stmt):
    """``name`` is an array of ``count`` elements in the block's shared memory; of all dynamic memory where 0."""

    name: Var
    count: int
    type: str

    @property
    def bytes(self) -> int:
        return self.count * (8 if self.type == "int64" else 4)

    @property
    def defines(self) -> Expr | None:
        return self.name


MOST_STATIC = 48 * 1024
"""Most bytes of static shared memory of a block."""


def shared_bytes(body: Iterable[Stmt]) -> int:
    """Bytes of static shared memory of statements."""
    return sum(s.bytes for s in walk(body) if isinstance(s, Shared))


def check_static(body: Iterable[Stmt]) -> None:
    """Raise Unsupported if statements need more static shared memory than a block may have."""
    if (taken := shared_bytes(body)) > MOST_STATIC:
        raise Unsupported(f"{taken} bytes of static shared memory")


def _do(name: str, *args: Expr, of: tuple[str | int, ...] = ()) -> Do:
    return Do(Intrinsic(name, args, of=of))


BARRIER = _do("cuda.syncthreads")
"""Barrier of the block: its threads wait for each other, and their earlier writes become visible."""
WARP_BARRIER = _do("cuda.syncwarp")
"""The same for the threads of a warp."""
CLUSTER_RANK = Intrinsic("cluster_rank", (), "int32")
"""Number of the block in its cluster."""
CLUSTER_ARRIVE, CLUSTER_WAIT = _do("cluster_arrive"), _do("cluster_wait")
"""Signal that this thread has begun, and wait until all threads of the cluster have. No block writes to another's
shared memory before."""
CLUSTER_BARRIER = _do("cluster_sync")
"""Barrier of the cluster: its threads wait for each other, and earlier writes to shared memory become visible."""
COMMIT_COPIES = _do("commit_copies")
"""The copies begun since the last one are a group, which may be empty."""
_EVERY_LANE = Const(0xFFFFFFFF)


def shuffle(value: Expr, distance: int) -> Expr:
    """``value`` as the lane ``self ^ distance`` has it; all lanes of the warp take part."""
    return Intrinsic("cuda.shfl_xor_sync", (_EVERY_LANE, value, Const(distance)), value.dtype)


def shuffle_from(value: Expr, lane: Expr) -> Expr:
    """``value`` as lane ``lane`` has it."""
    return Intrinsic("cuda.shfl_sync", (_EVERY_LANE, value, lane), value.dtype)


def ballot(test: Expr) -> Expr:
    """A bit for each lane of the warp, set if ``test`` holds in the lane."""
    return Intrinsic("cuda.ballot_sync", (_EVERY_LANE, test), "int32")


def bits_set(value: Expr) -> Expr:
    """The number of bits set in ``value``."""
    return Intrinsic("cuda.popc", (value,), "int32")


def remote_store(array: Expr, index: Expr, block: Expr, value: Expr) -> Do:
    """``array[index] = value`` in the shared memory of block ``block`` of the cluster; ``index`` is an int64."""
    return _do("rs", array, index, block, value, of=(value.dtype,))


Words = tuple[Expr, Expr, Const]
"""A thread's place in shared memory: an array of 32-bit words, its first one, and how far on each further piece of 16
bytes is."""


def copy_ahead(storage: str, lanes: int, hint: str, to: Words, pointer: Expr, index: Expr) -> Do:
    """Begins to copy ``lanes`` elements of a tensor to shared memory, with their layout in memory. See ``Load``."""
    return _do("copy", *to, pointer, index, of=(SHORT[storage], lanes, HINTS[hint]))


def await_copies(groups: int) -> Do:
    """Waits until at most ``groups`` groups of the thread's copies are under way."""
    return _do("await_copies", of=(groups,))


def take(storage: str, lanes: int, words: Words) -> Expr:
    """A tuple of ``lanes`` elements from shared memory, with the layout of a tensor of type ``storage``."""
    return Intrinsic("take", words, of=(SHORT[storage], lanes))


def put(words: Words, values: tuple[Expr, ...], storage: str = "float32") -> Do:
    """Leaves numbers of type ``storage``, float32 or int32, in shared memory."""
    return _do("put", *words, Tuple(values), of=(SHORT[storage], len(values)))


def rounds(count: int) -> Expr:
    """``count``, hidden from compilers, so that a loop of as many rounds stays a loop."""
    return Intrinsic("rounds", (Const(count, "int32"),), "int32")


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

    def number(self, x: Expr) -> Cast:
        """``x`` as a count."""
        return Cast(self.type, x)

    def quotient(self, x: Expr, n: int) -> Intrinsic:
        return Intrinsic("udiv64" if self.wide else "udiv", (x, Const(n)), self.type)

    def remainder(self, x: Expr, n: int) -> Intrinsic:
        return Intrinsic("urem64" if self.wide else "urem", (x, Const(n)), self.type)

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
