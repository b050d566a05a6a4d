"""Blocks that work together: thread-block clusters (sm_90) and the barrier over a whole grid.

Names that generated code uses; :func:`resolve` finds them, as ``intrinsics.resolve`` does its own.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
from numba import cuda, types
from numba.cuda.extending import intrinsic

_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_VOID = ir.VoidType()


def _call(builder: Any, result: Any, operands: list[Any], text: str, constraints: str) -> Any:
    """Inline assembly that other memory accesses are not moved across."""
    fty = ir.FunctionType(result, [o.type for o in operands])
    clobber = f"{constraints},~{{memory}}" if constraints else "~{memory}"
    return builder.call(ir.InlineAsm(fty, text, clobber, side_effect=True), operands)


@intrinsic
def _cluster_rank(typingctx):  # type: ignore[no-untyped-def]
    """Number of this block in its cluster."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        fty = ir.FunctionType(_I32, [])
        return builder.call(ir.InlineAsm(fty, "mov.u32 $0, %cluster_ctarank;", "=r", side_effect=False), [])

    return types.int32(), codegen


@intrinsic
def _cluster_sync(typingctx):  # type: ignore[no-untyped-def]
    """Barrier over the cluster's threads; what was written to distributed shared memory before is seen after."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        text = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
        _call(builder, _VOID, [], text, "")
        return context.get_dummy_value()

    return types.void(), codegen


def _half_barrier(text: str, doc: str) -> Any:
    @intrinsic
    def half(typingctx):  # type: ignore[no-untyped-def]
        def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
            _call(builder, _VOID, [], text, "")
            return context.get_dummy_value()

        return types.void(), codegen

    half.__doc__ = doc
    return half


_REMOTE = {"float32": ("f32", "f", _F32), "int32": ("u32", "r", _I32), "int64": ("u64", "l", _I64)}


def _make_remote_store(dtype: str) -> Any:
    """``rs_<type>(array, index, rank, value)``: ``array[index] = value`` in the shared memory of block ``rank``."""
    short, constraint, _ = _REMOTE[dtype]

    @intrinsic
    def store(typingctx, array, index, rank, value):  # type: ignore[no-untyped-def]
        wanted = getattr(types, dtype)
        sig = types.void(array, types.int64, types.int32, wanted)

        def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
            data = context.make_array(sig.args[0])(context, builder, args[0]).data
            at = builder.gep(data, [args[1]])
            text = (
                "{ .reg .u64 a; .reg .u32 s, r; cvta.to.shared.u64 a, $0; cvt.u32.u64 s, a;"
                f" mapa.shared::cluster.u32 r, s, $1; st.shared::cluster.{short} [r], $2; }}"
            )
            _call(builder, _VOID, [builder.ptrtoint(at, _I64), args[2], args[3]], text, f"l,r,{constraint}")
            return context.get_dummy_value()

        return sig, codegen

    return store


def _counter(text: str, result: Any, operands: int, constraints: str) -> Any:
    """An access to ``counter[index]`` with the order of memory that its assembly states."""

    @intrinsic
    def read(typingctx, ptr, index):  # type: ignore[no-untyped-def]
        def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
            at = builder.gep(args[0], [args[1]])
            out = _call(builder, _I32 if result is not types.void else _VOID, [at], text, constraints)
            return out if result is not types.void else context.get_dummy_value()

        return result(ptr, types.int64), codegen

    @intrinsic
    def add(typingctx, ptr, index, value):  # type: ignore[no-untyped-def]
        def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
            return _call(builder, _I32, [builder.gep(args[0], [args[1]]), args[2]], text, constraints)

        return result(ptr, types.int64, types.int32), codegen

    return add if operands == 2 else read


arrive = _counter("atom.add.acq_rel.gpu.global.u32 $0, [$1], $2;", types.int32, 2, "=r,l,r")
"""Add to a counter, after what this thread wrote and knows to be written; answers what it was."""
watch = _counter("ld.acquire.gpu.global.u32 $0, [$1];", types.int32, 1, "=r,l")
"""Read a counter; what was written before it was counted is seen after."""
reset = _counter("st.relaxed.gpu.global.u32 [$0], 0;", types.void, 1, "l")
"""Set a counter to zero."""

STATE_WORDS = 64
"""int32 counters of one grid barrier: two, in cache lines of their own."""
_OPEN = 1 << 20  # more than there are blocks


def _grid_barrier(state, first, nblk):  # type: ignore[no-untyped-def]
    # Counters ``first`` and ``first + 32`` of ``state`` are zero before and after. Blocks arrive at the first; the last
    # one opens the second; each block that leaves counts itself there, and the last to leave sets both to zero. All
    # blocks must run at the same time (a cooperative launch).
    cuda.threadfence()
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        if arrive(state, first, types.int32(1)) == nblk - 1:
            arrive(state, first + 32, types.int32(_OPEN))
        while watch(state, first + 32) < _OPEN:
            pass
        if arrive(state, first + 32, types.int32(1)) == _OPEN + nblk - 1:
            reset(state, first)
            reset(state, first + 32)
    cuda.syncthreads()


PLAIN: dict[str, Any] = {
    "cluster_rank": _cluster_rank,
    "cluster_sync": _cluster_sync,
    "cluster_arrive": _half_barrier("barrier.cluster.arrive.relaxed.aligned;", "Say that this thread has begun."),
    "cluster_wait": _half_barrier("barrier.cluster.wait.aligned;", "Wait until all threads of the cluster arrived."),
    "rs_float32": _make_remote_store("float32"),
    "rs_int32": _make_remote_store("int32"),
    "rs_int64": _make_remote_store("int64"),
}
DEVICE: dict[str, Any] = {"grid_barrier": _grid_barrier}
