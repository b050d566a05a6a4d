"""History of a search's sampler: an Optuna study in memory, built from stored measurements.

The measurements are the source of truth, and the study is rebuilt from them at any time: by a resumed search, by a
concurrent one, and by ``autotune dashboard`` (:mod:`autotune.tuner.studies`). No trial is stored: a trial in Optuna's
tables costs a server four times as much as the claim and the measurement.

A failed candidate is a COMPLETE trial with a finite penalty and a violated constraint. Optuna's samplers ignore FAIL
trials, and would propose more candidates like it. FAIL marks proposals without a result.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from autotune.space import Space
from autotune.store.records import Measurement
from autotune.task import Config, Status, config_key
from autotune.tuner.samplers import make_sampler

_CONSTRAINT = "failed"
_PENALTY = 2.0  # failures count as this many times the slowest latency seen
_WARM = 1000  # stored measurements in a new study, the fastest ones: more slow down each proposal


class History:
    """Ask-and-tell interface of a search to its Optuna study.

    Args:
        known: earlier measurements, oldest first; those outside the space are skipped.

    Raises:
        UserError: the sampler is unknown.
    """

    def __init__(self, *, sampler: str, seed: int, space: Space, known: Iterable[Measurement] = ()) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.space = space
        self._distributions: dict[str, BaseDistribution] = {p.name: CategoricalDistribution(p.choices) for p in space}
        self._known: set[str] = set()
        self._slowest = 0.0
        trials = self._trials(known)
        # The same seed would propose the same points again, all of them known.
        self._study = optuna.create_study(sampler=make_sampler(sampler, seed + len(trials)))
        self._study.add_trials(trials)

    def ask(self) -> tuple[Trial, Config]:
        """Return a trial and the sampler's configuration for it, which may be known already."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            trial = self._study.ask()
            return trial, self.space.suggest(trial)

    def tell(self, trial: Trial, m: Measurement) -> None:
        """Finish a trial with its measurement."""
        self._known.add(config_key(m.config))
        self._finish(trial, *self._value(m))

    def skip(self, trial: Trial, config: Config, expected_us: float) -> None:
        """Finish a pruned trial with the cost model's expected latency."""
        self._known.add(config_key(config))
        self._finish(trial, expected_us, 0.0)

    def drop(self, trial: Trial) -> None:
        """Mark a trial as FAIL, since it has no result for reasons beyond its candidate."""
        self._study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)

    def add(self, m: Measurement) -> None:
        """Add a measurement without a trial of this study, unless the study has it or its space excludes it."""
        self._study.add_trials(self._trials([m]))

    def _finish(self, trial: Trial, value: float, violated: float) -> None:
        trial.set_constraint(_CONSTRAINT, violated)
        self._study.tell(trial.number, value, skip_if_finished=True)

    def _trials(self, measurements: Iterable[Measurement]) -> list[FrozenTrial]:
        """Return finished trials of the fastest new measurements, in the order of ``measurements``."""
        new: dict[str, Measurement] = {}
        for m in measurements:
            key = config_key(m.config)
            if key not in self._known and self.space.contains(m.config):
                new.setdefault(key, m)
        kept = set(sorted(new, key=lambda key: new[key].latency_us or float("inf"))[:_WARM])
        chosen = [m for key, m in new.items() if key in kept]
        self._known |= kept
        self._slowest = max([self._slowest, *(m.latency_us for m in chosen if m.latency_us is not None)])
        trials = []
        for m in chosen:
            value, violated = self._value(m)
            trials.append(
                create_trial(
                    value=value,
                    params={p.name: m.config[p.name] for p in self.space},
                    distributions=self._distributions,
                    constraints={_CONSTRAINT: violated},
                )
            )
        return trials

    def _value(self, m: Measurement) -> tuple[float, float]:
        """Return the objective and the constraint of a measurement."""
        if m.status is Status.OK and m.latency_us is not None:
            self._slowest = max(self._slowest, m.latency_us)
            return m.latency_us, 0.0
        return _PENALTY * (self._slowest or 1e6), 1.0
