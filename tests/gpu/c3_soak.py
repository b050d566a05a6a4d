"""Thousands of copy-engine collectives of random sizes, back to back, with late ranks, two in flight, all checked.

    python tests/gpu/c3_soak.py [--calls 10000] [--seed 0] [--ranks N] [--device cuda:0] [--out FILE.json]

Starts a process for every GPU, calls ``tests.gpu.c3.soak`` on all of them and prints a line; the exit
code is 1 if a single element was wrong, or a rank died or hung, and 2 where there are too few GPUs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from autotune.errors import UserError
from autotune.measure.worker import WorkerFault
from tests.gpu.c3_host import open_ranks, parser, write

SOAK = "tests.gpu.c3.soak:soak"


def main(words: list[str] | None = None) -> int:
    assert __doc__ is not None
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--calls", type=int, default=10_000, metavar="N", help="(default: %(default)s)")
    arguments.add_argument(
        "--timeout", type=float, default=540.0, metavar="S", help="hung after (default: %(default)s)"
    )
    options = arguments.parse_args(words)
    try:
        if options.device == "cpu":
            raise UserError("the soak is of copy engines: it needs GPUs")
        ranks, device = open_ranks(options)
    except UserError as mistake:
        print(f"c3_soak: {mistake}", file=sys.stderr)
        return 2
    with ranks:
        try:
            answers = ranks.call(SOAK, {"calls": options.calls, "seed": options.seed}, options.timeout)
        except WorkerFault as fault:
            result: dict[str, Any] = {"calls": options.calls, "fault": str(fault)}
            print(f"FAILED: {fault}")
        else:
            result = summed(answers)
            print(
                f"{result['calls']} calls on {ranks.ranks} ranks in {result['seconds']} s: {result['wrong']} elements"
                f" wrong; {result['pairs']} times two in flight, {result['late']} delays; {result['by_op']}"
            )
        by_op = result.pop("by_op", {})
        write(options.out, ranks.ranks, device, by_op, {**result, "seed": options.seed})
    return int("fault" in result or result["wrong"] > 0 or result["calls"] < options.calls)


def summed(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """The results of all ranks: calls and pairs are common to them, the rest is separate."""
    return {
        **{name: answers[0][name] for name in ("calls", "pairs", "by_op")},
        **{name: sum(answer[name] for answer in answers) for name in ("wrong", "late")},
        "seconds": round(max(answer["seconds"] for answer in answers), 2),
    }


if __name__ == "__main__":
    raise SystemExit(main())
