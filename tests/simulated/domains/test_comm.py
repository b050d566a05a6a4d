"""The kernel that adds runs in plain Python on one memory with real addresses, and compiles to lean cubins."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from autotune.compiler.targets.cuda.compile import compile_ptx
from autotune.compiler.targets.cuda.source import Listing
from autotune.domains.c3.collectives.sm import MOST, build_sum, emit_sum
from autotune.errors import Unsupported
from tests.support.edited import with_text
from tests.support.simulator.errors import KernelError
from tests.support.simulator.listings import run_listing
from tests.support.simulator.tensors import STORAGE, decode, encode

TORCH = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
BYTES = {"u8": 1, "bf16": 2, "f16": 2, "f32": 4}
BLOCK, UNROLL = 32, 2


class Memory:
    """Bytes at addresses. Reading what was not given, and writing twice or where nothing may be written, are errors."""

    def __init__(self) -> None:
        self.data = np.full(1 << 16, 0xC7, np.uint8)
        self.readable = np.zeros(len(self.data), bool)
        self.writable = np.zeros(len(self.data), bool)
        self.end = 64

    def place(self, offset: int, content: np.ndarray[Any, Any], *, read: bool = False, write: bool = False) -> int:
        """Put ``content`` at an address that is ``offset`` modulo 16, with bytes around it that nobody may touch."""
        address = -(-self.end // 16) * 16 + 32 + offset
        raw = content.view(np.uint8)
        where = slice(address, address + len(raw))
        self.data[where], self.readable[where], self.writable[where] = raw, read, write
        self.end = address + len(raw)
        return address

    def span(self, p: Pointer, index: int, nbytes: int) -> slice:
        at = p.address + int(index) * p.step
        if at % nbytes:
            raise KernelError(f"{nbytes} bytes at {at} are not aligned")
        return slice(at, at + nbytes)

    def load(self, p: Pointer, index: int, nbytes: int) -> np.ndarray[Any, Any]:
        where = self.span(p, index, nbytes)
        if not self.readable[where].all():
            raise KernelError(f"reads {nbytes} bytes at {where.start} outside its sources")
        return self.data[where]

    def store(self, p: Pointer, index: int, raw: np.ndarray[Any, Any]) -> None:
        raw = raw.view(np.uint8)
        where = self.span(p, index, len(raw))
        if not self.writable[where].all():
            raise KernelError(f"writes {len(raw)} bytes at {where.start} twice, or outside its destinations")
        self.data[where], self.writable[where] = raw, False
        self.readable[where] = False  # in place: nobody may read it any more

    def elements(self, address: int, n: int, dtype: str) -> list[float]:
        raw = self.data[address : address + n * BYTES[dtype]].copy().view(STORAGE[dtype])
        return [float(x) for x in decode(dtype, raw)]


class Pointer:
    def __init__(self, address: int, step: int) -> None:
        self.address, self.step = address, step


def functions(text: str, memory: Memory) -> dict[str, Callable[..., Any]]:
    """The memory functions that the kernel calls, on ``memory``."""
    made: dict[str, Callable[..., Any]] = {
        "addr": lambda p: p.address,
        "add_rn": lambda a, b: np.float32(a) + np.float32(b),
    }

    def loads(short: str, n: int) -> Callable[..., Any]:
        def load(p: Pointer, index: int, where: bool = True) -> Any:
            nbytes = n * np.dtype(STORAGE[short]).itemsize
            raw = memory.load(p, index, nbytes) if where else np.zeros(nbytes, np.uint8)
            out = decode(short, raw.copy().view(STORAGE[short]))
            return out[0] if n == 1 else tuple(out)

        return load

    def stores(short: str, n: int) -> Callable[..., Any]:
        def store(p: Pointer, index: int, values: Any) -> None:
            memory.store(p, index, encode(short, [values] if n == 1 else list(values)))

        return store

    for kind, short, n in re.findall(r"\b(lg|lk|ld|st)_([a-z]+\d+)_(\d+)_[cd]\(", text):
        hint = "d" if kind == "st" else "c"
        made[f"{kind}_{short}_{n}_{hint}"] = (stores if kind == "st" else loads)(short, int(n))
    for short, n in re.findall(r"\bun_([a-z]+\d+)_(\d+)\(", text):
        made[f"un_{short}_{n}"] = lambda w, s=short: tuple(decode(s, np.array(w, np.int32).view(STORAGE[s])))
    return made


def run(source: Listing, memory: Memory, grid: int, addresses: Sequence[int], count: int) -> None:
    steps = [BYTES[short] for short in source.params]
    pointers = [Pointer(a, s) for a, s in zip(addresses, steps, strict=True)]
    run_listing(source, grid, [*pointers, count], functions(source.text, memory), seed=grid)


def numbers(dtype: str, n: int, seed: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(TORCH[dtype])


def stored(t: torch.Tensor) -> np.ndarray[Any, Any]:
    return t.view(torch.uint8).numpy() if t.numel() else np.zeros(0, np.uint8)


def check_reduce(
    ranks: int, dtype: str, n: int, offsets: Sequence[int], grid: int, in_place: bool = False, mean: bool = False
) -> None:
    memory = Memory()
    terms = [numbers(dtype, n, seed) for seed in range(ranks)]
    places = [memory.place(o, stored(t), read=True) for o, t in zip(offsets, terms, strict=False)]
    if in_place:
        target = places[1]
        memory.writable[target : target + n * BYTES[dtype]] = True
    else:
        target = memory.place(offsets[ranks], stored(terms[0]), write=True)
    run(emit_sum(ranks, dtype, BLOCK, UNROLL, mean=mean), memory, grid, [*places, target], n)
    total = terms[0].float()
    for t in terms[1:]:
        total = total + t.float()
    total = total * (1 / ranks) if mean else total
    assert memory.elements(target, n, dtype) == total.to(TORCH[dtype]).tolist()


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_means_are_rounded_once(dtype: str, ranks: int) -> None:
    check_reduce(ranks, dtype, 515, [4] * (ranks + 1), grid=2, mean=True)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("n", [0, 1, 9, 515])
@pytest.mark.parametrize("offsets", [(0, 0, 0, 0), (8, 8, 8, 8), (0, 4, 0, 12)])
def test_sums_of_any_size_at_any_address(dtype: str, n: int, offsets: tuple[int, ...]) -> None:
    check_reduce(3, dtype, n, offsets, grid=2)


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_sum_may_replace_one_of_its_terms(ranks: int) -> None:
    check_reduce(ranks, "bf16", 530, [4] * ranks, grid=3, in_place=True)


@pytest.mark.parametrize(
    ("dtype", "terms", "total"),
    [
        ("f32", (1e8, 1.0, -1e8), 0.0),  # in the order of ranks; any other makes 1
        ("bf16", (256.0, 1.0, 1.0), 258.0),  # rounded once; else 256
        ("f32", (1e-40, 1e-40, 0.0), float(np.float32(2e-40))),
    ],
)
def test_sums_are_in_fp32_in_the_order_of_ranks(dtype: str, terms: tuple[float, ...], total: float) -> None:
    memory = Memory()
    places = [memory.place(0, stored(torch.full((17,), t, dtype=TORCH[dtype])), read=True) for t in terms]
    target = memory.place(0, stored(torch.zeros(17, dtype=TORCH[dtype])), write=True)
    run(emit_sum(3, dtype, BLOCK, UNROLL), memory, 1, [*places, target], 17)
    np.testing.assert_allclose(memory.elements(target, 17, dtype), total, rtol=1e-4)


def test_the_memory_finds_a_kernel_that_goes_too_far() -> None:
    good = emit_sum(2, "bf16", BLOCK, UNROLL)

    def broken(old: str, new: str) -> None:
        memory = Memory()
        places = [memory.place(0, np.zeros(500, np.uint8), read=True) for _ in range(2)]
        places.append(memory.place(0, np.zeros(500, np.uint8), write=True))
        assert old in good.text
        run(with_text(good, good.text.replace(old, new)), memory, 2, places, 250)

    with pytest.raises(KernelError, match="outside"):
        broken("rest < count", "rest <= count")
    with pytest.raises(KernelError, match="twice"):
        broken("range(int64(blk)", "range(int64(0)")


@pytest.mark.parametrize(("ranks", "dtype"), [(2, "bf16"), (3, "f32"), (8, "bf16"), (MOST, "f16")])
def test_kernels_compile_without_spills(ranks: int, dtype: str) -> None:
    kernel = build_sum(ranks, dtype, "sm_90")
    assert kernel.entry == "autotune_c3_reduce"
    assert kernel.resources["stack"] == 0
    assert kernel.resources["registers"] <= 128
    assert kernel.launch["op"] == "reduce"
    assert kernel.launch["dynamic"] is True
    assert len(kernel.launch["args"]) == ranks + 1


@pytest.mark.parametrize("ranks", [4, 8])
def test_loads_are_in_flight_together_and_coherent(ranks: int) -> None:
    ptx, _ = compile_ptx(emit_sum(ranks, "bf16"), "sm_90")
    assert "ld.global.nc" not in ptx  # what another device wrote
    order = "".join("L" if m == "ld" else "S" for m in re.findall(r"\b(ld|st)\.global\S*v4", ptx))
    assert max(len(run_) for run_ in order.split("S")) >= 16
    assert re.search(r"\badd\.rn\.f32", ptx)
    assert not re.search(r"\badd\.(ftz\.)?f32", ptx)  # fast math's, in another order


@pytest.mark.usefixtures("compiled_anew")
def test_equal_kernels_are_equal_cubins() -> None:
    one, other = (build_sum(2, "bf16", "sm_90") for _ in range(2))
    assert one.sha256 == other.sha256


@pytest.mark.parametrize(
    ("ranks", "dtype", "words"), [(2, "i8", "i8"), (MOST + 1, "bf16", "17 parts"), (1, "bf16", "1 parts")]
)
def test_emit_sum_refuses_unsupported_sums(ranks: int, dtype: str, words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        emit_sum(ranks, dtype)
