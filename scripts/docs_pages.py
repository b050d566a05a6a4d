"""A hook of MkDocs that fills the page of commands from the parser, and the table of decisions from their files.

``python scripts/docs_pages.py`` writes that table to its page, which GitHub shows as it is.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

COMMANDS = "reference/commands.md"
DECISIONS = Path(__file__).resolve().parent.parent / "docs/decisions/index.md"
_TABLE = "| decision | date | status |"
NO_BREAK = "\N{NON-BREAKING HYPHEN}"
_OF_DOMAINS = ("search", "lookup", "compare", "calibrate")
"""The commands to which a domain may add options."""


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Append all commands with their options to their page."""
    if page.file.src_path == COMMANDS:
        from autotune.cli.app import build_parser

        return markdown + "\n" + "\n".join(_commands(build_parser()))
    return markdown


def with_decisions(page: str, folder: Path) -> str:
    """The page of decisions with its table, which ends the page, made from the records in ``folder``."""
    return page.partition(_TABLE)[0] + _decisions(folder)


def decision(text: str) -> tuple[str, str, str]:
    """The title, the date and the status of a decision: its first line, and the line under it.

    Raises:
        ValueError: a decision without them.
    """
    found = re.match(r"# \d{3}: (.+)\n\n(\d{4}-\d\d-\d\d)\. (.+)\n", text)
    if found is None:
        raise ValueError(f"no decision's head: {text[:80]!r}")
    return found[1], found[2], found[3]


def _decisions(folder: Path) -> str:
    rows = []
    for file in sorted(folder.glob("[0-9]*.md")):
        title, date, status = decision(file.read_text())
        rows.append(f"| [{file.name[:3]}: {title}]({file.name}) | {date.replace('-', NO_BREAK)} | {status} |")
    return "\n".join([_TABLE, "|---|---|---|", *rows]) + "\n"


def _commands(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The sections of all commands, subcommands included."""
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            continue
        for name, command in action.choices.items():
            below = [a for a in command._actions if isinstance(a, argparse._SubParsersAction)]
            yield f"## {command.prog}\n"
            yield (command.description or "") + "\n"
            if below:
                yield from _commands(command)
                continue
            yield f"```text\n{_usage(command)}\n```\n"
            yield from _table(command, command._actions)
            if command.prog == f"autotune {name}" and name in _OF_DOMAINS:
                yield from _domains(name)


def _domains(command: str) -> Iterator[str]:
    """The options that each domain adds to a command."""
    from autotune.cli.options import every_domain

    for name, domain in sorted(every_domain().items()):
        own = argparse.ArgumentParser(add_help=False)
        domain.add_arguments(command, own)
        if own._actions:
            yield f"### autotune {command} {name}\n"
            yield from _table(own, own._actions)


def _usage(command: argparse.ArgumentParser) -> str:
    text = command.format_usage().removeprefix("usage: ")
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def _table(command: argparse.ArgumentParser, actions: Sequence[argparse.Action]) -> Iterator[str]:
    """A table of arguments and their help texts."""
    formatter = command._get_formatter()
    rows = []
    for action in actions:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
            continue
        value = (
            ""
            if action.nargs == 0
            else formatter._format_args(action, formatter._get_default_metavar_for_optional(action))
        )
        names = ", ".join(f"`{option} {value}`" if value else f"`{option}`" for option in action.option_strings)
        if not action.option_strings:
            names = f"`{formatter._format_args(action, formatter._get_default_metavar_for_positional(action))}`"
        text = formatter._expand_help(action) if action.help else ""
        rows.append(f"| {_cell(names)} | {_cell(text)} |")
    if rows:
        yield "\n".join(["| argument | meaning |", "|---|---|", *rows]) + "\n"


def _cell(text: str) -> str:
    parts = " ".join(text.split()).split("`")  # a pipe in code ends no cell
    return "`".join(part if k % 2 else part.replace("|", "\\|") for k, part in enumerate(parts))


if __name__ == "__main__":
    DECISIONS.write_text(with_decisions(DECISIONS.read_text(), DECISIONS.parent))
