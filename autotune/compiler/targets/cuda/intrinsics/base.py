"""What Numba CUDA does not offer: vector memory access with cache hints, packed half types, NaN-keeping extrema.

Each name a generated kernel may use is made by :func:`resolve` on first use. Loads are ``ld.global.nc`` through inline
assembly without side effects, so that the compiler may move them above stores: a kernel never reads what it writes, but
for hint ``c`` (coherent), where what a thread stores to an address depends on what it loaded there.

Without side effects also means that the compiler takes such a load for arithmetic, which it may do before it knows
whether the result is wanted: one whose address is the same in every turn of a loop is moved out of the loop, and out of
any branch in it. So the branch must not be what keeps a load inside its tensor. Either the address is inside on both
sides (``least``), or the guard is an operand (``lg``, where no branch has tested the same before), or the load is one
that stays where it is (``lk``).
Measured on an H200: 16-byte accesses reach what torch's copy reaches; ``cuda.float32x4`` would emit four scalar loads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir
from numba import cuda, types
from numba.cuda import libdevice
from numba.cuda.extending import intrinsic

from autotune.compiler.targets.cuda.intrinsics import cluster as intrinsics_cluster
from autotune.compiler.targets.cuda.intrinsics import comm as intrinsics_comm
from autotune.compiler.targets.cuda.intrinsics import float8 as intrinsics_float8
from autotune.compiler.targets.cuda.intrinsics.names import access_of

F32 = ir.FloatType()
I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
SIZE = {"f32": 4, "f16": 2, "bf16": 2, "e4m3": 1, "e5m2": 1, "i64": 8, "i32": 4, "i16": 2, "i8": 1, "u8": 1, "b1": 1}
LOAD_HINT = {
    "d": "ld.global.nc",
    "s": "ld.global.cs.nc",
    "n": "ld.global.nc.L1::no_allocate",
    "p": "ld.global.nc.L1::no_allocate.L2::256B",
    "e": "ld.global.nc.L1::no_allocate.L2::cache_hint",
    "c": "ld.global.L1::no_allocate",  # of what this kernel, or another device, writes
}
STORE_HINT = {"d": "st.global", "s": "st.global.cs", "e": "st.global.L2::cache_hint", "l": "st.global.L2::cache_hint"}
POLICY = {"e": "evict_first", "l": "evict_last"}
"""Hints that are a policy of the L2, which needs sm_80: what is read once makes way, so that what is written stays."""
NUMBA = {
    "f32": types.float32,
    "f16": types.float32,
    "bf16": types.float32,
    "e4m3": types.float32,
    "e5m2": types.float32,
    "i64": types.int64,
    "i32": types.int32,
    "i16": types.int32,
    "i8": types.int32,
    "u8": types.int32,
    "b1": types.boolean,
}
POINTER = {
    "f32": types.float32,
    "f16": types.uint16,
    "bf16": types.uint16,
    "e4m3": types.uint8,
    "e5m2": types.uint8,
    "i64": types.int64,
    "i32": types.int32,
    "i16": types.int16,
    "i8": types.int8,
    "u8": types.uint8,
    "b1": types.uint8,
}


def words_of(short: str, n: int) -> int:
    """32-bit words that ``n`` elements take in registers as loaded (at least one)."""
    return max(1, n * SIZE[short] // 4)


def _asm(builder: Any, result: Any, operands: list[Any], text: str, constraints: str, effect: bool = False) -> Any:
    fty = ir.FunctionType(result, [o.type for o in operands])
    return builder.call(ir.InlineAsm(fty, text, constraints, side_effect=effect), operands)


def _memory(hint: str, text: str) -> str:
    """A load or store, with its L2 policy where the hint has one; ``text`` has ``{p}`` where the policy goes."""
    if hint not in POLICY:
        return text.replace("{p}", "")
    create = f"createpolicy.fractional.L2::{POLICY[hint]}.b64 pol, 1.0;"
    return "{ .reg .b64 pol; " + create + " " + text.replace("{p}", ", pol") + " }"


def _const(ty: Any, n: int) -> Any:
    return ir.Constant(ty, n)


def _at(b: Any, pointer: Any, done: int) -> Any:
    """``pointer``, ``done`` bytes on."""
    return pointer if not done else b.gep(b.bitcast(pointer, I8.as_pointer()), [_const(I64, done)])


def _load_words(b: Any, pointer: Any, nbytes: int, hint: str, fixed: bool = False) -> list[Any]:
    """``nbytes`` from ``pointer`` as i32 words (or one i16/i32-extended byte for less than a word); ``fixed`` keeps the
    compiler from moving the load out of its branch."""
    head = LOAD_HINT[hint]
    if nbytes == 1:
        return [_asm(b, I32, [pointer], _memory(hint, head + ".u8 $0, [$1]{p};"), "=r,l", fixed)]
    if nbytes == 2:
        h = _asm(b, I16, [pointer], _memory(hint, head + ".u16 $0, [$1]{p};"), "=h,l", fixed)
        return [b.zext(h, I32)]
    words: list[Any] = []
    done = 0
    while done < nbytes:
        step = min(16, nbytes - done)
        at = _at(b, pointer, done)
        n = step // 4
        if n == 1:
            words.append(_asm(b, I32, [at], _memory(hint, head + ".u32 $0, [$1]{p};"), "=r,l", fixed))
        else:
            outs = ",".join(f"${k}" for k in range(n))
            struct = _asm(
                b,
                ir.LiteralStructType([I32] * n),
                [at],
                _memory(hint, f"{head}.v{n}.u32 {{{outs}}}, [${n}]{{p}};"),
                ",".join(["=r"] * n) + ",l",
                fixed,
            )
            words.extend(b.extract_value(struct, k) for k in range(n))
        done += step
    return words


def _decode(b: Any, words: list[Any], short: str, n: int) -> list[Any]:
    """Words as loaded -> ``n`` arithmetic values."""
    if short in intrinsics_float8.NAMES:
        return intrinsics_float8.decode(b, words, short, n)
    out: list[Any] = []
    for k in range(n):
        if short == "f32":
            out.append(b.bitcast(words[k], F32))
        elif short == "i32":
            out.append(words[k])
        elif short == "i64":
            lo, hi = b.zext(words[2 * k], I64), b.zext(words[2 * k + 1], I64)
            out.append(b.or_(lo, b.shl(hi, _const(I64, 32))))
        elif short == "bf16":
            w = words[k // 2]
            bits = b.and_(w, _const(I32, 0xFFFF0000)) if k % 2 else b.shl(w, _const(I32, 16))
            out.append(b.bitcast(bits, F32))
        elif short == "f16":
            w = words[k // 2]
            half = b.trunc(b.lshr(w, _const(I32, 16)) if k % 2 else w, I16)
            out.append(_asm(b, F32, [half], "cvt.f32.f16 $0, $1;", "=f,h"))
        elif short == "i16":
            w = words[k // 2]
            up = w if k % 2 else b.shl(w, _const(I32, 16))
            out.append(b.ashr(up, _const(I32, 16)))
        else:
            w = words[k // 4]
            up = b.shl(w, _const(I32, 24 - 8 * (k % 4)))
            if short == "i8":
                out.append(b.ashr(up, _const(I32, 24)))
            else:
                byte = b.lshr(up, _const(I32, 24))
                out.append(byte if short == "u8" else b.icmp_unsigned("!=", byte, _const(I32, 0)))
    return out


def _encode(b: Any, vals: list[Any], short: str) -> tuple[list[Any], int]:
    """Arithmetic values -> words to store, and how many bytes they are."""
    n = len(vals)
    nbytes = n * SIZE[short]
    if short in intrinsics_float8.NAMES:
        return intrinsics_float8.encode(b, vals, short), nbytes
    if short == "f32":
        return [b.bitcast(v, I32) for v in vals], nbytes
    if short == "i32":
        return list(vals), nbytes
    if short == "i64":
        out = []
        for v in vals:
            out += [b.trunc(v, I32), b.trunc(b.lshr(v, _const(I64, 32)), I32)]
        return out, nbytes
    if short in ("bf16", "f16"):
        ty = "bf16" if short == "bf16" else "f16"
        if n == 1:
            half = _asm(b, I16, [vals[0]], f"cvt.rn.{ty}.f32 $0, $1;", "=h,f")
            return [b.zext(half, I32)], nbytes
        return [
            _asm(b, I32, [vals[k + 1], vals[k]], f"cvt.rn.{ty}x2.f32 $0, $1, $2;", "=r,f,f") for k in range(0, n, 2)
        ], nbytes
    bits = 8 * SIZE[short]
    per = 32 // bits
    mask = _const(I32, (1 << bits) - 1)
    out = []
    for k in range(0, n, per):
        word = _const(I32, 0)
        for q, v in enumerate(vals[k : k + per]):
            if v.type == I1:  # a byte is selected where it belongs, and two of them join in one instruction
                word = b.or_(word, b.select(v, _const(I32, 1 << bits * q), _const(I32, 0)))
                continue
            v32 = b.zext(v, I32) if v.type != I32 else v
            word = b.or_(word, b.shl(b.and_(v32, mask), _const(I32, bits * q)))
        out.append(word)
    return out, nbytes


def _store_words(b: Any, pointer: Any, words: list[Any], nbytes: int, hint: str) -> None:
    head = STORE_HINT[hint]
    void = ir.VoidType()
    if nbytes < 4:
        if nbytes == 1:
            _asm(b, void, [pointer, words[0]], _memory(hint, head + ".u8 [$0], $1{p};"), "l,r", True)
        else:
            half = b.trunc(words[0], I16)
            _asm(b, void, [pointer, half], _memory(hint, head + ".u16 [$0], $1{p};"), "l,h", True)
        return
    done = 0
    while done < nbytes:
        n = min(16, nbytes - done) // 4
        at = _at(b, pointer, done)
        part = words[done // 4 : done // 4 + n]
        if n == 1:
            _asm(b, void, [at, *part], _memory(hint, head + ".u32 [$0], $1{p};"), "l,r", True)
        else:
            ins = ",".join(f"${k + 1}" for k in range(n))
            text = _memory(hint, f"{head}.v{n}.u32 [$0], {{{ins}}}{{p}};")
            _asm(b, void, [at, *part], text, "l" + ",r" * n, True)
        done += 4 * n


def _pointer(b: Any, args: Any) -> Any:
    return b.gep(args[0], [args[1]])


def _make_load(short: str, n: int, hint: str, fixed: bool = False) -> Any:
    """``ld_<type>_<n>_<hint>(pointer, index)``: a tuple of ``n`` arithmetic values (a scalar for n = 1). ``lk``, which
    is ``fixed``, is for a load whose address may be outside where the branch round it is not taken."""

    @intrinsic
    def load(typingctx, ptr, idx):  # type: ignore[no-untyped-def]
        result = NUMBA[short] if n == 1 else types.UniTuple(NUMBA[short], n)
        sig = result(ptr, idx)

        def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
            words = _load_words(builder, _pointer(builder, args), n * SIZE[short], hint, fixed)
            vals = _decode(builder, words, short, n)
            return vals[0] if n == 1 else context.make_tuple(builder, sig.return_type, vals)

        return sig, codegen

    return load


def _make_raw(short: str, n: int, hint: str) -> Any:
    """``lr_<type>_<n>_<hint>(pointer, index)``: the same elements as 32-bit words, still packed."""
    count = words_of(short, n)

    @intrinsic
    def load_raw(typingctx, ptr, idx):  # type: ignore[no-untyped-def]
        sig = types.UniTuple(types.uint32, count)(ptr, idx)

        def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
            words = _load_words(builder, _pointer(builder, args), n * SIZE[short], hint)
            return context.make_tuple(builder, sig.return_type, words)

        return sig, codegen

    return load_raw


def _make_unpack(short: str, n: int) -> Any:
    """``un_<type>_<n>(words)``: packed words -> a tuple of ``n`` arithmetic values."""

    @intrinsic
    def unpack(typingctx, words):  # type: ignore[no-untyped-def]
        sig = types.UniTuple(NUMBA[short], n)(words)

        def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
            w = [builder.extract_value(args[0], k) for k in range(words_of(short, n))]
            return context.make_tuple(builder, sig.return_type, _decode(builder, w, short, n))

        return sig, codegen

    return unpack


def _make_store(short: str, n: int, hint: str) -> Any:
    """``st_<type>_<n>_<hint>(pointer, index, values)``: ``values`` a tuple of ``n`` (a scalar for n = 1)."""

    @intrinsic
    def store(typingctx, ptr, idx, vals):  # type: ignore[no-untyped-def]
        sig = types.void(ptr, idx, vals)

        def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
            v = [args[2]] if n == 1 else [builder.extract_value(args[2], k) for k in range(n)]
            words, nbytes = _encode(builder, v, short)
            _store_words(builder, _pointer(builder, args), words, nbytes, hint)
            return context.get_dummy_value()

        return sig, codegen

    return store


def _unary(text: str, constraints: str, result: Any, arg: Any, llvm: Any) -> Any:
    @intrinsic
    def op(typingctx, a):  # type: ignore[no-untyped-def]
        def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
            return _asm(builder, llvm, [args[0]], text, constraints)

        return result(arg), codegen

    return op


def _extremum(name: str) -> Any:
    @intrinsic
    def op(typingctx, a, b):  # type: ignore[no-untyped-def]
        def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
            return _asm(builder, F32, list(args), f"{name}.NaN.f32 $0, $1, $2;", "=f,f,f")

        return types.float32(types.float32, types.float32), codegen

    return op


@intrinsic
def _select(typingctx, cond, a, b):  # type: ignore[no-untyped-def]
    """``a if cond else b`` without a branch; both arguments have one type."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        return builder.select(args[0], args[1], args[2])

    return a(types.boolean, a, a), codegen


