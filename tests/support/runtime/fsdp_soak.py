"""Thousands of steps of ``autotune.fsdp``, on gloo ranks or on GPUs, of which one is stopped now and then and goes on.

    python -m tests.support.runtime.fsdp_soak --steps 10000 --stops 20
    python -m tests.support.runtime.fsdp_soak --steps 10000 --stops 20 --device cuda --ranks 4
    python -m tests.support.runtime.fsdp_soak --changes --device cuda --ranks 4

Prints a line; the exit code is 1 if a loss differs from stock FSDP2's. With ``--changes`` the program changes its
settings between steps.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from autotune.store import Store
from tests.support.runtime.ranks import Ranks

CHECKS = "tests.support.runtime.fsdp_checks"


def soaked(
    ranks: Ranks, db: str, *, steps: int, stops: int, stopped_s: float, every_s: float = 0.3, limit_s: float = 200
) -> float:
    """The largest relative difference of a loss to stock's; ranks are stopped in turn while they train.

    Args:
        stops: how often a rank is stopped, each for ``stopped_s``; longer than spins last, so that peers look for it.
        every_s: seconds between two stops.
        limit_s: the most that all steps may take.
    """
    over = threading.Event()

    def stop() -> None:
        for number in range(stops):
            if over.wait(every_s):
                return
            pid = ranks.pids[number % len(ranks.pids)]
            os.kill(pid, signal.SIGSTOP)
            try:
                over.wait(stopped_s)
            finally:
                os.kill(pid, signal.SIGCONT)

    stopper = threading.Thread(target=stop)
    stopper.start()
    try:
        answers = ranks.run(CHECKS, "soak", db, steps, timeout_s=limit_s)
    finally:
        over.set()
        stopper.join()
    assert all(answer["engines"] == ["copy"] for answer in answers), answers
    return max(float(answer["worst"]) for answer in answers)


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--stops", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1.5, help="of a stop")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two stops")
    parser.add_argument("--limit", type=float, default=7200, help="the most seconds that all steps may take")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--changes", action="store_true")
    options = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, Ranks(Path(folder), options.ranks, device=options.device) as ranks:
        db = str(Path(folder) / "soak.db")
        Store.open(db).close()
        if options.changes:
            (losses, engines), *_ = ranks.run(CHECKS, "changed", db, folder, 24, 27, timeout_s=options.limit)
            off = [change for change, ours, stock in losses if ours != pytest.approx(stock, rel=1e-3)]
            print(f"{len(losses)} changes with {engines}, {time.monotonic() - begin:.0f} s: off after {off or 'none'}")
            return int(bool(off))
        worst = soaked(
            ranks, db, steps=options.steps, stops=options.stops,
            stopped_s=options.seconds, every_s=options.every, limit_s=options.limit,
        )  # fmt: skip
    print(f"{options.steps} steps, {options.stops} stops, {time.monotonic() - begin:.0f} s: off by {worst:.1e} at most")
    return int(worst > 1e-4)


if __name__ == "__main__":
    sys.exit(main())
