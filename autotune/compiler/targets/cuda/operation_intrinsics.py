"""Inline assembly as Numba intrinsics: arithmetic, thread-block clusters, values that are opaque to compilers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import llvmlite.ir as ir
from numba import cuda, types
from numba.cuda import libdevice
from numba.cuda.extending import intrinsic as numba_intrinsic

from autotune.compiler import targets

F32 = ir.FloatType()
I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
made, written = partial(targets.make_intrinsic, numba_intrinsic), partial(targets.intrinsic_of, numba_intrinsic)


def asm(builder: Any, result: Any, operands: Sequence[Any], text: str, constraints: str, effect: bool = False) -> Any:
    """Inline assembly; ``effect`` prevents moving it."""
    fty = ir.FunctionType(result, [o.type for o in operands])
    return builder.call(ir.InlineAsm(fty, text, constraints, side_effect=effect), operands)


def barred(builder: Any, operands: Sequence[Any], text: str, constraints: str = "") -> None:
    """Inline assembly across which compilers move no memory access."""
    clobber = f"{constraints},~{{memory}}" if constraints else "~{memory}"
    asm(builder, ir.VoidType(), operands, text, clobber, True)


_REGISTER = {types.float32: (F32, "f"), types.int32: (I32, "r"), types.int64: (I64, "l")}


def instruction(text: str, result: Any, *operands: Any) -> Any:
    """An intrinsic that is one instruction without side effects, on arguments of these Numba types."""
    llvm, letter = _REGISTER[result]
    constraints = ",".join(["=" + letter, *(_REGISTER[t][1] for t in operands)])
    return written(result, *operands)(lambda b, *values: asm(b, llvm, values, text, constraints))


def statement(text: str) -> Any:
    """An intrinsic without arguments across which compilers move no memory access."""
    return written(types.void)(lambda b: barred(b, [], text))


_ONE = "mov.u32 $0, %nctaid.y;"
"""The grid's second extent, which is always 1, but opaque to compilers."""


@written(types.int32, types.int32)
def rounds(b: Any, n: Any) -> Any:
    """``n``, hidden from compilers, so that a loop of ``n`` iterations is not unrolled."""
    one = asm(b, I32, [], _ONE, "=r")
    return b.add(b.sub(n, ir.Constant(I32, 1)), one)


def _tanh(x):  # type: ignore[no-untyped-def]
    # tanh.approx is good to 2^-11 only. Below 0.55 an odd polynomial, above it 1 - 2 / (exp(2|x|) + 1): 2 ulp.
    a = abs(x)
    s = x * x
    p = fma(s, types.float32(0.01643755), types.float32(-0.0526718))
    p = fma(p, s, types.float32(0.13320725))
    p = fma(p, s, types.float32(-0.33332947))
    small = fma(p * s, x, x)
    big = types.float32(1.0) - types.float32(2.0) / (ex2(a * types.float32(2.8853900817779268)) + types.float32(1.0))
    big = math.copysign(big, x)
    return select(a < types.float32(0.55), small, big)


def _erf(x):  # type: ignore[no-untyped-def]
    # Abramowitz and Stegun 7.1.26, absolute error 1.5e-7; half the instructions of libdevice's erff and no branch,
    # which is what keeps a bf16 gelu below the memory's time.
    a = abs(x)
    t = rcp(fma(a, types.float32(0.3275911), types.float32(1.0)))
    p = fma(t, types.float32(1.061405429), types.float32(-1.453152027))
    p = fma(p, t, types.float32(1.421413741))
    p = fma(p, t, types.float32(-0.284496736))
    p = fma(p, t, types.float32(0.254829592))
    e = ex2(x * (x * types.float32(-1.4426950408889634)))
    return math.copysign(fma(-(p * t), e, types.float32(1.0)), x)


def _mod(x, y):  # type: ignore[no-untyped-def]
    # fmodf is exact; x - floor(x / y) * y is y or negative where the quotient rounds, and rubbish beyond 2^24.
    r = libdevice.fmodf(x, y)
    other_sign = (r < types.float32(0.0)) != (y < types.float32(0.0))
    return select((r != types.float32(0.0)) & other_sign, r + y, r)


