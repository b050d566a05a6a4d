"""Programs as their users write them: torch.compile, the same with attention rewritten, and a search in the program.

    python -m benchmarks.user_programs --device cuda:0 --search 90 --out user_programs.json

Steps are launched from Python, with the programs' own optimizers, scalers and clipping; models are made from
configurations with random weights, and nothing is downloaded. Each contender runs in its own process, with an empty
database and empty caches of Inductor: "compile" is torch.compile; "attention" is the backend "autotune" without any
kernels; "unsearched" takes predicted schedules, without a search; "search" has the option "search" of that backend.
"again", "unsearched again" and "compile again" are second processes with the database and caches of "search",
"unsearched" and "compile". Two processes of one program take turns by blocks of steps, so that both share clocks. With
--beside, several programs compile and search at the same time; each is timed alone.

--out is written after every contender, and programs in it are skipped. A program whose library is missing, or that no
longer fits --budget, is skipped and listed.
"""

from __future__ import annotations

import argparse
import copy
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autotune.cli.options import positive_int, seconds
from autotune.errors import UserError
from autotune.files import check_output
from benchmarks import form
from benchmarks.suite_options import names, program_parser
from benchmarks.user_programs import step_table
from benchmarks.user_programs.host import Host, as_they_end
from benchmarks.user_programs.program import CONTENDERS, MODES
from benchmarks.user_programs.rounds import Measured, Plan

