"""Registry of the samplers for ``--sampler``: each is one entry of :data:`SAMPLERS`."""

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

    # Multivariate (dependent parameters) and constant_liar (concurrent proposals) are Optuna's defaults.
    return TPESampler(seed=seed)


def _random(seed: int | None) -> BaseSampler:
    from optuna.samplers import RandomSampler

    return RandomSampler(seed=seed)


def _brute(seed: int | None) -> BaseSampler:
    from optuna.samplers import BruteForceSampler

    class Exhaustive(BruteForceSampler):
        """Optuna's sampler without its stop of the study, which works only inside ``optimize``; the search counts."""

        def after_trial(self, *args: Any) -> None:
            return None

    return Exhaustive(seed=seed)


@dataclass(frozen=True)
class Sampler:
    """A way to propose candidates.

    Attributes:
        make: Optuna's sampler for a seed.
        guided: True if the search adds neighbours of the best and prunes candidates by the cost model. Samplers that
            serve as references are not guided.
    """

    make: Callable[[int | None], BaseSampler]
    guided: bool = False


SAMPLERS: Mapping[str, Sampler] = {
    "tpe": Sampler(_tpe, guided=True),
    "random": Sampler(_random),
    "brute": Sampler(_brute),
}
DEFAULT = next(iter(SAMPLERS))


def is_guided(name: str) -> bool:
    """True if the sampler is guided; see :class:`Sampler`."""
    return SAMPLERS[name].guided


def make_sampler(name: str, seed: int | None) -> BaseSampler:
    """Return the Optuna sampler called ``name``.

    Raises:
        UserError: the name is unknown.
    """
    if name not in SAMPLERS:
        raise UserError(f"unknown sampler {name!r}; the samplers are {', '.join(SAMPLERS)}")
    from optuna.exceptions import ExperimentalWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        return SAMPLERS[name].make(seed)