def _least(of: Any, llvm: Any) -> Any:
    """The smaller of two integers, by an instruction that the compiler does not look into: what follows from a branch
    on one of them leaves it as it is."""

    @intrinsic
    def op(typingctx, a, b):  # type: ignore[no-untyped-def]
        def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
            text, r = (f"min.s{llvm.width} $0, $1, $2;", "l" if llvm.width == 64 else "r")
            return _asm(builder, llvm, list(args), text, f"={r},{r},{r}")

        return of(of, of), codegen

    return op


def _divide(name: str, of: Any) -> Any:
    @intrinsic
    def op(typingctx, a, b):  # type: ignore[no-untyped-def]
        def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
            return getattr(builder, name)(args[0], args[1])

        return of(of, of), codegen

    return op


@intrinsic
def _fma(typingctx, a, b, c):  # type: ignore[no-untyped-def]
    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        return _asm(builder, F32, list(args), "fma.rn.ftz.f32 $0, $1, $2, $3;", "=f,f,f,f")

    return types.float32(types.float32, types.float32, types.float32), codegen


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


def _sigmoid_rn(x):  # type: ignore[no-untyped-def]
    return rcp_rn(types.float32(1.0) + libdevice.expf(-x))


def _rsqrt_rn(x):  # type: ignore[no-untyped-def]
    return rcp_rn(sqrt_rn(x))


