"""Small versions of other libraries' models: correctness and compile time of backend="autotune".

    python -m benchmarks.model_check --out benchmarks/results/cpu/model_check.json

The architectures are those of :mod:`benchmarks.real_models` and more of transformers and timm, two layers deep and
narrow. For each step (training, inference, decoding with a static cache) every region gets its default schedule, so
that our kernels run wherever they can. Then processes take two steps, torch.compile and autotune in turns: with empty
caches, and again with those that the first ones left. --operators compiles no C++ and measures no times: torch's
operators run between our kernels, which takes a fifth of the time.

Results and all gradients are held against eager mode in fp64; the error is that of the worst tensor. Costs are CPU
seconds of the first step, the C++ compiler's included. Wrong is: an error of more than four times torch.compile's, or
one of torch.compile's own that would hide autotune's; more graphs or breaks than torch.compile makes; a
captured region that is not found; a kernel that fails.

--out is written after every model, and the same command goes on where an earlier one ended.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from autotune.cli.options import positive_int, seconds
from autotune.errors import UserError, first_line
from benchmarks import form
from benchmarks.real.families import NAMES, WAYS
from benchmarks.real.further import FURTHER_NAMES

SUITE = "model_check"
ALL = (*NAMES, *FURTHER_NAMES)
COLD, WARM = 1.25, 1.1
"""What a first step may cost of torch.compile's, with empty caches and with full ones."""
TIMES, LEAST, SENSELESS = 4.0, 2e-5, 1e-2
"""An error is one where it is more than this many times torch.compile's, and more than rounding in fp32 may make. Where
torch.compile's is above the last, the step is too sensitive to rounding to tell anything."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0; 1 where something is wrong; 2 for a mistake in the arguments."""
    args = parse(argv)
    try:
        return check_all(args)
    except UserError as error:
        print(f"model_check: {error}", file=sys.stderr)
        return 2


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m benchmarks.model_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", type=lambda text: text.split(","), metavar="A,B", help="names, or parts of names")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    parser.add_argument("--operators", action="store_true", help="right or wrong only, without C++")
    parser.add_argument("--repeats", type=positive_int, default=1, help="of the pair of cold starts (default: 1)")
    parser.add_argument("--timeout", type=seconds, default=600.0, help="for one process (default: 600)")
    parser.add_argument("--until", type=seconds, metavar="S", help="begin no model after so many seconds")
    parser.add_argument("--out", type=Path, help="result file; what is in it is kept")
    args = parser.parse_args(argv)
    wanted = args.models or ALL
    args.models = [name for name in ALL if any(part in name for part in wanted)]
    if not args.models:
        parser.error(f"no model is called so; there are {', '.join(ALL)}")
    return args


def check_all(args: argparse.Namespace) -> int:
    """Check what --out does not hold yet, and print the table of all of it."""
    from autotune.device import identify, resolve_device

    device = resolve_device(args.device)
    label = identify(device).label
    cases = form.finished(args.out, device=label, suite=SUITE, operators=args.operators) if args.out else {}
    begin, failed = time.monotonic(), dict[str, str]()
    for name in (name for name in args.models if name not in cases):
        if args.until and time.monotonic() - begin > args.until:
            break
        try:
            check = right if args.operators else functools.partial(checked, repeats=args.repeats)
            cases[name] = check(name, device, limit=args.timeout)
        except Exception as error:
            failed[name] = first_line(error)
            print(f"{name}: failed: {failed[name]}", file=sys.stderr, flush=True)
            continue
        print(_line(cases[name]), file=sys.stderr, flush=True)
        if args.out:
            form.write(
                args.out,
                label,
                list(cases.values()),
                extra={"suite": SUITE, "operators": args.operators, "failed": failed},
            )
    print(table(list(cases.values())))
    return 1 if failed or any(case["wrong"] for case in cases.values()) else 0


def right(name: str, device: str, limit: float = 600.0) -> dict[str, Any]:
    """The case of a model whose graphs run operator by operator around our kernels."""
    with tempfile.TemporaryDirectory(prefix="autotune-check-") as root:
        case = {"name": name, **apart("by_operators", (name, device, root), limit), "commit": form.commit()}
    return {**case, "wrong": wrong(case)}


def checked(name: str, device: str, repeats: int = 1, limit: float = 600.0) -> dict[str, Any]:
    """The case of a model for the result file."""
    found: dict[str, list[dict[str, Any]]] = {f"{way} {start}": [] for start in ("cold", "warm") for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="autotune-check-") as root:
        prepared = apart("prepare", (name, device, root), limit)
        for _ in range(repeats):
            for start in ("cold", "warm"):
                for way in WAYS:
                    if start == "cold":
                        shutil.rmtree(Path(root, way), ignore_errors=True)
                    found[f"{way} {start}"].append(apart("take_steps", (name, device, root, way), limit))
    last = {who: runs[-1] for who, runs in found.items()}
    case = {
        "name": name,
        **prepared,
        "error": {way: max(run["error"] for s in ("cold", "warm") for run in found[f"{way} {s}"]) for way in WAYS},
        "seconds": {who: statistics.median(run["seconds"] for run in runs) for who, runs in found.items()},
        "wall_s": {who: statistics.median(run["wall_s"] for run in runs) for who, runs in found.items()},
        "graphs": {way: last[f"{way} cold"]["graphs"] for way in WAYS},
        "breaks": {way: last[f"{way} cold"]["breaks"] for way in WAYS},
        "recompiled": {way: last[f"{way} cold"]["recompiled"] for way in WAYS},
        "cached": {way: last[f"{way} warm"]["cached"] for way in WAYS},
        "counters": last["autotune cold"]["counters"],
        "commit": form.commit(),
    }
    return {**case, "wrong": wrong(case), "dearer": dearer(case)}


