"""Several bodies in one launch, one after the other: a barrier over the whole grid between them (grid scope).

AStitch (ASPLOS'22) calls it the global scheme: intermediates go through global memory, which is the L2 for what is
small, and no second launch is needed. All blocks must run at the same time, so the launch is cooperative and its grid
fixed. A group's own finish takes the grid of its main kernel (:func:`behind_barrier`); the phases of a plan take as
many blocks as the device holds, each of which does the work of several of a phase that has more (:func:`in_phases`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from autotune.compiler.targets.cuda.intrinsics.cluster import STATE_WORDS
from autotune.compiler.targets.cuda.kernels import GroupKernels, Private, Ref
from autotune.compiler.targets.cuda.source import GENERATOR, CudaSource
from autotune.errors import Unsupported

_FUNCTION = re.compile(r"\b([fel])(\d+)\(")
_DEFINED = re.compile(r"^def [fel](\d+)\(", re.MULTILINE)
_POINTER = re.compile(r"\bp(\d+)\b")
_LOAD = re.compile(r"\b((?:l[dgkrw]|touch)_[a-z0-9]+_\d+)_[dsnpe]\(([ps]\d+)?")
_CHOSEN = re.compile(r"^ *(s\d+) = (.*)$", re.MULTILINE)

STEPS = 1000
"""Numbers of device functions set aside for each phase; the last is the phase itself. Packed bodies take 100 each."""


def renamed(source: CudaSource, first_function: int, pointers: Sequence[int]) -> tuple[list[str], list[str]]:
    """Functions and body of ``source`` with its functions numbered from ``first_function`` and its pointer ``k`` called
    ``p<pointers[k]>``. Device functions name pointers as parameters, which stay as they are."""

    def function(m: re.Match[str]) -> str:
        return f"{m.group(1)}{int(m.group(2)) + first_function}("

    def pointer(m: re.Match[str]) -> str:
        return f"p{pointers[int(m.group(1))]}"

    source = source.lines
    functions = [_FUNCTION.sub(function, text) for text in source.functions]
    body = [_POINTER.sub(pointer, _FUNCTION.sub(function, line)) for line in source.body]
    return functions, body


def coherent(source: CudaSource, written: Collection[int]) -> CudaSource:
    """``source`` with plain loads through the pointers ``written``: what another block of the same launch wrote must
    not be read through the path for read-only data, which keeps no order with the barrier.

    Raises:
        Unsupported: it is not to be seen what a load reads.
    """

    def plain(text: str) -> str:
        chosen = {name: _POINTER.findall(of) for name, of in _CHOSEN.findall(text)}  # of joined loads

        def load(m: re.Match[str]) -> str:
            name = m.group(2)
            if name is None:
                raise Unsupported("a load of an unknown tensor behind a grid barrier")
            behind = chosen[name] if name[0] == "s" else [name[1:]]
            return f"{m.group(1)}_w({name}" if any(int(k) in written for k in behind) else m.group(0)

        return _LOAD.sub(load, text)

    if not written:
        return source
    source = source.lines
    return replace(source, functions=tuple(map(plain, source.functions)), body=tuple(map(plain, source.body)))


def behind_barrier(
    main: CudaSource,
    args: tuple[Ref, ...],
    finish: GroupKernels,
    finish_args: Sequence[tuple[Ref, ...]],
    private: Sequence[Private],
) -> GroupKernels:
    """``main`` and one kernel after it as one cooperative launch of ``main``'s grid.

    Raises:
        Unsupported: the finish is several kernels, has clusters, or differs in its block size.
    """
    if len(finish.sources) != 1:
        raise Unsupported("a finish of several kernels behind a barrier")
    (after,), (after_args,) = finish.sources, finish_args
    if after.block != main.block or after.cluster > 1 or main.cluster > 1 or after.launch["dynamic"]:
        raise Unsupported("blocks of different shape on both sides of a grid barrier")
    state = ("private", len(private))
    apart = GroupKernels((main, after), (args, after_args), tuple(private))
    after = coherent(after, [k for k, ref in enumerate(after_args) if ref in args and ref[0] != "input"])
    refs = list(dict.fromkeys([*args, *after_args]))
    types: dict[Ref, str] = {}
    align: dict[Ref, int] = {}
    for source, own in ((main, args), (after, after_args)):
        for ref, short, need in zip(own, source.params, source.launch["align"], strict=True):
            types[ref] = short
            align[ref] = max(align.get(ref, 1), int(need))
    one, first = renamed(main, 0, [refs.index(r) for r in args])
    two, second = renamed(after, 100, [refs.index(r) for r in after_args])
    units = int(after.launch["inner"])
    blocks = -(-units // int(after.launch["per_block"]))
    grid = int(main.launch["grid"])
    if int(after.launch["blocks_per_sm"]) == 0 and blocks > grid:
        raise Unsupported(f"a finish of {blocks} blocks behind a barrier over {grid}")
    body = [*first, f"grid_barrier(p{len(refs)}, blk, nblk)"]
    if int(after.launch["blocks_per_sm"]) == 0:
        body += [f"if blk < {blocks}:", *("    " + line for line in second)]
    else:
        body += second
    launch = dict(main.launch) | {
        "cooperative": True,
        "align": [*(align[r] for r in refs), 128],
        "shared": max(int(main.launch["shared"]), int(after.launch["shared"])),
    }
    source = CudaSource(
        (*one, *two),
        tuple(body),
        (*(types[r] for r in refs), "i32"),
        launch,
        main.block,
        main.max_registers,
    )
    return GroupKernels((source,), ((*refs, state),), (*private, Private("int32", STATE_WORDS, True)), apart)


@dataclass(frozen=True)
class Phase:
    """A body that all blocks work on before any of them goes on.

    Attributes:
        source: without clusters and grid barriers of its own.
        refs: the tensor behind each of its pointers.
        extent: rows, where it takes them as an argument.
    """

    source: CudaSource
    refs: tuple[Ref, ...]
    extent: int

    def blocks(self, sms: int) -> int:
        """Blocks that it would have alone, on a device of so many multiprocessors."""
        rule = self.source.launch
        if "grid" in rule:
            return int(rule["grid"])
        units = (self.extent if rule["dynamic"] else 1) * int(rule["inner"])
        count = max(1, -(-units // int(rule["per_block"])))
        return min(count, int(rule["blocks_per_sm"]) * sms) if int(rule["blocks_per_sm"]) else count

    @property
    def any_grid(self) -> bool:
        """Whether fewer blocks do the same work: they go on with what is left, and nothing counts them."""
        return bool(int(self.source.launch["blocks_per_sm"])) and "grid" not in self.source.launch


def in_phases(phases: Sequence[Phase], state: Ref, sms: int) -> tuple[CudaSource, tuple[Ref, ...]]:
    """One cooperative kernel of bodies one after the other, and the tensors behind its pointers, each once.

    It works with any number of blocks: ``launch["inner"]`` is the most that have something to do, and whoever compiles
    it takes as many of them as fit the device at a time (``launch["grid"]``).

    Args:
        state: ``STATE_WORDS`` zeros, which all barriers of the launch share.

    Raises:
        Unsupported: the bodies cannot share a launch.
    """
    block = phases[0].source.block
    types: dict[Ref, str] = {}
    align: dict[Ref, int] = {}
    for phase in phases:
        own = phase.source
        if own.block != block:
            raise Unsupported(f"phases with blocks of {own.block} and of {block} threads in one launch")
        if own.cluster > 1 or own.launch.get("cooperative"):
            raise Unsupported("a phase whose blocks wait for each other")
        for ref, short, need in zip(phase.refs, own.params, own.launch["align"], strict=True):
            types[ref] = short
            align[ref] = max(align.get(ref, 1), int(need))
    refs = (*types, state)
    number = {ref: k for k, ref in enumerate(refs)}
    functions: list[str] = []
    body: list[str] = []
    back = False  # every other phase begins where the one before ended: that is what the cache still holds
    for j, phase in enumerate(phases):
        back = j > 0 and not back and not phase.any_grid
        if j:
            body.append(f"grid_barrier(p{number[state]}, blk, nblk)")
        if any(int(m.group(1)) >= STEPS - 1 for text in phase.source.lines.functions for m in _DEFINED.finditer(text)):
            raise Unsupported(f"more than {STEPS - 1} device functions in one phase")
        inner, lines = renamed(phase.source, j * STEPS, range(len(phase.refs)))
        rows = bool(phase.source.launch["dynamic"])
        name = f"f{j * STEPS + STEPS - 1}"
        takes = ["blk", "nblk", *(["n0"] if rows else []), *(f"p{k}" for k in range(len(phase.refs)))]
        functions += [*inner, "\n".join([f"def {name}({', '.join(takes)}):", *("    " + line for line in lines)])]
        given = [*([f"int64({phase.extent})"] if rows else []), *(f"p{number[r]}" for r in phase.refs)]
        count = phase.blocks(sms)
        if phase.any_grid:
            body += [
                f"m{j} = sel(nblk < {count}, nblk, int32({count}))",
                f"if blk < m{j}:",
                f"    {name}({', '.join(['blk', f'm{j}', *given])})",
            ]
        else:
            at = f"int32({count - 1} - b{j})" if back else f"int32(b{j})"
            call = f"{name}({', '.join([at, f'int32({count})', *given])})"
            # The next one's shared memory is this one's.
            body += [f"for b{j} in range(blk, int32({count}), nblk):", f"    {call}", "    cuda.syncthreads()"]
    caps = [phase.source.max_registers for phase in phases]
    launch = {
        "dynamic": False,
        "inner": max(phase.blocks(sms) for phase in phases),
        "per_block": 1,
        "blocks_per_sm": 0,
        "block": block,
        "shared": max(int(phase.source.launch["shared"]) for phase in phases),
        "align": [*(align[r] for r in types), 128],
        "multiple": 1,
        "generator": GENERATOR,
        "cooperative": True,
    }
    # A cap that suits one body would make another spill: the loosest, and none where one has none.
    cap = max(caps) if all(caps) else 0
    return CudaSource(tuple(functions), tuple(body), (*types.values(), "i32"), launch, block, cap), refs
