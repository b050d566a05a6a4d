"""The samplers that ``--sampler`` names."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Sequence

import optuna
from optuna.samplers import BaseSampler, BruteForceSampler, GPSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

from autotune.errors import UserError


class _Exhaustive(BruteForceSampler):
    """Optuna's, but it does not stop the study: that works inside ``optimize`` only, and the search counts itself."""

    def after_trial(
        self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        return None


def _tpe(seed: int | None) -> BaseSampler:
    # Multivariate (parameters depend on each other) and constant_liar (several asked at once) are Optuna's defaults.
    return TPESampler(seed=seed)


def _gp(seed: int | None) -> BaseSampler:
    missing = [name for name in ("torch", "scipy") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"the gp sampler needs {' and '.join(missing)}: pip install {' '.join(missing)}, or use tpe")
    return GPSampler(seed=seed)


def _brute(seed: int | None) -> BaseSampler:
    return _Exhaustive(seed=seed)


SAMPLERS: dict[str, Callable[[int | None], BaseSampler]] = {
    "tpe": _tpe,
    "gp": _gp,
    "random": lambda seed: RandomSampler(seed=seed),
    "brute": _brute,
}


def make_sampler(name: str, seed: int | None) -> BaseSampler:
    """The Optuna sampler called ``name``.

    Raises:
        UserError: there is none of this name, or a package it needs is missing.
    """
    if name not in SAMPLERS:
        raise UserError(f"unknown sampler {name!r}; there is {', '.join(SAMPLERS)}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return SAMPLERS[name](seed)


def check_sampler(name: str) -> None:
    """Raise UserError where there is no sampler of this name; "model" stands for none."""
    if name != "model":
        make_sampler(name, 0)
