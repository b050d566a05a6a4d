"""Copies from global to shared memory that need no registers on the way (``cp.async``, sm_80), and vectors there.

Names that generated code uses; :func:`resolve` finds them, as ``intrinsics.resolve`` does its own. Shared memory is an
array of uint32 here; of a vector of more than 16 bytes, pieces of 16 lie ``step`` words apart, so that the threads of a
warp, each with its own pieces side by side, meet no bank conflicts.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
from numba import types

from autotune.compiler.targets.cuda.intrinsics.base import (
    F32,
    I32,
    I64,
    NUMBA,
    SIZE,
    barred,
    decode,
    made,
    statement,
    words_of,
)
from autotune.compiler.targets.cuda.intrinsics.names import access_of

SHARED = 3
"""LLVM's address space of shared memory."""
_AWAIT = "await_copies_"


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
    kind = {"d": "", "p": ".L2::256B"}[hint]

    def write(context: Any, b: Any, sig: Any, args: Any) -> None:
        source = b.gep(args[3], [args[4]])
        for done, size, more in _pieces(b, n * SIZE[short], args[2]):
            to = b.ptrtoint(_at(context, b, sig.args[0], args[0], args[1], more), I32)
            start = b.add(b.ptrtoint(source, I64), ir.Constant(I64, done))
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
            at = _at(context, b, sig.args[0], args[0], args[1], more)
            many = ir.VectorType(I32, size // 4)
            vector = b.load(b.bitcast(at, many.as_pointer(SHARED)), align=size)
            words += [b.extract_element(vector, ir.Constant(I32, k)) for k in range(size // 4)]
        return context.make_tuple(b, sig.return_type, decode(b, words, short, n))

    return made(3, lambda array, *_: (types.UniTuple(NUMBA[short], n)(array, types.int32, types.int32), write))


def _make_put(n: int) -> Any:
    """``put_f32_<n>(array, word, step, values)``: ``n`` fp32 values, a tuple, to shared memory."""

    def write(context: Any, b: Any, sig: Any, args: Any) -> None:
        for done, size, more in _pieces(b, 4 * n, args[2]):
            at = _at(context, b, sig.args[0], args[0], args[1], more)
            many = ir.VectorType(F32, size // 4)
            vector = ir.Constant(many, ir.Undefined)
            for k in range(size // 4):
                value = b.extract_value(args[3], done // 4 + k)
                vector = b.insert_element(vector, value, ir.Constant(I32, k))
            b.store(vector, b.bitcast(at, many.as_pointer(SHARED)), align=size)

    values = types.UniTuple(types.float32, n)
    return made(4, lambda array, *_: (types.void(array, types.int32, types.int32, values), write))


def resolve(name: str) -> Any:
    """The object behind a name, or None if it is none of these.

    ``commit_copies()`` makes a group of the copies this thread began since the last one; ``await_copies_<n>()`` waits
    until at most ``n`` of its groups are not there yet. A thread sees its own copies then, others after a barrier.
    """
    if name == "commit_copies":
        return statement("cp.async.commit_group;")
    if name.startswith(_AWAIT):
        return statement(f"cp.async.wait_group {int(name.removeprefix(_AWAIT))};")
    found = access_of(name, ("copy", "take", "put"))
    if found is None:
        return None
    kind, short, n, hint = found
    if kind == "copy":
        return _make_copy(short, n, hint)
    return _make_take(short, n) if kind == "take" else _make_put(n)
