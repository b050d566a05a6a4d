"""The process that searches while its program compiles: ``python -m autotune.in_program.searching``.

It receives frames of :mod:`autotune.measure.child`. The first one has the ``device``. Each further one has
``workloads`` to search, with their numbers of occurrences. ``end`` follows when Inductor has finished, with the seconds
that are left. Until then nothing is answered, and no schedule is stored: the program's first code must not find any.
After it, the answers are progress, a result of each turn, and ``done``. ``stop`` ends the turn in an orderly way.
"""

from __future__ import annotations

import contextlib
import logging
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from autotune.errors import UserError
from autotune.measure.child import Link, serve
from autotune.measure.outcome import one_line
from autotune.workload import PRODUCT, Workload

if TYPE_CHECKING:
    from autotune.measure.pool import BaselinePool, CompilePool
    from autotune.measure.worker import Worker
    from autotune.tuner.context import Context
    from autotune.tuner.options import Budget
    from autotune.tuner.prefetch import Prefetcher
    from autotune.tuner.result import Progress, Result

log = logging.getLogger("autotune")

COMMAND = "search in the program"
"""The command of runs and of verdicts' records."""
_FIRST, _FEWEST = 8, 4
"""Most and fewest candidates of every region before any of them gets more. In recordings the best of five is 6%
slower than the best of ten (benchmarks/notes/search-quality.md); a region that is not reached is 10 to 40% slower."""
_CANDIDATE_S, _FIXED_S = 0.12, 0.6
"""Seconds of a candidate, and of the rest of a region: its inputs, its oracle and the final comparison."""
_TURN_S = 6.0
"""Most seconds of a first turn, unless turns usually take a quarter of that. Most take 0.5 to 2 s; single candidates
compile for 10 to 30 s, and so do some baselines. A region without a decision has another turn after all others."""
_REGION_S = 4.0
"""Minimum seconds of a region's second turn."""
_HOPELESS = 1.25
"""A region whose best candidate takes this multiple of the deployed code's time has no second turn. Five programs had 36
second turns: 30 of the 31 that began below it won, and none of the others, which began at 1.37 to 3.0 and took 54 s."""
_PREFETCHED = 10
"""Regions whose candidates are compiled while one is measured. Some regions' take eight seconds, the others' one."""
_WITHOUT = ("eager",)
"""Baselines that are not timed. A program under torch.compile runs Inductor's code where ours is slower."""
_KIND = "fusion"
"""Kind of the workloads of a program; its domain has the policy. Products use the same."""


class RegionTurn(NamedTuple):
    """A turn of a region.

    Attributes:
        number: of the region, in the order of arrival.
        granted: seconds, for comparison with other searches; 0 for a few candidates.
    """

    number: int
    budget: Budget
    granted: float


