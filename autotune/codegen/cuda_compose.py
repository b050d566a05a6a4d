"""Several bodies in one launch, one after the other: a barrier over the whole grid between them (grid scope).

AStitch (ASPLOS'22) calls it the global scheme: intermediates go through global memory, which is the L2 for what is
small, and no second launch is needed. All blocks must run at the same time, so the launch is cooperative and its grid
fixed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from autotune.codegen.cuda import CudaSource
from autotune.codegen.intrinsics_cluster import STATE_WORDS
from autotune.codegen.kernels import GroupKernels, Private, Ref
from autotune.errors import Unsupported

_FUNCTION = re.compile(r"\b([fel])(\d+)\(")
_POINTER = re.compile(r"\bp(\d+)\b")


def renamed(source: CudaSource, first_function: int, pointers: Sequence[int]) -> tuple[list[str], list[str]]:
    """Functions and body of ``source`` with its functions numbered from ``first_function`` and its pointer ``k`` called
    ``p<pointers[k]>``. Device functions name pointers as parameters, which stay as they are."""

    def function(m: re.Match[str]) -> str:
        return f"{m.group(1)}{int(m.group(2)) + first_function}("

    def pointer(m: re.Match[str]) -> str:
        return f"p{pointers[int(m.group(1))]}"

    functions = [_FUNCTION.sub(function, text) for text in source.functions]
    body = [_POINTER.sub(pointer, _FUNCTION.sub(function, line)) for line in source.body]
    return functions, body


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
    body = [*first, f"grid_barrier(p{len(refs)}, int64(0), nblk)"]
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
    return GroupKernels((source,), ((*refs, state),), (*private, Private("int32", STATE_WORDS, True)))
