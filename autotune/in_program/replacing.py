"""autotune's backend in the place of Inductor, in a process and in the Python processes that it starts.

Processes inherit the environment that :func:`replace_in_children` sets. Its ``PYTHONPATH`` has a folder with an entry
point of the group ``torch.backends``, which torch calls at the end of its import. So workers of ``multiprocessing``,
and ranks that a launcher or a library starts, are included. No other process has the folder in its path.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIABLE = "AUTOTUNE_RUN"
"""Environment variable of a program's processes; autotune's own processes do not inherit it."""
_HOOK = str(Path(__file__).resolve().parent / "hook")


def replace_inductor() -> None:
    """Make ``torch.compile`` use the backend "autotune" in place of "inductor", but not of other backends."""
    import torch

    plain: Callable[..., Any] = torch.compile
    if getattr(plain, "_autotune", False):
        return

    @functools.wraps(plain)
    def compile(model: Any = None, *, backend: Any = None, **options: Any) -> Any:
        if backend is None:  # torch 2.15 has a default that programs can change
            get: Callable[[], Any] = getattr(torch.compiler, "get_default_backend", lambda: "inductor")
            backend = get()
        if isinstance(backend, str) and backend == "inductor":
            from autotune.in_program.backend import registered

            backend = registered()
        return plain(model, backend=backend, **options)

    vars(compile)["_autotune"] = True
    torch.compile = compile


def replace_in_children() -> None:
    """Replace Inductor in the processes that this one starts."""
    os.environ[VARIABLE] = "1"
    paths = os.environ.get("PYTHONPATH", "")
    if _HOOK not in sys.path:
        os.environ["PYTHONPATH"] = f"{paths}{os.pathsep}{_HOOK}" if paths else _HOOK
        sys.path.append(_HOOK)  # multiprocessing gives its workers this path


def autoload() -> None:
    """Replace Inductor if :data:`VARIABLE` is set; torch calls this in processes that have the hook."""
    if os.environ.get(VARIABLE):
        replace_inductor()


__all__ = ["VARIABLE", "autoload", "replace_in_children", "replace_inductor"]