class RegionQueue:
    """The regions of a program, and which of them is searched next.

    The first turn of a region measures a few candidates, which bring most of the gain. When all regions have had it,
    those that it left undecided have one without a limit, and then those with the most to gain a second one.

    Args:
        seconds: expected time of the search, until :attr:`end` is set.

    Attributes:
        workloads: in the order of their arrival.
        end: time by ``time.monotonic()`` at which the search ends; None while Inductor compiles.
        results: of the turns that have ended.
    """

    def __init__(self, seconds: float) -> None:
        self.workloads: list[Workload] = []
        self.end: float | None = None
        self._seconds = seconds
        self._counts: dict[str, int] = {}
        self._shares: dict[str, float] = {}
        self._begun: set[str] = set()
        self._late: set[str] = set()
        self._again: set[str] = set()
        self.results: list[Result] = []

    def add(self, counted: Sequence[tuple[Workload, int]], *, whole: bool = False) -> None:
        """Add regions, or occurrences of known ones; with ``whole``, these are the occurrences in all graphs."""
        new = [workload for workload, _ in counted if workload.fingerprint not in self._counts]
        if whole:
            self._counts = dict.fromkeys(self._counts, 0)
        for workload, count in counted:
            self._counts[workload.fingerprint] = self._counts.get(workload.fingerprint, 0) + count
        self._shares = shares([(w, self._counts[w.fingerprint]) for w in (*self.workloads, *new)])
        self.workloads.extend(new)

    @property
    def left_s(self) -> float:
        """Seconds that are left, or that are expected to be."""
        return self._seconds if self.end is None else max(0.0, self.end - time.monotonic())

    def waiting(self) -> list[int]:
        """Numbers of the regions without a turn, the most promising first, and then of the undecided ones."""
        prints = [w.fingerprint for w in self.workloads]
        left = [i for i, key in enumerate(prints) if key not in self._begun]
        return sorted(left, key=lambda i: (prints[i] in self._late, -self._shares[prints[i]]))

    @property
    def trials(self) -> int:
        """Candidates of the next region's first turn."""
        return first_candidates(self.left_s, len(self.waiting()))

    def next(self) -> RegionTurn | None:
        """The next turn; None if none is left that fits the time."""
        from autotune.tuner.options import Budget

        if waiting := self.waiting():
            if (left := self.left_s) <= self._usual_s():
                return None
            trials = self.trials
            self._begun.add(key := self.workloads[waiting[0]].fingerprint)
            if key in self._late:
                return RegionTurn(waiting[0], Budget(trials, left), 0.0)
            most = max(_TURN_S, 4 * self._usual_s())
            return RegionTurn(waiting[0], Budget(trials, min(left, most), baselines=most / 2), 0.0)
        counted = [(w, self._counts[w.fingerprint]) for w in self.workloads if w.fingerprint not in self._again]
        most = max(1, int(self.left_s / _REGION_S))
        gains = gains_left(counted, self.results)[:most]
        if not gains or self.left_s < _REGION_S:
            return None
        (workload, gain), every = gains[0], sum(gain for _, gain in gains)
        self._again.add(workload.fingerprint)
        seconds = _REGION_S if self.end is None else max(_REGION_S, self.left_s * gain / every)
        return RegionTurn(self.workloads.index(workload), Budget(timeout=seconds), seconds)

    def done(self, result: Result) -> None:
        """Record the result of a turn."""
        self.results.append(result)
        if result.best is not None and not result.winner and result.workload not in self._late:
            self._late.add(result.workload)
            self._begun.discard(result.workload)

    def _usual_s(self) -> float:
        """Seconds of a first turn, by those that have ended; the first one waits for the processes' start."""
        ended = [r.seconds for r in self.results[1:]]
        return statistics.median(ended) if ended else 0.0