def _sigmoid(x):  # type: ignore[no-untyped-def]
    return rcp(types.float32(1.0) + ex2(x * types.float32(-1.4426950408889634)))


ex2 = _unary("ex2.approx.ftz.f32 $0, $1;", "=f,f", types.float32, types.float32, F32)
rcp = _unary("rcp.approx.ftz.f32 $0, $1;", "=f,f", types.float32, types.float32, F32)
rcp_rn = _unary("rcp.rn.f32 $0, $1;", "=f,f", types.float32, types.float32, F32)
sqrt_rn = _unary("sqrt.rn.f32 $0, $1;", "=f,f", types.float32, types.float32, F32)
fma = _fma
select = _select

PLAIN: dict[str, Any] = {
    "ex2": ex2,
    "rcp": rcp,
    "rcp_rn": rcp_rn,
    "sqrt_rn": sqrt_rn,
    "fma": fma,
    "sel": select,
    "fmax": _extremum("max"),
    "fmin": _extremum("min"),
    "rsqrt": _unary("rsqrt.approx.ftz.f32 $0, $1;", "=f,f", types.float32, types.float32, F32),
    "sqrt": _unary("sqrt.approx.ftz.f32 $0, $1;", "=f,f", types.float32, types.float32, F32),
    "rint": _unary("cvt.rni.f32.f32 $0, $1;", "=f,f", types.float32, types.float32, F32),
    "least": _least(types.int32, I32),
    "least64": _least(types.int64, I64),
    "udiv": _divide("udiv", types.int32),
    "urem": _divide("urem", types.int32),
    "udiv64": _divide("udiv", types.int64),
    "urem64": _divide("urem", types.int64),
}
DEVICE: dict[str, Callable[..., Any]] = {"tanh_": _tanh, "sigmoid_": _sigmoid, "erf_": _erf}
EXACT: dict[str, Callable[..., Any]] = {"sigmoid_rn": _sigmoid_rn, "rsqrt_rn": _rsqrt_rn}
"""Those of strict kernels, compiled without fast math."""
_ACCESSES = ("ld", "lk", "lr", "st", "un")


def resolve(name: str) -> Any:
    """The object behind a name of this module, ``cluster`` or ``comm``, or None if it is none of theirs."""
    if name in PLAIN:
        return PLAIN[name]
    if name in intrinsics_cluster.PLAIN:
        return intrinsics_cluster.PLAIN[name]
    if name in intrinsics_comm.PLAIN:
        return intrinsics_comm.PLAIN[name]
    if name in DEVICE:
        return cuda.jit(device=True, fastmath=True)(DEVICE[name])
    if name in EXACT:
        return cuda.jit(device=True)(EXACT[name])
    found = access_of(name, _ACCESSES)
    if found is None:
        return None
    kind, short, n, hint = found
    if kind in ("ld", "lk"):
        return _make_load(short, n, hint, fixed=kind == "lk")
    if kind == "un":
        return _make_unpack(short, n)
    return (_make_raw if kind == "lr" else _make_store)(short, n, hint)
