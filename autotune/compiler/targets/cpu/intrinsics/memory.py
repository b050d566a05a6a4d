"""Memory of a generated CPU kernel as Numba intrinsics: loads and stores over raw addresses, scratch, work tickets.

Floats of 8 bits are converted by integer arithmetic, since few processors have such conversions; loops of it are
vectorised. A number that is too large becomes the largest number (e4m3fn, as in torch 2.13 and Inductor's GPU code) or
an infinity (e5m2).

An ordinary store reads the line that it writes, so that 12 bytes move for every 8 of a copy. A streaming store writes
whole lines and bypasses the caches. LLVM vectorises no scalar loop of streaming stores, since it may not assume
alignment. A pass therefore writes its results into a buffer in the first-level cache (the second, if it also sums
them). After each stretch, :func:`streamer` copies them to memory in whole lines.

A kernel of several passes reads memory in the first of them only. The processor's prefetchers stop at the ends of
pages, which are often the ends of rows. So the later passes prefetch the next row, stretch by stretch
(:func:`fetcher`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from autotune.compiler.targets.cpu.intrinsics.math import F32, I32, Builder, Ir, is_nan
from autotune.compiler.targets.cpu.intrinsics.operators import NUMBA_TYPES, written
from autotune.compiler.targets.cpu.schedule import LINE
from autotune.ir.graph import EIGHT_BIT_FLOATS, STORAGE_BYTES, compute_type

_I8, _I16, _I64 = ir.IntType(8), ir.IntType(16), ir.IntType(64)
_LINE = ir.VectorType(I32, LINE // 4)
_SECOND_LEVEL = 2  # as llvm.prefetch counts: 3 is the first-level cache
_STORED: dict[str, Any] = {
    "float32": F32,
    "float16": ir.HalfType(),
    "bfloat16": _I16,
    "float8_e4m3fn": _I8,
    "float8_e5m2": _I8,
    "int64": _I64,
    "int32": I32,
    "int16": _I16,
    "int8": _I8,
    "uint8": _I8,
    "bool": _I8,
}
_ALIGNMENT = 64  # of scratch: a cache line and the widest vector
_NAN = 0x7F


@cache
def loader(storage: str, space: str, spaces: tuple[str, ...]) -> Any:
    """load(address, index) of an element of ``storage`` type; gives its compute type."""

    @written(NUMBA_TYPES[compute_type(storage)], types.int64, types.int64)
    def load(b: Builder, base: Ir, index: Ir) -> Ir:
        value = b.load(_address(b, base, index, storage), typ=_STORED[storage])
        value.align = STORAGE_BYTES[storage]
        _mark(b, value, space, spaces)
        return _widen(b, value, storage)

    return load


@cache
def storer(storage: str, space: str, spaces: tuple[str, ...]) -> Any:
    """store(address, index, value), where value is of the storage type's compute type."""

    @written(types.void, types.int64, types.int64, NUMBA_TYPES[compute_type(storage)])
    def store(b: Builder, base: Ir, index: Ir, value: Ir) -> None:
        access = b.store(_narrow(b, value, storage), _address(b, base, index, storage))
        access.align = STORAGE_BYTES[storage]
        _mark(b, access, space, spaces)

    return store


@cache
def streamer(storage: str, buffer: str, out: str, spaces: tuple[str, ...]) -> Any:
    """stream(address, index, buffer, count): copy ``count`` elements from the start of a buffer to an output.

    They are written from the output's element ``index`` on, in whole lines that bypass the caches. Elements before the
    first and after the last line boundary are written by ordinary stores.
    """
    size = STORAGE_BYTES[storage]

    @written(types.void, types.int64, types.int64, types.int64, types.int64)
    def stream(b: Builder, base: Ir, index: Ir, source: Ir, count: Ir) -> None:
        to = b.add(base, b.mul(index, _I64(size)))
        length = b.mul(count, _I64(size))
        before = b.and_(b.neg(to), _I64(LINE - 1))
        head = b.select(b.icmp_signed("<", before, length), before, length)
        lines = b.udiv(b.sub(length, head), _I64(LINE))
        tail_at = b.add(head, b.mul(lines, _I64(LINE)))
        _copy(b, to, source, head)
        first_to, first_from = b.add(to, head), b.add(source, head)
        with cgutils.for_range(b, lines) as loop:
            offset = b.mul(loop.index, _I64(LINE))
            value = b.load(b.inttoptr(b.add(first_from, offset), _LINE.as_pointer()), typ=_LINE)
            value.align = size
            _mark(b, value, buffer, spaces)
            access = b.store(value, b.inttoptr(b.add(first_to, offset), _LINE.as_pointer()))
            access.align = LINE
            access.set_metadata("nontemporal", b.module.add_metadata([I32(1)]))
            _mark(b, access, out, spaces)
        _copy(b, b.add(to, tail_at), b.add(source, tail_at), b.sub(length, tail_at))

    return stream


