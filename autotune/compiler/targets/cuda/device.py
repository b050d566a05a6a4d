"""What CUDA kernels have beside ``autotune.compiler.kernel.nodes``: warps, shared memory, barriers, clusters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from autotune.compiler.kernel.nodes import Expr, Stmt, Var, walk

BLOCK, BLOCKS = Var("blk", "int32"), Var("nblk", "int32")
"""Number of the block, and how many there are: of the launch, or of a body's own blocks where several share one."""
THREAD = Var("tid", "int32")
"""Number of the thread, where a kernel has given it this name."""
EXTENT = Var("n0", "int64")
"""Extent of axis 0, where a kernel takes it as an argument."""


@dataclass(frozen=True, slots=True)
class ThreadIndex(Expr):
    """Number of the thread in its block."""

    dtype: ClassVar[str] = "int32"


@dataclass(frozen=True, slots=True)
class Shuffle(Expr):
    """``value`` as the lane ``self ^ distance`` has it; all lanes of the warp take part."""

    like = ("value",)
    value: Expr
    distance: int


@dataclass(frozen=True, slots=True)
class ShuffleFrom(Expr):
    """``value`` as lane ``lane`` has it."""

    like = ("value",)
    value: Expr
    lane: Expr


@dataclass(frozen=True, slots=True)
class Ballot(Expr):
    """A bit for each lane of the warp: whether ``test`` holds there."""

    test: Expr

    dtype: ClassVar[str] = "int32"


@dataclass(frozen=True, slots=True)
class Bits(Expr):
    """How many bits of ``value`` are set."""

    value: Expr

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


@dataclass(frozen=True, slots=True)
class Barrier(Stmt):
    """All threads of the block wait for each other, and see what the others wrote."""


@dataclass(frozen=True, slots=True)
class ClusterRank(Expr):
    """Number of the block in its cluster."""

    dtype: ClassVar[str] = "int32"


@dataclass(frozen=True, slots=True)
class ClusterArrive(Stmt):
    """Says that this thread has begun; no block writes to another's shared memory before :class:`ClusterWait`."""


@dataclass(frozen=True, slots=True)
class ClusterWait(Stmt):
    """Waits until all threads of the cluster have arrived."""


@dataclass(frozen=True, slots=True)
class ClusterBarrier(Stmt):
    """All threads of the cluster wait for each other, and see what the others wrote to their shared memory."""


@dataclass(frozen=True, slots=True)
class RemoteStore(Stmt):
    """``array[index] = value`` in the shared memory of block ``block`` of the cluster; ``index`` is an int64."""

    array: Expr
    index: Expr
    block: Expr
    value: Expr


@dataclass(frozen=True, slots=True)
class Words(Expr):
    """A thread's place in an array of 32-bit words in shared memory: its first one, and how far on each further piece
    of 16 bytes is."""

    array: Expr
    first: Expr
    step: int


@dataclass(frozen=True, slots=True)
class CopyAhead(Stmt):
    """Begins to copy ``lanes`` elements of a tensor to shared memory, as they lie in memory. See :class:`Load`."""

    storage: str
    lanes: int
    hint: str
    to: Words
    pointer: Expr
    index: Expr


@dataclass(frozen=True, slots=True)
class CommitCopies(Stmt):
    """The copies begun since the last one are a group, which may be empty."""


@dataclass(frozen=True, slots=True)
class AwaitCopies(Stmt):
    """Waits until at most ``groups`` groups of the thread's copies are under way."""

    groups: int


@dataclass(frozen=True, slots=True)
class Take(Expr):
    """A tuple of ``lanes`` elements from shared memory, where they lie as in a tensor of type ``storage``."""

    storage: str
    lanes: int
    words: Words


@dataclass(frozen=True, slots=True)
class Put(Stmt):
    """Leaves float32 numbers in shared memory."""

    words: Words
    values: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Rounds(Expr):
    """``count``, of which no compiler can tell what it is, so that a loop of as many rounds stays a loop."""

    count: int

    dtype: ClassVar[str] = "int32"


def shared_bytes(body: Iterable[Stmt]) -> int:
    """Shared memory of fixed size that statements take."""
    return sum(s.bytes for s in walk(body) if isinstance(s, Shared))
