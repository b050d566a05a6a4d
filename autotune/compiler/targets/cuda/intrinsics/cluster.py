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


def _counter(text: str, operands: int, constraints: str) -> Any:
    """An access to ``counter[index]`` (int32) with the order of memory that its assembly states."""

    @intrinsic
    def read(typingctx, ptr, index):  # type: ignore[no-untyped-def]
        def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
            return _call(builder, _I32, [builder.gep(args[0], [args[1]])], text, constraints)

        return types.int32(ptr, types.int64), codegen

    @intrinsic
    def add(typingctx, ptr, index, value):  # type: ignore[no-untyped-def]
        def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
            return _call(builder, _I32, [builder.gep(args[0], [args[1]]), args[2]], text, constraints)

        return types.int32(ptr, types.int64, types.int32), codegen

    return add if operands == 2 else read


arrive = _counter("atom.add.release.gpu.global.u32 $0, [$1], $2;", 2, "=r,l,r")
"""Add to a counter, after what this thread wrote and knows to be written; answers what it was."""
watch = _counter("ld.acquire.gpu.global.u32 $0, [$1];", 1, "=r,l")
"""Read a counter; what was written before it was counted is seen after."""

STATE_WORDS = 32
"""int32 words of a grid barrier, of which the first counts: a cache line of its own, zero before the first launch."""


def _grid_barrier(state, blk, nblk):  # type: ignore[no-untyped-def]
    # What all blocks add is 2**31 (to 32 bits): the sign changes when the last one has arrived, and everything else is
    # as before, ready for the next barrier, of whatever launch. (Cooperative groups count in the same way.) With a
    # second counter for those who leave, a barrier took 2.2 us in place of 1.1 (132 blocks of an H200). All blocks
    # must run at the same time: a cooperative launch.
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        mine = types.int32(1)
        if blk == 0:
            mine = types.int32((1 - nblk) ^ -2147483648)  # 2**31 - (nblk - 1)
        was = arrive(state, 0, mine)
        while (watch(state, 0) ^ was) >= 0:
            pass
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
