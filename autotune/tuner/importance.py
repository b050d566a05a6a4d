"""Which parameters decided how fast candidates were, by Optuna's PED-ANOVA.

PED-ANOVA (Watanabe, Bansal and Hutter, IJCAI 2023, arXiv 2304.10255) compares how a parameter is distributed among the
best tenth of the candidates with how it is among all of them. It takes milliseconds where fANOVA, which grows a forest
of trees, takes seconds and scikit-learn.
"""

from __future__ import annotations

import datetime
import warnings
from collections.abc import Sequence

import optuna
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.importance import PedAnovaImportanceEvaluator
from optuna.trial import FrozenTrial, TrialState

from autotune.store.records import Measurement
from autotune.task import Choice, Config

FEWEST = 20
"""Candidates that worked, below which importances are noise."""

_MOST = 500
"""Candidates that are looked at, the first that were measured: a search ends long before."""


def importances(measurements: Sequence[Measurement]) -> dict[str, float]:
    """Parameter to its share of the importance, largest first; they add up to 1.

    Args:
        measurements: of one key and one stage; those that failed are left out.

    Returns:
        Parameters that every candidate has and that took several values; empty where too few candidates worked.
    """
    known = [(m.config, m.latency_us) for m in measurements if m.latency_us is not None][:_MOST]
    names = _varied([config for config, _ in known])
    if len(known) < FEWEST or not names:
        return {}
    # By their places among the values tried: numbers keep their order, and places are quick to compare.
    places = {n: {v: k for k, v in enumerate(sorted({c[n] for c, _ in known}, key=_order))} for n in names}
    distributions: dict[str, BaseDistribution] = {n: IntDistribution(0, len(places[n]) - 1) for n in names}
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study()
    now = datetime.datetime.now()
    trials = [
        FrozenTrial(
            number=n,
            trial_id=n,
            state=TrialState.COMPLETE,
            value=us,
            datetime_start=now,
            datetime_complete=now,
            params={name: places[name][config[name]] for name in names},
            distributions=distributions,
            user_attrs={},
            system_attrs={},
            intermediate_values={},
        )
        for n, (config, us) in enumerate(known)
    ]
    study.get_trials = lambda *_, **__: trials  # type: ignore[method-assign]  # adding them would copy each
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PED-ANOVA is marked experimental
        evaluator = PedAnovaImportanceEvaluator()
        found = optuna.importance.get_param_importances(study, params=names, evaluator=evaluator)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _varied(configs: Sequence[Config]) -> list[str]:
    """Parameters of all configurations that are not the same in all of them."""
    if not configs:
        return []
    shared = set(configs[0]).intersection(*configs[1:])
    return sorted(name for name in shared if len({c[name] for c in configs}) > 1)


def _order(value: Choice) -> tuple[bool, float, str]:
    """Numbers by size, then texts."""
    return (False, float(value), "") if isinstance(value, (int, float)) else (True, 0.0, value)
