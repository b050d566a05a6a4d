"""The result of one measurement attempt, and the blame for a failure.

A candidate's failure is stored permanently, a machine's failure is not.
"""

from __future__ import annotations

import errno
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from autotune.errors import UserError, without_command
from autotune.task import Status

_MACHINE = frozenset(
    (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.EIO,
     errno.ESTALE, errno.ENOTDIR, errno.EAGAIN)
)  # fmt: skip
_TEXT = re.compile(
    r"no space left on device|disk quota exceeded|read-only file system|too many open files"
    r"|\[Errno (28|122|30|24|23|5)\]",
    re.IGNORECASE,
)
_LACK = re.compile(
    r"out of memory|OutOfMemory|MemoryError|can(no|')t allocate memory|std::bad_alloc|\[Errno 12\]", re.IGNORECASE
)


class Blame(StrEnum):
    """The one to blame. Only a candidate's own failure is falsy."""

    CANDIDATE = ""
    LACK = "lack"  # out of memory or killed: the cause may be the candidate or another process
    MACHINE = "machine"  # no candidate fills a disk, takes away a permission or uses up file descriptors
    USER = "user"  # a setting that the user has to change; the reason has the details


@dataclass(frozen=True)
class Outcome:
    """Result of a job in the worker.

    Attributes:
        samples: microseconds, in the order taken; empty unless ``status`` is OK.
        error: largest ratio of error to tolerance in verification; None if verification was not reached.
        reason: one line; empty when OK.
        seconds: wall time of the job, without waiting for start-up.
        fault: the one to blame for a failure; a failure that is not the candidate's is not stored.
        metrics: domain-specific figures, by name.
    """

    status: Status
    samples: tuple[float, ...] = ()
    error: float | None = None
    reason: str = ""
    seconds: float = 0.0
    fault: Blame = Blame.CANDIDATE
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.status is Status.OK

    @property
    def latency_us(self) -> float | None:
        """Median of the samples."""
        return statistics.median(self.samples) if self.samples else None

    @property
    def noise(self) -> float | None:
        """(p75 - p25) / median of the samples."""
        return spread(self.samples) if self.samples else None

    def to_json(self) -> dict[str, Any]:
        return {
            "status": str(self.status),
            "samples": list(self.samples),
            "error": self.error,
            "reason": self.reason,
            "fault": str(self.fault),
            "metrics": dict(self.metrics),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any], seconds: float = 0.0) -> Outcome:
        return cls(
            status=Status(data["status"]),
            samples=tuple(float(s) for s in data["samples"]),
            error=None if data["error"] is None else float(data["error"]),
            reason=str(data["reason"]),
            seconds=seconds,
            fault=Blame(data.get("fault", "")),
            metrics={str(name): float(figure) for name, figure in (data.get("metrics") or {}).items()},
        )


def spread(samples: Sequence[float]) -> float:
    """Interquartile range over median; 0 for fewer than two samples."""
    if len(samples) < 2:
        return 0.0
    q1, q2, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return (q3 - q1) / q2 if q2 > 0 else 0.0


def one_line(text: object, limit: int = 300) -> str:
    """Return ``text`` as a single line of at most ``limit`` characters."""
    line = " ".join(without_command(str(text)).split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def blame(error: BaseException) -> tuple[Blame, BaseException]:
    """Return the one to blame for an exception, and the exception that shows it: itself, or its cause."""
    found = (Blame.CANDIDATE, error)
    for e in _chain(error):
        if isinstance(e, UserError):
            return Blame.USER, e
        if isinstance(e, OSError) and e.errno in _MACHINE:
            found = (Blame.MACHINE, e)
        elif not found[0]:
            lacking = isinstance(e, MemoryError) or (isinstance(e, OSError) and e.errno == errno.ENOMEM)
            fault = Blame.LACK if lacking else blame_text(f"{type(e).__name__}: {e}")
            found = (fault, e) if fault else found
    return found


def blame_text(text: str) -> Blame:
    """Return the one to blame for an error, by its message or by a process's last line on stderr."""
    if _TEXT.search(text):
        return Blame.MACHINE
    return Blame.LACK if _LACK.search(text) else Blame.CANDIDATE


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        yield at
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
