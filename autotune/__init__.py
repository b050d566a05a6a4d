"""autotune: search once on the machine, keep the results in SQL, look them up at deploy time.

The public API is imported lazily, so that ``import autotune`` costs nothing and deployment never imports the search.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

__version__ = "0.3.0"

_API = {
    "search": "autotune.api",
    "lookup": "autotune.runtime.lookup",
    "load": "autotune.runtime.control",
    "configure": "autotune.runtime.control",
    "compile": "autotune.in_program.backend",
    "aoti_compile_and_package": "autotune.runtime.packages",
    "aoti_load_package": "autotune.runtime.packages",
    "tuning": "autotune.in_program.options",
    "counters": "autotune.runtime.control",
    "coverage": "autotune.runtime.control",
    "overlap": "autotune.domains.c3.deploy",
    "fsdp": "autotune.domains.c3.fsdp.api",
    "tensor_parallel": "autotune.domains.c3.tensor_parallel.api",
    "all_gather_matmul": "autotune.domains.c3.tensor_parallel.operators",
    "matmul_reduce_scatter": "autotune.domains.c3.tensor_parallel.operators",
    "tunable": "autotune.domains.kernel.tunable",
    "triton_autotune": "autotune.domains.kernel.tunable",
    "Objective": "autotune.domains.kernel.kernel",
}
__all__ = ["__version__", *sorted(_API)]


def __getattr__(name: str) -> Any:
    if name in _API:
        return getattr(importlib.import_module(_API[name]), name)
    raise AttributeError(f"module 'autotune' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


_FILES = ("AUTOTUNE_DB", "AUTOTUNE_DB_READ", "AUTOTUNE_KEY", "AUTOTUNE_CACHE_DIR")
"""Environment variables that name a file or a folder."""


def _make_paths_absolute() -> None:
    """Make relative paths in the environment absolute: the program may change its working directory after the import.

    Processes that it starts then inherit the absolute paths.
    """
    for name in _FILES:
        text = os.environ.get(name, "")
        scheme = "sqlite:///" if text.startswith("sqlite:///") else ""
        path = text.removeprefix(scheme)
        if path.strip() and ":" not in path and not path.startswith(("/", "~")):
            try:
                os.environ[name] = scheme + os.path.abspath(path)
            except OSError:  # the working directory was removed
                return


_make_paths_absolute()