@cache
def fetcher(storage: str) -> Any:
    """fetch(address, index, count): have ``count`` elements from ``index`` on brought into the second-level cache."""
    size = STORAGE_BYTES[storage]

    @written(types.void, types.int64, types.int64, types.int64)
    def fetch(b: Builder, base: Ir, index: Ir, count: Ir) -> None:
        at = b.add(base, b.mul(index, _I64(size)))
        lines = b.udiv(b.add(b.mul(count, _I64(size)), _I64(LINE - 1)), _I64(LINE))
        byte = _I8.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
        prefetch = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
        with cgutils.for_range(b, lines) as loop:
            line = b.inttoptr(b.add(at, b.mul(loop.index, _I64(LINE))), byte)
            b.call(prefetch, [line, I32(0), I32(_SECOND_LEVEL), I32(1)])

    return fetch


@written(types.void)
def drain(b: Builder) -> None:
    """Wait until this thread's streamed results are as visible as its stores."""
    if b.module.triple.startswith(("x86_64", "i686", "i386")):
        b.call(cgutils.get_or_insert_function(b.module, ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse.sfence"), [])
    else:
        b.fence("release")


@written(types.int64, types.int64, types.int64)
def word(b: Builder, block: Ir, index: Ir) -> Ir:
    """The ``index``-th 64-bit word of the argument block."""
    return b.load(_address(b, block, index, "int64"), typ=_I64)


@written(types.int64, types.int64, types.int64)
def ticket(b: Builder, block: Ir, index: Ir) -> Ir:
    """Take the next number from the counter at word ``index``: 0, 1, 2, ... over all threads of a launch."""
    return b.atomic_rmw("add", _address(b, block, index, "int64"), _I64(1), "monotonic")


@written(types.void)
def wide(b: Builder) -> None:
    """Have LLVM make vectors of 512 bits of this function's loops where the processor has them.

    By itself it takes 256 on processors that once slowed down under wider ones.
    """
    # llvmlite accepts attributes of single words only.
    set.add(b.function.attributes, '"prefer-vector-width"="512"')


@written(types.int64, types.int64)
def hidden(b: Builder, number: Ir) -> Ir:
    """``number``, hidden from LLVM: a loop up to it is not unrolled whole."""
    return b.call(ir.InlineAsm(ir.FunctionType(_I64, [_I64]), "", "=r,0"), [number])


@written(types.int64, types.int64)
def allocate(b: Builder, size: Ir) -> Ir:
    """Raw scratch of ``size`` bytes from malloc, which ``release`` frees.

    Numba's arrays are unsuitable: Numba frees an array after its last use in the source, even if its address is still
    in use.
    """
    return b.ptrtoint(_libc(b, "malloc", _I8.as_pointer(), b.add(size, _I64(_ALIGNMENT))), _I64)


@written(types.void, types.int64)
def release(b: Builder, block: Ir) -> None:
    _libc(b, "free", ir.VoidType(), b.inttoptr(block, _I8.as_pointer()))


@written(types.void, types.int64, types.int64)
def enter(b: Builder, address: Ir, block: Ir) -> None:
    """Run the kernel at ``address`` on its argument block."""
    kernel = ir.FunctionType(ir.VoidType(), [_I64]).as_pointer()
    b.call(b.inttoptr(address, kernel), [block])


def _address(b: Builder, base: Ir, index: Ir, storage: str) -> Ir:
    element = _STORED[storage]
    pointer = b.inttoptr(base, element.as_pointer())
    return b.gep(pointer, [index], source_etype=element)


def _mark(b: Builder, access: Ir, space: str, spaces: Sequence[str]) -> None:
    """Mark an access as one of ``space`` alone, by scoped no-alias metadata."""
    module = b.module
    domain = module.add_metadata(["autotune"])
    scope = {name: module.add_metadata([f"autotune.{name}", domain]) for name in spaces}
    access.set_metadata("alias.scope", module.add_metadata([scope[space]]))
    others = [scope[name] for name in spaces if name != space]
    if others:
        access.set_metadata("noalias", module.add_metadata(others))


def _widen(b: Builder, x: Ir, storage: str) -> Ir:
    if storage == "bfloat16":
        return b.bitcast(b.shl(b.zext(x, I32), I32(16)), F32)
    if storage == "float16":
        return b.fpext(x, F32)
    if storage in EIGHT_BIT_FLOATS:
        return _widen_float8(b, x, storage)
    if storage in ("int16", "int8"):
        return b.sext(x, I32)
    if storage == "uint8":
        return b.zext(x, I32)
    if storage == "bool":
        return b.icmp_unsigned("!=", x, _I8(0))
    return x


def _narrow(b: Builder, x: Ir, storage: str) -> Ir:
    """A compute value as it is stored: floats rounded to nearest even, integers cut to their low bits."""
    if storage == "bfloat16":
        bits = b.bitcast(x, I32)
        even = b.and_(b.lshr(bits, I32(16)), I32(1))
        rounded = b.lshr(b.add(bits, b.add(even, I32(0x7FFF))), I32(16))
        # Rounding could carry a NaN into infinity.
        return b.trunc(b.select(is_nan(b, x), I32(0x7FC0), rounded), _I16)
    if storage == "float16":
        return b.fptrunc(x, ir.HalfType())
    if storage in EIGHT_BIT_FLOATS:
        return _narrow_float8(b, x, storage)
    if storage in ("int16", "int8", "uint8"):
        return b.trunc(x, _STORED[storage])
    if storage == "bool":
        return b.zext(x, _I8)
    return x


def _libc(b: Builder, name: str, result: Ir, *args: Ir) -> Ir:
    fn = cgutils.get_or_insert_function(b.module, ir.FunctionType(result, [a.type for a in args]), name)
    return b.call(fn, args)


def _copy(b: Builder, to: Ir, source: Ir, length: Ir) -> None:
    """Less than a line, by ordinary stores."""
    byte = _I8.as_pointer()
    with b.if_then(b.icmp_signed("!=", length, _I64(0)), likely=False):
        cgutils.raw_memcpy(b, b.inttoptr(to, byte), b.inttoptr(source, byte), length, 1)


@dataclass(frozen=True)
class _Form:
    """``mantissa``: its bits; ``bias``: of the exponent; ``beyond``: the byte of all that is too large; ``special``:
    the first that is no finite number."""

    mantissa: int
    bias: int
    beyond: int
    special: int

    @property
    def least(self) -> float:
        """The smallest denormal; all denormal numbers are multiples of it."""
        return 2.0 ** (1 - self.bias - self.mantissa)


_FORMS = {"float8_e4m3fn": _Form(3, 7, 0x7E, _NAN), "float8_e5m2": _Form(2, 15, 0x7C, 0x7C)}


def _widen_float8(b: Builder, x: Ir, storage: str) -> Ir:
    f = _FORMS[storage]
    byte = b.zext(x, I32)
    size = b.and_(byte, I32(0x7F))
    moved = b.shl(size, I32(23 - f.mantissa))
    normal = b.bitcast(b.add(moved, I32(127 - f.bias << 23)), F32)
    small = b.fmul(b.uitofp(size, F32), F32(f.least))
    value = b.bitcast(b.select(b.icmp_unsigned("<", size, I32(1 << f.mantissa)), small, normal), I32)
    # A non-finite number has an exponent of all ones; e4m3fn has one such number, a NaN.
    value = b.select(b.icmp_unsigned("<", size, I32(f.special)), value, b.or_(moved, I32(0x7F800000)))
    return b.bitcast(b.or_(value, b.shl(b.and_(byte, I32(0x80)), I32(24))), F32)


def _narrow_float8(b: Builder, x: Ir, storage: str) -> Ir:
    """float32 as a byte to store, rounded to nearest even."""
    f = _FORMS[storage]
    bits = b.bitcast(x, I32)
    size = b.and_(bits, I32(0x7FFFFFFF))
    cut = 23 - f.mantissa
    even = b.and_(b.lshr(size, I32(cut)), I32(1))
    rounded = b.lshr(b.add(size, b.add(even, I32((1 << cut - 1) - 1))), I32(cut))
    normal = b.sub(rounded, I32(127 - f.bias << f.mantissa))
    # Adding a number whose last bit has the value of the smallest denormal rounds to a multiple of that.
    magic = F32(f.least * 2.0**23)
    small = b.sub(b.bitcast(b.fadd(b.bitcast(size, F32), magic), I32), b.bitcast(magic, I32))
    is_small = b.icmp_unsigned("<", size, I32(128 - f.bias << 23))
    code = b.select(is_small, small, normal)
    code = b.select(b.icmp_unsigned(">", code, I32(f.beyond)), I32(f.beyond), code)
    code = b.select(is_nan(b, x), I32(_NAN), code)
    return b.trunc(b.or_(code, b.and_(b.lshr(bits, I32(24)), I32(0x80))), _I8)
