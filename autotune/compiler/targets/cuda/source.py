"""Parameters of schedules, and kernels before they are compiled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from typing import Any, Self

from autotune.compiler.kernel.nodes import Stmt
from autotune.compiler.kernel.rewrite import expressions_of
from autotune.compiler.targets.cuda.device import BLOCK, BLOCKS, Counts, Units, check_launch
from autotune.compiler.targets.cuda.names import GENERATOR, OVERWRITES, PREFIX
from autotune.errors import Unsupported
from autotune.ir.graph import Graph


def overwrite_launch(overwrites: Sequence[tuple[int, int]], graph: Graph) -> dict[str, Any]:
    """The launch data of a kernel whose pairs of a slot and an output may be one tensor: pairs of its pointers."""
    return {OVERWRITES: [[slot, len(graph.inputs) + k] for slot, k in overwrites]} if overwrites else {}


@dataclass(frozen=True)
class CudaSchedule:
    """The parameters that all schemes share; see ``[cuda.*]`` of ``search_spaces/fusion.toml``.

    A scheme adds its own in a subclass. A parameter with a default may be missing in
    configurations of earlier versions.
    """

    threads_per_row: int
    rows_per_block: int
    vector_bytes: int
    keep: str
    online: bool
    unroll: int
    max_registers: int
    load_hint: str
    store_hint: str
    blocks_per_sm: int
    cluster: int = 1
    prefetch: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        given = [f.name for f in fields(cls) if f.name in config or f.default is MISSING]
        return cls(**{name: config[name] for name in given})

    @property
    def block(self) -> int:
        return self.threads_per_row * self.rows_per_block

    def check_block(self) -> None:
        """Raise Unsupported unless a block is whole warps."""
        if not 32 <= self.block <= 1024 or self.block % 32:
            raise Unsupported("a block is a multiple of 32 up to 1024 threads")


@dataclass(frozen=True)
class FlatSchedule(CudaSchedule):
    """``by_row``: each block has a part of one row, and values of the row are computed once a thread."""

    by_row: bool = False


@dataclass(frozen=True)
class OuterSchedule(CudaSchedule):
    """``held``: indices of a strip that a thread holds in registers, while the others are copied to shared memory."""

    held: int = 0


@dataclass(frozen=True)
class ScatterSchedule(CudaSchedule):
    """``owned``: the number of adjacent places whose sums a block computes."""

    owned: int = 1


@dataclass(frozen=True)
class TransposeSchedule(CudaSchedule):
    """``tile``: side of the tiles that go through shared memory; 0 for none."""

    tile: int = 0


@dataclass(frozen=True)
class CudaSource:
    """A kernel before it is compiled.

    Attributes:
        body: its statements. They use ``device.BLOCK`` and ``BLOCKS`` instead of CUDA's block index and number of
            blocks, and have no early return.
        params: short storage names of its pointers ``p0``, ``p1``, ...; where ``launch["dynamic"]``, ``n0`` (int64)
            follows them.
        launch: the runtime's launch data.
        block: threads a block.
        max_registers: cap for ptxas; 0 for none.
        cluster: blocks a cluster.
        name: its name in profilers, an identifier.
        fast: True if operators are approximated and the kernel is compiled with CUDA's fast math.
    """

    body: tuple[Stmt, ...]
    params: tuple[str, ...]
    launch: Mapping[str, Any]
    block: int
    max_registers: int
    cluster: int = 1
    name: str = f"{PREFIX}kernel"
    fast: bool = True

    @classmethod
    def scheduled(
        cls,
        body: Iterable[Stmt],
        params: tuple[str, ...],
        schedule: CudaSchedule,
        counts: Counts,
        units: Units,
        extent: int,
        align: Sequence[int],
        cluster: int = 1,
        **launch: Any,
    ) -> CudaSource:
        """A kernel under a schedule.

        Args:
            counts: the width of its counters.
            extent: the extent of axis 0.
            align: bytes that each pointer must be aligned to.
            launch: launch data that differ from the default.

        Raises:
            Unsupported: the kernel needs too many blocks for one launch.
        """
        usual = {"blocks_per_sm": schedule.blocks_per_sm, "block": schedule.block, "shared": 0, "multiple": 1}
        shares = {"dynamic": units.dynamic, "inner": units.inner, "per_block": units.per_block, "align": [*align]}
        data = {"generator": GENERATOR} | usual | shares | launch | counts.launch()
        data |= {"cluster": cluster} if cluster > 1 else {}
        check_launch(data, extent)
        return cls(tuple(body), params, data, schedule.block, schedule.max_registers, cluster)

    @cached_property
    def text(self) -> str:
        """Numba source that defines ``kernel`` and its device functions."""
        from autotune.compiler.targets.cuda.printer import CudaPrinter

        printer = CudaPrinter(strict=not self.fast)
        counted = BLOCKS in expressions_of(self.body)
        return _module(printer.functions(self.body), printer.block(self.body), self, counted)


@dataclass(frozen=True)
class Listing:
    """A kernel with a fixed text, such as those of C3's collectives.

    Its other attributes are those of :class:`CudaSource`.

    Attributes:
        functions: the texts of its device functions.
        lines: the lines of its body.
    """

    functions: tuple[str, ...]
    lines: tuple[str, ...]
    params: tuple[str, ...]
    launch: Mapping[str, Any]
    block: int
    max_registers: int
    cluster: int = 1
    name: str = f"{PREFIX}kernel"
    fast: bool = True

    @cached_property
    def text(self) -> str:
        return _module(self.functions, self.lines, self, counted=True)


def _module(functions: Sequence[str], lines: Sequence[str], kernel: CudaSource | Listing, counted: bool) -> str:
    """The text of a kernel; ``counted``: it reads the number of blocks."""
    args = [f"p{k}" for k in range(len(kernel.params))] + (["n0"] if kernel.launch["dynamic"] else [])
    head = [f"def kernel({', '.join(args)}):", f"    {BLOCK.name} = int32(cuda.blockIdx.x)"]
    if counted:
        head.append(f"    {BLOCKS.name} = int32(cuda.gridDim.x)")
    return "\n\n".join([*functions, "\n".join([*head, *("    " + line for line in lines)])]) + "\n"
