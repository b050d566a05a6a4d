"""The Optuna study behind a search, kept in the same database as the measurements.

The study is the sampler's memory and can be opened with optuna-dashboard; the truth is in the measurements. Proposals
are made in memory, by what the database's study knows, and a trial is written there once, when it is finished: a
proposal would otherwise take a transaction for each parameter. What other searches find comes by their measurements.

A failure of a candidate is told as COMPLETE with a finite penalty and a violated constraint: told as FAIL, Optuna's
samplers would forget it and propose more of its kind. FAIL is for faults of the machine and for trials whose process
died.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import logging
import random
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.storages import BaseStorage, RDBStorage
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from autotune.errors import UserError
from autotune.space import Space
from autotune.store.claims import owner_is_dead
from autotune.store.connection.engine import parse_url, show_url
from autotune.store.connection.faults import first_line, lost_connection
from autotune.store.connection.outage import OUTAGE_S, Patience
from autotune.store.records import Measurement
from autotune.task import Config, Status, config_key
from autotune.tuner.proposals.samplers import make_sampler

_CONSTRAINT = "failed"
_PENALTY = 2.0  # failures count as this many times the slowest latency seen
_ORPHAN_S = 600.0  # a running trial whose owner was never written down is given up after this long
_WARM = 1000  # stored measurements given to a fresh study at most: each costs a few milliseconds

logger = logging.getLogger(__name__)
T = TypeVar("T")


class History:
    """Ask and tell.

    Args:
        storage: of :func:`open_storage`; or one in memory, for a search that nobody looks at.
        name: of the study; whatever fixes its choices must be part of it.
        owner: name of this search, noted on its trials (see ``autotune.store.claims.owner_name``).
        about: facts for whoever looks at the study.

    Raises:
        UserError: the sampler is unknown.
    """

    def __init__(
        self,
        storage: BaseStorage,
        name: str,
        *,
        sampler: str,
        seed: int,
        space: Space,
        owner: str,
        about: Mapping[str, Any],
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        make_sampler(sampler, seed)  # a mistake in its name is told before any table is made
        self.space = space
        self._owner = owner
        self._distributions: dict[str, BaseDistribution] = {p.name: CategoricalDistribution(p.choices) for p in space}
        self._url = storage.url if isinstance(storage, RDBStorage) else None
        self.study = _patiently(
            self._url, lambda: optuna.create_study(storage=storage, study_name=name, load_if_exists=True)
        )
        self._told: set[str] = set()
        self._slowest = 0.0
        trials = _patiently(self._url, lambda: self.study.get_trials(deepcopy=False))
        finished = [t for t in trials if t.state is TrialState.COMPLETE]
        for trial in finished:
            self._told.add(config_key(trial.params))
            if trial.value is not None and not any(v > 0 for v in trial.constraints.values()):
                self._slowest = max(self._slowest, trial.value)
        self._sweep(t for t in trials if t.state is TrialState.RUNNING)
        # The same seed again would propose the same points again, all of them known by now.
        self._asked = optuna.create_study(sampler=make_sampler(sampler, seed + len(finished)))
        self._asked.add_trials(finished)
        for key, value in about.items():
            self._try(functools.partial(self._note, key, value))

    def _note(self, key: str, value: str) -> None:
        if self.study.user_attrs.get(key) != value:
            self.study.set_user_attr(key, value)

    def _sweep(self, running: Iterable[FrozenTrial]) -> None:
        """Give up trials that a process which has died left running; only earlier versions wrote such."""
        now = datetime.datetime.now()
        for trial in running:
            owner = trial.user_attrs.get("owner")
            started = trial.datetime_start or now
            if owner_is_dead(owner) if owner else (now - started).total_seconds() > _ORPHAN_S:
                with contextlib.suppress(Exception):  # another search may sweep at the same time
                    self.study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)

    def ask(self) -> tuple[Trial, Config]:
        """A trial and the configuration that the sampler proposes in it. It may be one that is known already."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            trial = self._asked.ask()
            trial.set_user_attr("owner", self._owner)
            return trial, self.space.suggest(trial)

    def tell(self, trial: Trial, m: Measurement) -> None:
        """What became of a proposed configuration."""
        value, violated = self._value(m)
        self._told.add(config_key(m.config))
        for name, figure in m.metrics.items():
            trial.set_user_attr(name, figure)
        self._finish(trial, value, violated, str(m.status))

    def skip(self, trial: Trial, config: Config, expected_us: float) -> None:
        """A proposal that is not worth measuring; the sampler is told what the cost model expects of it."""
        self._told.add(config_key(config))
        self._finish(trial, expected_us, 0.0, "predicted")

    def drop(self, trial: Trial) -> None:
        """A proposal that came to nothing through no fault of its own."""
        self._asked.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)

    def _finish(self, trial: Trial, value: float, violated: float, status: str) -> None:
        trial.set_constraint(_CONSTRAINT, violated)
        trial.set_user_attr("status", status)
        done = self._asked.tell(trial.number, value, skip_if_finished=True)
        self._try(lambda: self.study.add_trial(done))

    def add(self, measurements: Iterable[Measurement]) -> int:
        """Teach the study measurements that it did not ask for; those it knows or cannot hold are passed over."""
        new = [m for m in measurements if config_key(m.config) not in self._told and self.space.contains(m.config)]
        trials = []
        for m in sorted(new, key=lambda m: m.latency_us or float("inf"))[:_WARM]:
            if config_key(m.config) in self._told:
                continue
            self._told.add(config_key(m.config))
            value, violated = self._value(m)
            trials.append(
                create_trial(
                    value=value,
                    params={p.name: m.config[p.name] for p in self.space},
                    distributions=self._distributions,
                    user_attrs={**m.metrics, "owner": self._owner, "status": str(m.status)},
                    constraints={_CONSTRAINT: violated},
                )
            )
        self._asked.add_trials(trials)
        self._try(lambda: self.study.add_trials(trials))
        return len(trials)

    def _value(self, m: Measurement) -> tuple[float, float]:
        """Objective and constraint of a measurement."""
        if m.status is Status.OK and m.latency_us is not None:
            self._slowest = max(self._slowest, m.latency_us)
            return m.latency_us, 0.0
        return _PENALTY * (self._slowest or 1e6), 1.0

    def _try(self, action: Callable[[], object]) -> None:
        """The measurement is stored already: a study that cannot be written costs advice, not data."""
        try:
            _patiently(self._url, action)
        except Exception as error:
            if self._url is None:
                raise
            logger.warning("the Optuna study could not be updated: %s", first_line(error, parse_url(self._url)))