def wrong(case: Mapping[str, Any]) -> list[str]:
    """The faults of a case, one a line."""
    ours, theirs = case["error"]["autotune"], case["error"]["compile"]
    found = []
    if not ours <= max(TIMES * theirs, LEAST):
        found.append(f"error {ours:.1e}, torch.compile {theirs:.1e}")
    if not theirs <= SENSELESS:
        found.append(f"the check tells nothing: torch.compile's own error is {theirs:.1e}")
    for what in ("graphs", "breaks", "recompiled"):
        if what in case and case[what]["autotune"] > case[what]["compile"]:
            found.append(f"{what}: {case[what]['autotune']}, torch.compile {case[what]['compile']}")
    if "cached" in case and case["cached"]["autotune"] < case["cached"]["compile"]:
        found.append(f"cached graphs: {case['cached']['autotune']}, torch.compile {case['cached']['compile']}")
    counters = case["counters"]
    found += [f"{what}: {counters[what]}" for what in ("misses", "fallbacks", "wrong_results") if counters.get(what)]
    if counters.get("hits", 0) < case["regions"] - counters.get("misses", 0):
        found.append(f"hits: {counters.get('hits', 0)} of {case['regions']} regions")
    return found + [f"no schedule for {label}: {why}" for label, why in case["refused"].items()]


def dearer(case: Mapping[str, Any]) -> dict[str, float]:
    """First steps that cost more of torch.compile's than they should, and how many times."""
    found = {}
    for start, most in (("cold", COLD), ("warm", WARM)):
        ratio = over(case, start)
        if ratio > most:
            found[start] = round(ratio, 3)
    return found


def over(case: Mapping[str, Any], start: str) -> float:
    """The ratio of a first step's time to torch.compile's."""
    ratio: float = case["seconds"][f"autotune {start}"] / case["seconds"][f"compile {start}"]
    return ratio


def _line(case: Mapping[str, Any]) -> str:
    parts = [f"{case['counters'].get('hits', 0)} of {case['regions']} regions"]
    parts.append(f"error {case['error']['autotune']:.1e} of {case['error']['compile']:.1e}")
    for start in ("cold", "warm") if "seconds" in case else ():
        ours, theirs = (case["seconds"][f"{way} {start}"] for way in ("autotune", "compile"))
        parts.append(f"{start} {ours:.1f} of {theirs:.1f} s ({over(case, start):.2f})")
    return f"{case['name']}: {', '.join(parts)}{'; WRONG: ' + '; '.join(case['wrong']) if case['wrong'] else ''}"


def table(cases: Sequence[Mapping[str, Any]]) -> str:
    """A line for each model, then the geometric means of first steps' times, for a terminal."""
    from benchmarks.fusion.report import geometric_mean

    if not cases:
        return "nothing was checked"
    lines = [_line(case) for case in cases]
    for start, most in (("cold", COLD), ("warm", WARM)):
        ratios = {case["name"]: over(case, start) for case in cases if "seconds" in case}
        if not ratios:
            continue
        worst = max(ratios, key=ratios.__getitem__)
        more = sum(ratio > most for ratio in ratios.values())
        mean = geometric_mean(list(ratios.values()))
        lines.append(
            f"{start} start over torch.compile's: {mean:.2f}x in the geometric mean of {len(ratios)}; worst {worst}"
            f" {ratios[worst]:.2f}x; {more} above {most}"
        )
    bad = sum(bool(case["wrong"]) for case in cases)
    none = [case["name"] for case in cases if not case["regions"]]
    lines.append(f"{bad} of {len(cases)} wrong; without a region: {', '.join(none) or 'none'}")
    return "\n".join(lines)


def apart(stage: str, arguments: Sequence[Any], limit: float) -> dict[str, Any]:
    """The result of a function of :mod:`benchmarks.real.check` in a separate process.

    Raises:
        RuntimeError: it failed, or took too long.
    """
    # One after the other, in this process: CPU seconds exclude other processes.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")  # the OpenMP threads of a process that forks are gone in its child
    mine, yours = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(yours, stage, tuple(arguments)))
    process.start()
    yours.close()
    try:
        if not mine.poll(limit):
            raise RuntimeError(f"{stage} took more than {limit:g} s")
        answer = json.loads(mine.recv())
    except EOFError:
        process.join()
        raise RuntimeError(f"{stage} ended with {process.exitcode}") from None
    finally:
        if process.is_alive():
            process.join(5)
            process.kill()
    if "failed" in answer:
        raise RuntimeError(answer["failed"])
    return dict(answer)


def _answer(to: Connection, stage: str, arguments: tuple[Any, ...]) -> None:
    try:
        import benchmarks.model_check_imports  # noqa: F401
        from benchmarks.real import check

        to.send(json.dumps(getattr(check, stage)(*arguments)))
    except Exception as error:
        to.send(json.dumps({"failed": f"{stage}: {first_line(error)}"}))


if __name__ == "__main__":
    raise SystemExit(main())
