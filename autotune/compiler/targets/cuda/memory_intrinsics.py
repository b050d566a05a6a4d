"""Vector loads and stores with cache hints, and asynchronous copies to shared memory (``cp.async``, sm_80).

A name such as ``ld_bf16_8_d`` has the kind of access, the storage type, the elements and the hint. Loads are
``ld.global.nc`` through inline assembly without side effects, so that the compiler may move them above stores. A kernel
never reads memory that it writes, except with hint ``c`` (coherent). Then the value that a thread stores to an address
depends on the value that it loaded there.

Without side effects also means that the compiler treats such a load as arithmetic and may execute it speculatively. A
load with the same address in every iteration is moved out of the loop, and out of any branch in it. So a branch alone
cannot keep a load inside its tensor. There are three ways. The address is valid on both sides (``least``). The guard is
an operand (``lg``, unless a branch has tested the same condition before). The load cannot be moved (``lk``).

Measured on an H200: 16-byte accesses are as fast as torch's copy; ``cuda.float32x4`` would emit four scalar loads.

Shared memory is an array of uint32 here. Pieces of 16 bytes of one vector are ``step`` words apart, so that the threads
of a warp have no bank conflicts. ``commit_copies()`` forms a group of the copies that this thread issued since the last
group. ``await_copies_<n>()`` waits until at most ``n`` of its groups are incomplete. Then a thread sees its own copies,
and others see them after a barrier.
"""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import llvmlite.ir as ir
from numba import types

from autotune.compiler.targets.cuda import operation_intrinsics
from autotune.compiler.targets.cuda.operation_intrinsics import (
    F32,
    I1,
    I8,
    I16,
    I32,
    I64,
    asm,
    barred,
    made,
    statement,
)
from autotune.ir.graph import SHORT, STORAGE_BYTES, compute_type

_ARITHMETIC = {"float32": types.float32, "int32": types.int32, "int64": types.int64, "bool": types.boolean}
SIZE = {short: STORAGE_BYTES[storage] for storage, short in SHORT.items()}
NUMBA = {short: _ARITHMETIC[compute_type(storage)] for storage, short in SHORT.items()}
"""By short name of a storage type: the bytes of an element, and the Numba type of an element in arithmetic."""
LOAD_HINT = {
    "d": "ld.global.nc",
    "s": "ld.global.cs.nc",
    "n": "ld.global.nc.L1::no_allocate",
    "p": "ld.global.nc.L1::no_allocate.L2::256B",
    "e": "ld.global.nc.L1::no_allocate.L2::cache_hint",
    "c": "ld.global.L1::no_allocate",  # for memory that this kernel or another device writes
}
STORE_HINT = {"d": "st.global", "s": "st.global.cs", "e": "st.global.L2::cache_hint", "l": "st.global.L2::cache_hint"}
_TEST = "{ .reg .pred q; "
POLICY = {"e": "evict_first", "l": "evict_last"}
"""Hints that are L2 eviction policies (from sm_80 on): data read once is evicted first, so that written data stays."""
POINTER = {"f32": types.float32, "i64": types.int64, "i32": types.int32, "i16": types.int16, "i8": types.int8}
POINTER |= {"f16": types.uint16, "bf16": types.uint16, **dict.fromkeys(("e4m3", "e5m2", "u8", "b1"), types.uint8)}