class Search:
    """The process's state. Frames arrive in the main thread, and another thread searches."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue = RegionQueue(0.0)
        self._context: Context | None = None
        self._baselines: BaselinePool | None = None
        self._prefetcher: Prefetcher | None = None
        self._stopped = self._quiet = False
        self._ahead: set[int] = set()
        self._last: dict[str, Progress] = {}
        self._sent = 0

    def handle(self, link: Link, message: dict[str, Any], blob: bytes) -> None:
        """Handle a frame."""
        if "device" in message:
            self._queue = RegionQueue(message["seconds"])
            settings = message["device"], message["numerics"]
            threading.Thread(target=self._run, args=(link, *settings), name="autotune-search", daemon=True).start()
            return
        with self._changed:
            if "stop" in message:
                self._stopped = True
                if self._context is not None:
                    self._context.interrupt.requested = True
            else:
                self._quiet = message.get("quiet", False)
                counted = [(Workload.from_json(w), count) for w, count in message["workloads"]]
                self._queue.add(counted, whole="end" in message)
            if "end" in message:
                self._queue.end = time.monotonic() + message["end"]
                self._end()
            self._compile_ahead()
            self._changed.notify_all()

    def _run(self, link: Link, device: str, settings: Mapping[str, Any]) -> None:
        error = ""
        try:
            with self._open(link, device, settings) as (context, prefetcher):
                self._search(link, context, prefetcher)
        except UserError as mistake:
            error = str(mistake)
        except Exception as problem:
            error = one_line(problem)
        with self._changed:
            self._changed.wait_for(lambda: self._queue.end is not None or self._stopped)
        self._send_pending(link)
        link.send({"done": error})

    @contextlib.contextmanager
    def _open(self, link: Link, device: str, settings: Mapping[str, Any]) -> Iterator[tuple[Context, Prefetcher]]:
        """Start the worker and the pools, which import what they need while the program is traced."""
        from autotune import numerics
        from autotune.domain import domain_of
        from autotune.measure.pool import BaselinePool, CompilePool
        from autotune.measure.worker import Worker

        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a region's baselines are one or two kernels
        policy = domain_of(_KIND).policy(device).within(_REGION_S)
        with ExitStack() as opened:
            worker = opened.enter_context(Worker(None, device, policy, without=_WITHOUT))
            pool = opened.enter_context(CompilePool(timeout_s=policy.build_s))
            pool.start()
            baselines = BaselinePool(timeout_s=policy.baseline_s)
            opened.callback(baselines.close)
            baselines.start()
            # SQLAlchemy, Optuna and torch take two seconds, in which the other processes start.
            import torch  # noqa: F401 - numerics are torch's settings

            from autotune.store.store import HeldStore
            from autotune.tuner.context import Context
            from autotune.tuner.options import Budget, SearchOptions
            from autotune.tuner.prefetch import Prefetcher
            from autotune.tuner.threads import Lease

            numerics.restore(settings)
            store = opened.enter_context(HeldStore.open(None))
            context = Context(
                store=store,
                device=device,
                policy=policy,
                options=SearchOptions(numerics=settings),
                lent=(worker, pool, baselines),
                report=lambda progress: self._report(link, progress),
                _worker=worker,
                _pool=pool,
                _baselines=baselines if _overlaps(device) else None,
            )
            opened.enter_context(closing(context))
            context.run = store.start_run(COMMAND, owner=context.owner).id
            opened.enter_context(Lease(store, context.owner))
            workloads = self._queue.workloads
            prefetcher = Prefetcher(context, workloads, lambda i: Budget(self._queue.trials), _PREFETCHED, active=True)
            opened.enter_context(prefetcher)
            with self._changed:
                self._context, self._baselines, self._prefetcher = context, baselines, prefetcher
                context.interrupt.requested = self._stopped
                if self._queue.end is not None:
                    self._end()
                self._compile_ahead()
            try:
                _warm_up(device, worker, pool, baselines, lambda: self._queue.end is not None)
                yield context, prefetcher
            finally:
                results = self._queue.results
                state = "interrupted" if self._stopped else "done" if any(r.ok for r in results) else "failed"
                store.finish_run(context.run, state, {"workloads": [r.to_json() for r in results]})

    def _search(self, link: Link, context: Context, prefetcher: Prefetcher) -> None:
        from autotune.tuner.study import tune

        while (turn := self._next(context.device)) is not None:
            prefetcher.advance(turn.number, self._queue.waiting())
            result = tune(context, self._queue.workloads[turn.number], turn.budget, turn.granted)
            with self._changed:
                self._queue.done(result)
            if self._queue.end is not None:
                self._send_pending(link)
            if result.interrupted or result.fault:
                return

    def _next(self, device: str) -> RegionTurn | None:
        """Wait for a turn; None at the end of the search.

        Nothing is measured on a CPU, or on a GPU that Inductor uses for its own measurements, while Inductor compiles.
        """
        with self._changed:
            while not self._stopped:
                ended = self._queue.end is not None
                may = ended or (_overlaps(device) and not self._quiet)
                turn = self._queue.next() if may else None
                if turn is not None or ended:
                    return turn
                self._changed.wait()
            return None

    def _compile_ahead(self) -> None:
        """Compile baselines of new regions, the most promising first; the caller has the lock.

        On a CPU, candidates are compiled too, and both only for the regions that the search can probably reach.
        """
        if self._context is None or self._baselines is None or self._prefetcher is None:
            return
        device, every = self._context.device, self._queue.waiting()
        if not _overlaps(device):
            every = every[: max(1, int(self._queue.left_s / _REGION_S))]
            if every:
                self._prefetcher.advance(every[0], every[1:])
        for number in (i for i in every if i not in self._ahead):
            self._ahead.add(number)
            self._baselines.begin(self._queue.workloads[number], device)

    def _end(self) -> None:
        """Begin the rest of the search, after the compilation; the caller has the lock."""
        from autotune.store.store import HeldStore

        if self._context is None:
            return
        self._context.end = self._queue.end
        if isinstance(self._context.store, HeldStore):
            self._context.store.publish()
        if self._baselines is not None and self._prefetcher is not None and not _overlaps(self._context.device):
            self._prefetcher.stop()  # what they compile would disturb the measurements from now on
            self._baselines.close()
            self._baselines = None

    def _report(self, link: Link, progress: Progress) -> None:
        """Send progress after the end of the compilation; nothing reads it before."""
        if self._queue.end is None:
            self._last[progress.workload] = progress
            return
        self._send_pending(link)
        link.send({"progress": asdict(progress)})

    def _send_pending(self, link: Link) -> None:
        """Send what was kept back while Inductor compiled, and the results since."""
        for label in list(self._last):
            link.send({"progress": asdict(self._last.pop(label))})
        for result in self._queue.results[self._sent :]:
            link.send({"result": asdict(result)})
        self._sent = len(self._queue.results)


def _warm_up(
    device: str, worker: Worker, pool: CompilePool, baselines: BaselinePool, ended: Callable[[], bool]
) -> None:
    """Have all processes import what they need, by small workloads, while the program is traced. Never raises.

    The first compilation in a process takes 8 s, Inductor's first one 13, and the first measurement 7.

    Args:
        ended: returns True once the program has been compiled. Then the search begins, warm or not.
    """
    from autotune.domain import domain_of, open_task

    numbers = range(max(pool.processes, baselines.processes))
    try:
        samples = [found for found in map(domain_of(_KIND).sample, numbers) if found is not None]
        for sample in samples[: baselines.processes]:
            baselines.begin(sample, device)
        for sample in samples:
            if ended():
                return
            task = open_task(sample, device)
            pool.prefetch(sample, device, task.normalize(task.default()))
        for sample in samples[:1]:
            worker.open(sample)
            if _overlaps(device):
                worker.compare([], seed=0, without=("inductor",))
            else:  # it compiles the baselines itself
                worker.warm(sample)
            task = open_task(sample, device)
            config = task.normalize(task.default())
            artifact = pool.submit(sample, device, config).result().artifact
            if artifact is not None and not ended():
                worker.measure(config, artifact, stage="screen", seed=0)
    except Exception as error:  # the search meets it again, and reports it
        log.debug("the processes of a search are not warm: %s", error)


def _overlaps(device: str) -> bool:
    """True if compiling does not disturb measurements on ``device``."""
    return device.startswith("cuda")


def first_candidates(seconds: float, regions: int) -> int:
    """Candidates that each region gets in the first pass, so that the pass reaches all regions if it can."""
    each = seconds / max(regions, 1) - _FIXED_S
    return max(_FEWEST, min(_FIRST, int(each / _CANDIDATE_S)))


def gains_left(counted: Sequence[tuple[Workload, int]], results: Sequence[Result]) -> list[tuple[Workload, float]]:
    """The workloads that may still gain, with the possible gain in microseconds of a step, the largest first.

    The possible gain is the time beyond moving the workload's bytes at the best rate of all results. Products compute
    for longer than that, and the first turns have timed their few candidates. Where Inductor is much faster than all
    candidates, more of them will not win.

    Args:
        counted: workloads with their numbers of occurrences.
        results: of their searches.
    """
    timed = {r.workload: r for r in results if r.kind != PRODUCT and r.best_us and r.bytes_moved}
    best = max((r.bytes_moved / r.best_us for r in timed.values() if r.best_us), default=1.0)
    gains = [
        (workload, count * (r.best_us - r.bytes_moved / best))
        for workload, count in counted
        if (r := timed.get(workload.fingerprint)) is not None and r.best_us
        if r.best_us < _HOPELESS * (r.deployed_us or r.best_us)
    ]
    return sorted((found for found in gains if found[1] > 0), key=lambda found: -found[1])


def shares(counted: Sequence[tuple[Workload, int]]) -> dict[str, float]:
    """Each workload's weight in a step by fingerprint: the mebibytes whose time it may save, times its occurrences.

    The first turns measure a fixed number of candidates of each, so the weight determines their order, not their time.
    """
    from autotune.domain import domain_of

    def saved(workload: Workload) -> float:
        return max(0.1, domain_of(workload.kind).bytes_saved(workload) / 2**20)

    return {workload.fingerprint: count * saved(workload) for workload, count in counted}


if __name__ == "__main__":
    serve(Search().handle)
