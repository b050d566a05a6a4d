"""Every pointwise operator of the CPU target against torch: accuracy, special values, integers and booleans."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import pytest
import torch

from autotune.compiler.targets.cpu.schedule import CpuSchedule, shared_exponentials
from autotune.ir.graph import compute_type
from autotune.ir.nodes import POINTWISE
from tests.support.cpu_graphs import TORCH, Build, run

INF, NAN = math.inf, math.nan
_POSITIVE = [0.0, INF, 0.5, 1.0, 1.5, 2.5, 3.0, 10.0, 17.0, 1e-30, 1e-7, 1e-3, 1e10, 3e38, 0.9999999, 1.0000001, 88.5]
_POSITIVE += [87.0, 89.5, 103.5, 104.5, 127.5, 128.5, 125.5]
SPECIAL = torch.tensor([NAN, *_POSITIVE, *(-x for x in _POSITIVE)])
_SMALL = torch.logspace(-30, 0, 3000)
RANGES = {  # where the error is measured: dense over what matters, log-spaced over the rest
    "exp": torch.linspace(-87.3, 88.7, 20001),
    "exp2": torch.linspace(-125.9, 127.9, 20001),
    "expm1": torch.cat([torch.linspace(-20, 88, 20001), _SMALL, -_SMALL]),
    "log": torch.cat([torch.logspace(-37, 38, 20001), torch.linspace(0.5, 2, 10001)]),
    "log2": torch.cat([torch.logspace(-37, 38, 20001), torch.linspace(0.5, 2, 10001)]),
    "log1p": torch.cat(
        [torch.logspace(-30, 38, 20001), -torch.logspace(-30, -0.001, 10001), torch.linspace(-0.9, 3, 9001)]
    ),
    "tanh": torch.cat([torch.linspace(-11, 11, 20001), _SMALL, -_SMALL]),
    "sigmoid": torch.linspace(-86, 100, 20001),
    "erf": torch.cat([torch.linspace(-6, 6, 40001), _SMALL, -_SMALL]),
    "sqrt": torch.logspace(-37, 38, 5001),
    "rsqrt": torch.logspace(-37, 37, 5001),
    "reciprocal": torch.logspace(-37, 37, 5001),
    "sin": torch.linspace(-1000, 1000, 5001),
    "cos": torch.linspace(-1000, 1000, 5001),
}
ULPS = {
    "exp": 2,
    "exp2": 2,
    "log": 2,
    "log2": 3,
    "log1p": 3,
    "expm1": 3,
    "sigmoid": 3,
    "erf": 3,
    "tanh": 4,
    "rsqrt": 2,
}
UNARY = [n for n, o in POINTWISE.items() if o.arity == 1 and n not in ("not", "cast")]
TORCH_UNARY = {**{n: getattr(torch, n) for n in UNARY}}
BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "pow": torch.pow,
    "mod": torch.remainder,
    "floordiv": torch.floor_divide,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "eq": torch.eq,
    "ne": torch.ne,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
}
_FLOAT_ONLY = {"div"}
_NOT_FLOAT = {"and", "or", "xor", "floordiv"}
_BOOL = {"and", "or", "xor", "eq", "ne", "lt", "le", "gt", "ge", "maximum", "minimum"}


def apply(op: str, *args: torch.Tensor, dtype: str | None = None) -> torch.Tensor:
    """The kernel of one operator over one-dimensional tensors."""
    return apply_all([(op, dtype)], *args)[op, dtype]


Asked = tuple[str, str | None]


def apply_all(ops: Iterable[Asked], *args: torch.Tensor) -> dict[Asked, torch.Tensor]:
    """The results of several operators, with their types, for the same tensors: one kernel."""
    b, asked = Build(len(args[0])), list(ops)
    names = {t: n for n, t in TORCH.items()}
    loads = [b.load(names[a.dtype], 0) for a in args]
    for op, dtype in asked:
        v = b.point(op, *loads, dtype=dtype)
        b.out(v, b.values[v].dtype)
    return dict(zip(asked, run(b.graph(), args, CpuSchedule()), strict=True))


@pytest.mark.parametrize("op", sorted(RANGES))
def test_error_in_units_of_the_last_place(op: str) -> None:
    x = RANGES[op].float()
    got, want = apply(op, x).double(), getattr(torch, op)(x.double())
    unit = torch.exp2(torch.frexp(want).exponent.double() - 24).clamp_min(2.0**-149)
    error = ((got - want).abs() / unit).max().item()
    assert error <= ULPS.get(op, 1.0), f"{op}: {error:.2f} ulp"


def test_erf_absolute_error() -> None:
    x = torch.linspace(-5, 5, 50001)
    assert (apply("erf", x).double() - torch.erf(x.double())).abs().max() <= 1e-7


def gelu_slope(n: int, *, alone: bool = False) -> Build:
    """The derivative of gelu; ``alone`` stores its erf too."""
    b = Build(n)
    x = b.load("float32", 0)
    erf = b.erf(b.mul(x, b.const(2**-0.5)))
    density = b.mul(b.exp(b.mul(b.mul(x, x), b.const(-0.5))), b.const((2 * torch.pi) ** -0.5))
    b.out(b.add_(b.mul(b.add_(erf, b.const(1.0)), b.const(0.5)), b.mul(x, density)), "float32")
    if alone:
        b.out(erf, "float32")
    return b


def test_the_derivative_of_gelu_takes_one_exponential() -> None:
    x = torch.cat([torch.linspace(-12, 12, 50001), SPECIAL])
    wide = x.double()
    want = 0.5 * (1 + torch.erf(wide * 0.5**0.5)) + wide * torch.exp(-0.5 * wide * wide) * (2 * torch.pi) ** -0.5
    (got,) = run(gelu_slope(len(x)).graph(), [x], CpuSchedule())
    assert shared_exponentials(gelu_slope(8).graph())
    torch.testing.assert_close(got.double(), want, rtol=0, atol=4e-7, equal_nan=True)


def test_an_error_function_that_is_stored_keeps_its_digits() -> None:
    graph = gelu_slope(1000, alone=True).graph()
    assert shared_exponentials(graph) == {}
    x = torch.linspace(-1e-3, 1e-3, 1000)
    got = run(graph, [x], CpuSchedule())[1]
    torch.testing.assert_close(got, torch.erf(x * 2**-0.5), rtol=4e-7, atol=0)


@pytest.mark.parametrize("part", range(4))
def test_unary_on_special_values(part: int) -> None:
    """A quarter of them in a kernel."""
    x = SPECIAL
    for (op, _), got in apply_all(((op, None) for op in list(UNARY)[part::4]), x).items():
        fits = x.abs() != 3e38 if op in ("sin", "cos") else torch.ones_like(x, dtype=torch.bool)
        want = TORCH_UNARY[op](x.double()).float() if op not in ("isnan", "isinf") else TORCH_UNARY[op](x)
        if got.dtype == torch.bool:
            assert torch.equal(got, want), op
            continue
        flushed = torch.where(want.abs() < 1.1754944e-38, torch.zeros(()), want)  # denormals may be flushed
        got = torch.where(got.abs() < 1.1754944e-38, torch.zeros(()), got)
        torch.testing.assert_close(got[fits], flushed[fits], rtol=6e-7, atol=0.0, equal_nan=True, msg=naming(op))


def naming(op: str) -> Callable[[str], str]:
    return lambda message: f"{op}: {message}"


@pytest.mark.parametrize("op", ["tanh", "expm1", "erf", "log1p", "sqrt", "neg"])
def test_odd_functions_keep_the_sign_of_zero(op: str) -> None:
    x = torch.tensor([0.0, -0.0])
    assert torch.equal(torch.signbit(apply(op, x)), torch.signbit(TORCH_UNARY[op](x)))


@pytest.mark.parametrize("ops", [sorted(set(BINARY) - _NOT_FLOAT - {"mod"}), ["mod"]], ids=["all", "mod"])
def test_binary_on_special_values(ops: list[str]) -> None:
    keep = SPECIAL if ops != ["mod"] else SPECIAL[SPECIAL.abs() < 1e9]
    x, y = keep.repeat(len(keep)), keep.repeat_interleave(len(keep))
    for (op, _), got in apply_all(((op, None) for op in ops), x, y).items():
        want = BINARY[op](x, y)
        if got.dtype == torch.bool:
            assert torch.equal(got, want), op
        else:
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1.2e-38, equal_nan=True, msg=naming(op))


@pytest.mark.parametrize("exponent", [0.5, -0.5, 1.0, 2.0, 3.0, 4.0, -1.0, 2.7, 0.0])
def test_constant_powers(exponent: float) -> None:
    x = torch.tensor([0.3, 2.0, 7.5, 0.0, INF, NAN, -2.0])
    b = Build(len(x))
    b.out(b.pow(b.load("float32", 0), b.const(exponent)), "float32")
    (got,) = run(b.graph(), [x], CpuSchedule())
    torch.testing.assert_close(got, x**exponent, rtol=1e-6, atol=0, equal_nan=True)


_DIVIDING = {"floordiv", "mod"}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "ops",
    [sorted(set(BINARY) - _FLOAT_ONLY - _DIVIDING - {"pow"}), sorted(_DIVIDING), ["pow"]],
    ids=["most", "dividing", "pow"],
)
def test_binary_on_integers(ops: list[str], dtype: torch.dtype) -> None:
    top = torch.iinfo(dtype)
    pool = torch.tensor([1, -1, 2, -2, 3, -3, 7, 100, -101, 65537], dtype=dtype)
    if ops == ["pow"]:
        x, y = pool.repeat(4), torch.tensor([0, 1, 2, 3], dtype=dtype).repeat_interleave(len(pool))
        small = x.abs() <= 101
        x, y = x[small], y[small]
    else:
        x = torch.cat([pool, torch.tensor([0, top.max, top.min], dtype=dtype)])
        x, y = x.repeat(len(pool)), pool.repeat_interleave(len(x))
        if _DIVIDING & {*ops}:  # torch itself traps on this one
            fine = ~((x == top.min) & (y == -1))
            x, y = x[fine], y[fine]
    for (op, _), got in apply_all(((op, None) for op in ops), x, y).items():
        assert torch.equal(got, BINARY[op](x, y)), op


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("op", ["floordiv", "mod"])
def test_divisions_that_would_trap_do_not(op: str, dtype: torch.dtype) -> None:
    least = torch.iinfo(dtype).min
    x, y = torch.tensor([5, least, 7], dtype=dtype), torch.tensor([0, -1, 2], dtype=dtype)
    got = apply(op, x, y)
    assert got[2] == (3 if op == "floordiv" else 1)
    assert got[1] == (least if op == "floordiv" else 0)


def test_unary_on_integers() -> None:
    x = torch.tensor([0, 1, -1, 5, -2147483648, 2147483647], dtype=torch.int32)
    for (op, _), got in apply_all(((op, None) for op in ("neg", "abs", "sign", "not")), x).items():
        assert torch.equal(got, torch.bitwise_not(x) if op == "not" else TORCH_UNARY[op](x)), op


def test_binary_on_booleans() -> None:
    x, y = torch.tensor([False, False, True, True]), torch.tensor([False, True, False, True])
    for (op, _), got in apply_all(((op, None) for op in sorted(_BOOL)), x, y).items():
        assert torch.equal(got, BINARY[op](x, y)), op


def test_not_and_where_on_booleans() -> None:
    x = torch.tensor([True, False, True])
    assert torch.equal(apply("not", x), ~x)
    a, c = torch.tensor([1.0, NAN, INF]), torch.tensor([-1.0, 2.0, -INF])
    torch.testing.assert_close(apply("where", x, a, c), torch.where(x, a, c), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(apply("where", x, ~x, x), torch.where(x, ~x, x))


@pytest.mark.parametrize("have", sorted(TORCH))
def test_casts(have: str) -> None:
    x = torch.tensor([0, 1, 2, 5, 100, 7])
    if have not in ("bool", "uint8"):
        x = torch.cat([x, -x])
    if TORCH[have].is_floating_point:
        x = torch.cat([x, torch.tensor([0.5, -1.9, 2.5])])
    x = x.to(TORCH[have])
    for (_, to), got in apply_all((("cast", to) for to in ("float32", "int32", "int64", "bool")), x).items():
        assert torch.equal(got, x.to(TORCH[to])), to


@pytest.mark.parametrize("count", [1, 7, 33])
def test_casts_of_nan_and_out_of_range_are_those_of_the_host(count: int) -> None:
    """As torch converts on the same processor, below a vector's length and above it."""
    x = torch.tensor([NAN, INF, -INF, 3e38, 2.0**31, -(2.0**31), -2147483904.0, 2.0**63, -(2.0**63), 1e19])
    x = x.repeat(4)[:count]
    for to in ("int32", "int64", "bool"):
        assert torch.equal(apply("cast", x, dtype=to), x.to(TORCH[to])), to


