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
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import llvmlite.ir as ir
from numba import cuda, types
from numba.cuda import libdevice
from numba.cuda.extending import intrinsic as numba_intrinsic

from autotune.compiler.targets import intrinsic
from autotune.compiler.targets.cuda.intrinsics import float8 as intrinsics_float8
from autotune.compiler.targets.cuda.intrinsics.names import access_of
from autotune.ir.graph import SHORT, STORAGE_BYTES, compute_type

F32 = ir.FloatType()
I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
_ARITHMETIC = {"float32": types.float32, "int32": types.int32, "int64": types.int64, "bool": types.boolean}
SIZE = {short: STORAGE_BYTES[storage] for storage, short in SHORT.items()}
NUMBA = {short: _ARITHMETIC[compute_type(storage)] for storage, short in SHORT.items()}
"""Of each storage type's short name: the bytes of an element, and the Numba type of an element in arithmetic."""
LOAD_HINT = {
    "d": "ld.global.nc",
    "s": "ld.global.cs.nc",
    "n": "ld.global.nc.L1::no_allocate",
    "p": "ld.global.nc.L1::no_allocate.L2::256B",
    "e": "ld.global.nc.L1::no_allocate.L2::cache_hint",
    "c": "ld.global.L1::no_allocate",  # of what this kernel, or another device, writes
}
STORE_HINT = {"d": "st.global", "s": "st.global.cs", "e": "st.global.L2::cache_hint", "l": "st.global.L2::cache_hint"}
_TEST = "{ .reg .pred q; "
POLICY = {"e": "evict_first", "l": "evict_last"}
"""Hints that are a policy of the L2, which needs sm_80: what is read once makes way, so that what is written stays."""
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


made, written = partial(intrinsic.made, numba_intrinsic), partial(intrinsic.written, numba_intrinsic)
"""As those of ``intrinsic``, without the decorator."""


def asm(builder: Any, result: Any, operands: Sequence[Any], text: str, constraints: str, effect: bool = False) -> Any:
    """Inline assembly; ``effect`` keeps it where it is."""
    fty = ir.FunctionType(result, [o.type for o in operands])
    return builder.call(ir.InlineAsm(fty, text, constraints, side_effect=effect), operands)


def barred(builder: Any, operands: Sequence[Any], text: str, constraints: str = "") -> None:
    """Inline assembly that other memory accesses are not moved across."""
    clobber = f"{constraints},~{{memory}}" if constraints else "~{memory}"
    asm(builder, ir.VoidType(), operands, text, clobber, True)


_REGISTER = {types.float32: (F32, "f"), types.int32: (I32, "r"), types.int64: (I64, "l")}


def instruction(text: str, result: Any, *operands: Any) -> Any:
    """An intrinsic that is one instruction without side effects, on arguments of these Numba types."""
    llvm, letter = _REGISTER[result]
    constraints = ",".join(["=" + letter, *(_REGISTER[t][1] for t in operands)])
    return written(result, *operands)(lambda b, *values: asm(b, llvm, values, text, constraints))


def statement(text: str) -> Any:
    """An intrinsic without arguments that other memory accesses are not moved across."""
    return written(types.void)(lambda b: barred(b, [], text))


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


_PARTS = {1: (I32, "u8", "r"), 2: (I16, "u16", "h")}
"""What one register of a part takes: its type, the suffix of the access, and its constraint; 32 bits else."""


def load_words(b: Any, pointer: Any, nbytes: int, hint: str, fixed: bool = False, where: Any = None) -> list[Any]:
    """``nbytes`` from ``pointer`` as i32 words (less than a word is extended to one).

    Args:
        fixed: keeps the compiler from moving the load out of its branch.
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


def decode(b: Any, words: list[Any], short: str, n: int) -> list[Any]:
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
            out.append(asm(b, F32, [half], "cvt.f32.f16 $0, $1;", "=f,h"))
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
            half = asm(b, I16, [vals[0]], f"cvt.rn.{ty}.f32 $0, $1;", "=h,f")
            return [b.zext(half, I32)], nbytes
        return [
            asm(b, I32, [vals[k + 1], vals[k]], f"cvt.rn.{ty}x2.f32 $0, $1, $2;", "=r,f,f") for k in range(0, n, 2)
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


def pointer_to(b: Any, args: Any) -> Any:
    return b.gep(args[0], [args[1]])


def numbers(short: str, n: int) -> Any:
    """The Numba type of ``n`` arithmetic values: a tuple, or the one itself."""
    return NUMBA[short] if n == 1 else types.UniTuple(NUMBA[short], n)


def _make_load(kind: str, short: str, n: int, hint: str) -> Any:
    """``ld_<type>_<n>_<hint>(pointer, index)``: a tuple of ``n`` arithmetic values (a scalar for n = 1).

    ``lk`` is for a load whose address may be outside where the branch round it is not taken. ``lr`` gives the same
    elements as 32-bit words, still packed. ``lg`` and ``lw`` are ``ld`` and ``lr`` with a third argument: zeros where
    it is false.
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


