"""What a search's sampler remembers: an Optuna study in memory, taught from measurements.

The measurements are the truth, and the study can be made from them at any time: a search that goes on, or that another
one began, teaches its own. ``autotune dashboard`` does so too (:mod:`autotune.tuner.studies`). Nothing is written for
the sampler: a trial in Optuna's own tables costs a server four times what the claim and the measurement do.

A failure of a candidate is told as COMPLETE with a finite penalty and a violated constraint: told as FAIL, Optuna's
samplers would forget it and propose more of its kind. FAIL is for proposals that came to nothing.
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
from autotune.tuner.proposals.samplers import make_sampler

_CONSTRAINT = "failed"
_PENALTY = 2.0  # failures count as this many times the slowest latency seen
_WARM = 1000  # the fastest stored measurements that a study begins with: more make each proposal slower


class History:
    """Ask and tell.

    Args:
        known: what was measured before, oldest first; what is not of the space is passed over.

    Raises:
        UserError: the sampler is unknown.
    """

    def __init__(self, *, sampler: str, seed: int, space: Space, known: Iterable[Measurement] = ()) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.space = space
        self._distributions: dict[str, BaseDistribution] = {p.name: CategoricalDistribution(p.choices) for p in space}
        self._told: set[str] = set()
        self._slowest = 0.0
        trials = self._trials(known)
        # The same seed again would propose the same points again, all of them known by now.
        self._study = optuna.create_study(sampler=make_sampler(sampler, seed + len(trials)))
        self._study.add_trials(trials)

    def ask(self) -> tuple[Trial, Config]:
        """A trial and the configuration that the sampler proposes in it. It may be one that is known already."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            trial = self._study.ask()
            return trial, self.space.suggest(trial)

    def tell(self, trial: Trial, m: Measurement) -> None:
        """What became of a proposed configuration."""
        self._told.add(config_key(m.config))
        self._finish(trial, *self._value(m))

    def skip(self, trial: Trial, config: Config, expected_us: float) -> None:
        """A proposal that is not worth measuring; the sampler is told what the cost model expects of it."""
        self._told.add(config_key(config))
        self._finish(trial, expected_us, 0.0)

    def drop(self, trial: Trial) -> None:
        """A proposal that came to nothing through no fault of its own."""
        self._study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)

    def add(self, m: Measurement) -> None:
        """Teach the study a measurement that it did not ask for, unless it knows it or cannot hold it."""
        self._study.add_trials(self._trials([m]))

    def _finish(self, trial: Trial, value: float, violated: float) -> None:
        trial.set_constraint(_CONSTRAINT, violated)
        self._study.tell(trial.number, value, skip_if_finished=True)

    def _trials(self, measurements: Iterable[Measurement]) -> list[FrozenTrial]:
        """Finished trials of the fastest, in their order."""
        new: dict[str, Measurement] = {}
        for m in measurements:
            key = config_key(m.config)
            if key not in self._told and self.space.contains(m.config):
                new.setdefault(key, m)
        kept = set(sorted(new, key=lambda key: new[key].latency_us or float("inf"))[:_WARM])
        chosen = [m for key, m in new.items() if key in kept]
        self._told |= kept
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
        """Objective and constraint of a measurement."""
        if m.status is Status.OK and m.latency_us is not None:
            self._slowest = max(self._slowest, m.latency_us)
            return m.latency_us, 0.0
        return _PENALTY * (self._slowest or 1e6), 1.0
