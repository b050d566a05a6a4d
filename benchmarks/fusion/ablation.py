"""Searches without one of their parts, to see what each part buys.

An ablation searches into a separate database, so that none deploys another's results. Its winner is measured
together with the full search's in the same run.
"""

from __future__ import annotations

import difflib
import inspect
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.errors import UserError

FULL = "full"


@dataclass(frozen=True)
class Ablation:
    """A search that lacks something.

    Attributes:
        about: what is left.
        search: keyword arguments of ``autotune.search``.
        space: parameter of the search space (such as "cuda.keep") to the choices that are left of it.
    """

    about: str
    search: Mapping[str, Any] = field(default_factory=dict)
    space: Mapping[str, Sequence[Any]] = field(default_factory=dict)


ABLATIONS: Mapping[str, Ablation] = {
    FULL: Ablation("everything"),
    "greedy": Ablation("the largest groups that are legal, their schedules searched", {"plans": "greedy"}),
    "model-plan": Ablation("the plan that the cost model ranks first, its schedules searched", {"plans": "model"}),
}


def choose(names: Sequence[str]) -> list[str]:
    """The ablations of these names, the full search always and first.

    Raises:
        UserError: there is no such ablation, or the search lacks what it needs.
    """
    from autotune.api import tune_workloads
    from autotune.tuner.options import SearchOptions

    taken = {*inspect.signature(tune_workloads).parameters, *inspect.signature(SearchOptions).parameters}
    for name in names:
        if name not in ABLATIONS:
            close = difflib.get_close_matches(name, ABLATIONS, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(ABLATIONS)}"
            raise UserError(f"there is no ablation {name!r}; {hint}")
        if unknown := [key for key in ABLATIONS[name].search if key not in taken]:
            raise UserError(
                f"the ablation {name!r} sets {', '.join(unknown)}, which this version's search does not have"
            )
    return list(dict.fromkeys([FULL, *names]))


def database(db: str | None, name: str) -> str | None:
    """The database of an ablation: that of the full search, or a file in the same folder.

    Raises:
        UserError: the full search's is not a file that was named.
    """
    if name == FULL:
        return db
    if db is None or "://" in db:
        raise UserError("--ablation keeps a database for each search: give --db FILE, and their names are made from it")
    path = Path(db)
    return str(path.with_name(f"{path.stem}.{name}{path.suffix}"))


@contextmanager
def search_options(name: str, device: str) -> Iterator[dict[str, Any]]:
    """Keyword arguments of ``tune_workloads`` for an ablation, while its space's file exists.

    Args:
        device: "cpu" or "cuda:N"; what restricts the space of another kind of device is left out.
    """
    chosen = ABLATIONS[name]
    kind = device.partition(":")[0]
    restrictions = {key: values for key, values in chosen.space.items() if key.startswith(f"{kind}.")}
    options = dict(chosen.search)
    with tempfile.TemporaryDirectory(prefix="autotune-space-") as folder:
        if restrictions:
            file = Path(folder) / f"{name}.toml"
            file.write_text(space_text(restrictions))
            options["space_file"] = str(file)
        yield options


def space_text(restrictions: Mapping[str, Sequence[Any]]) -> str:
    """A search-space file that leaves everything as it is but these parameters' choices."""
    lines = ['domain = "fusion"', "version = 1"]
    for key, values in restrictions.items():
        lines += ["", f"[{key}]", f"choices = [{', '.join(map(_toml, values))}]"]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
