"""Loads and stores under a condition, each one predicated instruction: no branch, so that all that a thread does lies
in one block of instructions, and the compiler can issue the loads of one pack before the stores of another.

And what says when something is to be done: ``touch``, ``pin`` and ``tied``, for
:mod:`autotune.compiler.targets.cuda.rows.early`, and ``to_l2``, for :mod:`autotune.compiler.targets.cuda.scatter`.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.cuda.extending import intrinsic

from autotune.compiler.targets.cuda.intrinsics.base import (
    F32,
    I16,
    I32,
    LOAD_HINT,
    NUMBA,
    SIZE,
    STORE_HINT,
    _asm,
    _at,
    _const,
    _decode,
    _encode,
    _load_words,
    _memory,
    _pointer,
    words_of,
)
from autotune.compiler.targets.cuda.intrinsics.names import access_of

_ACCESSES = ("lg", "lw", "sg", "touch")
_TEST = "{ .reg .pred q; "


def _load(b: Any, pointer: Any, where: Any, nbytes: int, hint: str) -> list[Any]:
    """``nbytes`` as i32 words, zeros where ``where`` (an i32) is 0."""
    head = LOAD_HINT[hint]
    if nbytes < 4:
        kind, ty, c = (".u8", I32, "=&r") if nbytes == 1 else (".u16", I16, "=&h")
        zero = "mov.u32 $0, 0;" if nbytes == 1 else "mov.u16 $0, 0;"
        text = f"{_TEST}setp.ne.u32 q, $2, 0; {zero} @q {head}{kind} $0, [$1]{{p}}; }}"
        out = _asm(b, ty, [pointer, where], _memory(hint, text), f"{c},l,r")
        return [out if nbytes == 1 else b.zext(out, I32)]
    words: list[Any] = []
    for done in range(0, nbytes, 16):
        n = min(16, nbytes - done) // 4
        outs = ", ".join(f"${k}" for k in range(n))
        many, names = ("", outs) if n == 1 else (f".v{n}", f"{{{outs}}}")
        zero = " ".join(f"mov.u32 ${k}, 0;" for k in range(n))
        text = f"{_TEST}setp.ne.u32 q, ${n + 1}, 0; {zero} @q {head}{many}.u32 {names}, [${n}]{{p}}; }}"
        result = I32 if n == 1 else ir.LiteralStructType([I32] * n)
        operands = [_at(b, pointer, done), where]
        made = _asm(b, result, operands, _memory(hint, text), ",".join(["=&r"] * n) + ",l,r")
        words += [made] if n == 1 else [b.extract_value(made, k) for k in range(n)]
    return words


def _store(b: Any, pointer: Any, words: list[Any], where: Any, nbytes: int, hint: str) -> None:
    """The first ``nbytes`` of i32 words, where ``where`` (an i32) is not 0."""
    head, void = STORE_HINT[hint], ir.VoidType()
    if nbytes < 4:
        kind, c, x = (".u8", "r", words[0]) if nbytes == 1 else (".u16", "h", b.trunc(words[0], I16))
        text = f"{_TEST}setp.ne.u32 q, $2, 0; @q {head}{kind} [$0], $1{{p}}; }}"
        _asm(b, void, [pointer, x, where], _memory(hint, text), f"l,{c},r", True)
        return
    for done in range(0, nbytes, 16):
        n = min(16, nbytes - done) // 4
        ins = ", ".join(f"${k + 1}" for k in range(n))
        many, names = ("", ins) if n == 1 else (f".v{n}", f"{{{ins}}}")
        text = f"{_TEST}setp.ne.u32 q, ${n + 1}, 0; @q {head}{many}.u32 [$0], {names}{{p}}; }}"
        operands = [_at(b, pointer, done), *words[done // 4 : done // 4 + n], where]
        _asm(b, void, operands, _memory(hint, text), "l" + ",r" * (n + 1), True)


def _make_load(short: str, n: int, hint: str, raw: bool = False) -> Any:
    """``lg_<type>_<n>_<hint>(pointer, index, where)``: as ``ld``, zeros where ``where`` is false. ``lw``, which is
    ``raw``: as ``lr``."""

    @intrinsic
    def load(typingctx, ptr, idx, where):  # type: ignore[no-untyped-def]
        result = NUMBA[short] if n == 1 else types.UniTuple(NUMBA[short], n)
        result = types.UniTuple(types.uint32, words_of(short, n)) if raw else result
        sig = result(ptr, idx, types.boolean)

        def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
            test = builder.zext(args[2], I32)
            words = _load(builder, _pointer(builder, args), test, n * SIZE[short], hint)
            vals = words if raw else _decode(builder, words, short, n)
            return vals[0] if n == 1 and not raw else context.make_tuple(builder, sig.return_type, vals)

        return sig, codegen

    return load


def _make_store(short: str, n: int, hint: str) -> Any:
    """``sg_<type>_<n>_<hint>(pointer, index, values, where)``: as ``st``, nothing where ``where`` is false."""

    @intrinsic
    def store(typingctx, ptr, idx, vals, where):  # type: ignore[no-untyped-def]
        sig = types.void(ptr, idx, vals, types.boolean)

        def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
            v = [args[2]] if n == 1 else [builder.extract_value(args[2], k) for k in range(n)]
            words, nbytes = _encode(builder, v, short)
            _store(builder, _pointer(builder, args), words, builder.zext(args[3], I32), nbytes, hint)
            return context.get_dummy_value()

        return sig, codegen

    return store


def _make_touch(short: str, n: int, hint: str) -> Any:
    """``touch_<type>_<n>_<hint>(pointer, index)``: up to four of the bytes of ``n`` elements that are loaded later."""

    @intrinsic
    def touch(typingctx, ptr, idx):  # type: ignore[no-untyped-def]
        def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
            return _load_words(builder, _pointer(builder, args), min(4, n * SIZE[short]), hint)[0]

        return types.int32(ptr, idx), codegen

    return touch


@intrinsic
def _pin(typingctx, word):  # type: ignore[no-untyped-def]
    """``word``, as something the compiler does not look into: bits packed into it stay packed."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        return _asm(builder, I32, list(args), "mov.b32 $0, $1;", "=r,r")

    return types.int32(types.int32), codegen


