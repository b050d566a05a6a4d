"""The search space: parameters and their choices, read from ``search_spaces/<domain>.toml`` and narrowed by the user.

The shipped file lists every choice that the code generator can emit. A user's copy may leave parameters out and drop
choices. A task then drops choices that do not suit its workload with :meth:`Space.restrict`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol, TypeGuard

from autotune.errors import UserError
from autotune.files import read_toml, resource_dir
from autotune.words import closest
from autotune.workload import digest

VERSION = 1

Choice = int | str | bool | float
Config = dict[str, Choice]
"""A candidate: parameter name to value. Flat JSON, whose keys are parameters of the task's space."""


Range = tuple[int, ...] | tuple[str, ...] | None
"""Smallest and largest number, or the permitted strings; None for a boolean."""


def within(value: object, limits: Range) -> bool:
    """True if a stored value, which may be anything, has the type of a range and is in it."""
    if limits is None:
        return type(value) is bool
    if isinstance(limits[0], str):
        return type(value) is str and value in limits
    return type(value) is int and int(limits[0]) <= value <= int(limits[1])


class Suggests(Protocol):
    """The part of an Optuna trial that a space needs."""

    def suggest_categorical(self, name: str, choices: Any) -> Any: ...


@dataclass(frozen=True)
class Parameter:
    """One parameter: its name, its allowed values in the order of the file, and a one-line description.

    ``bounds`` are the smallest and the largest number that a stored configuration may hold; () if it is not a number.
    """

    name: str
    choices: tuple[Choice, ...]
    about: str = ""
    bounds: tuple[int, ...] = ()

    @property
    def range(self) -> Range:
        """The values that a stored configuration may hold."""
        words = tuple(c for c in self.choices if isinstance(c, str))
        return None if isinstance(self.choices[0], bool) else words or self.bounds

    def index(self, value: object) -> int | None:
        """Index of ``value`` among the choices, or None. Types are compared too: ``True`` is not 1."""
        for i, choice in enumerate(self.choices):
            if _same(choice, value):
                return i
        return None


@dataclass(frozen=True)
class Space:
    """The candidates: every combination of the parameters' choices.

    ``source`` is the file that the choices come from, for messages.
    """

    parameters: tuple[Parameter, ...]
    source: str = ""

    def __iter__(self) -> Iterator[Parameter]:
        return iter(self.parameters)

    def __getitem__(self, name: str) -> Parameter:
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, Parameter]:
        return {p.name: p for p in self.parameters}

    @property
    def size(self) -> int:
        """Number of configurations, feasible or not."""
        return math.prod(len(p.choices) for p in self.parameters)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of names and choices, 64 hex digits. A study's choices are fixed, so its name contains this."""
        return digest([[p.name, list(p.choices)] for p in self.parameters])

    def restrict(self, name: str, allowed: Iterable[Choice]) -> Space:
        """The space with parameter ``name`` narrowed to those of its choices that are in ``allowed``.

        Raises:
            KeyError: unknown parameter.
            UserError: no choice is left, which only a user's search-space file can cause.
        """
        old, legal = self._by_name[name], list(allowed)
        left = tuple(c for c in old.choices if any(_same(c, a) for a in legal))
        if not left:
            raise UserError(
                f"{self.source or 'the search space'}: none of {name} = {_list(old.choices)} is possible for this"
                f" workload; it needs one of {_list(legal)}"
            )
        return replace(
            self, parameters=tuple(replace(p, choices=left) if p.name == name else p for p in self.parameters)
        )

    def contains(self, config: Mapping[str, Choice]) -> bool:
        """Return True if ``config`` has exactly this space's parameters, each with one of its choices."""
        return config.keys() == self._by_name.keys() and all(
            p.index(config[p.name]) is not None for p in self.parameters
        )

    def suggest(self, trial: Suggests) -> Config:
        """A configuration suggested by an Optuna trial."""
        return {p.name: trial.suggest_categorical(p.name, p.choices) for p in self.parameters}

    def at(self, index: int) -> Config:
        """Configuration number ``index`` of ``size``; the last parameter varies fastest."""
        config: Config = {}
        for p in reversed(self.parameters):
            index, digit = divmod(index, len(p.choices))
            config[p.name] = p.choices[digit]
        return {p.name: config[p.name] for p in self.parameters}

    def sample(self, rng: random.Random) -> Config:
        """A configuration drawn uniformly."""
        return {p.name: rng.choice(p.choices) for p in self.parameters}

    def neighbours(self, config: Config) -> list[Config]:
        """Configurations one step away: another value of one parameter; for numbers, the next larger or smaller."""
        out: list[Config] = []
        for p in self.parameters:
            here = p.index(config[p.name])
            if here is None:
                continue
            for i, choice in enumerate(p.choices):
                if i != here and (abs(i - here) == 1 or not is_number(choice)):
                    out.append({**config, p.name: choice})
        return out

    def project(self, config: Mapping[str, Choice]) -> Config | None:
        """The configuration of this space nearest to ``config``; None if a parameter has no sensible counterpart.

        Numbers map to the nearest choice by ratio. Other values must be among the choices. Parameters that this space
        lacks are dropped.
        """
        out: Config = {}
        for p in self.parameters:
            if p.name not in config:
                return None
            value = config[p.name]
            index = p.index(value)
            if index is None:
                numbers = [c for c in p.choices if is_number(c)]
                if not is_number(value) or not numbers:
                    return None
                out[p.name] = min(numbers, key=lambda c: _distance(c, value))
            else:
                out[p.name] = p.choices[index]
        return out


