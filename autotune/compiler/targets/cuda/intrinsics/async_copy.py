"""Copies from global to shared memory that need no registers on the way (``cp.async``, sm_80), and vectors there.

Names that generated code uses; :func:`resolve` finds them, as ``intrinsics.resolve`` does its own. Shared memory is an
array of uint32 here; of a vector of more than 16 bytes, pieces of 16 lie ``step`` words apart, so that the threads of a
warp, each with its own pieces side by side, meet no bank conflicts.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.cuda.extending import intrinsic

from autotune.compiler.targets.cuda.intrinsics.base import F32, I32, I64, NUMBA, SIZE, _decode, words_of
from autotune.compiler.targets.cuda.intrinsics.names import access_of

SHARED = 3
"""LLVM's address space of shared memory."""
_VOID = ir.VoidType()
_ACCESSES = ("copy", "take", "put")
_AWAIT = "await_copies_"


def _asm(b: Any, operands: list[Any], text: str, constraints: str) -> None:
    """Inline assembly that other memory accesses are not moved across."""
    fty = ir.FunctionType(_VOID, [o.type for o in operands])
    clobber = f"{constraints},~{{memory}}" if constraints else "~{memory}"
    b.call(ir.InlineAsm(fty, text, clobber, side_effect=True), operands)


def _at(context: Any, b: Any, array: Any, value: Any, word: Any, more: Any) -> Any:
    """Pointer to shared memory, ``word + more`` words on."""
    data = context.make_array(array)(context, b, value).data
    at = b.gep(data, [b.sext(b.add(word, more), I64)])
    return b.addrspacecast(at, I32.as_pointer(SHARED))


def _pieces(b: Any, nbytes: int, step: Any) -> list[tuple[int, int, Any]]:
    """(first byte, bytes, words on) of each piece."""
    sizes = [(d, min(16, nbytes - d)) for d in range(0, nbytes, 16)]
    return [(d, n, b.mul(step, ir.Constant(I32, k))) for k, (d, n) in enumerate(sizes)]


def _make_copy(short: str, n: int, hint: str) -> Any:
    """``copy_<type>_<n>_<hint>(array, word, step, pointer, index)``: begin to copy ``n`` elements to shared memory."""
    kind, policy = (".L2::256B", "") if hint == "p" else ("", "")
    if hint == "e":
        kind, policy = ".L2::cache_hint", "createpolicy.fractional.L2::evict_first.b64 pol, 1.0;"

    @intrinsic
    def copy(typingctx, array, word, step, ptr, idx):  # type: ignore[no-untyped-def]
        def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
            source = builder.gep(args[3], [args[4]])
            for done, size, more in _pieces(builder, n * SIZE[short], args[2]):
                to = builder.ptrtoint(_at(context, builder, sig.args[0], args[0], args[1], more), I32)
                start = builder.add(builder.ptrtoint(source, I64), ir.Constant(I64, done))
                cache = "cg" if size == 16 else "ca"
                text = f"cp.async.{cache}.shared.global{kind} [$0], [$1], {size}{', pol' if policy else ''};"
                if policy:
                    text = "{ .reg .b64 pol; " + policy + " " + text + " }"
                _asm(builder, [to, start], text, "r,l")
            return context.get_dummy_value()

        return types.void(array, types.int32, types.int32, ptr, types.int64), codegen

    return copy


def _make_take(short: str, n: int) -> Any:
    """``take_<type>_<n>(array, word, step)``: a tuple of ``n`` arithmetic values from shared memory."""
    nbytes = 4 * words_of(short, n)

    @intrinsic
    def take(typingctx, array, word, step):  # type: ignore[no-untyped-def]
        sig = types.UniTuple(NUMBA[short], n)(array, types.int32, types.int32)

        def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
            words: list[Any] = []
            for _, size, more in _pieces(builder, nbytes, args[2]):
                at = _at(context, builder, sig.args[0], args[0], args[1], more)
                many = ir.VectorType(I32, size // 4)
                vector = builder.load(builder.bitcast(at, many.as_pointer(SHARED)), align=size)
                words += [builder.extract_element(vector, ir.Constant(I32, k)) for k in range(size // 4)]
            return context.make_tuple(builder, sig.return_type, _decode(builder, words, short, n))

        return sig, codegen

    return take


def _make_put(n: int) -> Any:
    """``put_f32_<n>(array, word, step, values)``: ``n`` fp32 values, a tuple, to shared memory."""

    @intrinsic
    def put(typingctx, array, word, step, values):  # type: ignore[no-untyped-def]
        sig = types.void(array, types.int32, types.int32, types.UniTuple(types.float32, n))

        def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
            for done, size, more in _pieces(builder, 4 * n, args[2]):
                at = _at(context, builder, sig.args[0], args[0], args[1], more)
                many = ir.VectorType(F32, size // 4)
                vector = ir.Constant(many, ir.Undefined)
                for k in range(size // 4):
                    value = builder.extract_value(args[3], done // 4 + k)
                    vector = builder.insert_element(vector, value, ir.Constant(I32, k))
                builder.store(vector, builder.bitcast(at, many.as_pointer(SHARED)), align=size)
            return context.get_dummy_value()

        return sig, codegen

    return put


def _wait(text: str) -> Any:
    @intrinsic
    def wait(typingctx):  # type: ignore[no-untyped-def]
        def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
            _asm(builder, [], text, "")
            return context.get_dummy_value()

        return types.void(), codegen

    return wait


@intrinsic
def _rounds(typingctx, n):  # type: ignore[no-untyped-def]
    """``n``, by way of the grid's second extent, which is always 1: no compiler can tell, so a loop stays a loop."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        one = builder.call(ir.InlineAsm(ir.FunctionType(I32, []), "mov.u32 $0, %nctaid.y;", "=r"), [])
        return builder.add(builder.sub(args[0], ir.Constant(I32, 1)), one)

    return types.int32(types.int32), codegen


def resolve(name: str) -> Any:
    """The object behind a name, or None if it is none of these.

    ``commit_copies()`` makes a group of the copies this thread began since the last one; ``await_copies_<n>()`` waits
    until at most ``n`` of its groups are not there yet. A thread sees its own copies then, others after a barrier.
    """
    if name == "rounds":
        return _rounds
    if name == "commit_copies":
        return _wait("cp.async.commit_group;")
    if name.startswith(_AWAIT):
        return _wait(f"cp.async.wait_group {int(name.removeprefix(_AWAIT))};")
    found = access_of(name, _ACCESSES)
    if found is None:
        return None
    kind, short, n, hint = found
    if kind == "copy":
        return _make_copy(short, n, hint)
    return _make_take(short, n) if kind == "take" else _make_put(n)
