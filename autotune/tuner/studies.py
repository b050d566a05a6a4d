"""Optuna studies that are built from stored measurements: the history of a search's sampler, and a database's searches.

The measurements are the source of truth, and studies are rebuilt from them at any time: by a resumed search, by a
concurrent one, and by ``autotune dashboard``. No trial is stored: a trial in Optuna's tables costs a server four times
as much as the claim and the measurement. The importance of parameters is computed from a study too.

In a sampler's history, a failed candidate is a COMPLETE trial with a finite penalty and a violated constraint. Optuna's
samplers ignore FAIL trials, and would propose more candidates like it. FAIL marks proposals without a result.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.importance import PedAnovaImportanceEvaluator
from optuna.storages import InMemoryStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from autotune.domain import figure_of
from autotune.space import Space
from autotune.store.records import Key, Measurement
from autotune.store.store import Store
from autotune.task import Choice, Config, Status, config_key
from autotune.tuner.samplers import make_sampler
from autotune.workload import Workload

FEWEST = 20
"""Minimum of working candidates; with fewer, importances are noise."""
_MOST = 500
"""Maximum of candidates evaluated, the first ones measured; a search ends long before this number."""
_AGAIN_S = 2.0
"""Seconds between refreshes of the list of searches."""
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


class Studies(InMemoryStorage):
    """Optuna storage in the role of ``optuna.storages.RDBStorage``, built from measurements; writes are not stored.

    A study contains the first timings of one workload under one policy on one device. Failed candidates are failed
    trials. A parameter's choices are the values tried so far.

    Args:
        store: read only; any thread may use it during the lifetime of this object.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._store, self._looking, self._looked = store, threading.Lock(), 0.0
        self._keys: dict[Key, int] = {}
        self._shown: dict[int, set[str]] = {}
        self._choices: dict[int, dict[str, dict[Any, None]]] = {}

    def get_all_studies(self) -> Any:
        """Return all studies, including those begun since the last call; see Optuna."""
        with self._looking:
            if time.monotonic() - self._looked > _AGAIN_S:
                self._find()
                self._looked = time.monotonic()
        return super().get_all_studies()

    def get_all_trials(self, study_id: int, deepcopy: bool = True, states: Any = None) -> list[FrozenTrial]:
        """Return all trials, including those measured since the last call; see Optuna."""
        with self._looking:
            key = next((key for key, number in self._keys.items() if number == study_id), None)
            if key is not None:
                self._learn(study_id, key)
        return super().get_all_trials(study_id, deepcopy, states)

    def _find(self) -> None:
        new = [key for key in self._store.measured_keys() if key not in self._keys]
        workloads = self._store.get_workloads({key.workload for key in new})
        devices = self._store.get_devices({key.device for key in new})
        for key in new:
            workload, device = workloads.get(key.workload), devices.get(key.device)
            if workload is None or device is None:
                continue
            # Prefixes of the digests distinguish policies and software versions.
            name = f"{workload.label or workload.fingerprint[:12]} on {device.label} [{key_words(key)}]"
            number = self._keys[key] = self.create_new_study([_direction(workload)], name)
            for what in ("workload", "device", "environment", "policy"):
                self.set_study_user_attr(number, what, getattr(key, what))

    def _learn(self, number: int, key: Key) -> None:
        shown, choices = self._shown.setdefault(number, set()), self._choices.setdefault(number, {})
        found = self._store.measurements(key.workload, key.device, key.environment, key.policy, "screen")
        new = [m for m in found if config_key(m.config) not in shown]
        for m in new:
            for name, choice in m.config.items():
                choices.setdefault(name, {})[choice] = None
        distributions = {name: CategoricalDistribution(list(values)) for name, values in choices.items()}
        workload = self._store.get_workload(key.workload) if new else None
        figure = figure_of(workload) if workload is not None else None
        for m in new:
            shown.add(config_key(m.config))
            us = m.latency_us if m.status is Status.OK else None
            value = us if us is None or figure is None else figure(us)[0]
            self.create_new_trial(number, _trial(m, value, distributions))


def key_words(key: Key) -> str:
    """Return the prefixes of a key's parts."""
    return ".".join(part[:10] for part in (key.workload, key.device, key.environment, key.policy))


def _direction(workload: Workload) -> StudyDirection:
    figure = figure_of(workload)
    return StudyDirection.MAXIMIZE if figure and figure(2.0)[0] < figure(1.0)[0] else StudyDirection.MINIMIZE


def _trial(m: Measurement, value: float | None, distributions: Mapping[str, CategoricalDistribution]) -> FrozenTrial:
    trial = create_trial(
        state=TrialState.COMPLETE if value is not None else TrialState.FAIL,
        value=value,
        params=dict(m.config),
        distributions={name: distributions[name] for name in m.config},
        user_attrs={"status": str(m.status), **({"reason": m.reason} if m.reason else {}), **m.metrics},
    )
    with contextlib.suppress(OverflowError, ValueError, OSError):  # a damaged row may contain any number as its time
        end = datetime.datetime.fromtimestamp(m.when)
        trial.datetime_start, trial.datetime_complete = end - datetime.timedelta(seconds=m.measure_s), end
    return trial


def importances(measurements: Sequence[Measurement]) -> dict[str, float]:
    """Return each parameter's share of the importance, largest first; the shares add up to 1.

    Args:
        measurements: of one key and one stage; failed ones are ignored.

    Returns:
        Parameters that every candidate has and that took several values; empty if too few candidates worked.
    """
    known = [(m.config, m.latency_us) for m in measurements if m.latency_us is not None][:_MOST]
    names = _varied([config for config, _ in known])
    if len(known) < FEWEST or not names:
        return {}
    # Values are replaced by their ranks among the values tried: numbers keep their order, and integers compare fast.
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
    study.get_trials = lambda *_, **__: trials  # type: ignore[method-assign]  # add_trials would copy each
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PED-ANOVA is marked experimental
        evaluator = PedAnovaImportanceEvaluator()
        found = optuna.importance.get_param_importances(study, params=names, evaluator=evaluator)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _varied(configs: Sequence[Config]) -> list[str]:
    if not configs:
        return []
    shared = set(configs[0]).intersection(*configs[1:])
    return sorted(name for name in shared if len({c[name] for c in configs}) > 1)


def _order(value: Choice) -> tuple[bool, float, str]:
    """Return a sort key: numbers by value, then strings."""
    return (False, float(value), "") if isinstance(value, (int, float)) else (True, 0.0, value)
