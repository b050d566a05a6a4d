"""Run a script with autotune in place of Inductor: ``python -m autotune.in_program SCRIPT [ARGUMENTS]``.

``-m MODULE`` runs a module. ``autotune run`` starts this; so does ``torchrun -m autotune.in_program SCRIPT`` on every
rank.

Python processes that the script starts have autotune in place of Inductor as well. They inherit the environment that
:func:`replace_in_children` sets. Its ``PYTHONPATH`` has a folder with an entry point of the group ``torch.backends``,
which torch calls at the end of its import. So workers of ``multiprocessing``, and ranks that a launcher or a library
starts, are included. No other process has the folder in its path.
"""

from __future__ import annotations

import builtins
import functools
import os
import runpy
import sys
import zipfile
from collections.abc import Callable, Sequence
from io import open_code
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import Any, NoReturn

VARIABLE = "AUTOTUNE_RUN"
"""Environment variable of a program's processes; autotune's own processes do not inherit it."""
_HOOK = str(Path(__file__).resolve().parent / "hook")


def main(words: Sequence[str]) -> None:
    """Run a script, a module, or a folder or archive with a ``__main__.py``, as Python would.

    Raises:
        SystemExit: raised by the script; 2 if there is no such script or module.
    """
    module = words[:1] == ["-m"]
    named = words[1:] if module else words
    if not named:
        _reject("name a script, or -m and a module")
    if not module and not os.path.exists(named[0]):
        _reject(f"there is no script {ascii(named[0])[1:-1]}")
    replace_inductor()
    replace_in_children()
    sys.argv = list(named)
    path = os.path.abspath(named[0])
    if not module and not os.path.isdir(path) and not zipfile.is_zipfile(path):
        sys.path[0] = os.path.dirname(path)
        _run_file(path)
        return
    try:
        if module:
            sys.path[0] = os.getcwd()
            runpy.run_module(named[0], run_name="__main__", alter_sys=True)
        else:
            del sys.path[0]  # runpy puts the folder or archive there
            runpy.run_path(path, run_name="__main__")
    except ImportError as error:
        if any(frame.f_globals["__name__"] != "runpy" for frame, _ in list(walk_tb(error.__traceback__))[1:]):
            raise  # code of the script raised it
        _reject(str(error))


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


def _reject(reason: str) -> NoReturn:
    print(f"autotune: {reason}", file=sys.stderr)
    sys.exit(2)


def _run_file(path: str) -> None:
    """Run a file as the module ``__main__``, which stays that module: threads and handlers at the exit may need it.

    ``runpy.run_path`` removes it at the end of the file.
    """
    with open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)  # not this file's __future__ imports
    made = ModuleType("__main__")
    vars(made).update(__file__=path, __builtins__=builtins)
    sys.modules["__main__"] = made
    exec(code, vars(made))


if __name__ == "__main__":
    main(sys.argv[1:])
