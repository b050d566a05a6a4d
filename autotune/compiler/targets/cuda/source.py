"""Kernels before they are compiled: the parameters of schedules, the kernels of one group, and several in one launch.

Several kernels share a launch by kernel packing (FusionStitching, arXiv 2009.10924, section 4). A *body* is one emitted
kernel as a device function. Its *runs* are the sets of tensors it works on: one for a single group, many for the
updates of an optimizer step. The code of a body is printed once for any number of runs. A block finds its run by a tree
of comparisons with its number, which is uniform over its threads: six steps for 64 runs. The leaf selects pointers and
the number of rows, and the body counts blocks from 0 as in a separate launch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from typing import Any, Self

from autotune.compiler.kernel.nodes import Assign, Cast, Const, Do, Function, Pointer, Stmt, Var, expressions_of, when
from autotune.compiler.targets.cuda import GENERATOR, OVERWRITES, PREFIX
from autotune.compiler.targets.cuda.device import BLOCK, BLOCKS, EXTENT, Counts, Units, check_launch
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


Ref = tuple[str, int]
"""A tensor of a group: ("input", slot), ("output", k) or ("private", number)."""


@dataclass(frozen=True)
class GroupKernels:
    """The kernels of one group under one configuration.

    Attributes:
        sources: in launch order.
        args: for each source, the tensor behind each of its pointers.
        private: (storage type, elements) of each array between the kernels, whatever the extent of the open axis.
    """

    sources: tuple[CudaSource, ...]
    args: tuple[tuple[Ref, ...], ...]
    private: tuple[tuple[str, int], ...] = ()

    @classmethod
    def single(cls, source: CudaSource, graph: Graph) -> GroupKernels:
        """One kernel that takes the group's inputs, then its outputs."""
        refs = [("input", k) for k in range(len(graph.inputs))] + [("output", k) for k in range(len(graph.outputs))]
        return cls((source,), (tuple(refs),))


@dataclass(frozen=True)
class Run:
    """One set of tensors for a body.

    Attributes:
        refs: the tensor behind each of the body's pointers.
        extent: the number of rows, if it is an argument of the body.
        work: bytes moved, by which the blocks of persistent bodies are distributed.
    """

    refs: tuple[Ref, ...]
    extent: int
    work: int


@dataclass(frozen=True)
class Body:
    """An emitted kernel and its runs. A body that takes no extent has runs of one extent only."""

    source: CudaSource
    runs: tuple[Run, ...]


def pack_bodies(bodies: Sequence[Body], sms: int) -> tuple[CudaSource, tuple[Ref, ...]]:
    """One kernel of all bodies, and the tensors behind its pointers, each once.

    The kernel's grid is fixed (``launch["grid"]``). It is itself a body: its lines use ``blk`` only.

    Args:
        bodies: of one block size, without clusters.
        sms: multiprocessors of the device: persistent bodies get ``blocks_per_sm`` times as many blocks in all.

    Raises:
        Unsupported: the bodies cannot share a launch.
    """
    first = bodies[0].source
    for body in bodies:
        if body.source.block != first.block:
            raise Unsupported(f"blocks of {body.source.block} and of {first.block} threads in one launch")
        if body.source.cluster > 1:
            raise Unsupported("blocks that wait for each other and other blocks in one launch")
    refs = tuple(dict.fromkeys(ref for body in bodies for run in body.runs for ref in run.refs))
    number = {ref: k for k, ref in enumerate(refs)}
    blocks = deal(bodies, sms)
    branches: list[tuple[int, list[Stmt]]] = []
    begin = 0
    for body, counts in zip(bodies, blocks, strict=True):
        rows = [EXTENT] if body.source.launch["dynamic"] else []
        pointers = (Pointer(k) for k in range(len(body.source.params)))
        work = Function((BLOCK, BLOCKS, *rows, *pointers), body.source.body)
        leaves: list[tuple[int, list[Stmt]]] = []
        start = begin
        for run, count in zip(body.runs, counts, strict=True):
            leaves.append((start, _leaf(body.source, run, start, count, [number[r] for r in run.refs])))
            start += count
        branches.append((begin, [*_tree(leaves), Do(work({p.name: _own(p) for p in work.params}))]))
        begin = start
    return _source(bodies, refs, _tree(branches), begin), refs


def deal(bodies: Sequence[Body], sms: int) -> list[list[int]]:
    """Blocks of each run of each body.

    Their number is that of a separate launch. Persistent bodies get a share of the device's resident blocks in
    proportion to the run's work, at least one.
    """
    total = sum(run.work for body in bodies for run in body.runs) or 1
    out = []
    for body in bodies:
        rule = body.source.launch
        counts = []
        for run in body.runs:
            units = (run.extent if rule["dynamic"] else 1) * int(rule["inner"])
            count = -(-units // int(rule["per_block"]))
            held = int(rule["blocks_per_sm"]) * sms
            if held:
                count = min(count, max(1, round(held * run.work / total)))
            counts.append(max(1, count))
        out.append(counts)
    return out


def _own(parameter: Var | Pointer) -> Var:
    return Var(f"a_{parameter.name}", parameter.dtype)


def _leaf(source: CudaSource, run: Run, start: int, count: int, pointers: Sequence[int]) -> list[Stmt]:
    out = [Assign(_own(BLOCK), Cast("int32", BLOCK - start)), Assign(_own(BLOCKS), Cast("int32", Const(count)))]
    if source.launch["dynamic"]:
        out.append(Assign(_own(EXTENT), Cast("int64", Const(run.extent))))
    return [*out, *(Assign(_own(Pointer(k)), Pointer(n)) for k, n in enumerate(pointers))]


def _tree(leaves: Sequence[tuple[int, list[Stmt]]]) -> list[Stmt]:
    """The statements of the leaf that a block belongs to, by bisection; leaves come with their first blocks."""
    if len(leaves) == 1:
        return leaves[0][1]
    middle = len(leaves) // 2
    return [when(BLOCK < leaves[middle][0], _tree(leaves[:middle]), _tree(leaves[middle:]))]


def _source(bodies: Sequence[Body], refs: Sequence[Ref], body: Sequence[Stmt], grid: int) -> CudaSource:
    types: dict[Ref, str] = {}
    align: dict[Ref, int] = {}
    for b in bodies:
        for run in b.runs:
            for ref, short, need in zip(run.refs, b.source.params, b.source.launch["align"], strict=True):
                types[ref] = short
                align[ref] = max(align.get(ref, 1), int(need))
    block, caps = bodies[0].source.block, [b.source.max_registers for b in bodies]
    launch: dict[str, Any] = {"dynamic": False, "per_block": 1, "blocks_per_sm": 0, "multiple": 1}
    launch |= {"inner": grid, "grid": grid, "block": block, "align": [align[r] for r in refs], "generator": GENERATOR}
    launch["shared"] = max(int(b.source.launch["shared"]) for b in bodies)
    # A cap for one body could make another spill: use the loosest, or none if one body has none.
    cap = max(caps) if all(caps) else 0
    return CudaSource(tuple(body), tuple(types[r] for r in refs), launch, block, cap)
