"""Sums over ranks by a Numba kernel that reads the peers' memory directly, without staging buffers.

The protocol is that of :mod:`autotune.domains.c3.collectives.dma`, with the kernel instead of the copies. That module's
reductions use the same kernel.

The kernel reads and writes memory of this device or of its peers through pointers passed at each launch, and supports
any grid size. It does not synchronise ranks: the caller's stream operations on flags order it after the writes of its
inputs and before the reads of its outputs. Loads do not use the read-only cache, since other devices may have written
the data. Each thread loads several packs of 16 bytes before it stores any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from autotune.domains.c3.collectives.nccl import DTYPES, Spec
from autotune.domains.c3.collectives.symmetric import Copies, Flags, give_all, new_event, take
from autotune.domains.c3.group import Group
from autotune.domains.c3.scenario import ITEMSIZE, REDUCING
from autotune.domains.c3.strategy import Strategy
from autotune.errors import Superseded, Unsupported
from autotune.runtime.launch.cuda import Launch, make_launch
from autotune.task import Artifact, Kernel

if TYPE_CHECKING:
    from autotune.compiler.targets.cuda.source import Listing

GENERATOR = "comm-2"
"""Version of the emitted code's semantics; part of an artifact."""
LINE = 128
"""Alignment of chunks in bytes: a cache line, which also satisfies vectorised accesses."""
MOST = 16
"""Maximum number of ranks of a sum."""
_READY, _DONE = 0, 1
_PACK = 16
_IN_FLIGHT = 16  # 16-byte loads that a thread issues before it waits: 64 registers
_launches: dict[tuple[int, int, int, int], tuple[Launch, Kernel]] = {}
"""Launches by key, each with its kernel; the reference keeps the kernel's ``id`` from being reused."""

Lines = Callable[[int], list[str]]


class SmCollective:
    """A reduce-scatter or an all-reduce by the reduction kernel.

    Args:
        artifact: contains the kernel (see :func:`kind_of`).

    Raises:
        Superseded: the collective only moves data, which kernels of earlier versions also did.
        Unsupported: a device has no access to a peer's memory, or the kernel is missing.

    """

    engine = "sm"

    def __init__(self, spec: Spec, group: Group, strategy: Strategy, artifact: Artifact | None = None) -> None:
        if spec.op not in REDUCING:
            raise Superseded(f"{spec.op} by kernels that only move data, which this autotune lacks")
        kinds = [kind_of("pairs", mean=spec.mean), kind_of(mean=spec.mean)]  # the latter by earlier versions
        there = {k.launch.get("op"): k for k in (artifact.kernels if artifact else ())}
        found = [there[kind] for kind in kinds if kind in there]
        if not found:
            raise Unsupported(f"the kernel of {spec.op} is missing")
        self.spec, self.group, self.strategy, self._kernel = spec, group, strategy, found[0]
        self.met = new_event()
        dtype, ranks = DTYPES[spec.dtype], group.ranks
        part = spec.part(ranks)
        self._bytes = part * ITEMSIZE[spec.dtype]
        self._shared = take(group, self._bytes * ranks)
        self._result = take(group, self._bytes * ranks) if spec.op == "all_reduce" else None
        self._flags = Flags(group, 2)
        self._signal = [self._flags.signal(k) for k in range(2)]
        self._wait = [self._flags.wait(k) for k in range(2)]
        self.input = self._shared.view(dtype, part * ranks)[: spec.numel]
        self._own = group.rank * self._bytes
        if self._result is None:
            self.output = torch.empty(part, dtype=dtype, device=group.device)
            self._spread = Copies([])
        else:
            self.output = self._result.view(dtype, spec.numel)
            # Copy engines send the sums: a second kernel would have to wait for SMs, which the computation occupies.
            self._spread = Copies(self._result.to_peers(self._flags.peers, self._own, self._bytes))

    def enqueue(self, stream: Any = None) -> None:
        stream = stream or torch.cuda.current_stream()
        raw = stream.cuda_stream
        self._signal[_READY](raw)
        self._wait[_READY](raw)
        self.met.record(stream)
        sources = [pointer + self._own for pointer in self._shared.pointers]
        target = self.output.data_ptr() + (0 if self._result is None else self._own)
        count = self._bytes // ITEMSIZE[self.spec.dtype]
        blocks = self.strategy.blocks + self.strategy.blocks % 2
        launch(self._kernel, self.group.device.index or 0, blocks, [*sources, target], count, raw)
        self._spread(raw)  # each rank's sums have a separate slot of the output
        self._signal[_DONE](raw)
        self._wait[_DONE](raw)

    def close(self) -> None:
        """Free buffers and flags. A collective call; no call may be in progress."""
        give_all(self.group, self._flags, self._shared, self._result)


# ---- the kernel -----------------------------------------------------------------------------------------------------


def launch(kernel: Kernel, device: int, grid: int, pointers: Sequence[int], count: int, stream: int) -> None:
    """Enqueue a kernel of :func:`build_sum`; also during graph capture, since its cubin is loaded eagerly.

    Args:
        device: index of the current device.
        grid: number of thread blocks.
        pointers: addresses in the order of ``kernel.launch["args"]``.
        count: number of elements per pointer.
        stream: raw handle of a stream of that device.

    Raises:
        LaunchError: the driver returns an error.
    """
    key = (id(kernel), device, grid, count)
    found = _launches.get(key)
    if found is None:
        wanted = len(kernel.launch["args"])
        if len(pointers) != wanted:
            raise ValueError(f"{len(pointers)} pointers for a kernel of {wanted}")
        found = _launches[key] = make_launch(kernel, device, grid, count), kernel
    found[0](stream, pointers)


