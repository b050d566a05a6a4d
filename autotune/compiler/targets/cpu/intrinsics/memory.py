"""Memory of a generated CPU kernel as Numba intrinsics: loads and stores over raw addresses, scratch, work tickets."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from autotune.compiler.targets.cpu.intrinsics import float8 as cpu_float8
from autotune.compiler.targets.cpu.intrinsics.math import F32, I32, Builder, Ir, is_nan
from autotune.compiler.targets.cpu.intrinsics.ops import NUMBA_TYPES, written
from autotune.ir.graph import EIGHT_BIT_FLOATS, STORAGE_BYTES, compute_type

_I8, _I16, _I64 = ir.IntType(8), ir.IntType(16), ir.IntType(64)
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


def _address(b: Builder, base: Ir, index: Ir, storage: str) -> Ir:
    element = _STORED[storage]
    pointer = b.inttoptr(base, element.as_pointer())
    return b.gep(pointer, [index], source_etype=element)


def mark(b: Builder, access: Ir, space: str, spaces: Sequence[str]) -> None:
    """Tell LLVM that this access touches ``space`` only (scoped no-alias metadata)."""
    module = b.module
    domain = module.add_metadata(["autotune"])
    scope = {name: module.add_metadata([f"autotune.{name}", domain]) for name in spaces}
    access.set_metadata("alias.scope", module.add_metadata([scope[space]]))
    others = [scope[name] for name in spaces if name != space]
    if others:
        access.set_metadata("noalias", module.add_metadata(others))


def _widen(b: Builder, x: Ir, storage: str) -> Ir:
    """A stored element as its compute type."""
    if storage == "bfloat16":
        return b.bitcast(b.shl(b.zext(x, I32), I32(16)), F32)
    if storage == "float16":
        return b.fpext(x, F32)
    if storage in EIGHT_BIT_FLOATS:
        return cpu_float8.widen(b, x, storage)
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
        return cpu_float8.narrow(b, x, storage)
    if storage in ("int16", "int8", "uint8"):
        return b.trunc(x, _STORED[storage])
    if storage == "bool":
        return b.zext(x, _I8)
    return x


@cache
def loader(storage: str, space: str, spaces: tuple[str, ...]) -> Any:
    """load(address, index) of an element of ``storage`` type; gives its compute type."""

    @written(NUMBA_TYPES[compute_type(storage)], types.int64, types.int64)
    def load(b: Builder, base: Ir, index: Ir) -> Ir:
        value = b.load(_address(b, base, index, storage), typ=_STORED[storage])
        value.align = STORAGE_BYTES[storage]
        mark(b, value, space, spaces)
        return _widen(b, value, storage)

    return load


@cache
def storer(storage: str, space: str, spaces: tuple[str, ...]) -> Any:
    """store(address, index, value), where value is of the storage type's compute type."""

    @written(types.void, types.int64, types.int64, NUMBA_TYPES[compute_type(storage)])
    def store(b: Builder, base: Ir, index: Ir, value: Ir) -> None:
        access = b.store(_narrow(b, value, storage), _address(b, base, index, storage))
        access.align = STORAGE_BYTES[storage]
        mark(b, access, space, spaces)

    return store


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
    # llvmlite knows the attributes that are single words only.
    set.add(b.function.attributes, '"prefer-vector-width"="512"')


@written(types.int64, types.int64)
def hidden(b: Builder, number: Ir) -> Ir:
    """``number`` as LLVM cannot know it: a loop up to it is not unrolled whole."""
    return b.call(ir.InlineAsm(ir.FunctionType(_I64, [_I64]), "", "=r,0"), [number])


def _libc(b: Builder, name: str, result: Ir, *args: Ir) -> Ir:
    fn = cgutils.get_or_insert_function(b.module, ir.FunctionType(result, [a.type for a in args]), name)
    return b.call(fn, args)


@written(types.int64, types.int64)
def allocate(b: Builder, size: Ir) -> Ir:
    """Raw scratch of ``size`` bytes from malloc, to be given to ``release``.

    Numba's own arrays are no use here: they are freed after their last mention, which says nothing about addresses
    taken from them.
    """
    return b.ptrtoint(_libc(b, "malloc", _I8.as_pointer(), b.add(size, _I64(_ALIGNMENT))), _I64)


@written(types.void, types.int64)
def release(b: Builder, block: Ir) -> None:
    _libc(b, "free", ir.VoidType(), b.inttoptr(block, _I8.as_pointer()))
