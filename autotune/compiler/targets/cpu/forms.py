"""Forms that values take on the CPU: constants of the module, and operators of Python where Numba has them."""

from __future__ import annotations

from autotune.compiler.kernel.lower import identity
from autotune.compiler.kernel.nodes import Binary, Const, Expr, Op, Unary
from autotune.compiler.targets.cpu.nodes import Named

_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_COMPARE = {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_POWERS = {0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal"}


def start(op: str, dtype: str = "float32") -> Named:
    """A reduction's neutral element; booleans are carried as such."""
    neutral = Const(op in ("prod", "min"), "bool") if dtype == "bool" else identity(op, dtype)
    return Named(f"START_{op}_{dtype}", neutral)


def number(name: str, value: float, dtype: str) -> Named:
    """A constant of type ``dtype``."""
    kind = {"float32": float, "bool": bool}.get(dtype, int)
    return Named(name, Const(kind(value), dtype))


def zero(dtype: str) -> Named:
    return number(f"ZERO_{dtype}", 0, dtype)


def plain(x: Expr) -> Expr:
    """An operator without a call, where that is the same: LLVM sees through it as well, and the source is shorter."""
    if not isinstance(x, Op):
        return x
    if x.of == "float32" and x.name in _INFIX:
        return Binary(_INFIX[x.name], *x.args)
    if x.of == "float32" and x.name == "neg":
        return Unary("-", *x.args)
    if x.of != "bool" and x.name in _COMPARE:
        return Binary(_COMPARE[x.name], *x.args)
    if x.of == "float32" and x.name == "pow" and isinstance(x.args[1], Named):
        return _power(x, float(x.args[1].value.value))
    return x


def _power(x: Op, exponent: float) -> Expr:
    """Constant powers that need no libm call, as torch takes them too."""
    base = x.args[0]
    if exponent in _POWERS:
        return Op(_POWERS[exponent], (base,), "float32", "float32")
    square = base * base
    return {1.0: base, 2.0: square, 3.0: square * base, 4.0: square * square}.get(exponent, x)
