"""A group's tuned parameters on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from autotune.errors import UserError

MOST = {"row_block": 1024, "column_tile": 1 << 16, "parts": 16, "threads": 1024}
"""Largest values of a schedule: what is emitted multiplies them by extents, and they may come from a database."""


@dataclass(frozen=True)
class CpuSchedule:
    """A group's tuned parameters on the CPU; see ``[cpu.*]`` of ``search_spaces/fusion.toml``.

    ``keep`` and ``online`` say which program to build (``build_program(graph, keep=schedule.keep == "scratch",
    online=schedule.online)``); the rest is the printer's.
    """

    row_block: int = 8
    column_tile: int = 0
    keep: str = "scratch"
    online: bool = False
    threads: int = 1
    parts: int = 0
    stream: bool = False
    prefetch: bool = False
    wide: bool = False

    def __post_init__(self) -> None:
        if self.row_block < 1 or self.threads < 1 or self.column_tile < 0 or self.parts < 0:
            raise UserError(
                f"row_block={self.row_block}, threads={self.threads}, column_tile={self.column_tile}, "
                f"parts={self.parts}: row_block and threads must be at least 1, column_tile and parts at least 0"
            )
        if large := next((name for name, most in MOST.items() if getattr(self, name) > most), None):
            raise UserError(f"{large}={getattr(self, large)}: must be {MOST[large]} at most")
        if self.keep not in ("scratch", "reload"):
            raise UserError(f"keep={self.keep!r}: must be 'scratch' or 'reload'")

    @classmethod
    def from_config(cls, config: Mapping[str, int | str | bool | float]) -> CpuSchedule:
        """The schedule of a configuration; a missing key takes its default.

        Raises:
            UserError: an unknown key or a value of the wrong type or range.
        """
        known = {f.name: type(f.default) for f in fields(cls)}
        for key, value in config.items():
            if key not in known:
                raise UserError(f"unknown CPU parameter {key!r}: known are {', '.join(known)}")
            if type(value) is not known[key]:
                raise UserError(f"{key}={value!r}: must be of type {known[key].__name__}")
        return cls(**config)  # type: ignore[arg-type]
