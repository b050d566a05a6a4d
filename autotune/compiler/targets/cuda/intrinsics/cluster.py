"""Blocks that work together: thread-block clusters (sm_90). Names that generated code uses."""

from __future__ import annotations

from typing import Any

from numba import types

from autotune.compiler.targets.cuda.intrinsics.base import I64, barred, instruction, made, statement

_REMOTE = {types.float32: ("f32", "f"), types.int32: ("u32", "r"), types.int64: ("u64", "l")}


def _make_remote_store(dtype: Any) -> Any:
    """``rs_<type>(array, index, rank, value)``: ``array[index] = value`` in the shared memory of block ``rank``."""
    short, constraint = _REMOTE[dtype]
    text = (
        "{ .reg .u64 a; .reg .u32 s, r; cvta.to.shared.u64 a, $0; cvt.u32.u64 s, a;"
        f" mapa.shared::cluster.u32 r, s, $1; st.shared::cluster.{short} [r], $2; }}"
    )

    def write(context: Any, b: Any, sig: Any, args: Any) -> None:
        data = context.make_array(sig.args[0])(context, b, args[0]).data
        barred(b, [b.ptrtoint(b.gep(data, [args[1]]), I64), args[2], args[3]], text, f"l,r,{constraint}")

    return made(4, lambda array, *_: (types.void(array, types.int64, types.int32, dtype), write))


PLAIN: dict[str, Any] = {
    "cluster_rank": instruction("mov.u32 $0, %cluster_ctarank;", types.int32),
    # Barrier over the cluster's threads; what was written to distributed shared memory before is seen after.
    "cluster_sync": statement("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"),
    "cluster_arrive": statement("barrier.cluster.arrive.relaxed.aligned;"),  # says that this thread has begun
    "cluster_wait": statement("barrier.cluster.wait.aligned;"),  # waits until all threads of the cluster arrived
    **{f"rs_{dtype}": _make_remote_store(dtype) for dtype in _REMOTE},
}
