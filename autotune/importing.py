"""Importing what the user named on the command line."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType

from autotune.errors import UserError, first_line


def import_module(name: str, spec: str) -> ModuleType:
    """A module by its name; the current directory is importable.

    Args:
        spec: what asks for it, for messages.

    Raises:
        UserError: it is not there, or importing it fails, in one line.
    """
    if os.sep in name:
        raise UserError(_named_by_file(name, spec))
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            if name.endswith(".py"):
                raise UserError(_named_by_file(name, spec)) from None
            raise UserError(f"no module {error.name!r} for {spec}; it must be installed or in {here}") from None
        raise UserError(f"importing {name} for {spec} failed: {first_line(error)}") from error
    except (KeyboardInterrupt, UserError):
        raise
    except BaseException as error:  # a script without a guard ends in sys.exit
        raise UserError(f"importing {name} for {spec} failed: {first_line(error)}") from error


def _named_by_file(name: str, spec: str) -> str:
    module = os.path.normpath(name.removesuffix(".py")).replace(os.sep, ".").lstrip(".")
    return f"{spec}: {name} names a file; give its module, such as {module}"
