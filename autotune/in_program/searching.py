"""The process that searches while its program compiles: ``python -m autotune.in_program.searching``.

It receives frames of :mod:`autotune.measure.child`. The first one of a graph has the ``device``. Each further one has
``workloads`` to search, with their numbers of occurrences. ``end`` follows when Inductor has finished, with the seconds
that are left. Until then nothing is answered, and no schedule is stored: the program's first code must not find any.
After it, the answers are progress, a result of each turn, and ``done``. ``stop`` ends the turn in an orderly way.
``rest`` announces another graph.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from autotune.errors import UserError
from autotune.in_program.turns import REGION_S, RegionQueue, RegionTurn
from autotune.measure.child import Link, serve
from autotune.measure.outcome import one_line
from autotune.workload import Workload

if TYPE_CHECKING:
    from autotune.measure.policy import Policy
    from autotune.measure.pool import BaselinePool, CompilePool
    from autotune.measure.worker import Worker
    from autotune.tuner.context import Context
    from autotune.tuner.prefetch import Prefetcher
    from autotune.tuner.result import Progress

log = logging.getLogger("autotune")

COMMAND = "search in the program"
"""The command of runs and of verdicts' records."""
REST_S = 40.0
"""Seconds between two graphs of a function, after which the process ends by itself. T5's were 23 s apart on an H200."""
_PREFETCHED = 10
"""Regions whose candidates are compiled while one is measured. Some regions' take eight seconds, the others' one."""
_WITHOUT = ("eager",)
"""Baselines that are not timed. A program under torch.compile runs Inductor's code where ours is slower."""
_KIND = "fusion"
"""Kind of the workloads of a program; its domain has the policy. Products use the same."""


class Search:
    """The process's state: its helpers, which serve all graphs, and the search of the present graph.

    Frames arrive in the main thread, and another thread searches.
    """

    def __init__(self) -> None:
        self.graph: GraphSearch | None = None
        self._graphs: SimpleQueue[GraphSearch] = SimpleQueue()
        self._rest: threading.Timer | None = None

    def handle(self, link: Link, message: dict[str, Any], blob: bytes) -> None:
        """Handle a frame."""
        if "device" in message:
            if self._rest is not None:
                self._rest.cancel()
            first, device = self.graph is None, message["device"]
            more = message.get("more", False)
            queue = RegionQueue(message["seconds"], message.get("measured_us", 0.0), more=more)
            self.graph = GraphSearch(link, device, message["numerics"], queue)
            self._graphs.put(self.graph)
            if first:
                args = device, message["numerics"]
                threading.Thread(target=self._run, args=args, name="autotune-search", daemon=True).start()
        elif "rest" in message:
            self._rest = threading.Timer(REST_S, os._exit, (0,))
            self._rest.daemon = True
            self._rest.start()
        elif self.graph is not None:
            self.graph.handle(message)

    def _run(self, device: str, settings: Mapping[str, Any]) -> None:
        """Start the worker and the pools, which import what they need while the program is traced, and search.

        Args:
            settings: the program's numerics; those of later graphs, which are on a GPU, have the same policy.
        """
        from autotune.domain import domain_of
        from autotune.measure.pool import BaselinePool, CompilePool
        from autotune.measure.worker import Worker

        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a region's baselines are one or two kernels
        with ExitStack() as opened:
            helpers, error = None, ""
            try:
                policy = domain_of(_KIND).policy(device).within(REGION_S).under(settings)
                worker = opened.enter_context(Worker(None, device, policy, without=_WITHOUT))
                pool = opened.enter_context(CompilePool(timeout_s=policy.build_s))
                pool.start()
                baselines = BaselinePool(timeout_s=policy.baseline_s)
                opened.callback(baselines.close)
                baselines.start()
                # SQLAlchemy, Optuna and torch take two seconds, in which the other processes start.
                import torch  # noqa: F401 - numerics are torch's settings

                helpers = Helpers(policy, worker, pool, baselines)
            except Exception as problem:
                error = one_line(problem)
            warm = False
            while True:
                graph = self._graphs.get()
                if helpers is None:
                    graph.finish(error)
                else:
                    graph.run(helpers, warm=warm)
                warm = True


@dataclass(frozen=True)
class Helpers:
    """Processes that serve the searches of all graphs."""

    policy: Policy
    worker: Worker
    pool: CompilePool
    baselines: BaselinePool


