"""Constraints: allowed expressions, and those that are refused before any evaluation."""

from __future__ import annotations

import re
from typing import Any

import pytest

from autotune.domains.kernel.constraints import constraint
from autotune.errors import UserError

VALUES = {"a": 4, "b": 16, "mode": "fast", "flag": True, "x": 0.5}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a * b <= 64", True),
        ("a * b < 64", False),
        ("4 <= a < b", True),
        ("a < b < 8", False),
        ("b % a == 0 and b // a == 4", True),
        ("mode in ('fast', 'slow')", True),
        ("mode not in ['fast']", False),
        ("not flag or a > 8", False),
        ("a if flag else 0", True),
        ("min(a, b) == 4 and max(a, b, 3) == 16 and abs(-a) == 4", True),
        ("cdiv(17, a) == 5", True),
        ("1 << a == b and b >> 2 == a and a ** 2 == b", True),
        ("(a & 4) | 1 == 5 and a ^ a == 0 and ~0 == -1", True),
        ("x / 2 == 0.25 and -x < +x", True),
    ],
)
def test_results_equal_pythons(text: str, expected: bool) -> None:
    made = constraint(text, "k")
    assert made.holds(VALUES) is expected
    assert made.names == VALUES.keys() & set(re.findall(r"\w+", text))
    assert bool(eval(text, {"cdiv": lambda a, b: -(-a // b)}, dict(VALUES))) is expected


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "a.__class__",
        "open('/etc/passwd')",
        "[i for i in (1, 2)]",
        "lambda: 1",
        "a[0]",
        "f'{a}'",
        "min(*a)",
        "min(a, key=b)",
        "(a := 3)",
        "{1: 2}",
        "None is None",
        "b'x'",
        "1j",
    ],
)
def test_other_than_arithmetic_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="the constraint") as error:
        constraint(text, "k")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a <", "is not an expression"),
        ("", "is not an expression"),
        ("a = 3", "is not an expression"),
        ("1" * 600, "more than 500 characters"),
        ("(" * 300 + "a" + ")" * 100, "is not an expression"),
        ("-" * 100 + "a", "it may have"),
    ],
)
def test_an_invalid_expression_is_one_line(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        constraint(text, "k")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a // 0", "cannot be computed"),
        ("2 ** 10 ** 10 > 1", "too large"),
        ("1 << 100000 > 1", "too large"),
        ("mode * 1000 == a", "is no number"),
        ("mode < a", "cannot be applied"),
    ],
)
def test_a_failing_expression_is_one_line(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        constraint(text, "k").holds(VALUES)


def test_a_callable_reads_parameters_by_name() -> None:
    def wide(a: int, b: int) -> bool:
        return b > a

    made = constraint(wide, "k")
    assert (made.names, made.holds(VALUES)) == ({"a", "b"}, True)

    def fails(a: int) -> Any:
        raise KeyError(a)

    with pytest.raises(UserError, match="fails failed: KeyError"):
        constraint(fails, "k").holds(VALUES)
    with pytest.raises(UserError, match="must name its parameters"):
        constraint(lambda **all: True, "k")
    with pytest.raises(UserError, match="is not a string"):
        constraint(3, "k")
