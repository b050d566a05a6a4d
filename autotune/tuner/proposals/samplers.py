"""The samplers that ``--sampler`` names: a line of :data:`SAMPLERS` is all that one needs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotune.errors import UserError

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler


def _tpe(seed: int | None) -> BaseSampler:
    from optuna.samplers import TPESampler

    # Multivariate (parameters depend on each other) and constant_liar (several asked at once) are Optuna's defaults.
    return TPESampler(seed=seed)


def _random(seed: int | None) -> BaseSampler:
    from optuna.samplers import RandomSampler

    return RandomSampler(seed=seed)


def _brute(seed: int | None) -> BaseSampler:
    from optuna.samplers import BruteForceSampler

    class Exhaustive(BruteForceSampler):
        """Optuna's, but it does not stop the study: that works inside ``optimize`` only, and the search counts
        itself."""

        def after_trial(self, *args: Any) -> None:
            return None

    return Exhaustive(seed=seed)


@dataclass(frozen=True)
class Sampler:
    """A way to propose candidates.

    Attributes:
        make: Optuna's sampler for a seed.
        guided: whether the search goes beyond what it proposes: neighbours of the best, no candidate without hope.
            Those that others are compared with stay what they are.
    """

    make: Callable[[int | None], BaseSampler]
    guided: bool = False


SAMPLERS: Mapping[str, Sampler] = {
    "tpe": Sampler(_tpe, guided=True),
    "random": Sampler(_random),
    "brute": Sampler(_brute),
}
DEFAULT = next(iter(SAMPLERS))
NONE = "model"
"""In a sampler's place: the domain's cost model alone decides, and nothing is searched."""


def is_guided(name: str) -> bool:
    """Whether the search goes beyond what the sampler proposes."""
    return name in SAMPLERS and SAMPLERS[name].guided


def make_sampler(name: str, seed: int | None) -> BaseSampler:
    """The Optuna sampler called ``name``.

    Raises:
        UserError: there is none of this name.
    """
    if name not in SAMPLERS:
        raise UserError(f"unknown sampler {name!r}; there is {', '.join(SAMPLERS)}")
    from optuna.exceptions import ExperimentalWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        return SAMPLERS[name].make(seed)


def check_sampler(name: str) -> None:
    """Raise UserError where there is no sampler of this name; :data:`NONE` stands for none."""
    if name != NONE:
        make_sampler(name, 0)
