"""The flat skeleton: a pointwise program, one pack a thread at a time, ``unroll`` packs in flight."""

from __future__ import annotations

from dataclasses import replace

from autotune.compiler.kernel.nodes import Assign, Const, Do, Expr, Function, Intrinsic, Stmt, Var, both, loop, when
from autotune.compiler.program.in_place import overwritable
from autotune.compiler.program.program import Program
from autotune.compiler.program.vectors import narrowest, open_row
from autotune.compiler.targets.cuda.counts import Counts
from autotune.compiler.targets.cuda.device import BLOCK, BLOCKS, EXTENT, THREAD, ThreadIndex
from autotune.compiler.targets.cuda.memory.access import AHEAD, COLUMN, ROW
from autotune.compiler.targets.cuda.rows.emitter import CudaEmitter
from autotune.compiler.targets.cuda.rows.prefetch import MOST_WORDS, load_function, loads_ahead
from autotune.compiler.targets.cuda.source import CudaSource, FlatSchedule, told
from autotune.errors import Unsupported

_MOST_PLACES = 1.125
"""Places for packs that the parts of a row may have, over the packs that it has."""
PACK, TOTAL = Var("pack"), Var("total")
"""Number of the pack at hand, and of packs in all."""


def emit_flat(e: CudaEmitter) -> CudaSource:
    """The flat kernel of ``e``'s program.

    Every full block runs without bounds checks, so that all its loads can be in flight at once; the last block checks
    each pack. Elements that do not fill a pack, where their number is open, go one by one to its first threads.

    Each element is read and written by one thread, so that an output may lie where an input lies.
    """
    program, vec = e.program, e.vec
    block, unroll = e.schedule.block, e.schedule.unroll
    e.schedule.check_block()
    (pas,) = program.passes
    if pas.row_stores:
        raise Unsupported("an output without a column axis in a flat kernel")
    overwrites = overwritable(program.graph)
    e.overwritten = frozenset(slot for slot, _ in overwrites)
    function, _ = e.pass_function(0, pas)
    dynamic = program.dynamic == 0
    open_cols = open_row(program)
    row_packs = program.n_cols // vec
    step = block * unroll
    tiles = parts_of_a_row(program, vec, step) if isinstance(e.schedule, FlatSchedule) and e.schedule.by_row else 0
    inner = e.inner_rows() * (1 if open_cols else tiles or row_packs)
    count = Counts(open_cols or e.count.wide)

    def place(number: Expr) -> list[Stmt]:
        out: list[Stmt] = [Assign(PACK, number)]
        if tiles:
            out.append(Assign(COLUMN, count.number(PACK * vec)))
        elif open_cols:
            out.append(Assign(COLUMN, PACK * vec))
        else:
            in_row: Expr = PACK
            if program.rows:
                out.append(Assign(ROW, count.quotient(PACK, row_packs)))
                in_row = PACK - ROW * row_packs
            out += [Assign(COLUMN, count.number(in_row * vec)), *e.row_indices()]
        return out

    def of_row() -> list[Stmt]:
        return [*(line for i in pas.row_values for line in e.row_value(i)), *e.bases()]

    def pack(number: Expr, done: Function = function) -> list[Stmt]:
        return [*place(number), *([] if tiles else of_row()), Do(done())]

    group, first, u = Var("group"), Var("first"), Var("u")
    checked = [Assign(PACK, count.number(first + u * block)), when(PACK < TOTAL, pack(PACK))]
    numbers = [count.number(first + u * block) for u in range(unroll)]
    full: list[Stmt] = []
    if overwrites and unroll > 1 and _hold(e, unroll):
        # Loads of what is overwritten stay behind stores before them: here all loads come first.
        loads, (stored, _) = load_function(e), e.pass_function(0, pas)
        words = [Var(f"x_{u}") for u in range(unroll)]
        for number, x in zip(numbers, words, strict=True):
            full += [*place(number), *([] if tiles else e.bases(e.ahead, ())), Assign(x, loads())]
        for number, x in zip(numbers, words, strict=True):
            full += [Assign(AHEAD, x), *pack(number, stored)]
    else:
        full += [line for number in numbers for line in pack(number)]
    tile: Expr = group
    row: list[Stmt] = []
    packs = EXTENT // vec if open_cols else count.number(EXTENT * inner if dynamic else Const(inner))
    groups: Expr = (packs + (step - 1)) // step
    if tiles:
        groups, packs, tile = packs, count.number(Const(row_packs)), (at := Var("tile"))
        row = [Assign(ROW, count.quotient(group, tiles)), Assign(at, count.number(group - ROW * tiles))]
        row += [*e.row_indices(), *of_row()]
    work: list[Stmt] = [
        *row,
        Assign(first, count.number(tile * step + THREAD)),
        when((tile + 1) * step <= TOTAL, full, [loop(u, unroll, checked)]),
    ]
    body: list[Stmt] = [Assign(THREAD, ThreadIndex()), Assign(TOTAL, packs)]
    if e.schedule.blocks_per_sm:
        body.append(loop(group, groups, work, count.number(BLOCK), BLOCKS))
    else:
        body += [Assign(group, count.number(BLOCK)), *work]
    if open_cols and vec > 1:
        body += _rest(e)
    return CudaSource.scheduled(
        body,
        e.params(),
        e.schedule,
        count,
        program.graph.extents[0],
        dynamic=dynamic,
        inner=1 if open_cols else inner,
        per_block=1 if tiles else step * (vec if open_cols else 1),
        align=e.alignments(),
        **told(overwrites, program.graph),
    )


def has_row_values(program: Program) -> bool:
    """Whether rows of a pointwise program have values in common, which every element of a row takes."""
    return bool(program.rows and program.passes[0].row_values)


def parts_of_a_row(program: Program, vec: int, step: int) -> int:
    """Blocks that share a row where each has ``step`` packs of ``vec`` elements of one row alone; 0 where the packs are
    better dealt over all rows: nothing is the same in all of a row, or its last part leaves threads without work."""
    packs = program.n_cols // vec
    parts = -(-packs // step)
    return parts if has_row_values(program) and parts * step <= _MOST_PLACES * packs else 0


def _hold(e: CudaEmitter, packs: int) -> bool:
    """Set the loads of a pack that can be issued before the pack's turn; whether registers hold those of ``packs``."""
    ahead = loads_ahead(e)
    held = bool(ahead) and sum(map(e.raw_words, ahead)) * packs <= MOST_WORDS
    e.ahead, e.ahead_pass = ahead if held else (), 0
    return held


def _rest(e: CudaEmitter) -> list[Stmt]:
    """The elements after the last whole pack, one by one."""
    single = CudaEmitter(e.program, replace(e.schedule, vector_bytes=narrowest(e.program)))
    single.overwritten = e.overwritten
    (pas,) = single.program.passes
    function, _ = single.pass_function(0, pas)
    # Other threads' loads are inside too, should the compiler move them out of a loop over blocks and the branch in it.
    inside = Var("inside", "int64")
    values = [line for i in pas.row_values for line in single.row_value(i)]
    return [
        Assign(COLUMN, TOTAL * e.vec + THREAD),
        Assign(inside, Intrinsic("least64", (COLUMN, EXTENT - 1), "int64")),
        when(
            both(BLOCK.equals(BLOCKS - 1), COLUMN < EXTENT),
            [*values, *single.bases(), Do(function({COLUMN.name: inside}))],
        ),
    ]
