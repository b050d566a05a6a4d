"""Errors that cross module boundaries.

The CLI prints a :class:`UserError` as one line and exits with code 2. The other errors are outcomes of a candidate or
of a region: the search records them and continues.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any


class UserError(Exception):
    """Invalid input from the user; ``str(error)`` is one line with the problem and its fix."""


LONGEST = 2000
"""Characters of an error's line; a longer line is cut in the middle."""
_LONGEST_WORD = 400
"""Characters of a word in a command: a cut line has the whole command, or its end without its beginning."""

_COMPILER = re.compile(r"\n+Command:\n.*\n+Output:\n")
_UNQUOTED = re.compile("[^'\"]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_LOGIN = re.compile(r"(:(?!//))(\S{1,512})(?=@)")  # bounded, so that matching takes linear time
_OPTION = re.compile(
    r"(?i)((?:password|passwd|pwd|secret|token)\w{0,32}\s{0,8}=\s{0,8})('[^']{0,512}'|\"[^\"]{0,512}\"|[^\s&'\"]{1,512})"
)


def mask_passwords(text: str) -> str:
    """``text`` without the passwords of the URLs and connection strings in it.

    Quotes stay, so that a shell still quotes the same words of ``text``.
    """
    return _OPTION.sub(_hidden, _LOGIN.sub(_hidden, text))


def _hidden(found: re.Match[str]) -> str:
    return found[1] + _UNQUOTED.sub("***", found[2])


def printable(text: str) -> str:
    """``text`` on one line, with terminal control characters escaped."""
    return _CONTROL.sub(lambda m: " " if m[0] in "\n\t" else m[0].encode("unicode_escape").decode(), text)


def safe_line(text: object, longest: int = LONGEST) -> str:
    """An error's text for printing: one line of at most ``longest`` characters, without passwords."""
    line = printable(mask_passwords(str(text)))
    half = (longest - 5) // 2
    return line if len(line) <= longest else f"{line[:half]} ... {line[-half:]}"


def quoted_command(*words: str) -> str:
    """A command for the user to paste into a shell: every word is quoted.

    A word that is too long, or that :func:`safe_line` would change, is replaced by "...".
    """
    quoted = [shlex.quote(word) for word in words]
    return " ".join(word if len(word) <= _LONGEST_WORD and safe_line(word) == word else "..." for word in quoted)


def requoted_command(command: object) -> str:
    """A stored command, perhaps of another user, for the user to paste: every word is quoted again.

    A line that does not begin with ``autotune`` or ``python`` becomes a single word.
    """
    text = str(command)
    try:
        words = shlex.split(text)
    except ValueError:
        words = []
    return quoted_command(*words) if words[:1] in (["autotune"], ["python"]) else quoted_command(text)


def without_command(text: str) -> str:
    """The message of Inductor's ``CppCompileError`` without the compiler's command, which hides its output."""
    return _COMPILER.sub(": ", text)


def first_line(error: BaseException) -> str:
    """An exception of the user's program as one line: its type and the first line of its message.

    If the first line ends in a colon, as Dynamo's messages do, the second one is appended. The cause in Dynamo's
    "Explanation:" line, after ": got ", is appended too.
    """
    text = [line.strip() for line in without_command(str(error)).strip().splitlines() if line.strip()]
    if not text:
        return type(error).__name__
    summary = " ".join(text[:2]) if text[0].endswith(":") else text[0]
    _, met, cause = next((line for line in text[1:] if line.startswith("Explanation: ")), "").rpartition(": got ")
    summary += f": {cause}" if met else ""
    return f"{type(error).__name__}: {summary}"


class Unsupported(Exception):
    """A region, group or operator that this version cannot express; the caller falls back and records the reason.

    ``node`` is the graph node that caused it, if there is a single one.
    """

    def __init__(self, reason: str = "", node: Any = None) -> None:
        super().__init__(reason)
        self.node = node


class Superseded(Unsupported):
    """A form of kernel that an earlier version generated and this one does not. Stored kernels of it still run."""


class Unreachable(Unsupported):
    """No load can follow an index that several operators computed together; the last one is to blame."""


class Repeated(Unsupported):
    """A region would compute sums several times, since they are read in several ways.

    ``nodes`` are these sums if they are matrix products or index-adds, else the operators that read them at computed
    indices.
    """

    def __init__(self, nodes: Sequence[Any]) -> None:
        super().__init__("a sum computed several times over")
        self.nodes = tuple(nodes)


class BuildError(Exception):
    """A candidate that cannot be built (does not compile, spills hopelessly, needs more memory than the device has)."""