def words_of(short: str, n: int) -> int:
    """32-bit words that ``n`` elements take in registers as loaded (at least one)."""
    return max(1, n * SIZE[short] // 4)


def _memory(hint: str, text: str) -> str:
    """A load or store with the L2 policy of its hint, if any, which replaces ``{p}`` in ``text``."""
    if hint not in POLICY:
        return text.replace("{p}", "")
    create = f"createpolicy.fractional.L2::{POLICY[hint]}.b64 pol, 1.0;"
    return "{ .reg .b64 pol; " + create + " " + text.replace("{p}", ", pol") + " }"


def _at(b: Any, pointer: Any, done: int) -> Any:
    return pointer if not done else b.gep(b.bitcast(pointer, I8.as_pointer()), [I64(done)])


_PARTS = {1: (I32, "u8", "r"), 2: (I16, "u16", "h")}
"""The register of a part by its bytes: type, suffix of the access, and constraint; 32 bits by default."""


def load_words(b: Any, pointer: Any, nbytes: int, hint: str, fixed: bool = False, where: Any = None) -> list[Any]:
    """``nbytes`` from ``pointer`` as i32 words (less than a word is extended to one).

    Args:
        fixed: prevents the compiler from moving the load out of its branch.
        where: an i32; zeros where it is 0, by a predicated instruction.
    """
    words: list[Any] = []
    for done in range(0, nbytes, 16):
        n = max(1, min(16, nbytes - done) // 4)
        kind, suffix, letter = _PARTS.get(nbytes, (I32, "u32", "r"))
        outs = [f"${k}" for k in range(n)]
        several = f".v{n}.{suffix} {{{', '.join(outs)}}}" if n > 1 else f".{suffix} $0"
        text, constraint, operands = f"{LOAD_HINT[hint]}{several}, [${n}]{{p}};", f"={letter}", [_at(b, pointer, done)]
        if where is not None:
            zero = " ".join(f"mov.{'u16' if kind is I16 else 'u32'} {x}, 0;" for x in outs)
            text = f"{_TEST}setp.ne.u32 q, ${n + 1}, 0; {zero} @q {text} }}"
            constraint, operands = f"=&{letter}", [*operands, where]
        constraints = ",".join([constraint] * n + ["l", "r"][: len(operands)])
        result = kind if n == 1 else ir.LiteralStructType([kind] * n)
        got = asm(b, result, operands, _memory(hint, text), constraints, fixed)
        words += [b.extract_value(got, k) for k in range(n)] if n > 1 else [b.zext(got, I32) if kind is I16 else got]
    return words


def store_words(b: Any, pointer: Any, words: list[Any], nbytes: int, hint: str, where: Any = None) -> None:
    """The first ``nbytes`` of i32 words to ``pointer``; only where ``where`` (an i32), if given, is not 0."""
    for done in range(0, nbytes, 16):
        n = max(1, min(16, nbytes - done) // 4)
        kind, suffix, letter = _PARTS.get(nbytes, (I32, "u32", "r"))
        part = [b.trunc(words[0], I16)] if kind is I16 else words[done // 4 : done // 4 + n]
        several = f".v{n}.{suffix} [$0], {{{', '.join(f'${k + 1}' for k in range(n))}}}"
        text = f"{STORE_HINT[hint]}{several if n > 1 else f'.{suffix} [$0], $1'}{{p}};"
        operands, constraints = [_at(b, pointer, done), *part], "l" + f",{letter}" * n
        if where is not None:
            text = f"{_TEST}setp.ne.u32 q, ${n + 1}, 0; @q {text} }}"
            operands, constraints = [*operands, where], constraints + ",r"
        asm(b, ir.VoidType(), operands, _memory(hint, text), constraints, True)


_FLOAT8 = ("e4m3", "e5m2")
_INFINITE = 61440.0
"""The least magnitude that becomes infinite in e5m2: halfway from its largest number to the next power of two."""


def _decode_float8(b: Any, words: list[Any], short: str, n: int) -> list[Any]:
    """Words as loaded -> ``n`` float32 values."""
    out: list[Any] = []
    for k in range(0, n, 2):
        word = words[k // 4]
        pair = b.lshr(word, I32(16)) if k % 4 else word
        if short == "e4m3":
            two = asm(b, I32, [b.trunc(pair, I16)], "cvt.rn.f16x2.e4m3x2 $0, $1;", "=r,h")
        else:  # the upper half of a float16
            low, high = b.shl(b.and_(pair, I32(0xFF)), I32(8)), b.shl(b.and_(pair, I32(0xFF00)), I32(16))
            two = b.or_(low, high)
        halves = [two, b.lshr(two, I32(16))][: n - k]
        out += [asm(b, F32, [b.trunc(h, I16)], "cvt.f32.f16 $0, $1;", "=f,h") for h in halves]
    return out


def _encode_float8(b: Any, vals: list[Any], short: str) -> list[Any]:
    """float32 values -> words to store, rounded to nearest even."""
    out: list[Any] = []
    for k in range(0, len(vals), 4):
        word = I32(0)
        for q in range(k, min(k + 4, len(vals)), 2):
            low, high = vals[q], vals[q + 1] if q + 1 < len(vals) else F32(0.0)
            pair = b.zext(asm(b, I16, [high, low], f"cvt.rn.satfinite.{short}x2.f32 $0, $1, $2;", "=h,f,f"), I32)
            for x, one in ((low, 1), (high, 1 << 8)) if short == "e5m2" else ():
                size = asm(b, F32, [x], "abs.f32 $0, $1;", "=f,f")
                more = b.fcmp_ordered(">=", size, F32(_INFINITE))
                pair = b.add(pair, b.select(more, I32(one), I32(0)))
            word = b.or_(word, b.shl(pair, I32(8 * (q - k))))
        out.append(word)
    return out


def decode(b: Any, words: list[Any], short: str, n: int) -> list[Any]:
    """Words as loaded -> ``n`` arithmetic values."""
    if short in _FLOAT8:
        return _decode_float8(b, words, short, n)
    out: list[Any] = []
    for k in range(n):
        if short == "f32":
            out.append(b.bitcast(words[k], F32))
        elif short == "i32":
            out.append(words[k])
        elif short == "i64":
            lo, hi = b.zext(words[2 * k], I64), b.zext(words[2 * k + 1], I64)
            out.append(b.or_(lo, b.shl(hi, I64(32))))
        elif short == "bf16":
            w = words[k // 2]
            bits = b.and_(w, I32(0xFFFF0000)) if k % 2 else b.shl(w, I32(16))
            out.append(b.bitcast(bits, F32))
        elif short == "f16":
            w = words[k // 2]
            half = b.trunc(b.lshr(w, I32(16)) if k % 2 else w, I16)
            out.append(asm(b, F32, [half], "cvt.f32.f16 $0, $1;", "=f,h"))
        elif short == "i16":
            w = words[k // 2]
            up = w if k % 2 else b.shl(w, I32(16))
            out.append(b.ashr(up, I32(16)))
        else:
            w = words[k // 4]
            up = b.shl(w, I32(24 - 8 * (k % 4)))
            if short == "i8":
                out.append(b.ashr(up, I32(24)))
            else:
                byte = b.lshr(up, I32(24))
                out.append(byte if short == "u8" else b.icmp_unsigned("!=", byte, I32(0)))
    return out


def _encode(b: Any, vals: list[Any], short: str) -> tuple[list[Any], int]:
    """Arithmetic values -> words to store, and their number of bytes."""
    n = len(vals)
    nbytes = n * SIZE[short]
    if short in _FLOAT8:
        return _encode_float8(b, vals, short), nbytes
    if short == "f32":
        return [b.bitcast(v, I32) for v in vals], nbytes
    if short == "i32":
        return list(vals), nbytes
    if short == "i64":
        out = []
        for v in vals:
            out += [b.trunc(v, I32), b.trunc(b.lshr(v, I64(32)), I32)]
        return out, nbytes
    if short in ("bf16", "f16"):
        if n == 1:
            return [b.zext(asm(b, I16, vals, f"cvt.rn.{short}.f32 $0, $1;", "=h,f"), I32)], nbytes
        pairs = ([vals[k + 1], vals[k]] for k in range(0, n, 2))
        return [asm(b, I32, pair, f"cvt.rn.{short}x2.f32 $0, $1, $2;", "=r,f,f") for pair in pairs], nbytes
    bits = 8 * SIZE[short]
    per = 32 // bits
    mask = I32((1 << bits) - 1)
    out = []
    for k in range(0, n, per):
        word = I32(0)
        for q, v in enumerate(vals[k : k + per]):
            if v.type == I1:  # a byte is selected where it belongs, and two of them join in one instruction
                word = b.or_(word, b.select(v, I32(1 << bits * q), I32(0)))
                continue
            v32 = b.zext(v, I32) if v.type != I32 else v
            word = b.or_(word, b.shl(b.and_(v32, mask), I32(bits * q)))
        out.append(word)
    return out, nbytes


def pointer_to(b: Any, args: Any) -> Any:
    return b.gep(args[0], [args[1]])


def numbers(short: str, n: int) -> Any:
    """The Numba type of ``n`` arithmetic values: a tuple, or the type of a single value."""
    return NUMBA[short] if n == 1 else types.UniTuple(NUMBA[short], n)


def _make_load(kind: str, short: str, n: int, hint: str) -> Any:
    """``ld_<type>_<n>_<hint>(pointer, index)``: a tuple of ``n`` arithmetic values (a scalar for n = 1).

    ``lk`` is for a load whose address may be invalid if the branch around it is not taken. ``lr`` returns the same
    elements as packed 32-bit words. ``lg`` and ``lw`` are ``ld`` and ``lr`` with a third argument: zeros if it is
    false.
    """
    raw, guarded = kind in ("lr", "lw"), kind in ("lg", "lw")
    result = types.UniTuple(types.uint32, words_of(short, n)) if raw else numbers(short, n)

    def write(context: Any, b: Any, sig: Any, args: Any) -> Any:
        where = b.zext(args[2], I32) if guarded else None
        words = load_words(b, pointer_to(b, args), n * SIZE[short], hint, kind == "lk", where)
        values = words if raw else decode(b, words, short, n)
        return values[0] if n == 1 and not raw else context.make_tuple(b, sig.return_type, values)

    return made(2 + guarded, lambda ptr, idx, *where: (result(ptr, idx, *(types.boolean for _ in where)), write))


def _make_unpack(short: str, n: int) -> Any:
    """``un_<type>_<n>(words)``: packed words -> a tuple of ``n`` arithmetic values."""

    def write(context: Any, b: Any, sig: Any, args: Any) -> Any:
        words = [b.extract_value(args[0], k) for k in range(words_of(short, n))]
        return context.make_tuple(b, sig.return_type, decode(b, words, short, n))

    return made(1, lambda words: (types.UniTuple(NUMBA[short], n)(words), write))


def _make_store(kind: str, short: str, n: int, hint: str) -> Any:
    """``st_<type>_<n>_<hint>(pointer, index, values)``: ``values`` a tuple of ``n`` (a scalar for n = 1). ``sg`` has a
    fourth argument: nothing is stored where it is false."""

    def write(context: Any, b: Any, sig: Any, args: Any) -> None:
        values = [args[2]] if n == 1 else [b.extract_value(args[2], k) for k in range(n)]
        words, nbytes = _encode(b, values, short)
        at = pointer_to(b, args)
        store_words(b, at, words, nbytes, hint, b.zext(args[3], I32) if kind == "sg" else None)

    def typed(ptr: Any, idx: Any, values: Any, *where: Any) -> Any:
        return types.void(ptr, idx, values, *(types.boolean for _ in where)), write

    return made(3 + (kind == "sg"), typed)


def _to_l2(context: Any, b: Any, sig: Any, args: Any) -> None:
    asm(b, ir.VoidType(), [pointer_to(b, args)], "prefetch.global.L2 [$0];", "l", True)


_SHARED = 3
"""LLVM's address space of shared memory."""


def _shared_at(context: Any, b: Any, array: Any, value: Any, word: Any, more: Any) -> Any:
    """Pointer to shared memory, ``word + more`` words on."""
    data = context.make_array(array)(context, b, value).data
    at = b.gep(data, [b.sext(b.add(word, more), I64)])
    return b.addrspacecast(at, I32.as_pointer(_SHARED))


def _pieces(b: Any, nbytes: int, step: Any) -> list[tuple[int, int, Any]]:
    """(first byte, bytes, words on) of each piece."""
    sizes = [(d, min(16, nbytes - d)) for d in range(0, nbytes, 16)]
    return [(d, n, b.mul(step, I32(k))) for k, (d, n) in enumerate(sizes)]


def _make_copy(short: str, n: int, hint: str) -> Any:
    """``copy_<type>_<n>_<hint>(array, word, step, pointer, index)``: begin to copy ``n`` elements to shared memory."""
    kind = {"d": "", "p": ".L2::256B"}[hint]

    def write(context: Any, b: Any, sig: Any, args: Any) -> None:
        source = b.gep(args[3], [args[4]])
        for done, size, more in _pieces(b, n * SIZE[short], args[2]):
            to = b.ptrtoint(_shared_at(context, b, sig.args[0], args[0], args[1], more), I32)
            start = b.add(b.ptrtoint(source, I64), I64(done))
            cache = "cg" if size == 16 else "ca"
            barred(b, [to, start], f"cp.async.{cache}.shared.global{kind} [$0], [$1], {size};", "r,l")

    return made(
        5, lambda array, _, step, ptr, idx: (types.void(array, types.int32, types.int32, ptr, types.int64), write)
    )


def _make_take(short: str, n: int) -> Any:
    """``take_<type>_<n>(array, word, step)``: a tuple of ``n`` arithmetic values from shared memory."""
    nbytes = 4 * words_of(short, n)

    def write(context: Any, b: Any, sig: Any, args: Any) -> Any:
        words: list[Any] = []
        for _, size, more in _pieces(b, nbytes, args[2]):
            at = _shared_at(context, b, sig.args[0], args[0], args[1], more)
            many = ir.VectorType(I32, size // 4)
            vector = b.load(b.bitcast(at, many.as_pointer(_SHARED)), align=size)
            words += [b.extract_element(vector, I32(k)) for k in range(size // 4)]
        return context.make_tuple(b, sig.return_type, decode(b, words, short, n))

    return made(3, lambda array, *_: (types.UniTuple(NUMBA[short], n)(array, types.int32, types.int32), write))


def _make_put(short: str, n: int) -> Any:
    """``put_<type>_<n>(array, word, step, values)``: ``n`` fp32 or int32 values, a tuple, to shared memory."""
    element = {"f32": F32, "i32": I32}[short]

    def write(context: Any, b: Any, sig: Any, args: Any) -> None:
        for done, size, more in _pieces(b, 4 * n, args[2]):
            at = _shared_at(context, b, sig.args[0], args[0], args[1], more)
            many = ir.VectorType(element, size // 4)
            vector = ir.Constant(many, ir.Undefined)
            for k in range(size // 4):
                value = b.extract_value(args[3], done // 4 + k)
                vector = b.insert_element(vector, value, I32(k))
            b.store(vector, b.bitcast(at, many.as_pointer(_SHARED)), align=size)

    values = types.UniTuple(NUMBA[short], n)
    return made(4, lambda array, *_: (types.void(array, types.int32, types.int32, values), write))


PLAIN: dict[str, Any] = {
    # ``to_l2(pointer, index)``: has the line of an element brought into the L2; nothing waits for it.
    "to_l2": made(2, lambda ptr, idx: (types.void(ptr, idx), _to_l2)),
    # The address that a pointer holds.
    "addr": made(1, lambda ptr: (types.int64(ptr), lambda c, b, sig, args: b.ptrtoint(args[0], I64))),
    "commit_copies": statement("cp.async.commit_group;"),
}
_AWAIT = "await_copies_"
_MAKERS: dict[str, Any] = {
    **{kind: partial(_make_load, kind) for kind in ("ld", "lk", "lr", "lg", "lw")},
    **{kind: partial(_make_store, kind) for kind in ("st", "sg")},
    "un": _make_unpack,
    "copy": _make_copy,
    "take": _make_take,
    "put": _make_put,
}


@functools.cache
def resolve(name: str) -> Any:
    """The object behind a name that generated code uses, made on first use, or None if the name is not an intrinsic."""
    if (found := operation_intrinsics.resolve(name)) is not None:
        return found
    if name.startswith(_AWAIT):
        return statement(f"cp.async.wait_group {int(name.removeprefix(_AWAIT))};")
    kind, *rest = name.split("_")
    if kind in _MAKERS and len(rest) in (2, 3) and rest[1].isdecimal():
        return _MAKERS[kind](rest[0], int(rest[1]), *rest[2:])
    return PLAIN.get(name)
