"""What the searches of one run share: the database, the machine, the method, and when the user wants an end."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from autotune import __version__
from autotune import device as devices
from autotune.device import DeviceIdentity
from autotune.errors import Unsupported
from autotune.measure.policy import Policy
from autotune.measure.pool import CompilePool
from autotune.measure.worker import Measurer, Worker
from autotune.numerics import Numerics, read
from autotune.resources import resource_dir
from autotune.space import Space
from autotune.store.records import Effort, Key, Measurement
from autotune.store.store import Store
from autotune.store.tables.claims import owner_name
from autotune.task import ComposedTask, Composition, Config, Task, domain_hook, open_task, place
from autotune.tuner.budget import Budget, Pace
from autotune.tuner.devices.interrupt import Interrupt
from autotune.tuner.proposals.history import History
from autotune.tuner.proposals.samplers import DEFAULT, NONE
from autotune.tuner.result import Progress
from autotune.tuner.session import Session
from autotune.words import size
from autotune.workload import Workload, digest

_PLANNED = 8  # workloads whose compositions are remembered
_ENOUGH = 0.5  # what was searched with half of the time it would get now is not searched again


@dataclass
class Context:
    """One run's means. The worker and the compile pool are started when first needed, and closed by :meth:`close`.

    Attributes:
        device: "cpu" or "cuda:N".
        sampler: a name of :data:`autotune.tuner.proposals.samplers.SAMPLERS`, or ``NONE`` for what the domain's cost
        model likes
            best, unsearched.
        seed: of the sampler and of the random inputs that candidates are verified on.
        space_file: a user's narrowed copy of the domain's search space.
        method: of the domain, "" for its whole; see ``autotune.task.ComposedTask.under``.
        plans: compositions of a workload that are considered at most.
        seeds: workload (its fingerprint) to candidates that are measured whatever else is suggested.
        numerics: under which the program's step runs; the processes of other devices restore them.
        lent: the worker and the pool where they are the caller's, who closes them.
        told: workload to the fingerprints of its device (or devices) and their software, where those are of another
            host, which has stored them.
    """

    store: Store
    device: str
    policy: Policy
    sampler: str = DEFAULT
    seed: int = 0
    space_file: str | None = None
    method: str = ""
    plans: int = 6
    seeds: Mapping[str, Sequence[Config]] = field(default_factory=dict)
    numerics: Numerics = field(default_factory=read)
    lent: tuple[Measurer | CompilePool | None, ...] = ()
    report: Callable[[Progress], None] | None = None
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    owner: str = field(default_factory=owner_name)
    interrupt: Interrupt = field(default_factory=Interrupt)
    pace: Pace = field(default_factory=Pace)
    told: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    _worker: Measurer | None = None
    _pool: CompilePool | None = None
    _places: dict[DeviceIdentity, tuple[str, str]] = field(default_factory=dict)
    _figures: dict[tuple[str, str], Mapping[str, float]] = field(default_factory=dict)
    _confined: dict[str, Any] = field(default_factory=dict)
    _planned: dict[str, Sequence[Composition]] = field(default_factory=dict)
    _planning: threading.Lock = field(default_factory=threading.Lock)

    def close(self) -> None:
        """End the worker and the compile pool, unless they are lent."""
        with contextlib.ExitStack() as stack:
            for own in (self._worker, self._pool):
                if own is not None and not any(own is other for other in self.lent):
                    stack.callback(own.close)

    def worker(self, workload: Workload) -> Measurer:
        """The measuring worker, turned to ``workload``."""
        if self._worker is None:
            start = domain_hook(workload.kind, "open_measurer") or Worker
            self._worker = start(workload, self.device, self.policy)
        self._worker.open(workload)
        return self._worker

    @property
    def pool(self) -> CompilePool:
        if self._pool is None:
            self._pool = CompilePool(timeout_s=self.policy.build_s)
        return self._pool

    def _place(self, workload: Workload) -> tuple[str, str]:
        """Fingerprints of the device (or devices) and of the software, stored if they are new."""
        if workload.fingerprint in self.told:
            return self.told[workload.fingerprint]
        identity = place(workload, self.device)
        if identity not in self._places:
            environment = devices.environment(self.device)
            self._places[identity] = self.store.put_device(identity), self.store.put_environment(environment)
        return self._places[identity]

    def key(self, workload: Workload) -> Key:
        """The key of a workload, which is stored if it is new."""
        if not workload.source and self.store.get_workload(workload.fingerprint) is not None:
            fingerprint = workload.fingerprint  # a part that is known as a workload keeps its name and its program
        else:
            fingerprint = self.store.put_workload(workload)
        if fingerprint not in self._confined and (own := domain_hook(workload.kind, "confined")) is not None:
            self._confined[fingerprint] = own(workload)
        device, environment = self._place(workload)
        return Key(fingerprint, device, environment, self.policy.key)

    def measured(self, workload: Workload) -> bool:
        """Whether anything is stored of a workload's candidates here."""
        device, environment = self._place(workload)
        return bool(self.store.measurements(workload.fingerprint, device, environment, self.policy.key, limit=1))

    def task(self, workload: Workload) -> Task:
        """The workload's task; under this run's method, and with the device's calibration, where it takes such.

        Raises:
            UserError: the domain has no such method.
            Unsupported: as the task's own; or the device has less memory than the workload takes.
        """
        held = domain_hook(workload.kind, "bytes_held")
        identity = self.store.get_device(self._place(workload)[0])
        if held and identity and (need := held(workload)) > identity.memory_mib << 20:
            raise Unsupported(f"it takes {size(need)} of memory, and the device has {size(identity.memory_mib << 20)}")
        task = open_task(workload, self.device)
        if not isinstance(task, ComposedTask):
            return task
        where = (self._place(workload)[0], workload.kind)
        if where not in self._figures:
            found = self.store.get_calibration(*where)
            self._figures[where] = found.figures if found else {}
        return task.under(self.method, self._figures[where])

    def compositions(self, task: Task) -> Sequence[Composition]:
        """What the task's workload can be composed of, the most promising first; nothing where it has no parts.

        Thought out once for both threads that ask, the search's and that of :mod:`autotune.tuner.ahead`: side by side
        each would take twice as long.

        Raises:
            Unsupported: as the task's own.
        """
        if not isinstance(task, ComposedTask):
            return ()
        key = task.workload.fingerprint
        if (known := self._planned.get(key)) is not None:  # without waiting for what is thought out now
            return known
        with self._planning:
            if (known := self._planned.get(key)) is None:
                known = task.compositions(self.plans)
                while len(self._planned) >= _PLANNED:
                    del self._planned[next(iter(self._planned))]
                self._planned[key] = known
            return known

    def session(self, task: Task, budget: Budget, whole: Session | None = None) -> Session:
        """A search's state, with the worker turned to its workload.

        Args:
            whole: the session of the workload that this one is a part of.
        """
        space = task.space(self.space_file)
        narrowed = space if self.space_file and space.fingerprint != task.space().fingerprint else None
        return Session(
            task=task,
            store=self.store,
            key=self.key(task.workload),
            policy=self.policy,
            worker=self.worker(task.workload),
            pool=self.pool,
            interrupt=self.interrupt,
            owner=self.owner,
            run=self.run,
            trials=budget.most,
            most=budget.most,
            timeout=budget.timeout,
            seed=self.seed,
            report=self.report,
            narrowed=narrowed,
            space_file=self.space_file,
            label=whole.label if whole else task.workload.label or task.workload.fingerprint[:12],
            whole=whole,
        )

    def history(self, space: Space, known: Sequence[Measurement]) -> History | None:
        """What a search in ``space`` proposes by, with what was measured before; None where no sampler proposes."""
        if self.sampler == NONE:
            return None
        return History(sampler=self.sampler, seed=self.seed, space=space, known=known)

    def scope(self, key: Key) -> str:
        """Digest of what this run's searches of ``key`` are confined to: under it, efforts can be told from each other.

        What the domain says confines it beside the shipped spaces is known once :meth:`key` was asked of the workload.
        """
        own = self._confined.get(key.workload)
        return self._scope if own is None else digest([self._scope, own])

    @cached_property
    def _scope(self) -> str:
        """Of every workload's scope.

        The shipped spaces count too: what another version of them left nothing to do for has new choices.
        """
        shipped = [p.read_text() for p in sorted(resource_dir("search_spaces").glob("*.toml"))]
        file = Path(self.space_file).read_text() if self.space_file else ""
        own = {"space": file, "method": self.method, "sampler": self.sampler}
        return digest({**own, "shipped": shipped, "autotune": __version__})

    def searched(self, key: Key, budget: Budget, granted: float | None) -> Effort | None:
        """The effort that makes another search of ``key`` needless, or None.

        A search that is asked for a number of candidates is never needless.

        Args:
            granted: seconds that the search would get now; None for no limit.
        """
        if budget.trials is not None:
            return None
        effort = self.store.get_effort(key, self.scope(key))
        if effort is None:
            return None
        timed = granted is not None and effort.granted >= _ENOUGH * granted
        return effort if effort.settled or timed else None

    def note(self, s: Session, stop: str, settled: bool, granted: float | None) -> None:
        """Remember how a session's search ended, unless it was cut short."""
        if not self.interrupt.requested:
            self.store.add_effort(Effort(s.key, self.scope(s.key), s.elapsed, granted or 0.0, settled, stop))
