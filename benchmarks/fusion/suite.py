"""All cases by name, and each as a target of the other commands.

``autotune search fusion benchmarks.fusion.suite:rope --inputs benchmarks.fusion.suite:rope_inputs`` searches
one of them, at the size that suits the device or that $AUTOTUNE_SUITE_SIZE (gpu, cpu) names: every case is an
attribute of this module, its inputs another.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autotune.errors import UserError
from benchmarks.fusion.cases.backward import BACKWARD
from benchmarks.fusion.cases.case import Arguments, Case
from benchmarks.fusion.cases.forward import FORWARD
from benchmarks.fusion.cases.mixed import MIXED

CASES: Mapping[str, Case] = {case.name: case for case in (*FORWARD, *BACKWARD, *MIXED)}


def choose(names: Sequence[str]) -> list[Case]:
    """The cases of these names, or all, in the suite's order.

    Args:
        names: names of cases, or kinds ("forward", "backward", "mixed").

    Raises:
        UserError: one is neither.
    """
    kinds = {case.kind for case in CASES.values()}
    for name in names:
        if name not in CASES and name not in kinds:
            close = difflib.get_close_matches(name, [*CASES, *kinds], 1)
            hint = f"did you mean {close[0]!r}?" if close else "`python -m benchmarks.fusion --list` lists them"
            raise UserError(f"the suite has no case {name!r}; {hint}")
    return [case for case in CASES.values() if not names or {case.name, case.kind} & set(names)]


def _inputs(case: Case) -> Callable[[str], Arguments]:
    def make(device: str) -> Arguments:
        size = os.environ.get("AUTOTUNE_SUITE_SIZE") or ("cpu" if device.startswith("cpu") else "gpu")
        return case.arguments("cpu" if size == "cpu" else "gpu", device)

    return make


def __getattr__(name: str) -> Any:
    if name in CASES:
        return CASES[name].fn
    stem = name.removesuffix("_inputs")
    if stem != name and stem in CASES:
        return _inputs(CASES[stem])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *CASES, *(f"{name}_inputs" for name in CASES)])