SUITE = "user_programs"
_COMPILES_S = 40.0
"""Seconds that a process of a program takes beside its search, where none was measured yet."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0; 1 where a program failed; 2 for a mistake in the arguments; 130 where interrupted."""
    args = parse(argv)
    command = shlex.join(["python", "-m", f"benchmarks.{SUITE}", *(sys.argv[1:] if argv is None else argv)])
    if argv is None:  # the contenders are processes of their own sessions: they are to be ended as well
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return listing() if args.list else measure_all(args, command)
    except UserError as error:
        print(f"user_programs: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("user_programs: interrupted", file=sys.stderr)
        return 130


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = program_parser(f"benchmarks.{SUITE}", __doc__, "program", rounds=5, timeout_s=1800.0)
    about = "names as of --list, or their beginnings (default: all but those of held_out*.py)"
    parser.add_argument("--programs", type=names, metavar="A,B", help=about)
    about = f"default: all of {','.join(CONTENDERS)}"
    parser.add_argument("--contenders", type=names, default=list(CONTENDERS), metavar="A,B", help=about)
    parser.add_argument("--search", type=seconds, default=90.0, metavar="S", help="of the option (default: 90)")
    parser.add_argument("--mode", choices=MODES, default="default", help="of torch.compile (default: default)")
    parser.add_argument("--steps", type=positive_int, default=20, help="of a block (default: 20)")
    about = "also time each step as one CUDA graph, where it can be captured; optimizers are made capturable"
    parser.add_argument("--graph", action="store_true", help=about)
    about = "names of kernels of a kind that are kept, those that take most (default: 12)"
    parser.add_argument("--kernels", type=positive_int, default=12, metavar="N", help=about)
    parser.add_argument("--budget", type=seconds, metavar="S", help="for the whole command")
    about = "contenders start side by side, then the second processes; their first steps share the host"
    parser.add_argument("--together", action="store_true", help=about)
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the contenders' standard error and databases")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.contenders if name not in CONTENDERS]:
        parser.error(f"unknown contender {', '.join(unknown)}; there are {', '.join(CONTENDERS)}")
    return args


def listing() -> int:
    """Print all programs, a line each."""
    from benchmarks.user_programs.known import ALL

    width = max(map(len, ALL))
    for name, known in ALL.items():
        lacks = known.lacks()
        print(f"{name.ljust(width)}  {known.about}{f' ({lacks})' if lacks else ''}")
    return 0


def _chosen(given: Sequence[str] | None) -> list[str]:
    from benchmarks.user_programs.known import ALL, PROGRAMS

    if given is None:
        return list(PROGRAMS)
    found: dict[str, None] = {}
    for part in given:
        here = [part] if part in ALL else [name for name in ALL if name.startswith(part)]
        if not here:
            raise UserError(f"unknown program {part!r}; --list shows them")
        found.update(dict.fromkeys(here))
    return list(found)


def measure_all(args: argparse.Namespace, command: str) -> int:
    """Measure what --out does not have yet and print the table of all of it."""
    from autotune.device import environment, identify, resolve_device
    from benchmarks.user_programs.known import ALL

    begin = time.monotonic()
    chosen, device = _chosen(args.programs), resolve_device(args.device)
    if args.out:
        form.check_commit()
        check_output(args.out, f"--out {args.out}", make=True)
    label, env = identify(device).label, environment(device)
    own = {"suite": SUITE, "tiny": args.tiny, "mode": args.mode}
    cases = form.finished(args.out, device=label, **own) if args.out else {}
    versions = {k: str(v) for k, v in (("cuda", env.cuda), ("driver", env.driver)) if v}
    failed, skipped = dict[str, str](), dict[str, str]()
    plan = Plan(
        args.contenders, device, args.mode, args.search, args.steps, args.rounds, args.tiny,
        together=args.together or args.beside > 1, beside=args.beside > 1, names=args.kernels, graph=args.graph,
    )  # fmt: skip
    end = begin + args.budget if args.budget else float("inf")
    longest = args.search + _COMPILES_S * len(args.contenders) if not args.tiny else 0.0
    host, writing, running = Host(), threading.RLock(), list[Measured]()

    def write() -> dict[str, Any]:
        with writing:
            more = {**own, "failed": failed, "skipped": skipped}
            found = list(cases.values())
            if args.out and (cases or failed):
                return form.write(args.out, label, found, versions, command=command, extra=more)
            return {**more, "cases": found}

    def measure(name: str) -> None:
        nonlocal longest
        left = end - time.monotonic()
        if left < 0.8 * longest:
            skipped[name] = f"{max(left, 0):.0f} s of the budget were left"
            return
        started = time.monotonic()
        until = min(end - 2.0, started + args.timeout)
        with tempfile.TemporaryDirectory(prefix="autotune-user-") as folder:
            with Measured(plan, name, Path(folder), until, _say, host) as measured:
                running.append(measured)
                for case in measured.run():
                    case |= {"about": ALL[name].about, "commit": form.commit()}
                    case |= {"when": datetime.now(UTC).isoformat(timespec="seconds")}
                    if any(case[f"{who}_ms"] for who in ("compile", "attention", "unsearched", "search")):
                        with writing:
                            cases[name] = copy.deepcopy(case)
                        write()
                if name not in cases:
                    failed[name] = "; ".join(f"{who}: {why}" for who, why in measured.case["missing"].items())
                    write()
            if args.logs:
                for found in (*Path(folder).glob("*/*.log"), *Path(folder).glob("*/schedules.db*")):
                    (args.logs / name / found.parent.name).mkdir(parents=True, exist_ok=True)
                    shutil.copy(found, args.logs / name / found.parent.name)
        longest = max(longest if name in failed else 0.0, time.monotonic() - started)
        _say(f"{name}: {time.monotonic() - started:.0f} s")

    waiting = []
    for name in chosen:
        if name in cases:
            _say(f"{name}: is there already, skipped")
        elif lacks := ALL[name].lacks():
            skipped[name] = lacks
        else:
            waiting.append(name)
    pool = ThreadPoolExecutor(args.beside)
    try:
        for done in as_they_end([pool.submit(measure, name) for name in waiting]):
            done.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for measured in running:
            measured.end()
        pool.shutdown()
    print(step_table.text(write()), flush=True)
    return 1 if failed else 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
