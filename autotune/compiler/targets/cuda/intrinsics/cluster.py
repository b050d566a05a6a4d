"""Blocks that work together: thread-block clusters (sm_90).

Names that generated code uses; :func:`resolve` finds them, as ``intrinsics.resolve`` does its own.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
from numba import types
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


PLAIN: dict[str, Any] = {
    "cluster_rank": _cluster_rank,
    "cluster_sync": _cluster_sync,
    "cluster_arrive": _half_barrier("barrier.cluster.arrive.relaxed.aligned;", "Say that this thread has begun."),
    "cluster_wait": _half_barrier("barrier.cluster.wait.aligned;", "Wait until all threads of the cluster arrived."),
    "rs_float32": _make_remote_store("float32"),
    "rs_int32": _make_remote_store("int32"),
    "rs_int64": _make_remote_store("int64"),
}
