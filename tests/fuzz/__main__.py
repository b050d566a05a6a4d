"""``python -m tests.fuzz``; see :mod:`tests.fuzz.check`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.check import Fuzz, Tally


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Mutated databases and snapshots.")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so long")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    tally, begin = Tally(), time.monotonic()
    done = 0
    with tempfile.TemporaryDirectory(prefix="autotune-fuzz-") as folder:
        fuzz = Fuzz(Path(folder).resolve())
        for seed in range(args.first, args.first + args.cases):
            told = len(tally.faults)
            fuzz.case(seed, tally)
            done += 1
            for fault in tally.faults[told:]:
                print(fault, flush=True)
            if time.monotonic() - begin > args.seconds:
                break
    answer = {
        "cases": done,
        "faults": len(tally.faults),
        "slowest_s": round(tally.slowest_s, 3),
        "seconds": round(time.monotonic() - begin, 1),
        "outcomes": dict(sorted(tally.outcomes.items())),
    }
    print(json.dumps(answer, indent=1))
    if args.out:
        args.out.write_text(json.dumps(answer, indent=1) + "\n")
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
