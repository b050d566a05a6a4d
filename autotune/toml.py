"""TOML files of the user."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from autotune.errors import UserError

_LARGEST = 4 << 20  # bytes


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The tables of a TOML file; ``what`` it should be, such as "file of scenarios".

    Raises:
        UserError: it is not there, cannot be read, is larger than 4 MiB, or is not TOML that Python can hold.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST + 1)
        if len(data) > _LARGEST:
            raise UserError(f"{path}: cannot read the {what}: it is larger than {_LARGEST >> 20} MiB")
        return tomllib.loads(data.decode())
    except FileNotFoundError:
        raise UserError(f"{path}: no such {what}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot read the {what}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: cannot read the {what}: not UTF-8 text") from None
    except RecursionError:
        raise UserError(f"{path}: cannot read the {what}: it is nested too deep") from None
    except ValueError as error:  # TOMLDecodeError, a number of thousands of digits, or a name that no file has
        raise UserError(f"{path}: not TOML: {' '.join(str(error).split())}") from None
