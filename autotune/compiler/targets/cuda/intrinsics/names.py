"""Names of memory accesses in generated code: ``ld_bf16_8_d`` loads 8 elements of bf16 with the default hint."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple


class AccessName(NamedTuple):
    """What a name says: kind of access, short storage type, elements, and the letter of its hint ("" for none)."""

    kind: str
    storage: str
    lanes: int
    hint: str


def access_of(name: str, kinds: Collection[str]) -> AccessName | None:
    """The access that ``name`` stands for; None where it is of none of ``kinds``."""
    kind, *rest = name.split("_")
    if kind not in kinds or len(rest) not in (2, 3) or not rest[1].isdecimal():
        return None
    return AccessName(kind, rest[0], int(rest[1]), rest[2] if rest[2:] else "")
