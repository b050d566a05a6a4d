"""Searches of any domain on the command line: run here or on a cluster, and reported with an exit code."""

from __future__ import annotations

import argparse
import contextlib
import copy
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotune.tuner.result import BusyMachine, Result, busy_note
from autotune.workload import Workload

if TYPE_CHECKING:
    from autotune.store import Store
    from autotune.tuner.cluster.cluster import Cluster, Kind


@dataclass(frozen=True)
class SearchOutcome:
    """The outcome of a search of workloads of one domain.

    Attributes:
        answer: for ``--json``.
        results: of the workloads that were begun, and earlier results of the others. ``not_begun`` of the answer counts
            the others.
        reasons: fingerprint to the reason why nothing could be measured.
        show: prints the answer on stdout.
        captured: fingerprints of all workloads, including those not begun.
    """

    answer: Mapping[str, Any]
    results: Sequence[Result]
    reasons: Mapping[str, str]
    show: Callable[[Mapping[str, Any]], None]
    captured: frozenset[str] = frozenset()

    @property
    def interrupted(self) -> bool:
        return any(result.interrupted for result in self.results)


def tune(
    args: argparse.Namespace,
    devices: str | Sequence[str],
    store: Store,
    workloads: Sequence[Workload],
    timeout: float | None,
    command: str,
    **options: Any,
) -> list[Result]:
    """Search workloads with the command's options and show the progress; warn at the end if the machine was busy.

    Args:
        timeout: seconds for all of them.
        command: stored with the run.
        options: further options of :func:`autotune.api.tune_workloads`.
    """
    from autotune.api import tune_workloads
    from autotune.cli.commands.watch import ProgressDisplay

    with ProgressDisplay(of=len(workloads)) as display, warnings.catch_warnings():
        warnings.simplefilter("ignore", BusyMachine)  # printed below, after the progress display is closed
        results = tune_workloads(
            workloads,
            devices,
            store,
            trials=args.trials,
            timeout=timeout,
            sampler=args.sampler,
            seed=args.seed,
            space_file=args.space,
            progress=display.show,
            command=command,
            **options,
        )
    if note := busy_note(results):
        print(f"autotune: WARNING: {note}", file=sys.stderr)
    return results


def not_begun(workloads: int, results: Sequence[Result]) -> int:
    """Number of workloads that the search did not begin."""
    return workloads - sum(result.begun for result in results)


def conclude(done: Sequence[SearchOutcome], json: bool, advice: str = "") -> int:
    """Print the outcome of a search; returns the exit code.

    Args:
        json: the answers have been printed already.
        advice: a line on the use of the results, printed last if there are some.

    Raises:
        KeyboardInterrupt: the user interrupted the search.
    """
    broken = next((result for searched in done for result in searched.results if result.fault), None)
    for searched in done:
        if not json:
            searched.show(searched.answer)
        for result in searched.results:
            if not result.ok and not result.interrupted and not result.fault:
                why = searched.reasons.get(result.workload) or result.stop
                print(f"autotune: NOTHING COULD BE MEASURED for {result.label}: {why}", file=sys.stderr)
        left = searched.answer.get("not_begun", 0)
        if left and not searched.interrupted and broken is None:
            many = f"{left} workloads were" if left > 1 else "1 workload was"
            known = sum(not result.begun for result in searched.results)
            many += f" begun ({known} with an earlier result)" if known else " begun"
            more = "run the same command again to continue, or give more --timeout"
            print(f"autotune: WARNING: the time was up before {many}: {more}", file=sys.stderr)
    if any(searched.interrupted for searched in done):
        raise KeyboardInterrupt
    if broken is not None:
        mend = "nothing of this workload was stored; repair the machine, and run the same command again to continue"
        print(f"autotune: STOPPED, the machine failed on {broken.label}: {broken.error} ({mend})", file=sys.stderr)
        return 1
    worked = any(result.ok for searched in done for result in searched.results)
    if worked and advice and not json:
        print(f"next: {advice}", file=sys.stderr)
    return 0 if worked else 1


def reason(store: Store, result: Result) -> str:
    """One line on why no candidate worked: the machine's error, or counts by status and the most common reason."""
    if result.error:
        return result.error
    failed = [m for m in store.measurements(workload=result.workload, policy=result.policy) if m.reason]
    if not failed:
        return ""
    counts = Counter(str(m.status) for m in failed)
    (reason, times), *_ = Counter(m.reason for m in failed).most_common(1)
    statuses = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    return f"{statuses}; {times} of them: {reason}"


def given_options(args: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """The options with these names that have a value, as words of the command line."""
    given = ((name, getattr(args, name, None)) for name in names)
    return [word for name, value in given if value is not None for word in (f"--{name}", str(value))]


def add_ray(parser: argparse.ArgumentParser) -> None:
    """Add ``--ray``."""
    about = (
        "search on all devices of the Ray cluster at ADDRESS (HOST:PORT of its head node, or auto on a node of the"
        " cluster), with --device auto, cpu or cuda; several hosts need a PostgreSQL --db (extra `ray`)"
    )
    parser.add_argument("--ray", metavar="ADDRESS", help=about)


@contextlib.contextmanager
def joined_cluster(args: argparse.Namespace) -> Iterator[Cluster | None]:
    """The cluster that the command names, or None.

    Raises:
        UserError: Ray is not installed, no cluster answers at the address, or none of its nodes has the device.
    """
    if args.ray is None:
        yield None
        return
    from autotune.tuner.cluster.cluster import Cluster
    from autotune.tuner.cluster.engine import Engine

    with contextlib.redirect_stdout(sys.stderr):  # Ray prints lost nodes to stdout
        engine = Engine(args.ray)
        try:
            yield Cluster(engine, args.device)
        finally:
            engine.close()


def call_on_node(
    cluster: Cluster | None,
    function: Any,
    args: argparse.Namespace,
    device: str,
    store: Store,
    *more: Any,
    kind: Kind | None = None,
    gpus: int = 1,
) -> Any:
    """``function(args, device, store, *more)``: here, or on a node of the cluster that has the device.

    Args:
        function: at the top level of a module, so that a node can import it.
        kind: of the device; None for any.
        gpus: number that the function needs, if the devices are GPUs.
    """
    if cluster is None:
        return function(args, device, store, *more)
    sent = copy.copy(args)
    sent.db = sent.run = None  # the store has the database's URL; ``run`` is a function of this host
    return cluster.call(function, sent, store, *more, kind=kind, gpus=gpus)


def describe_nodes(cluster: Cluster) -> str:
    """Description of the cluster."""
    nodes = cluster.nodes()
    gpus = f", {sum(node.gpus for node in nodes)} GPUs" if cluster.device != "cpu" else ""
    many = f"{len(nodes)} nodes" if len(nodes) > 1 else "1 node"
    return f"{many} of the Ray cluster at {cluster.address}{gpus}"


def warn(text: object) -> None:
    """Print a warning on stderr."""
    print(f"autotune: WARNING: {text}", file=sys.stderr)
