"""Kernels of collectives: copies of several parts at a time, and sums over ranks.

Both read and write memory of this device or of its peers, through pointers that are handed over at each launch, and run
on grids of any size. They order nothing between ranks: whoever launches them sees to it that the data is there before,
and waited for after (by operations of streams on flags, say). Loads are plain ones, as another device may have written
what they read; each thread loads several packs of 16 bytes before it stores any.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autotune.compiler.kernel.printer import tuple_of
from autotune.compiler.targets.cuda.source import PREFIX, Listing
from autotune.errors import Unsupported
from autotune.task import Kernel

GENERATOR = "comm-2"
"""Changes when emitted code changes meaning; part of an artifact."""
SIZE = {"bf16": 2, "f16": 2, "f32": 4}
MOST = 16
"""Parts of a copy, or ranks of a sum, at most."""
_PACK = 16
_IN_FLIGHT = 16  # loads of 16 bytes that a thread issues before it waits: 64 registers

Lines = Callable[[int], list[str]]


def build_comm(op: str, ranks: int, dtype: str, target: str, threads: int = 512, unroll: int = 0) -> Kernel:
    """Compile one kernel for ``target`` ("sm_90"), without a GPU.

    The kernel takes pointers, in the order of ``launch["args"]``, and one int64 after them:

    - "copy": ``ranks`` sources, ``ranks`` destinations, and the bytes of each part. Part i goes from source i to
      destination i; a part whose source or destination is null is left out. Block b works on part b modulo ``ranks``:
      ranks that hand their parts over in different orders write to different peers.
    - "reduce": ``ranks`` sources, the destination, and the elements of each. They are added in fp32, in the order of
      the sources, and rounded once. The destination may be one of the sources.

    Addresses are multiples of an element's size, and sizes whole elements. Where all addresses that go together are the
    same modulo 16, accesses are of 16 bytes; else of an element.

    Args:
        op: "copy" or "reduce".
        dtype: of the elements: "bf16", "f16" or "f32".
        threads: of a block.
        unroll: packs of 16 bytes in flight for each source; 0 for as many as registers allow.

    Raises:
        Unsupported: there is no such kernel.
        BuildError: it does not compile.
    """
    from autotune.compiler.targets.cuda.compile import build

    return build(emit_comm(op, ranks, dtype, threads, unroll), target)


def emit_comm(op: str, ranks: int, dtype: str, threads: int = 512, unroll: int = 0) -> Listing:
    """The source that :func:`build_comm` compiles."""
    least = 2 if op == "reduce" else 1
    if op not in ("copy", "reduce") or dtype not in SIZE:
        raise Unsupported(f"no kernel that does {op!r} on elements of {dtype!r}")
    if not least <= ranks <= MOST:
        raise Unsupported(f"{op} of {ranks} parts: {least} to {MOST} fit one kernel")
    if not 32 <= threads <= 1024 or threads % 32:
        raise Unsupported("a block is a multiple of 32 up to 1024 threads")
    emit = _copy if op == "copy" else _reduce
    return replace(emit(ranks, dtype, threads, unroll), name=f"{PREFIX}c3_{op}")


def _launch(op: str, args: list[tuple[str, int]], threads: int, align: int) -> dict[str, object]:
    return {
        "op": op,
        "args": [list(a) for a in args],
        "align": [align] * len(args),
        "dynamic": True,  # bytes or elements follow the pointers
        "block": threads,
        "shared": 0,
        "generator": GENERATOR,
    }


def _walk(total: str, first: str, count: str, threads: int, unroll: int, load: Lines, store: Lines) -> list[str]:
    """Lines that take ``total`` packs in steps of ``threads * unroll``: every ``count``-th step, from ``first`` on.

    Loads are predicated, without a branch between them, so that those of the last step are in flight together too.

    Args:
        load: lines that load pack ``w<u>``, for u below ``unroll``, where ``ok<u>`` says that there is such a pack.
        store: lines that store it.
    """
    step = threads * unroll
    lines = [f"for group in range({first}, ({total} + {step - 1}) // {step}, {count}):"]
    for u in range(unroll):
        lines += [f"    w{u} = group * {step} + tid + {u * threads}", f"    ok{u} = w{u} < {total}"]
    for u in range(unroll):
        lines += _in(load(u))
    for u in range(unroll):
        lines += [f"    if ok{u}:", *_in(_in(store(u)))]
    return lines


def _in(lines: list[str]) -> list[str]:
    return ["    " + line for line in lines]


# ---- copies ---------------------------------------------------------------------------------------------------------


def _copy(parts: int, dtype: str, threads: int, unroll: int) -> Listing:
    unroll = unroll or _IN_FLIGHT // 2
    size = SIZE[dtype]

    def through(total: str, base: str, width: int, kind: str) -> list[str]:
        """Lines that copy ``total`` pieces of ``width`` bytes, from byte ``base`` on."""
        return _walk(
            total, "first", "count", threads, unroll,
            lambda u: [f"u{u} = lg_{kind}_c(s, {base}w{u} * {width}, ok{u})"],
            lambda u: [f"st_{kind}_d(d, {base}w{u} * {width}, u{u})"],
        )  # fmt: skip

    part = [
        "def f0(s, d, n, first, count, tid):",
        f"    if ((addr(s) ^ addr(d)) & {_PACK - 1}) == 0:",
        f"        head = (-addr(s)) & {_PACK - 1}",
        "        if head > n:",
        "            head = n",
        f"        packs = (n - head) // {_PACK}",
        *_in(_in(through("packs", "head + ", _PACK, "i32_4"))),
        f"        if first == 0 and tid < {_PACK}:",  # what lies before the first pack and after the last
        "            if tid < head:",
        "                st_u8_1_d(d, tid, lk_u8_1_c(s, tid))",
        f"            rest = head + packs * {_PACK} + tid",
        "            if rest < n:",
        "                st_u8_1_d(d, rest, lk_u8_1_c(s, rest))",
        "    else:",
        f"        items = n // {size}",
        *_in(_in(through("items", "", size, f"i{8 * size}_1"))),
    ]
    body = [
        "tid = int32(cuda.threadIdx.x)",
        f"first = int64(udiv(blk, {parts}))",
        f"for part in range(urem(blk, {parts}), {parts}, nblk):",  # once, unless there are fewer blocks than parts
        "    count = int64(1)",
        "    if part < nblk:",
        f"        count = int64(udiv(int32(nblk - 1 - part), {parts}) + 1)",
        "    s = p0",
        f"    d = p{parts}",
    ]
    for k in range(1, parts):
        body += [f"    if part == {k}:", f"        s = p{k}", f"        d = p{parts + k}"]
    body += ["    if addr(s) != 0 and addr(d) != 0:", "        f0(s, d, n0, first, count, tid)"]
    args = [("source", k) for k in range(parts)] + [("destination", k) for k in range(parts)]
    launch = _launch("copy", args, threads, size)
    return Listing(("\n".join(part),), tuple(body), ("u8",) * len(args), launch, threads, 0)


# ---- sums -----------------------------------------------------------------------------------------------------------


def _reduce(ranks: int, dtype: str, threads: int, unroll: int) -> Listing:
    unroll = unroll or max(1, _IN_FLIGHT // ranks)
    size = SIZE[dtype]
    vec = _PACK // size
    out = f"p{ranks}"

    def add(terms: list[str]) -> str:
        text = terms[0]
        for term in terms[1:]:
            text = f"add_rn({text}, {term})"
        return text

    def through(total: str, vec: int, base: str, loaded: str, added: str) -> list[str]:
        """Lines that add ``total`` pieces of ``vec`` elements, from element ``base`` on."""

        def load(u: int) -> list[str]:
            return [f"u{u}_{r} = {loaded}(p{r}, {base}w{u} * {vec}, ok{u})" for r in range(ranks)]

        def store(u: int) -> list[str]:
            terms = ", ".join(f"u{u}_{r}" for r in range(ranks))
            return [f"st_{dtype}_{vec}_d({out}, {base}w{u} * {vec}, {added}({terms}))"]

        return _walk(total, "int64(blk)", "nblk", threads, unroll, load, store)

    words, numbers = [f"w{r}" for r in range(ranks)], [f"x{r}" for r in range(ranks)]
    packs = [f"def f0({', '.join(words)}):"]
    packs += [f"    {x} = un_{dtype}_{vec}({w})" for x, w in zip(numbers, words, strict=True)]
    packs.append(f"    return {tuple_of([add([f'{x}[{e}]' for x in numbers]) for e in range(vec)])}")
    single = f"def f1({', '.join(numbers)}):\n    return {add(numbers)}"

    def alone(at: str) -> str:
        loads = ", ".join(f"lk_{dtype}_1_c(p{r}, {at})" for r in range(ranks))
        return f"st_{dtype}_1_d({out}, {at}, f1({loads}))"

    apart = " | ".join(f"(addr(p{r}) ^ addr({out}))" for r in range(ranks))
    body = [
        "tid = int32(cuda.threadIdx.x)",
        f"if (({apart}) & {_PACK - 1}) == 0:",
        f"    head = ((-addr({out})) & {_PACK - 1}) // {size}",
        "    if head > n0:",
        "        head = n0",
        f"    packs = (n0 - head) // {vec}",
        *_in(through("packs", vec, "head + ", "lg_i32_4_c", "f0")),
        f"    if blk == 0 and tid < {vec}:",  # what lies before the first pack and after the last
        "        if tid < head:",
        f"            {alone('tid')}",
        f"        rest = head + packs * {vec} + tid",
        "        if rest < n0:",
        f"            {alone('rest')}",
        "else:",
        *_in(through("n0", 1, "", f"lg_{dtype}_1_c", "f1")),
    ]
    args = [("source", r) for r in range(ranks)] + [("destination", 0)]
    launch = _launch("reduce", args, threads, size)
    return Listing(("\n".join(packs), single), tuple(body), (dtype,) * len(args), launch, threads, 0)
