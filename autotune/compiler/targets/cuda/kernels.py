"""The kernels of one group, and bodies of several side by side in one launch (kernel packing).

A *body* is one emitted kernel as a device function. Its *runs* are the sets of tensors it works on: one for a single
group, many for the updates of an optimizer step. The code of a body is printed once for any number of runs. A block
finds its run by a tree of comparisons with its number, which is uniform over its threads: six steps for 64 runs. The
leaf selects pointers and the number of rows, and the body counts blocks from 0 as in a separate launch. FusionStitching
(arXiv 2009.10924, section 4) calls it kernel packing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autotune.compiler.kernel.nodes import Assign, Cast, Const, Do, Function, Pointer, Stmt, Var, when
from autotune.compiler.targets.cuda.device import BLOCK, BLOCKS, EXTENT
from autotune.compiler.targets.cuda.names import GENERATOR
from autotune.compiler.targets.cuda.source import CudaSource
from autotune.errors import Unsupported
from autotune.ir.graph import Graph

Ref = tuple[str, int]
"""A tensor of a group: ("input", slot), ("output", k) or ("private", number)."""


@dataclass(frozen=True)
class Private:
    """Global memory between the kernels of one group.

    Attributes:
        storage: storage type.
        numel: elements, whatever the extent of the open axis.
    """

    storage: str
    numel: int


@dataclass(frozen=True)
class GroupKernels:
    """The kernels of one group under one configuration.

    Attributes:
        sources: in launch order.
        args: for each source, the tensor behind each of its pointers.
        private: the group's private scratch.
    """

    sources: tuple[CudaSource, ...]
    args: tuple[tuple[Ref, ...], ...]
    private: tuple[Private, ...] = ()

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
