"""What CUDA kernels have beside ``autotune.compiler.kernel.nodes``: warps, shared memory, barriers, clusters."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.compiler.kernel.nodes import Expr, Stmt, Var

BLOCK, BLOCKS = Var("blk", "int32"), Var("nblk", "int32")
"""Number of the block, and how many there are: of the launch, or of a body's own blocks where several share one."""


@dataclass(frozen=True, slots=True)
class ThreadIndex(Expr):
    """Number of the thread in its block."""

    @property
    def dtype(self) -> str:
        return "int32"


@dataclass(frozen=True, slots=True)
class Shuffle(Expr):
    """``value`` as the lane ``self ^ distance`` has it; all lanes of the warp take part."""

    value: Expr
    distance: int

    @property
    def dtype(self) -> str:
        return self.value.dtype

    def children(self) -> tuple[Expr, ...]:
        return (self.value,)


@dataclass(frozen=True, slots=True)
class ShuffleFrom(Expr):
    """``value`` as lane ``lane`` has it."""

    value: Expr
    lane: Expr

    @property
    def dtype(self) -> str:
        return self.value.dtype

    def children(self) -> tuple[Expr, ...]:
        return (self.value, self.lane)


@dataclass(frozen=True, slots=True)
class Ballot(Expr):
    """A bit for each lane of the warp: whether ``test`` holds there."""

    test: Expr

    @property
    def dtype(self) -> str:
        return "int32"

    def children(self) -> tuple[Expr, ...]:
        return (self.test,)


@dataclass(frozen=True, slots=True)
class Bits(Expr):
    """How many bits of ``value`` are set."""

    value: Expr

    @property
    def dtype(self) -> str:
        return "int32"

    def children(self) -> tuple[Expr, ...]:
        return (self.value,)


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

    def expressions(self) -> tuple[Expr, ...]:
        return (self.name,)


@dataclass(frozen=True, slots=True)
class Barrier(Stmt):
    """All threads of the block wait for each other, and see what the others wrote."""


@dataclass(frozen=True, slots=True)
class Line(Stmt):
    """A line of source as it stands, with its indentation."""

    line: str
