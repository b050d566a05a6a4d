"""A group's tuned parameters on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache

from autotune.errors import UserError
from autotune.space import load_space

EARLIER: Mapping[str, tuple[str, ...] | None] = {"keep": ("scratch", "reload"), "online": None}
"""Parameters that only configurations of earlier versions have, and what they may be (None: a truth value).

Results are the same without them, and no slower: where values waited for the next pass (computing them again was slower
in three cases of three), and whether a softmax took one pass less (1.8% in the space of a cross entropy).
"""


@cache
def _bounds() -> dict[str, tuple[int, ...]]:
    """Smallest and largest numbers of a schedule: they are multiplied by extents, and may come from a database."""
    return {p.name: p.bounds for p in load_space("fusion", "cpu") if p.bounds}


@dataclass(frozen=True)
class CpuSchedule:
    """A group's tuned parameters on the CPU; see ``[cpu.*]`` of ``search_spaces/fusion.toml``."""

    row_block: int = 8
    column_tile: int = 0
    threads: int = 1
    parts: int = 0
    stream: bool = False
    prefetch: bool = False
    wide: bool = False

    def __post_init__(self) -> None:
        for name, (least, most) in _bounds().items():
            if not least <= getattr(self, name) <= most:
                raise UserError(f"{name}={getattr(self, name)}: must be {least} to {most}")

    @classmethod
    def from_config(cls, config: Mapping[str, int | str | bool | float]) -> CpuSchedule:
        """The schedule of a configuration; a missing key takes its default, and :data:`EARLIER` changes nothing. Raises
        UserError for an unknown key or a value of the wrong type or range."""
        known = {f.name: type(f.default) for f in fields(cls)}
        config = {key: value for key, value in config.items() if key not in EARLIER}
        for key, value in config.items():
            if key not in known:
                raise UserError(f"unknown CPU parameter {key!r}: the parameters are {', '.join(known)}")
            if type(value) is not known[key]:
                raise UserError(f"{key}={value!r}: must be of type {known[key].__name__}")
        return cls(**config)  # type: ignore[arg-type]