def holds(space: Space, config: Config, normalize: Callable[[Config], Config]) -> bool:
    """Return True if some configuration of ``space`` normalizes to ``config``, which a task has normalized.

    A value outside the space is allowed if the parameter has no effect, that is, if one of the space's own values
    normalizes to it.
    """
    member = dict(config)
    if member.keys() != {p.name for p in space}:
        return False
    for p in space:
        if p.index(member[p.name]) is None:
            same = (c for c in p.choices if normalize({**member, p.name: c}) == config)
            choice = next(same, None)
            if choice is None:
                return False
            member[p.name] = choice
    return True


def load_space(domain: str, section: str, file: str | None = None, shipped: Path | None = None) -> Space:
    """The search space of ``domain`` on ``section`` ("cpu", "cuda"), narrowed by the user's ``file`` if given.

    Args:
        shipped: the domain's own file; None for ``search_spaces/<domain>.toml``.

    Raises:
        UserError: the file cannot be read, is not TOML, or is for another domain or version. Or it names a section,
            parameter or value that the shipped file lacks; the message has the name and the valid ones.
    """
    shipped = shipped or resource_dir("search_spaces") / f"{domain}.toml"
    base = _shipped(shipped, shipped.stat().st_mtime_ns if shipped.exists() else 0)
    sections = {name: table for name, table in base.items() if isinstance(table, dict)}
    if section not in sections:
        raise UserError(f"{shipped}: no search space for {section!r}; there are {_list(sorted(sections))}")
    parameters = {
        name: Parameter(name, tuple(entry["choices"]), str(entry.get("about", "")), tuple(entry.get("bounds", ())))
        for name, entry in sections[section].items()
    }
    if file is None:
        return Space(tuple(parameters.values()), str(shipped))
    user = read_toml(Path(file).expanduser(), "search-space file")
    _check_head(file, user, base, domain)
    for name, table in user.items():
        if isinstance(table, dict):
            if name not in sections:
                raise UserError(f"{file}: unknown section [{name}]; {_known(name, sections)}")
            for parameter, entry in table.items():
                narrowed = _narrow(file, name, parameter, entry, sections[name])
                if name == section:
                    parameters[parameter] = replace(parameters[parameter], choices=narrowed)
    return Space(tuple(parameters.values()), file)


@lru_cache(maxsize=8)
def _shipped(path: Path, changed_ns: int) -> Mapping[str, Any]:
    """The tables of a shipped file; cached, since a search reads its space for each part of a region."""
    return read_toml(path, "search-space file")


def _check_head(file: str, user: Mapping[str, Any], base: Mapping[str, Any], domain: str) -> None:
    for name, value in user.items():
        if isinstance(value, dict):
            continue
        if isinstance(base.get(name), dict):
            raise UserError(f"{file}: {name} is a section: write [{name}.PARAMETER] and choices = [...] below it")
        if name not in ("domain", "version"):
            hint = _known(name, ["domain", "version", *(k for k, v in base.items() if isinstance(v, dict))])
            raise UserError(f"{file}: unknown key {name!r}; {hint}")
    if user.get("domain", domain) != domain:
        raise UserError(f"{file}: the search space is of domain {user['domain']!r}, not {domain!r}")
    version = base.get("version", VERSION)
    if user.get("version", version) != version:
        raise UserError(f"{file}: version {user['version']!r}; this autotune reads version {version}")


def _narrow(file: str, section: str, name: str, entry: object, base: Mapping[str, Any]) -> tuple[Choice, ...]:
    where = f"{section}.{name}"
    if name not in base:
        raise UserError(f"{file}: unknown parameter {where}; {_known(name, base)}")
    if not isinstance(entry, dict) or not isinstance(entry.get("choices"), list):
        raise UserError(f"{file}: {where} needs a list, such as choices = {_list(base[name]['choices'][:3])}")
    for key in entry:
        if key not in ("choices", "about", "bounds"):
            raise UserError(f"{file}: unknown key {key!r} in [{where}]; {_known(key, ['choices', 'about'])}")
    if entry.get("bounds", base[name].get("bounds")) != base[name].get("bounds"):
        raise UserError(f"{file}: the code generator sets the bounds of {where}: leave them out")
    allowed = Parameter(name, tuple(base[name]["choices"]))
    if not entry["choices"]:
        raise UserError(f"{file}: {where} has no choices left; use some of {_list(allowed.choices)}")
    chosen: set[int] = set()
    for value in entry["choices"]:
        index = allowed.index(value)
        if index is None:
            raise UserError(f"{file}: {where} cannot be {_show(value)}; {_known(value, allowed.choices)}")
        chosen.add(index)
    return tuple(c for i, c in enumerate(allowed.choices) if i in chosen)


def _known(wrong: object, known: Iterable[object]) -> str:
    names = list(known)
    hint = closest(str(wrong), (n for n in names if isinstance(n, str)))
    return f"{hint} there is {_list(names)}".lstrip()


def _list(values: Iterable[object]) -> str:
    return "[" + ", ".join(_show(v) for v in values) + "]"


def _show(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def _same(a: object, b: object) -> bool:
    return isinstance(a, bool) == isinstance(b, bool) and isinstance(a, str) == isinstance(b, str) and a == b


def is_number(value: object) -> TypeGuard[int | float]:
    """Return True for an int or float, of a value of any type; bool does not count."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _distance(a: Any, b: Any) -> float:
    if a > 0 and b > 0:
        return abs(math.log(a / b))
    return math.inf if (a > 0) != (b > 0) else abs(a - b)
