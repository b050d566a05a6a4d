"""autotune's backend in the place of Inductor, in a process and in the Python processes that it starts.

``autotune run`` sets ``AUTOTUNE_RUN``, which processes inherit. torch calls :func:`autoload` at the end of its import,
by the entry point ``torch.backends``. So workers of ``multiprocessing`` and ranks that a library starts are included.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

VARIABLE = "AUTOTUNE_RUN"
"""Environment variable: neither empty nor 0 to replace Inductor."""


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


def autoload() -> None:
    """Replace Inductor if :data:`VARIABLE` is set; imports nothing if it is not."""
    if os.environ.get(VARIABLE, "").strip() not in ("", "0"):
        replace_inductor()


__all__ = ["VARIABLE", "autoload", "replace_inductor"]
