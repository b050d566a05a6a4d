"""The steps of random programs: each draws operands and adds a line or two."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tests.support.random_programs.maker import Maker, Skip, Val
from tests.support.random_programs.programs import FLOATS, NARROW

Step = Callable[[Maker], None]

# Pointwise ------------------------------------------------------------------------------------------------------------

_UNARY: tuple[tuple[str, float, Callable[[float], float]], ...] = (
    # text of {x}, the largest |x| it takes, a bound of the result from that of x
    ("torch.tanh({x})", math.inf, lambda b: 1),
    ("torch.sigmoid({x})", math.inf, lambda b: 1),
    ("torch.erf({x})", math.inf, lambda b: 1),
    ("torch.exp({x})", 4, lambda b: math.exp(b)),
    ("torch.exp(-{x}.abs())", math.inf, lambda b: 1),
    ("torch.exp2({x})", 5, lambda b: 2**b),
    ("torch.expm1({x})", 3, lambda b: math.exp(b)),
    ("torch.log({x}.abs() + 0.5)", math.inf, lambda b: 8),
    ("torch.log2({x}.abs() + 0.5)", math.inf, lambda b: 8),
    ("torch.log10({x}.abs() + 0.5)", math.inf, lambda b: 4),
    ("torch.log1p({x}.abs())", math.inf, lambda b: 8),
    ("torch.sqrt({x}.abs() + 0.25)", math.inf, lambda b: math.sqrt(b + 0.25)),
    ("torch.rsqrt({x}.abs() + 0.5)", math.inf, lambda b: 1.5),
    ("torch.reciprocal({x}.abs() + 0.5)", math.inf, lambda b: 2),
    ("torch.sin({x})", 8, lambda b: 1),
    ("torch.cos({x})", 8, lambda b: 1),
    ("{x}.square()", 32, lambda b: b * b),
    ("{x}.pow(3)", 8, lambda b: b**3),
    ("({x}.abs() + 0.5).pow(1.7)", 32, lambda b: (b + 0.5) ** 1.7),
    ("({x}.abs() + 0.5).pow(-0.5)", math.inf, lambda b: 1.5),
    ("F.relu({x})", math.inf, lambda b: b),
    ("F.gelu({x})", math.inf, lambda b: b),
    ('F.gelu({x}, approximate="tanh")', 8, lambda b: b),
    ("F.silu({x})", math.inf, lambda b: b),
    ("F.leaky_relu({x}, 0.125)", math.inf, lambda b: b),
    ("F.elu({x})", math.inf, lambda b: b),
    ("F.softplus({x})", math.inf, lambda b: b + 1),
    ("F.hardtanh({x})", math.inf, lambda b: 1),
    ("F.hardswish({x})", math.inf, lambda b: b),
    ("F.hardsigmoid({x})", math.inf, lambda b: 1),
    ("F.logsigmoid({x})", math.inf, lambda b: b + 1),
    ("{x}.clamp(-1.0, 1.5)", math.inf, lambda b: 1.5),
    ("{x}.clamp_min(-0.5)", math.inf, lambda b: b),
)

_EXACT = (  # of exact values only: they jump, or must be compared
    ("torch.round({x} * 4)", lambda b: 4 * b),
    ("torch.floor({x} * 2)", lambda b: 2 * b),
    ("torch.ceil({x})", lambda b: b),
    ("torch.trunc({x} * 4)", lambda b: 4 * b),
    ("torch.sign({x})", lambda b: 1),
    ("torch.remainder({x}, 2.0)", lambda b: 2),
)


def unary(m: Maker) -> None:
    v = m.floating()
    text, limit, bound = m.rng.choice(_UNARY)
    m.add(text.format(x=m.scaled(v, limit)), bound(min(v.bound, limit)))


def moved(m: Maker) -> None:
    """Exact operators: sign, absolute value."""
    v = m.floating()
    m.add(m.rng.choice(["-{x}", "{x}.abs()"]).format(x=v.name), v.bound, exact=v.exact)


def jump(m: Maker) -> None:
    v = m.pick(lambda v: v.floating and v.exact)
    text, bound = m.rng.choice(_EXACT)
    m.add(text.format(x=v.name), bound(v.bound))


def binary(m: Maker) -> None:
    v = m.floating()
    dtype = v.dtype if m.rng.random() < 0.8 else m.rng.choice(FLOATS)
    w = m.partner(v, lambda w: w.floating, dtype)
    kind = m.rng.choice(["+", "+", "-", "*", "*", "/", "max", "min", "lerp", "reversed"])
    if kind in ("+", "-"):
        m.add(f"{v.name} {kind} {w.name}", v.bound + w.bound)
    elif kind == "reversed":
        m.add(f"torch.sub({w.name}, {v.name}, alpha=0.5)", v.bound + w.bound)
    elif kind == "*":
        m.add(f"{m.scaled(v, 64)} * {m.scaled(w, 64)}", min(v.bound, 64) * min(w.bound, 64))
    elif kind == "/":
        m.add(f"{v.name} / ({w.name}.abs() + 0.5)", 2 * v.bound)
    elif kind == "lerp":
        if v.dtype != w.dtype:
            raise Skip
        m.add(f"torch.lerp({v.name}, {w.name}, {m.rng.choice([0.25, 0.75])})", v.bound + w.bound)
    else:
        m.add(f"torch.{kind}imum({v.name}, {w.name})", max(v.bound, w.bound), exact=v.exact and w.exact)


def scalar(m: Maker) -> None:
    v = m.floating()
    c = m.number()
    text = m.rng.choice(["{x} + {c}", "{x} * {c}", "{c} - {x}", "{x} / {c}", "torch.add({x}, {x}, alpha={c})"])
    m.add(text.format(x=v.name, c=c), (v.bound + 2) * 4)


def ternary(m: Maker) -> None:
    v = m.floating()
    a = m.partner(v, lambda w: w.floating and w.dtype == v.dtype, v.dtype)
    b = m.partner(v, lambda w: w.floating and w.dtype == v.dtype, v.dtype)
    if m.rng.random() < 0.5:
        m.add(f"torch.addcmul({v.name}, {m.scaled(a, 32)}, {m.scaled(b, 32)}, value=0.5)", v.bound + 512)
    else:
        m.add(f"torch.addcdiv({v.name}, {a.name}, {b.name}.abs() + 1.0, value=0.25)", v.bound + a.bound)


def cast(m: Maker) -> None:
    v = m.floating()
    dtype = m.rng.choice(FLOATS)
    m.add(f"{v.name}.to(torch.{dtype})", v.bound, exact=v.exact and dtype == "float32", centred=v.centred)


def condition(m: Maker) -> None:
    """A boolean: a comparison of exact values, or booleans combined."""
    flags = [v for v in m.pool if v.dtype == "bool"]
    if flags and m.rng.random() < 0.4:
        a = m.rng.choice(flags)
        b = m.partner(a, lambda w: w.dtype == "bool", "bool")
        m.add(
            m.rng.choice(["{a} & {b}", "{a} | {b}", "{a} ^ {b}", "~{a}", "torch.logical_not({b})"]).format(
                a=a.name, b=b.name
            )
        )
        return
    v = m.pick(lambda v: v.exact and (v.floating or v.integer))
    op = m.rng.choice(["<", "<=", ">", ">=", "==", "!="])
    kind = m.rng.random()
    if kind < 0.4:
        m.add(f"{v.name} {op} {m.rng.choice([-1, 0, 0.5, 1]) if v.floating else m.rng.randint(-3, 3)}")
    elif kind < 0.5 and v.floating:
        m.add(m.rng.choice(["torch.isnan({x})", "torch.isinf({x})"]).format(x=v.name))
    else:
        w = m.partner(v, lambda w: w.exact and w.dtype == v.dtype, v.dtype)
        m.add(f"{v.name} {op} {w.name}")


def where(m: Maker) -> None:
    v = m.pick(lambda v: v.floating or v.integer)
    flag = m.partner(v, lambda w: w.dtype == "bool", "bool")
    w = m.partner(v, lambda w: w.dtype == v.dtype, v.dtype)
    kind = m.rng.random()
    exact = v.exact and w.exact
    if kind < 0.6:
        m.add(f"torch.where({flag.name}, {v.name}, {w.name})", max(v.bound, w.bound), exact=exact)
    elif kind < 0.8 and v.floating:
        fill = m.rng.choice(["-1.5", "0.0", "-100.0" if v.bound <= 32 else "1.0"])
        m.add(f"{v.name}.masked_fill({flag.name}, {fill})", max(v.bound, 100), exact=v.exact)
    else:
        m.add(f"torch.where({flag.name}, {v.name}, {2 if v.integer else 0.5})", v.bound, exact=v.exact)


# Integers and booleans ------------------------------------------------------------------------------------------------


def whole(m: Maker) -> None:
    """Integer arithmetic that cannot overflow."""
    v = m.pick(lambda v: v.integer)
    kind = m.rng.choice(["const", "const", "binary", "binary", "bits", "bits", "abs", "narrow"])
    if kind == "const":
        c = m.rng.choice([2, 3, 5, 7])
        text = m.rng.choice([f"+ {c}", f"- {c}", f"* {c}", f"// {c}", f"% {c}", f"& {c}"])
        m.add(f"{v.name} {text}", v.bound * c + c, exact=True)
    elif kind == "abs":
        m.add(m.rng.choice(["{x}.abs()", "-{x}", "torch.sign({x})"]).format(x=v.name), v.bound, exact=True)
    elif kind == "narrow":
        w = m.partner(v, lambda w: w.dtype in NARROW, m.rng.choice(NARROW))
        text = m.rng.choice(["{v} + {w}", "{v} * {w}.to(torch.{d})", "torch.maximum({v}, {w})"])
        m.add(text.format(v=v.name, w=w.name, d=v.dtype), v.bound * 8 + 8, exact=True)
    else:
        w = m.partner(v, lambda w: w.integer, v.dtype)
        ops = ["&", "|", "^"] if kind == "bits" else ["+", "-", "*"]
        op = m.rng.choice(ops)
        bound = v.bound * w.bound if op == "*" else 2 * max(v.bound, w.bound) + 1
        if bound > 2**24:
            raise Skip
        m.add(f"{v.name} {op} {w.name}", bound, exact=True)
    if m.pool[-1].bound > 2**24:
        m.add(f"{m.pool[-1].name} % 1000", 1000, exact=True)


def narrow(m: Maker) -> None:
    """Small integers combined with floats: dequantisation, and small values."""
    shape = m.pick(lambda v: v.ndim > 0)
    v = m.partner(shape, lambda w: w.dtype in NARROW, m.rng.choice(NARROW))
    kind = m.rng.random()
    if kind < 0.5:
        m.add(f"{v.name}.to(torch.float32) * {m.number()}", 32)
    elif kind < 0.75:
        m.add(f"{v.name}.to(torch.{m.rng.choice(['int32', 'int64'])})", 8, exact=True)
    elif v.dtype != "uint8":
        w = m.partner(v, lambda w: w.dtype == v.dtype, v.dtype)
        m.add(
            m.rng.choice(["torch.minimum({v}, {w})", "{v} & {w}", "{v} ^ {w}"]).format(v=v.name, w=w.name),
            8,
            exact=True,
        )
    else:
        m.add(f"{v.name} > 3")


def to_float(m: Maker) -> None:
    v = m.pick(lambda v: (v.integer and v.bound < 2**24) or v.dtype == "bool")
    m.add(m.rng.choice(["{x}.float()", "{x} * 0.5", "{x} / 3"]).format(x=v.name), v.bound + 1)


def to_whole(m: Maker) -> None:
    """From floats, where these are exact and finite."""
    v = m.pick(lambda v: v.floating and v.exact)
    m.add(f"torch.where({v.name}.abs() < 8, {v.name}, 0.0).to(torch.{m.rng.choice(['int32', 'int64'])})", 8, exact=True)


# Reductions -----------------------------------------------------------------------------------------------------------


def _terms(v: Val, dims: Sequence[int]) -> int:
    return math.prod(v.shape[d] for d in dims)


def uncentred(m: Maker, v: Val) -> Val:
    """``v``, or a product with an input where its sums would cancel."""
    if not v.centred:
        return v
    w = m.input(v.shape, v.dtype)
    return m.add(f"{v.name} * {w.name}", v.bound * w.bound, keep=False)


def reduction(m: Maker) -> None:
    v = m.floating(1)
    dims = m.dims(v)
    n, keep = _terms(v, dims), m.rng.random() < 0.55
    if n == 0:
        raise Skip
    tail = f"dim={dims if len(dims) > 1 else dims[0]}, keepdim={keep}"
    kind = m.rng.choice(
        ["sum", "sum", "sum", "mean", "mean", "amax", "amax", "amin", "var", "std", "lse", "norm", "max"]
    )
    if kind in ("sum", "mean"):
        v = uncentred(m, v)
        m.add(f"{v.name}.{kind}({tail})", v.bound * (math.sqrt(n) if kind == "sum" else 1))
    elif kind in ("amax", "amin"):
        m.add(f"{v.name}.{kind}({tail})", v.bound, exact=v.exact)
    elif kind == "max":
        m.add(f"{v.name}.max(dim={dims[0]}, keepdim={keep}).values", v.bound, exact=v.exact)
    elif kind == "lse":
        m.add(f"torch.logsumexp({m.scaled(v, 32)}, {tail})", min(v.bound, 32) + math.log(n))
    elif kind == "norm":
        m.add(
            f"torch.linalg.vector_norm({v.name}, ord={m.rng.choice(['1', '2', 'torch.inf'])}, {tail})",
            v.bound * math.sqrt(n),
        )
    else:
        correction = m.rng.choice([0, 1]) if n > 3 else 0
        x = m.scaled(v, 32)
        if kind == "std" and not v.exact:  # a root is steep at 0
            m.add(f"({x}.var({tail}, correction={correction}) + 0.125).sqrt()", 32)
        else:
            m.add(f"{x}.{kind}({tail}, correction={correction})", 1024)


def product(m: Maker) -> None:
    v = m.floating(1)
    d = m.rng.randrange(v.ndim)
    if not 0 < v.shape[d] <= 64:
        raise Skip
    m.add(f"({m.scaled(v, 0.5)} + 1.0).prod({d}, keepdim={m.rng.random() < 0.5})", 32)


def counting(m: Maker) -> None:
    """Reductions of integers and booleans."""
    v = m.pick(lambda v: v.ndim > 0 and (v.integer or v.dtype == "bool") and 0 not in v.shape)
    dims = m.dims(v)
    keep = m.rng.random() < 0.5
    d = dims if len(dims) > 1 else dims[0]
    if v.dtype == "bool":
        m.add(
            f"{v.name}.{m.rng.choice(['sum', 'sum', 'any', 'all'])}(dim={d}, keepdim={keep})",
            _terms(v, dims),
            exact=True,
        )
        return
    kind = m.rng.choice(["sum", "amax", "amin"])
    if v.bound * _terms(v, dims) > 2**24:
        kind = "amax"
    m.add(f"{v.name}.{kind}(dim={d}, keepdim={keep})", v.bound * (_terms(v, dims) if kind == "sum" else 1), exact=True)


def softmax(m: Maker) -> None:
    v = m.floating(1)
    d = m.rng.choice([v.ndim - 1, v.ndim - 1, 0, m.rng.randrange(v.ndim)])
    kind = m.rng.choice(["softmax", "softmax", "log_softmax"])
    m.add(f"torch.{kind}({m.scaled(v, 32)}, {d})", 1 if kind == "softmax" else 80, centred=True)


def norm(m: Maker) -> None:
    v = m.floating(1)
    kind = m.rng.choice(["layer", "layer", "rms", "formula", "group", "batch"])
    x = m.scaled(v, 64)
    eps = 1e-5 if v.exact and v.shape[-1] > 32 and v.name in {i.name for i in m.inputs if 0 not in i.strides} else 0.25
    if kind in ("layer", "rms"):
        tail = list(v.shape[-m.rng.choice([1, 1, min(2, v.ndim)]) :])
        w = m.input(tail, v.dtype).name if m.rng.random() < 0.8 else "None"
        if kind == "rms":
            m.add(f"F.rms_norm({x}, {tail}, {w}, {eps})", 256)
            return
        b = m.input(tail, v.dtype).name if w != "None" and m.rng.random() < 0.7 else "None"
        m.add(f"F.layer_norm({x}, {tail}, {w}, {b}, {eps})", 256, centred=True)
    elif kind == "formula":
        h = m.add(f"{x}.float()", v.bound, keep=False)
        m.add(f"{h.name} * torch.rsqrt({h.name}.pow(2).mean(-1, keepdim=True) + {eps})", 64)
    elif kind == "group":
        if v.ndim < 2 or v.ndim > 4 or 0 in v.shape:
            raise Skip
        possible = [g for g in (1, 2, 3, 4, 5, 8) if v.shape[1] % g == 0 and math.prod(v.shape) > g]
        if not possible:
            raise Skip
        groups = m.rng.choice(possible)
        scale, shift = (m.input([v.shape[1]], v.dtype, plain=True) for _ in range(2))
        m.add(f"F.group_norm({x}, {groups}, {scale.name}, {shift.name}, 0.25)", 256, centred=True)
    else:
        if v.ndim < 2 or v.ndim > 4 or 0 in v.shape or math.prod(v.shape) == v.shape[1]:
            raise Skip
        scale, shift = (m.input([v.shape[1]], "float32", plain=True) for _ in range(2))
        m.add(f"F.batch_norm({x}, None, None, {scale.name}, {shift.name}, True, 0.1, 0.25)", 256, centred=True)
