"""What came of a search, of any domain: how it is told, and the exit code."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotune.store import Store
    from autotune.tuner.result import Result
    from autotune.workload import Workload


@dataclass(frozen=True)
class Searched:
    """What a search of workloads of one domain came to.

    Attributes:
        answer: for ``--json``.
        results: of those that were begun, and of those that were not what is known; how many were not is ``not_begun``
            of the answer.
        reasons: fingerprint to why nothing could be measured.
        show: prints the answer on stdout.
        captured: fingerprints of all workloads, those that were not begun included.
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
    """Search workloads as the command's options say, and show how far it is; a busy machine is told at the end.

    Args:
        timeout: seconds for all of them.
        command: to note with the run.
        options: more of :func:`autotune.api.tune_workloads`.
    """
    from autotune.api import tune_workloads
    from autotune.cli.progress import ProgressDisplay
    from autotune.tuner.result import BusyMachine, busy_note

    with ProgressDisplay(of=len(workloads)) as display, warnings.catch_warnings():
        warnings.simplefilter("ignore", BusyMachine)  # told in our own words, after the display has gone
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
    """How many of so many workloads the search did not come to."""
    return workloads - sum(result.begun for result in results)


def conclude(done: Sequence[Searched], json: bool) -> int:
    """Tell what came of a search; returns the exit code.

    Args:
        json: the answers have been printed.

    Raises:
        KeyboardInterrupt: the user interrupted it.
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
            many += f" begun ({known} known from earlier)" if known else " begun"
            more = "give it more --timeout, or the same command again, which goes on with what is left"
            print(f"autotune: WARNING: the time was up before {many}: {more}", file=sys.stderr)
    if any(searched.interrupted for searched in done):
        raise KeyboardInterrupt
    if broken is not None:
        mend = "nothing of it was stored; mend that, and the same command goes on from there"
        print(f"autotune: STOPPED, the machine failed on {broken.label}: {broken.error} ({mend})", file=sys.stderr)
        return 1
    return 0 if any(result.ok for searched in done for result in searched.results) else 1


def reason(store: Store, result: Result) -> str:
    """Why no candidate worked, in one line: what the machine said, or how they failed and the commonest reason."""
    if result.error:
        return result.error
    failed = [m for m in store.measurements(workload=result.workload, policy=result.policy) if m.reason]
    if not failed:
        return ""
    counts = Counter(str(m.status) for m in failed)
    (reason, times), *_ = Counter(m.reason for m in failed).most_common(1)
    statuses = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    return f"{statuses}; {times} of them: {reason}"