@pytest.mark.parametrize("storage", sorted(TORCH))
def test_loads_and_stores_of_every_type(storage: str) -> None:
    """Loads and stores keep every bit, and floats are rounded to nearest even."""
    if storage == "bool":
        x = torch.tensor([True, False, True])
    elif TORCH[storage].is_floating_point:
        x = torch.cat([torch.randn(1000), SPECIAL, torch.tensor([65504.0, 6e-8, 1e-5])]).to(TORCH[storage])
    else:
        i = torch.iinfo(TORCH[storage])
        x = torch.tensor([i.min, i.max, 0, 1, i.max - 1], dtype=TORCH[storage])
    b = Build(len(x))
    b.out(b.load(storage, 0), storage)
    (got,) = run(b.graph(), [x], CpuSchedule())
    torch.testing.assert_close(got, x, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("storage", ["bfloat16", "float16"])
def test_rounding_to_half_types(storage: str) -> None:
    g = torch.Generator().manual_seed(1)
    x = torch.cat(
        [torch.randn(4096, generator=g) * 10, SPECIAL, torch.tensor([1.00390625, 1.01171875, 65520.0, 65519.9])]
    )
    bits = torch.randint(0x7F800001, 0x7FFFFFFF, (64,), generator=g, dtype=torch.int32).view(
        torch.float32
    )  # NaN payloads
    x = torch.cat([x, bits])
    b = Build(len(x))
    b.out(b.load("float32", 0), storage)
    (got,) = run(b.graph(), [x], CpuSchedule())
    torch.testing.assert_close(got, x.to(TORCH[storage]), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("storage", ["int8", "uint8", "int16", "int32", "bool", "float32"])
def test_integer_results_narrow_when_stored(storage: str) -> None:
    x = torch.tensor([0, 1, 127, 128, 255, 256, -1, -129, 70000])
    b = Build(len(x))
    b.out(b.load("int64", 0), storage)
    assert compute_type(storage) != "int64"
    (got,) = run(b.graph(), [x], CpuSchedule())
    assert torch.equal(got, x.to(TORCH[storage]))