def kind_of(form: str = "", *, mean: bool = False) -> str:
    """The kind of a kernel, "op" in its launch data, by its form: "" or "pairs"."""
    return "_".join(["reduce", *([form] if form else []), *(["mean"] if mean else [])])


def build_sum(ranks: int, dtype: str, target: str, form: str = "", *, mean: bool = False) -> Kernel:
    """Compile the reduction kernel for ``target`` ("sm_90"), without a GPU.

    The kernel takes pointers, in the order of ``launch["args"]``: ``ranks`` sources and the destination, which may be
    one of the sources. An int64 after them is the number of elements of each. Elements are summed in fp32, in the order
    of the sources, and rounded once.

    Blocks in pairs are clusters of two, which share a graphics processing cluster of the device. Single blocks would
    take one SM from each of several pairs that a GEMM with such clusters needs.

    Addresses are multiples of the element size. If all are congruent modulo 16, accesses are 16 bytes wide; else one
    element.

    Args:
        dtype: dtype of the elements: "bf16", "f16" or "f32".
        form: "" for single blocks, or "pairs".
        mean: it divides sums by the number of ranks before it rounds them.

    Raises:
        Unsupported: there is no kernel for these arguments.
        BuildError: the kernel does not compile.
    """
    from autotune.compiler.targets.cuda.compile import build, capability

    alone = capability(target) < (9, 0)
    return build(emit_sum(ranks, dtype, form=form, mean=mean, cluster=1 if alone or not form else 2), target)


def emit_sum(
    ranks: int, dtype: str, threads: int = 512, unroll: int = 0, *, form: str = "", mean: bool = False, cluster: int = 1
) -> Listing:
    """The source code that :func:`build_sum` compiles.

    Args:
        threads: threads per block, a multiple of 32 up to 1024.
        unroll: packs of 16 bytes in flight per source; 0 for as many as registers allow.
    """
    from autotune.compiler.kernel.printer import tuple_of
    from autotune.compiler.targets.cuda import PREFIX
    from autotune.compiler.targets.cuda.source import Listing

    if dtype not in ITEMSIZE:
        raise Unsupported(f"no kernel that adds elements of {dtype!r}")
    if not 2 <= ranks <= MOST:
        raise Unsupported(f"a sum of {ranks} parts: 2 to {MOST} fit one kernel")
    unroll = unroll or max(1, _IN_FLIGHT // ranks)
    size = ITEMSIZE[dtype]
    vec = _PACK // size
    out = f"p{ranks}"

    def add(terms: list[str]) -> str:
        text = terms[0]
        for term in terms[1:]:
            text = f"add_rn({text}, {term})"
        return f"{text} * float32({1 / ranks!r})" if mean else text

    def through(total: str, vec: int, base: str, loaded: str, added: str) -> list[str]:
        """Lines that sum ``total`` packs of ``vec`` elements, starting at element ``base``."""

        def load(u: int) -> list[str]:
            return [f"u{u}_{r} = {loaded}(p{r}, {base} + w{u} * {vec}, ok{u})" for r in range(ranks)]

        def store(u: int) -> list[str]:
            terms = ", ".join(f"u{u}_{r}" for r in range(ranks))
            return [f"st_{dtype}_{vec}_d({out}, {base} + w{u} * {vec}, {added}({terms}))"]

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
    chunk = [
        f"if (({apart}) & {_PACK - 1}) == 0:",
        f"    head = ((-addr({out})) & {_PACK - 1}) // {size}",
        "    if head > count:",
        "        head = count",
        f"    packs = (count - head) // {vec}",
        *_in(through("packs", vec, "first + head", "lg_i32_4_c", "f0")),
        f"    if blk == 0 and tid < {vec}:",  # elements before the first pack and after the last
        "        if tid < head:",
        f"            {alone('first + tid')}",
        f"        rest = head + packs * {vec} + tid",
        "        if rest < count:",
        f"            {alone('first + rest')}",
        "else:",
        *_in(through("count", 1, "first", f"lg_{dtype}_1_c", "f1")),
    ]
    body = ["tid = int32(cuda.threadIdx.x)", "first = int64(0)", "count = n0", *chunk]
    args = [("source", r) for r in range(ranks)] + [("destination", 0)]
    launch = {
        "op": kind_of(form, mean=mean),
        "args": [list(a) for a in args],
        "align": [size] * (ranks + 1),
        "dynamic": True,  # the number of elements follows the pointers
        "block": threads,
        "shared": 0,
        "generator": GENERATOR,
    }
    code = ("\n".join(packs), single)
    params = (dtype,) * (ranks + 1)
    return Listing(code, tuple(body), params, launch, threads, 0, cluster, name=f"{PREFIX}c3_{launch['op']}")


def _walk(total: str, first: str, count: str, threads: int, unroll: int, load: Lines, store: Lines) -> list[str]:
    """Lines that process ``total`` packs in steps of ``threads * unroll``: every ``count``-th step from ``first`` on.

    Loads are predicated, without branches between them, so that those of the last step are also in flight together.

    Args:
        load: lines that load pack ``w<u>``, for u below ``unroll``; ``ok<u>`` is True if the pack exists.
        store: lines that store the pack.
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
