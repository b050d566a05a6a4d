"""Check of C3's strategies and ``autotune.overlap`` on these GPUs: every engine with all its options.

    python tests/gpu/c3_check.py [--ranks N] [--variants 2] [--only NAME ...] [--device cuda:0|cpu] [--out FILE.json]

Starts a process for every GPU. First strategies, by the hundred, on shares of one element, of a prime number and of
megabytes: every element of two calls back to back is compared, and the concurrent GEMM. Then ``autotune.overlap`` as
programs use it: loops, functions, training, CUDA graphs, two in flight, a group of some of the ranks. Prints a line
for each failure, goes on after it (with new processes, where the old ones are lost), and at the end "checked N bad M".
The exit code is 1 if M is not 0, and 2 where there are too few GPUs. About a minute on 2 to 8 GPUs; ``--only`` takes
names of engines, of collectives and of the checks of deployment.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from autotune.domains.c3.measuring.ranks import Ranks
from autotune.domains.c3.scenario import COLLECTIVES
from autotune.errors import UserError
from autotune.measure.worker import WorkerFault
from tests.gpu.c3.check import ENGINES, Batch, batches
from tests.gpu.c3.check_deploy import CHECKS
from tests.gpu.c3_host import open_ranks, parser, write

STRATEGIES, DEPLOYED = "tests.gpu.c3.check:strategies", "tests.gpu.c3.check_deploy:deployed"
NAMES = (*dict.fromkeys(engine for side in ENGINES.values() for engine in side), *COLLECTIVES, *CHECKS)
FAULTS = 3  # in one batch of strategies, after which the rest of it is left
MOST_FAULTS = 12  # in all: each costs new processes, and a hang its time limit
CALL_S, EACH_S = 45.0, 0.2  # seconds that a call may take, and more for each strategy


class Check:
    """The results so far.

    Attributes:
        checked: strategies by engine, and checks of deployment.
        bad: a line for each failure.
    """

    def __init__(self, ranks: Ranks, seed: int, folder: Path) -> None:
        self.ranks, self.seed, self.folder = ranks, seed, folder
        self.checked: Counter[str] = Counter()
        self.bad: list[str] = []
        self.faults = 0

    def fail(self, line: str) -> None:
        self.bad.append(line)
        print(f"BAD {line}", flush=True)

    def fault(self, line: str) -> None:
        """A failure that took the processes with it."""
        self.fail(line)
        self.faults += 1

    @property
    def hopeless(self) -> bool:
        return self.faults >= MOST_FAULTS

    def batch(self, batch: Batch) -> None:
        """Check a batch of strategies; after one that breaks the ranks go on with the next."""
        progress, first, faults = self.folder / "progress", 0, 0
        while first < len(batch.configs) and not self.hopeless:
            if faults == FAULTS:
                self.fail(f"{batch.label}: {len(batch.configs) - first} strategies are left out")
                return
            progress.write_text("")
            arguments = {
                "scenario": batch.scenario.to_json(),
                "configs": [dict(config) for config in batch.configs[first:]],
                "seed": self.seed + first,
                "progress": str(progress),
            }
            try:
                found = self.ranks.call(STRATEGIES, arguments, CALL_S + EACH_S * len(batch.configs))[0]
            except WorkerFault as fault:
                found = [json.loads(line) for line in progress.read_text().splitlines()]
                self.fault(f"{batch.told(min(first + len(found), len(batch.configs) - 1))}: {fault}")
                self.checked[batch.engine] += 1
                faults += 1
            for number, what in enumerate(found):
                if what:
                    self.fail(f"{batch.told(first + number)}: {what}")
            self.checked[batch.engine] += len(found)
            first += len(found) + 1  # the one after those is to blame

    def deployment(self, name: str) -> None:
        """One of the checks of ``autotune.overlap``."""
        self.checked[name] += 1
        try:
            answers = self.ranks.call(DEPLOYED, {"check": name, "db": str(self.folder / f"{name}.db")}, 2 * CALL_S)
        except WorkerFault as fault:
            self.fault(f"deployment, {name}: {fault}")
            return
        for line in distinct(answers):
            self.fail(f"deployment, {name}: {line}")


def distinct(answers: Sequence[Sequence[str]]) -> list[str]:
    """Each line once, with the first rank that reported it."""
    found: dict[str, int] = {}
    for rank, lines in enumerate(answers):
        for line in lines:
            found.setdefault(line, rank)
    return [f"rank {rank}: {line}" for line, rank in found.items()]


def options_of(words: list[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    arguments = parser(__doc__.splitlines()[0])
    about = "ways to share the device, for each way to move data (default: %(default)s)"
    arguments.add_argument("--variants", type=int, default=2, metavar="N", help=about)
    about = f"check these alone: {', '.join(NAMES)}"
    arguments.add_argument("--only", nargs="+", default=[], choices=NAMES, metavar="NAME", help=about)
    return arguments.parse_args(words)


def main(words: list[str] | None = None) -> int:
    options = options_of(words)
    begin = time.monotonic()
    try:
        ranks, device = open_ranks(options)
    except UserError as mistake:
        print(f"c3_check: {mistake}", file=sys.stderr)
        return 2
    with ranks, tempfile.TemporaryDirectory() as folder:
        check = Check(ranks, options.seed, Path(folder))
        todo, names = chosen(ranks.ranks, device, options)
        count = sum(len(batch.configs) for batch in todo)
        print(f"{count} strategies, {len(names)} checks of deployment, on {ranks.ranks} ranks of {device}", flush=True)
        for batch in todo:
            check.batch(batch)
        took = time.monotonic() - begin
        for name in names:
            if not check.hopeless:
                check.deployment(name)
        if check.hopeless:
            check.fail("given up: the ranks broke too often")
        result: dict[str, Any] = {
            "bad": check.bad,
            "seed": options.seed,
            "strategies_s": round(took, 1),
            "wall_s": round(time.monotonic() - begin, 1),
        }
        write(options.out, ranks.ranks, device, dict(check.checked), result)
    print(f"{dict(check.checked)}; {result['strategies_s']} s for strategies, {result['wall_s']} s in all")
    print(f"checked {sum(check.checked.values())} bad {len(check.bad)}")
    return int(bool(check.bad))


def chosen(ranks: int, device: str, options: argparse.Namespace) -> tuple[list[Batch], list[str]]:
    """The batches and the checks of deployment that ``--only`` leaves."""
    todo = batches(ranks, device.partition(":")[0], seed=options.seed, variants=options.variants)
    only = set(options.only)
    engines, ops = {b.engine for b in todo} & only, {b.scenario.collective for b in todo} & only
    names = [name for name in CHECKS if not only or name in only]
    if only and not engines and not ops:
        return [], names

    def left(batch: Batch) -> bool:
        return (not engines or batch.engine in engines) and (not ops or batch.scenario.collective in ops)

    return [batch for batch in todo if left(batch)], names


if __name__ == "__main__":
    raise SystemExit(main())