@intrinsic
def _tied(typingctx, x, word):  # type: ignore[no-untyped-def]
    """``x``, which has to wait for ``word``: with bits that are zero, for the grid's second extent is always 1."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        one = builder.call(ir.InlineAsm(ir.FunctionType(I32, []), "mov.u32 $0, %nctaid.y;", "=r"), [])
        none = builder.and_(args[1], builder.sub(one, _const(I32, 1)))
        return builder.bitcast(builder.or_(builder.bitcast(args[0], I32), none), F32)

    return types.float32(types.float32, types.int32), codegen


@intrinsic
def _to_l2(typingctx, ptr, idx):  # type: ignore[no-untyped-def]
    """``to_l2(pointer, index)``: has the line of an element brought into the L2; nothing waits for it."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        _asm(builder, ir.VoidType(), [_pointer(builder, args)], "prefetch.global.L2 [$0];", "l", True)
        return context.get_dummy_value()

    return types.void(ptr, idx), codegen


PLAIN = {"pin": _pin, "tied": _tied, "to_l2": _to_l2}


def resolve(name: str) -> Any:
    """The object behind a name, or None if it is none of these."""
    if name in PLAIN:
        return PLAIN[name]
    found = access_of(name, _ACCESSES)
    if found is None:
        return None
    kind, short, n, hint = found
    if kind in ("lg", "lw"):
        return _make_load(short, n, hint, raw=kind == "lw")
    return (_make_store if kind == "sg" else _make_touch)(short, n, hint)
