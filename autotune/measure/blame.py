"""Whose fault a failure is: a candidate's, which is stored for good, or the machine's, which is not."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from enum import StrEnum

from autotune.errors import UserError


class Blame(StrEnum):
    """Who is to blame. Only a candidate's own failure is falsy."""

    CANDIDATE = ""
    LACK = "lack"  # memory ran out, or somebody killed the process: candidates may ask for too much, others may too
    MACHINE = "machine"  # no candidate fills a disk, takes away a permission or uses up file descriptors
    USER = "user"  # a setting that the user has to mend; the reason says how


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


def blame(error: BaseException) -> tuple[Blame, BaseException]:
    """Whose fault an exception is, and what says so: itself, or what it was raised from."""
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
    """The same of what is left of an error: its message, or the last words of a process."""
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
