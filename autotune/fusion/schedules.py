"""From a region's plan to configurations: which choices make sense for it, where to begin, and what a choice means.

A region of one group uses the names of ``search_spaces/fusion.toml`` as they are. With several groups each has its own
copy, ``g0.threads_per_row`` and so on; parameters of the machine (``threads``) would still be one a group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from autotune.codegen.program import Program, find_online
from autotune.task import Choice, Config

if TYPE_CHECKING:
    from autotune.tuner.space import Space


def group_config(config: Mapping[str, Choice], group: int, groups: int) -> Config:
    """The part of a region's configuration that is for one of its groups, under plain names."""
    if groups == 1:
        return dict(config)
    prefix = f"g{group}."
    return {k.removeprefix(prefix): v for k, v in config.items() if k.startswith(prefix)}


def join_configs(parts: Sequence[Mapping[str, Choice]]) -> Config:
    """The region's configuration made of its groups'."""
    if len(parts) == 1:
        return dict(parts[0])
    return {f"g{k}.{name}": value for k, part in enumerate(parts) for name, value in part.items()}


def join_spaces(spaces: Sequence[Space]) -> Space:
    """The region's space made of its groups'."""
    if len(spaces) == 1:
        return spaces[0]
    parameters = tuple(replace(p, name=f"g{k}.{p.name}") for k, s in enumerate(spaces) for p in s.parameters)
    return replace(spaces[0], parameters=parameters)


def has_online(program: Program) -> bool:
    return bool(find_online(program.graph))


def narrow(space: Space, name: str, allowed: Iterable[Choice]) -> Space:
    """``space.restrict``, except that a user's own narrowing wins where nothing of ours is left in it."""
    legal = list(allowed)
    if any(c in legal for c in space[name].choices):
        return space.restrict(name, legal)
    return space