def open_storage(url: str) -> RDBStorage:
    """The database's studies; opening it takes a tenth of a second, so that a run does it once.

    Args:
        url: the database, as Optuna wants it.

    Raises:
        UserError: the database holds another version of Optuna's tables.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    # A connection that lay idle while a candidate was measured may have ended with its server.
    sqlite: dict[str, Any] = {"connect_args": {"timeout": 60}}
    options = sqlite if url.startswith("sqlite") else {"pool_pre_ping": True}

    def once() -> RDBStorage:
        try:
            return RDBStorage(url, engine_kwargs=options)
        except RuntimeError as error:
            where, why = show_url(parse_url(url)), " ".join(str(error).split())
            raise UserError(f"the Optuna tables in {where} do not fit: {why}") from None

    return _patiently(url, once)


def _patiently(url: str | None, action: Callable[[], T], attempts: int = 5) -> T:
    """Several searches may create the same tables, or write the same SQLite file, at the same moment. A server that
    went away is waited for, as by the store. What lies in memory (no ``url``) is there."""
    if url is None:
        return action()
    parsed = parse_url(url)

    def once() -> T:
        for attempt in range(attempts):
            try:
                return action()
            except UserError:
                raise
            except Exception as error:
                if lost := lost_connection(parsed, error):
                    raise lost from error
                transient = isinstance(error, StorageInternalError) or "sqlalchemy" in type(error).__module__
                if not transient or attempt == attempts - 1:
                    raise
                time.sleep(random.uniform(0.05, 0.2) * 2**attempt)
        raise AssertionError("unreachable")

    return Patience(f"the database {show_url(parsed)}", OUTAGE_S).call(once)
