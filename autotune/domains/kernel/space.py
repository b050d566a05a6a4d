"""A kernel's search space: choices of its parameters or a list of configurations, constraints, and the default."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from autotune.domains.kernel.constraints import Constraint, constraint
from autotune.errors import UserError
from autotune.space import Choice, Config, Parameter, Space, is_number
from autotune.task import config_key

_LOOKED_AT = 200_000
"""Maximum number of configurations to test for one that fulfils the constraints."""


@dataclass(frozen=True)
class KernelSpace:
    """The configurations of a kernel that a search may try.

    Attributes:
        space: every combination of the parameters' choices.
        default: the configuration without a search.
        constraints: conditions that a configuration must also fulfil.
        points: the listed configurations, the only valid ones; () allows every combination.
    """

    space: Space
    default: Config
    constraints: tuple[Constraint, ...] = ()
    points: tuple[Config, ...] = ()

    @property
    def names(self) -> list[str]:
        """Names of the parameters."""
        return [p.name for p in self.space]

    def reject(self, config: Mapping[str, Choice], key: Mapping[str, Any] | None = None) -> str | None:
        """The reason why a configuration is outside this space; None if it is inside.

        Args:
            key: the call's key; if None, constraints that also read the key are skipped.

        Raises:
            UserError: a constraint reads a name that is in neither the parameters nor the key, or cannot be computed.

        """
        if not self.space.contains(config):
            return "it is not in the space"
        if self.points and config_key(config) not in self._listed:
            return "it is not in the list"
        for c in self.constraints:
            values = {**(key or {}), **config}
            if unknown := c.names - values.keys():
                if key is None:
                    continue
                raise UserError(
                    f"{self.space.source}: the constraint {c.text!r} reads {', '.join(sorted(unknown))}, which is not a"
                    f" parameter ({', '.join(self.names)}) and not in the key ({', '.join(key) or 'empty'})"
                )
            if not c.holds(values):
                return f"it violates the constraint {c.text}"
        return None

    @cached_property
    def _listed(self) -> set[str]:
        return {config_key(point) for point in self.points}

    def nearest(self, config: Config) -> Config:
        """The configuration itself if it is listed or no list was given; else the nearest listed one."""
        if not self.points or config_key(config) in self._listed:
            return config
        found: Config = min(self.points, key=lambda point: self._distance(config, point))
        return dict(found)

    def _distance(self, a: Config, b: Config) -> float:
        """Distance in steps through each parameter's ordered choices, relative to their number."""
        return sum(abs((p.index(a[p.name]) or 0) - (p.index(b[p.name]) or 0)) / len(p.choices) for p in self.space)

    def candidates(self) -> Iterator[Config]:
        """All configurations, including those that break a constraint."""
        if self.points:
            yield from map(dict, self.points)
        else:
            yield from map(self.space.at, range(self.space.size))

    def check(self, key: Mapping[str, Any] | None = None) -> None:
        """Check that the default fulfils the constraints.

        Raises:
            UserError: the default breaks a constraint, or no configuration fulfils all; a one-line message.
        """
        why = self.reject(self.default, key)
        if why is None:
            return
        some = next(
            (c for c, _ in zip(self.candidates(), range(_LOOKED_AT), strict=False) if not self.reject(c, key)), None
        )
        if some is None and self.space.size <= _LOOKED_AT:
            texts = "; ".join(c.text for c in self.constraints)
            raise UserError(
                f"{self.space.source}: no configuration satisfies the constraints ({texts}): relax one of them"
            )
        hint = f"; {config_words(some)} is possible" if some is not None else ""
        raise UserError(f"{self.space.source}: the default {config_words(self.default)} is invalid: {why}{hint}")


def declare_space(
    given: object, default: object, constraints: Iterable[object], known: Mapping[str, Any], where: str
) -> KernelSpace:
    """Make a space from a declaration.

    Args:
        given: parameter name to choices, or a list of configurations.
        default: a configuration; None takes ``known``, or the first of a list.
        known: defaults in the function's signature.
        where: prefix of messages, such as "kernels:matmul".

    Raises:
        UserError: the declaration is invalid; a one-line message.
    """
    points: tuple[Config, ...] = ()
    if isinstance(given, Mapping):
        choices = {_name(name, where): _choices(name, values, where) for name, values in given.items()}
    elif isinstance(given, (list, tuple)):
        points = _points(given, where)
        choices = {name: _distinct(point[name] for point in points) for name in points[0]}
    else:
        raise UserError(
            f"{where}: the space is a {type(given).__name__}; give a dict of parameter names to lists of choices, a"
            " list of configurations, or the name of a TOML file"
        )
    if not choices:
        raise UserError(f"{where}: the space has no parameters: give at least one, such as {{'BLOCK': [64, 128]}}")
    space = Space(tuple(Parameter(name, values) for name, values in choices.items()), where)
    whole = _default(default, space, points, known, where)
    made = KernelSpace(space, whole, tuple(constraint(c, where) for c in constraints), points)
    made.check()
    return made


