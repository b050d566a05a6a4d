"""Replacements of sound values: other types, huge numbers, deep nesting, paths, SQL, code."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

TEXTS = (
    "", "\0", "x" * 70, "../../../../tmp/escaped", "/etc/passwd", "'; DROP TABLE autotune_schedules; --",
    '"); DELETE FROM autotune_workloads; --', "__import__('os').system('touch /tmp/escaped')", "${jndi:ldap://x}",
    "\x1b]0;owned\x07\x1b[2J", "\u202egnp.exe", "http.server:test", "autotune.cli.app:main", "NaN", "1e999", "-0",
    "\ud800", "a\udcff",
    "aten.from_file.default", "aten.fill_.Scalar", "{", "[]", "null", "cos\nsystem\n(S'touch /tmp/escaped'\ntR.",
)  # fmt: skip
NUMBERS = (
    0, -1, 1, 2, 3, 7, 31, 32, 33, 255, 1024, 2**15, 2**16 + 1, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 1,
    2**63, -(2**63), 2**64, 10**30, 10**400, 0.0, -0.0, 0.5, 1e-300, 1e300, 1e308, 1e12,
    float("inf"), float("-inf"), float("nan"),
)  # fmt: skip
SHAPES: tuple[Any, ...] = (None, True, False, [], {}, [[]], [None], {"": 0}, {"a": {"a": {"a": []}}})


def deep() -> Any:
    """A list in a list, and so on; :func:`as_text` goes deeper."""
    value: Any = 0
    for _ in range(200):
        value = [value]
    return value


def hostile(chance: random.Random) -> Any:
    """A value that no sound file has at that place, mostly."""
    kind = chance.randrange(12)
    if kind < 4:
        return chance.choice(TEXTS)
    if kind < 8:
        return chance.choice(NUMBERS)
    if kind < 11:
        return copy.deepcopy(chance.choice(SHAPES))
    return deep()


def altered(value: Any, chance: random.Random) -> Any:
    """A copy of a JSON value in which one entry, at any depth, is replaced, removed or duplicated."""
    value = copy.deepcopy(value)
    places: list[tuple[Any, Any]] = []

    def walk(at: Any) -> None:
        items = at.items() if isinstance(at, dict) else enumerate(at) if isinstance(at, list) else ()
        for name, inner in items:
            places.append((at, name))
            walk(inner)

    walk(value)
    if not places:
        return hostile(chance)
    where, name = chance.choice(places)
    kind = chance.randrange(10)
    if kind == 0:
        del where[name]
    elif kind == 1 and isinstance(where, list):
        where.insert(name, where[name])
    elif kind == 2 and isinstance(where, dict):
        where[str(hostile(chance))[:50]] = where.pop(name)
    elif kind < 5 and isinstance(where[name], (int, float)) and not isinstance(where[name], bool):
        where[name] = chance.choice(
            (where[name] + 1, where[name] - 1, -where[name], where[name] * 2, where[name] * 1000)
        )
    else:
        where[name] = hostile(chance)
    return value


def as_text(value: Any, chance: random.Random) -> str:
    """A JSON value as text, now and then spoilt as text is: bits, ends, digits, brackets."""
    text = json.dumps(value)
    kind = chance.randrange(12)
    if kind == 0:
        return text[: chance.randrange(len(text) + 1)]
    if kind == 1:
        at = chance.randrange(len(text) + 1)
        return (
            text[:at] + chance.choice(("[" * 20_000, "9" * 5000, "\\ud800", "\\u0000", '"', "{", "1e99999")) + text[at:]
        )
    if kind == 2:
        at = chance.randrange(max(len(text), 1))
        return text[:at] + chr(ord(text[at : at + 1] or " ") ^ (1 << chance.randrange(7))) + text[at + 1 :]
    return text


def flipped(data: bytes, chance: random.Random) -> bytes:
    """Bytes with some bits changed, a part overwritten, left out or twice, or the end cut off."""
    if not data:
        return b"\0"
    out = bytearray(data)
    kind, at = chance.randrange(8), chance.randrange(len(data))
    length = min(chance.choice((1, 4, 16, 100, 512, 4096)), len(data) - at)
    if kind < 4:
        for _ in range(chance.choice((1, 1, 1, 3, 30))):
            out[chance.randrange(len(out))] ^= 1 << chance.randrange(8)
    elif kind == 4:
        out[at : at + length] = bytes(length)
    elif kind == 5:
        out[at : at + length] = chance.randbytes(length)
    elif kind == 6:
        del out[at:]
    else:
        out[at:at] = out[at : at + length]
    return bytes(out)
