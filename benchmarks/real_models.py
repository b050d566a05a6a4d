"""Models that people use, whole: torch.compile in each of its modes, Liger Kernel, and the same with tuned regions.

    python -m benchmarks.real_models --device cuda:0 --db real.db --out benchmarks/results/h200/real_models.json

The models are those of transformers and timm, made from the libraries' own configurations with random weights; --list
shows them. The extra ``bench`` installs them, and nothing else is downloaded. For each, in a separate process: a
search of --search seconds into --db, and the verdict on the step, as `autotune search` ends with. Then a step of eager
mode, of torch.compile and of torch.compile(backend="autotune") in the same --modes, and of Liger Kernel with
torch.compile where it has the model; interleaved, medians, on a GPU each as the replay of one CUDA graph where it can
be captured. Weights and arithmetic are bf16 on a GPU, without autocast.

--out is written after every model. A model that is in it already in all --modes is skipped, so that the same command
goes on where an earlier one ended, and another one adds a mode; one that failed is noted there, and tried again with
--retry. With --beside, a model that runs out of memory among others is measured again, alone. Depth is the published
one, unless memory is too small (then "layers" is below "published_layers" and "cut" has the reason) or --layers
sets it.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from autotune.cli.options import positive_int, seconds
from autotune.errors import UserError, first_line
from benchmarks import form
from benchmarks.real import table
from benchmarks.real.families import DEFAULT, FAMILIES, NAMES
from benchmarks.real.measure import COMPARED, MODES, Options, measure, merged, missing_modes
from benchmarks.suite_options import names, program_parser
from benchmarks.user_programs.host import as_they_end

SUITE = "real_models"
T = TypeVar("T")
_running: set[subprocess.Popen[str]] = set()


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0; 1 where a model failed; 2 for a mistake in the arguments; 130 where interrupted."""
    args = parse(argv)
    if args.measure:
        return measured_here(args.measure, Options.from_json(args.options))
    if args.list:
        print(listing())
        return 0
    try:
        with tempfile.TemporaryDirectory(prefix="autotune-real-") as folder:
            db = args.db or os.path.join(folder, "real.db")
            one_search = os.path.join(folder, "search") if args.beside > 1 else ""
            return measure_all(args, db if "://" in db else os.path.abspath(db), one_search)
    except UserError as error:
        print(f"real_models: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        more = "; the same command goes on with the rest" if args.out else ""
        print(f"real_models: interrupted{more}", file=sys.stderr)
        return 130


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = program_parser(f"benchmarks.{SUITE}", __doc__, "model", rounds=40, timeout_s=3600.0)
    about = "by comma: names as of --list, or a family's name for what is measured of it (default: those marked)"
    parser.add_argument("--models", type=names, default=list(DEFAULT), metavar="A,B", help=about)
    parser.add_argument("--layers", type=positive_int, metavar="N", help="at most so many layers (of each stage)")
    parser.add_argument("--batch", type=positive_int, metavar="N", help="sequences or images (default: the model's)")
    about = "seconds to search for each model; 0 deploys what --db holds (default: 120; 5 with --tiny)"
    parser.add_argument("--search", type=float, metavar="S", help=about)
    about = "seconds for the verdict on the step in each mode, which is obeyed (default: 120; 0, for none, with --tiny)"
    parser.add_argument("--step-timeout", type=float, metavar="S", help=about)
    about = f"of torch.compile, by comma: {', '.join(MODES)} (default: all on a GPU, default on a CPU)"
    parser.add_argument("--modes", type=names, metavar="M,...", help=about)
    parser.add_argument("--seconds", type=seconds, default=20.0, help="of interleaved timing at most (default: 20)")
    parser.add_argument("--until", type=seconds, metavar="S", help="begin no model after so many seconds")
    parser.add_argument("--db", help="database (default: a new one, thrown away)")
    parser.add_argument("--retry", action="store_true", help="measure again what failed")
    parser.add_argument("--measure", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--options", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.models = list(dict.fromkeys(name for given in args.models for name in _names(given, parser)))
    if args.search is None:
        args.search = 5.0 if args.tiny else 120.0
    if args.step_timeout is None:
        args.step_timeout = 0.0 if args.tiny else 120.0
    for name, value in (("--search", args.search), ("--step-timeout", args.step_timeout)):
        if not 0 <= value < float("inf"):
            parser.error(f"{name} is a number of seconds, or 0")
    if unknown := [m for m in args.modes or () if m not in MODES]:
        parser.error(f"unknown mode {', '.join(unknown)}; there are {', '.join(MODES)}")
    if args.modes and not set(args.modes) & set(COMPARED):
        parser.error(f"--modes needs one of {', '.join(COMPARED)}")
    return args


def _names(given: str, parser: argparse.ArgumentParser) -> list[str]:
    if given in NAMES:
        return [given]
    if given not in FAMILIES:
        parser.error(f"unknown model {given!r}; --list shows them")
    return [name for name in DEFAULT if name.rpartition("_")[0] == given]


def listing() -> str:
    """All models, a line each."""
    rows = [("", "name", "layers", "batch x length", "library", "what it is")]
    for name in NAMES:
        known, _, kind = name.rpartition("_")
        f = FAMILIES[known]
        layers = f"{f.cut} of {f.layers}" if f.cut else str(f.layers)
        rows.append(("*" if name in DEFAULT else "", name, layers, str(f.shapes[kind]), f.library, f.about))
    widths = [max(len(row[k]) for row in rows) for k in range(6)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    notes = ["* measured where no --models is given"]
    notes += [f"{f.about}: {f.cut} of {f.layers} layers, since {f.why}" for f in FAMILIES.values() if f.cut]
    for library in ("transformers", "timm", "liger_kernel"):
        if importlib.util.find_spec(library) is None:
            notes.append(f"{library.replace('_', '-')} is not installed here: pip install 'autotune-torch[bench]'")
    return "\n".join([*lines, "", *notes])


def measure_all(args: argparse.Namespace, db: str, one_search: str = "") -> int:
    """Measure what --out does not hold yet, a process a model, and print the table of all of it."""
    from autotune.device import environment, identify, resolve_device
    from autotune.store.opening import files_for

    device = resolve_device(args.device)
    identity, env = identify(device), environment(device)
    if not args.search and not _holds_schedules(db, identity.fingerprint):
        known = files_for(identity)
        mend = f"autotune import package:{known[0].stem} --db {args.db or 'real.db'}" if known else "a search with --db"
        raise UserError(f"--search 0 deploys what --db holds, which is nothing for {identity.name}; {mend} fills one")
    label = identity.label
    extra: dict[str, Any] = {"suite": SUITE, "tiny": args.tiny}
    cases = form.finished(args.out, device=label, **extra) if args.out else {}
    failed: dict[str, str] = json.loads(args.out.read_text()).get("failed", {}) if cases or _there(args.out) else {}
    modes = args.modes or (list(MODES) if device.startswith("cuda") else ["default"])
    whole = {name for name, case in cases.items() if not missing_modes(case, modes)}
    done = whole | ({} if args.retry else failed).keys()
    for name in (name for name in args.models if name in done):
        _say(f"{name}: {'is there already, skipped' if name in whole else 'failed before, --retry measures it again'}")
    shape = (args.tiny, args.layers, args.batch)
    options = Options(device, db, *shape, args.search, modes, args.rounds, args.seconds, args.step_timeout, one_search)
    versions = {k: str(v) for k, v in (("cuda", env.cuda), ("driver", env.driver)) if v}
    begin, fresh = time.monotonic(), dict[str, str]()
    waiting = [name for name in args.models if name not in done]
    left: list[str] = []

    def one(name: str) -> tuple[dict[str, Any] | None, str] | None:
        late = args.until and time.monotonic() - begin > args.until
        if late:
            return None
        lacks = missing_modes(cases[name], modes) if name in cases else modes
        return measured(name, dataclasses.replace(options, modes=lacks), args.timeout)

    crowded: list[str] = []

    def note(name: str, found: tuple[dict[str, Any] | None, str] | None) -> None:
        if found is None:
            left.append(name)
            return
        case, why = found
        if case is None:
            failed[name] = fresh[name] = why
            _say(f"{name}: failed: {why}")
        else:
            failed.pop(name, None)
            fresh.pop(name, None)
            cases[name] = merged(cases[name], case) if name in cases else case
            _say(f"{name}: {told(case)}")
        if args.out:
            form.write(args.out, label, list(cases.values()), versions, extra={**extra, "failed": failed})

    for name, found in side_by_side(one, waiting, args.beside):
        if args.beside > 1 and found is not None and found[0] is None and "OutOfMemoryError" in found[1]:
            crowded.append(name)
            _say(f"{name}: no memory beside the others; it is measured alone afterwards")
        else:
            note(name, found)
    for name in crowded:
        note(name, one(name))
    if left:
        _say(f"left for another call: {', '.join(left)}")
    print(table.text(list(cases.values()), failed))
    return 1 if fresh else 0


def side_by_side(one: Callable[[str], T], names: Sequence[str], count: int) -> Iterator[tuple[str, T]]:
    """The result of ``one`` for each name, as they end, ``count`` at a time; leaving the loop ends running ones."""
    pool = ThreadPoolExecutor(count)
    asked: dict[Future[T], str] = {}
    try:
        asked |= {pool.submit(one, name): name for name in names}
        for answer in as_they_end(asked):
            yield asked[answer], answer.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        while any(not answer.done() for answer in asked):
            for process in list(_running):
                process.terminate()
            time.sleep(0.05)


def _holds_schedules(db: str, device: str) -> bool:
    from autotune.store import Store

    store = Store.attach(db)
    if store is None:
        return False
    with store:
        return bool(store.schedules(device))


def _there(out: Path | None) -> bool:
    return out is not None and out.exists()


def told(case: dict[str, Any]) -> str:
    """One line of a model that has been measured."""
    over = table.over_best(case)
    ours, theirs = table.fastest(case, "autotune"), table.fastest(case, "compile")
    times = f"{(theirs or 0) / 1e3:.2f} ms with torch.compile, {(ours or 0) / 1e3:.2f} ms with autotune"
    regions = f"{case['counters'].get('hits', 0)} of {case['regions']} regions deployed"
    return f"{times}, {over or 0:.3f}x; {regions}; {case['seconds']['all']:.0f} s"


def measured(name: str, options: Options, limit: float) -> tuple[dict[str, Any] | None, str]:
    """A model's case, or None and the reason, from a separate process, which frees all memory and compiled code."""
    command = [sys.executable, "-m", "benchmarks.real_models", "--measure", name, "--options", options.to_json()]
    searched_here = {**os.environ, "AUTOTUNE_PACKAGED": "refuse"}  # and nothing that comes with autotune
    process = subprocess.Popen(command, cwd=form.ROOT, env=searched_here, stdout=subprocess.PIPE, text=True)
    _running.add(process)
    try:
        out, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        return None, f"took more than {limit:g} s"
    finally:
        _running.discard(process)
        if process.poll() is None:
            process.terminate()
            try:
                process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
    try:
        answer = json.loads(out.splitlines()[-1])
    except (IndexError, ValueError):
        return None, f"the process ended with {process.returncode}"
    return (None, answer["failed"]) if "failed" in answer else (answer, "")


def measured_here(name: str, options: Options) -> int:
    """Measure in this process; the answer is the last line of stdout."""
    from autotune.bench.step import NotCompared

    _quiet()
    try:
        answer = measure(name, options, lambda stage, took: _say(f"  {name}: {stage} {took:.1f} s"))
    except NotCompared as error:
        answer = {"failed": f"it fails as it is: {error}"}
    except Exception as error:
        answer = {"failed": first_line(error)}
    print(json.dumps({**answer, **({} if "failed" in answer else _when())}), flush=True)
    return 1 if "failed" in answer else 0


def _when() -> dict[str, str]:
    from datetime import UTC, datetime

    return {"commit": form.commit(), "when": datetime.now(UTC).isoformat(timespec="seconds")}


def _quiet() -> None:
    """Silence transformers' warnings of random weights and of token numbers beyond a tiny vocabulary."""
    if importlib.util.find_spec("transformers") is not None:
        from transformers.utils import logging

        logging.set_verbosity_error()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
