"""Run a script with autotune in place of Inductor: ``python -m autotune.in_program SCRIPT [ARGUMENTS]``.

``-m MODULE`` runs a module. ``autotune run`` starts this; so does ``torchrun -m autotune.in_program SCRIPT`` on every
rank.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from typing import Any


def replace_inductor() -> None:
    """Make ``torch.compile`` use the backend "autotune" in place of "inductor", but not of other backends."""
    import torch

    from autotune.in_program.backend import dynamo_backend

    plain: Callable[..., Any] = torch.compile

    @functools.wraps(plain)
    def compile(model: Any = None, *, backend: Any = "inductor", **options: Any) -> Any:
        return plain(model, backend=dynamo_backend if backend == "inductor" else backend, **options)

    torch.compile = compile


def main(words: Sequence[str]) -> None:
    """Run a script or a module as Python would.

    Raises:
        SystemExit: raised by the script; 2 without a script or if the file does not exist.
    """
    module = words[:1] == ["-m"]
    named = words[1:] if module else words
    wrong = "name a script, or -m and a module" if not named else ""
    if not module and named and not os.path.isfile(named[0]):
        wrong = f"there is no script {ascii(named[0])[1:-1]}"
    if wrong:
        print(f"autotune: {wrong}", file=sys.stderr)
        sys.exit(2)
    replace_inductor()
    sys.argv = list(named)
    if module:
        sys.path[0] = os.getcwd()
        runpy.run_module(named[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(named[0]))
        runpy.run_path(named[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