def _make_touch(kind: str, short: str, n: int, hint: str) -> Any:
    """``touch_<type>_<n>_<hint>(pointer, index)``: up to four of the bytes of ``n`` elements that are loaded later."""

    def write(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return load_words(b, pointer_to(b, args), min(4, n * SIZE[short]), hint)[0]

    return made(2, lambda ptr, idx: (types.int32(ptr, idx), write))


def _integers(name: str, of: Any) -> Any:
    """An instruction of LLVM on two integers."""
    return written(of, of, of)(lambda b, x, y: getattr(b, name)(x, y))


_ONE = "mov.u32 $0, %nctaid.y;"
"""The grid's second extent, which is always 1; no compiler can tell."""


@written(types.float32, types.float32, types.int32)
def tied(b: Any, x: Any, word: Any) -> Any:
    """``x``, which has to wait for the word, with bits of it that are zero."""
    none = b.and_(word, b.sub(asm(b, I32, [], _ONE, "=r"), _const(I32, 1)))
    return b.bitcast(b.or_(b.bitcast(x, I32), none), F32)


@written(types.int32, types.int32)
def rounds(b: Any, n: Any) -> Any:
    """``n``, of which no compiler can tell what it is, so that a loop of as many rounds stays a loop."""
    one = asm(b, I32, [], _ONE, "=r")
    return b.add(b.sub(n, _const(I32, 1)), one)


def _to_l2(context: Any, b: Any, sig: Any, args: Any) -> None:
    asm(b, ir.VoidType(), [pointer_to(b, args)], "prefetch.global.L2 [$0];", "l", True)


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


_F32 = types.float32
ex2 = instruction("ex2.approx.ftz.f32 $0, $1;", _F32, _F32)
rcp = instruction("rcp.approx.ftz.f32 $0, $1;", _F32, _F32)
rcp_rn = instruction("rcp.rn.f32 $0, $1;", _F32, _F32)
sqrt_rn = instruction("sqrt.rn.f32 $0, $1;", _F32, _F32)
fma = instruction("fma.rn.ftz.f32 $0, $1, $2, $3;", _F32, _F32, _F32, _F32)
# ``a if test else b`` without a branch; both have one type.
select = made(3, lambda test, a, b: (a(types.boolean, a, a), lambda c, builder, sig, args: builder.select(*args)))

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
    # An instruction that the compiler does not look into: what follows from a branch on a side leaves it as it is.
    "least": instruction("min.s32 $0, $1, $2;", types.int32, types.int32, types.int32),
    "least64": instruction("min.s64 $0, $1, $2;", types.int64, types.int64, types.int64),
    "udiv": _integers("udiv", types.int32),
    "urem": _integers("urem", types.int32),
    "udiv64": _integers("udiv", types.int64),
    "urem64": _integers("urem", types.int64),
    # Its argument, as something the compiler does not look into: bits packed into it stay packed.
    "pin": instruction("mov.b32 $0, $1;", types.int32, types.int32),
    "tied": tied,
    "rounds": rounds,
    # ``to_l2(pointer, index)``: has the line of an element brought into the L2; nothing waits for it.
    "to_l2": made(2, lambda ptr, idx: (types.void(ptr, idx), _to_l2)),
}
DEVICE: dict[str, Callable[..., Any]] = {"tanh_": _tanh, "sigmoid_": _sigmoid, "erf_": _erf}
EXACT: dict[str, Callable[..., Any]] = {"sigmoid_rn": _sigmoid_rn, "rsqrt_rn": _rsqrt_rn}
"""Those of strict kernels, compiled without fast math."""
_MAKERS = {
    **dict.fromkeys(("ld", "lk", "lr", "lg", "lw"), _make_load),
    **dict.fromkeys(("st", "sg"), _make_store),
    "touch": _make_touch,
}


def resolve(name: str) -> Any:
    """The object behind a name of this module, or None if it is none."""
    if name in PLAIN:
        return PLAIN[name]
    if name in DEVICE:
        return cuda.jit(device=True, fastmath=True)(DEVICE[name])
    if name in EXACT:
        return cuda.jit(device=True)(EXACT[name])
    found = access_of(name, (*_MAKERS, "un"))
    if found is None:
        return None
    kind, short, n, hint = found
    return _make_unpack(short, n) if kind == "un" else _MAKERS[kind](kind, short, n, hint)