def narrowed(space: KernelSpace, given: Mapping[str, Any], where: str) -> KernelSpace:
    """Narrow a space by the choices in the user's file.

    Raises:
        UserError: the file has parameters or choices that the space lacks, or no configuration remains.
    """
    kept = space.space
    for name, values in given.items():
        if name not in space.names:
            raise UserError(f"{where}: the kernel has no parameter {name!r}; it has {', '.join(space.names)}")
        for value in _choices(name, values, where):
            if kept[name].index(value) is None:
                raise UserError(
                    f"{where}: {name} cannot be {value!r}: the kernel's choices are {list(kept[name].choices)}"
                )
        kept = kept.restrict(name, values)
    kept = replace(kept, source=where)
    points = tuple(point for point in space.points if kept.contains(point))
    if space.points and not points:
        raise UserError(f"{where}: the file leaves none of the kernel's {len(space.points)} configurations")
    return replace(space, space=kept, points=points)


def _name(name: object, where: str) -> str:
    if not isinstance(name, str) or not name.isidentifier():
        raise UserError(f"{where}: {name!r} is not a valid name of a parameter")
    return name


def _choices(name: object, values: object, where: str) -> tuple[Choice, ...]:
    if isinstance(values, (str, Mapping)) or not isinstance(values, Iterable):
        raise UserError(f"{where}: {name} needs a list of choices, such as [64, 128], not {values!r}")
    found = tuple(_choice(name, value, where) for value in values)
    if not found:
        raise UserError(f"{where}: {name} has no choices: give at least one")
    if len(_distinct(found)) < len(found):
        twice = next(v for i, v in enumerate(found) if Parameter("", found[:i]).index(v) is not None)
        raise UserError(f"{where}: {name} has the choice {twice!r} twice: name every choice once")
    return found


def _choice(name: object, value: object, where: str) -> Choice:
    if isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise UserError(
        f"{where}: {name} has the choice {value!r}: a choice is a finite number, a string, True or False, which another"
        " process can receive; use a string, and let the kernel map it to the value"
    )


def _distinct(values: Iterable[Choice]) -> tuple[Choice, ...]:
    """Distinct values, numbers sorted: neighbours in the space are then neighbours in size."""
    found: list[Choice] = []
    for value in values:
        if Parameter("", tuple(found)).index(value) is None:
            found.append(value)
    if all(map(is_number, found)):
        found.sort(key=float)
    return tuple(found)


def _points(given: Sequence[object], where: str) -> tuple[Config, ...]:
    if not given:
        raise UserError(f"{where}: the list of configurations is empty: give at least one")
    points: dict[str, Config] = {}
    for nth, point in enumerate(given, 1):
        if not isinstance(point, Mapping) or not point:
            raise UserError(f"{where}: configuration {nth} is {point!r}: give a dict of parameter names to values")
        made = {_name(name, where): _choice(name, value, where) for name, value in point.items()}
        first = next(iter(points.values()), made)
        if made.keys() != first.keys():
            odd = sorted(made.keys() ^ first.keys())
            raise UserError(
                f"{where}: configuration {nth} must have the same parameters as the first: check {', '.join(odd)}"
            )
        points.setdefault(config_key(made), made)
    return tuple(points.values())


def _default(given: object, space: Space, points: Sequence[Config], known: Mapping[str, Any], where: str) -> Config:
    if given is not None and not isinstance(given, Mapping):
        raise UserError(f"{where}: the default {given!r} is not a dict of parameter names to values")
    values: dict[str, Any] = {**(points[0] if points else known), **(given or {})}
    if extra := (given or {}).keys() - {p.name for p in space}:
        raise UserError(f"{where}: the default has {', '.join(sorted(extra))}, which the space does not have")
    whole: Config = {}
    for p in space:
        if p.name not in values:
            raise UserError(
                f"{where}: {p.name} has no default: add it to default={{...}}, or give the function's parameter a value"
            )
        index = p.index(values[p.name])
        if index is None:
            raise UserError(
                f"{where}: the default {p.name} = {values[p.name]!r} is not one of its choices {list(p.choices)}"
            )
        whole[p.name] = p.choices[index]
    return whole


def config_words(config: Mapping[str, Any]) -> str:
    """Format a configuration for display: ``BLOCK=64 num_warps=4``."""
    return " ".join(f"{name}={value}" for name, value in config.items())