def _sigmoid_rn(x):  # type: ignore[no-untyped-def]
    return rcp_rn(types.float32(1.0) + libdevice.expf(-x))


def _rsqrt_rn(x):  # type: ignore[no-untyped-def]
    return rcp_rn(sqrt_rn(x))


def _sigmoid(x):  # type: ignore[no-untyped-def]
    return rcp(types.float32(1.0) + ex2(x * types.float32(-1.4426950408889634)))


_F32 = types.float32
ex2 = instruction("ex2.approx.ftz.f32 $0, $1;", _F32, _F32)
rcp = instruction("rcp.approx.ftz.f32 $0, $1;", _F32, _F32)
rcp_rn = instruction("rcp.rn.f32 $0, $1;", _F32, _F32)
sqrt_rn = instruction("sqrt.rn.f32 $0, $1;", _F32, _F32)
fma = instruction("fma.rn.ftz.f32 $0, $1, $2, $3;", _F32, _F32, _F32, _F32)
# ``a if test else b`` without a branch; both have one type.
select = made(3, lambda test, a, b: (a(types.boolean, a, a), lambda c, builder, sig, args: builder.select(*args)))

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
    "ex2": ex2,
    "rcp": rcp,
    "rcp_rn": rcp_rn,
    "sqrt_rn": sqrt_rn,
    "fma": fma,
    "sel": select,
    "fmax": instruction("max.NaN.f32 $0, $1, $2;", _F32, _F32, _F32),
    "fmin": instruction("min.NaN.f32 $0, $1, $2;", _F32, _F32, _F32),
    "rsqrt": instruction("rsqrt.approx.ftz.f32 $0, $1;", _F32, _F32),
    "sqrt": instruction("sqrt.approx.ftz.f32 $0, $1;", _F32, _F32),
    "rint": instruction("cvt.rni.f32.f32 $0, $1;", _F32, _F32),
    # An instruction that is opaque to the compiler, which does not simplify it by facts from a branch.
    "least": instruction("min.s32 $0, $1, $2;", types.int32, types.int32, types.int32),
    "least64": instruction("min.s64 $0, $1, $2;", types.int64, types.int64, types.int64),
    "udiv": written(types.int32, types.int32, types.int32)(lambda b, x, y: b.udiv(x, y)),
    "urem": written(types.int32, types.int32, types.int32)(lambda b, x, y: b.urem(x, y)),
    "udiv64": written(types.int64, types.int64, types.int64)(lambda b, x, y: b.udiv(x, y)),
    "urem64": written(types.int64, types.int64, types.int64)(lambda b, x, y: b.urem(x, y)),
    # Its argument, as something the compiler does not look into: bits packed into it stay packed.
    "pin": instruction("mov.b32 $0, $1;", types.int32, types.int32),
    "rounds": rounds,
    "cluster_rank": instruction("mov.u32 $0, %cluster_ctarank;", types.int32),
    # Barrier over the cluster's threads, after which earlier writes to distributed shared memory are visible.
    "cluster_sync": statement("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"),
    "cluster_arrive": statement("barrier.cluster.arrive.relaxed.aligned;"),  # signals that this thread has begun
    "cluster_wait": statement("barrier.cluster.wait.aligned;"),  # waits until all threads of the cluster arrived
    **{f"rs_{dtype}": _make_remote_store(dtype) for dtype in _REMOTE},
    # ``a + b``, rounded to nearest and with subnormals; fast math would change the order.
    "add_rn": instruction("add.rn.f32 $0, $1, $2;", types.float32, types.float32, types.float32),
}
DEVICE: dict[str, Callable[..., Any]] = {"tanh_": _tanh, "sigmoid_": _sigmoid, "erf_": _erf}
EXACT: dict[str, Callable[..., Any]] = {"mod_": _mod, "sigmoid_rn": _sigmoid_rn, "rsqrt_rn": _rsqrt_rn}
"""Operators compiled without fast math: the remainder, and those of strict kernels."""


def resolve(name: str) -> Any:
    """The object behind a name of this module, or None if it is none."""
    if name in DEVICE:
        return cuda.jit(device=True, fastmath=True)(DEVICE[name])
    if name in EXACT:
        return cuda.jit(device=True)(EXACT[name])
    return PLAIN.get(name)