class GraphSearch:
    """The search of a graph.

    Args:
        settings: the program's numerics.
        queue: its regions, none so far.
    """

    def __init__(self, link: Link, device: str, settings: Mapping[str, Any], queue: RegionQueue) -> None:
        self.queue = queue
        self._link, self._device, self._settings = link, device, settings
        self._changed = threading.Condition()
        self._context: Context | None = None
        self._baselines: BaselinePool | None = None
        self._prefetcher: Prefetcher | None = None
        self._stopped = self._quiet = False
        self._ahead: set[int] = set()
        self._last: dict[str, Progress] = {}
        self._sent = 0

    def handle(self, message: dict[str, Any]) -> None:
        """Handle a frame."""
        with self._changed:
            if "stop" in message:
                self._stopped = True
                if self._context is not None:
                    self._context.interrupt.requested = True
            else:
                self._quiet = message.get("quiet", False)
                counted = [(Workload.from_json(w), count) for w, count in message["workloads"]]
                self.queue.add(counted, whole="end" in message)
            if "end" in message:
                self.queue.end_in(message["end"])
                self._send_pending()  # the present turn may last longer than the program waits
                self._end()
            self._compile_ahead()
            self._changed.notify_all()

    def run(self, helpers: Helpers, *, warm: bool) -> None:
        """Search until the end, and send ``done``; never raises.

        Args:
            warm: the helpers have worked before.
        """
        error = ""
        try:
            with self._open(helpers) as (context, prefetcher):
                if not warm:
                    own = helpers.worker, helpers.pool, helpers.baselines
                    _warm_up(self._device, *own, lambda: self.queue.end is not None)
                self._search(context, prefetcher)
        except UserError as mistake:
            error = str(mistake)
        except Exception as problem:
            error = one_line(problem)
        self.finish(error)

    def finish(self, error: str) -> None:
        """Wait for the end, and send what is left to send and ``done``."""
        with self._changed:
            self._changed.wait_for(lambda: self.queue.end is not None or self._stopped)
        self._send_pending()
        self._link.send({"done": error})

    @contextlib.contextmanager
    def _open(self, helpers: Helpers) -> Iterator[tuple[Context, Prefetcher]]:
        """Open the database and the run."""
        from autotune import numerics
        from autotune.store.store import HeldStore
        from autotune.tuner.context import Context
        from autotune.tuner.options import Budget, SearchOptions
        from autotune.tuner.prefetch import Prefetcher
        from autotune.tuner.threads import Lease

        numerics.restore(self._settings)
        worker, pool, baselines = helpers.worker, helpers.pool, helpers.baselines
        with ExitStack() as opened:
            store = opened.enter_context(HeldStore.open(None))
            context = Context(
                store=store,
                device=self._device,
                policy=helpers.policy,
                options=SearchOptions(numerics=self._settings),
                lent=(worker, pool, baselines),
                report=self._report,
                _worker=worker,
                _pool=pool,
                _baselines=baselines if _overlaps(self._device) else None,
            )
            opened.enter_context(closing(context))
            context.run = store.start_run(COMMAND, owner=context.owner).id
            opened.enter_context(Lease(store, context.owner))
            workloads = self.queue.workloads
            prefetcher = Prefetcher(context, workloads, lambda i: Budget(self.queue.trials), _PREFETCHED, active=True)
            opened.enter_context(prefetcher)
            with self._changed:
                self._context, self._baselines, self._prefetcher = context, baselines, prefetcher
                context.interrupt.requested = self._stopped
                if self.queue.end is not None:
                    self._end()
                self._compile_ahead()
            try:
                yield context, prefetcher
            finally:
                results = self.queue.results
                state = "interrupted" if self._stopped else "done" if any(r.ok for r in results) else "failed"
                store.finish_run(context.run, state, {"workloads": [r.to_json() for r in results]})

    def _search(self, context: Context, prefetcher: Prefetcher) -> None:
        from autotune.tuner.study import tune

        while (turn := self._next()) is not None:
            prefetcher.advance(turn.number, self.queue.waiting())
            result = tune(context, self.queue.workloads[turn.number], turn.budget, turn.granted)
            with self._changed:
                self.queue.done(result)
            if self.queue.end is not None:
                self._send_pending()
            if result.interrupted or result.fault:
                return

    def _next(self) -> RegionTurn | None:
        """Wait for a turn; None at the end of the search.

        Nothing is measured on a CPU, or on a GPU that Inductor uses for its own measurements, while Inductor compiles.
        """
        with self._changed:
            while not self._stopped:
                ended = self.queue.end is not None
                may = ended or (_overlaps(self._device) and not self._quiet)
                turn = self.queue.next() if may else None
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
        every = self.queue.waiting()
        if not _overlaps(self._device):
            every = every[: max(1, int(self.queue.left_s / REGION_S))]
            if every:
                self._prefetcher.advance(every[0], every[1:])
        for number in (i for i in every if i not in self._ahead):
            self._ahead.add(number)
            self._baselines.begin(self.queue.workloads[number], self._device)

    def _end(self) -> None:
        """Begin the rest of the search, after the compilation; the caller has the lock."""
        from autotune.store.store import HeldStore

        if self._context is None:
            return
        self._context.end = self.queue.end
        if isinstance(self._context.store, HeldStore):
            self._context.store.publish()
        if self._baselines is not None and self._prefetcher is not None and not _overlaps(self._device):
            self._prefetcher.stop()  # what they compile would disturb the measurements from now on
            self._baselines.close()
            self._baselines = None

    def _report(self, progress: Progress) -> None:
        """Send progress after the end of the compilation; nothing reads it before."""
        with self._changed:
            self._last[progress.workload] = progress
            if self.queue.end is not None:
                self._send_pending()

    def _send_pending(self) -> None:
        """Send what was kept back while Inductor compiled, and the results since."""
        with self._changed:
            for label in list(self._last):
                self._link.send({"progress": asdict(self._last.pop(label))})
            for result in self.queue.results[self._sent :]:
                self._link.send({"result": asdict(result)})
            self._sent = len(self.queue.results)


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


if __name__ == "__main__":
    serve(Search().handle)
