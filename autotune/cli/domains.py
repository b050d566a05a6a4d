"""What commands ask of domains; see :class:`autotune.task.Domain`."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping
from typing import Any

from autotune import task
from autotune.errors import UserError, told
from autotune.workload import Workload

DEFAULT = "fusion"
"""The domain of a command that names none."""


def names(command: str = "") -> list[str]:
    """Every domain, the default one first; those that have ``command`` as their own only, where one is given."""
    found = sorted(task.domains(), key=lambda name: (name != DEFAULT, name))
    return [name for name in found if not command or command in commands(name)]


def commands(name: str) -> Mapping[str, str]:
    """The commands that a domain has as its own, and their modules."""
    return _offered(name, "COMMANDS") or {}


def targets(name: str) -> Mapping[str, str]:
    """The built-in targets of a domain, and what each computes."""
    found = _offered(name, "targets")
    return found() if found else {}


def add_arguments(command: str, parser: argparse.ArgumentParser) -> None:
    """Add each domain's own options to a command."""
    for name in names():
        if add := _offered(name, "add_arguments"):
            add(command, parser)


def own(command: str, args: argparse.Namespace, name: str | None) -> Any:
    """The module that is ``command`` for a domain (None for the default one), or None where it goes as for any.

    Raises:
        UserError: options of another domain are given, or the domain's module cannot be imported.
    """
    name = name or DEFAULT
    try:
        importlib.import_module(task.module_of(name))
    except ImportError as error:
        raise UserError(f"the domain {name!r} cannot be imported: {told(error)}") from error
    for other in names():
        if other != name and (refuse := _offered(other, "refuse")):
            refuse(command, args)
    return importlib.import_module(commands(name)[command]) if command in commands(name) else None


def workloads_of(args: argparse.Namespace) -> list[tuple[Workload, int]]:
    """The workloads of ``DOMAIN TARGET``, and how often each occurs.

    Raises:
        UserError: there is no such target.
    """
    made = task.domain_hook(args.domain, "workloads_of")
    if made is None:
        raise UserError(f"the domain {args.domain!r} has no targets")
    return list(made(args.target, args.inputs))


def searching_missed() -> dict[str, Any]:
    """The domains that search what deployments missed by themselves, and the module that does."""
    found = {name: importlib.import_module(commands(name)["search"]) for name in names("search")}
    return {name: module for name, module in found.items() if hasattr(module, "search_missed")}


def _offered(name: str, what: str) -> Any:
    """What a domain offers, or None; a module that cannot be imported is told of where it is used."""
    try:
        return task.domain_hook(name, what)
    except ImportError:
        return None
