"""``autotune compare``: the time of a whole step in eager mode, with ``torch.compile`` and with autotune."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autotune import numerics
from autotune.cli import regression
from autotune.cli.options import (
    add_db,
    add_device,
    add_json,
    add_replica,
    add_target,
    check_modes,
    command_line,
    modes,
    positive_int,
)
from autotune.cli.output import TUNABLE, aligned, machine_output, microseconds, ratio
from autotune.ir.nodes import asking
from autotune.measure.policy import default_policy
from autotune.runtime.deployment import deployment
from autotune.store import attached
from autotune.store.records import BUSY
from autotune.words import plural

if TYPE_CHECKING:
    from autotune.bench.step import Comparison

SLOWER = 0.99
"""Speedup over ``torch.compile`` below which autotune is slower; from this to 1 is a tie."""

UNSURE = 0.5
"""Factor of the interquartile range of 25 to 40 samples: two standard errors of the difference of two medians."""

APART = 2.0
"""Results are reported if they differ from eager's by more than this many times ``torch.compile``'s difference."""

ROUNDING, LOW = 1e-5, 1e-2
"""Differences from eager's that are not reported, with ``torch.compile``'s results and without (16-bit types)."""

BUSY_NOTE = "busy: other processes disturbed the comparison; compare again on a quiet machine."


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "compare",
        command="compare",
        help="time a whole step in eager mode, with torch.compile and with autotune",
        description="Time a whole step of a target, library calls included, in one process: in eager mode, with "
        'torch.compile and with torch.compile(backend="autotune"), in turn. On a GPU, count the kernels of each. This '
        "command searches and stores nothing: run `autotune search` for the target first.",
    )
    add_target(parser, names=("fusion",))
    about = (
        "modes of torch.compile, for it and for autotune, separated by commas: default, reduce-overhead, max-autotune,"
        " max-autotune-no-cudagraphs (default: default); on a GPU every step, also in eager mode, runs as one CUDA"
        " graph, so modes differ in their kernels only"
    )
    parser.add_argument("--mode", default=["default"], type=modes, metavar="M,...", help=about)
    about = "timed runs of each (default: 40 on a GPU and 25 on a CPU, or as many as ten seconds allow)"
    parser.add_argument("--rounds", type=positive_int, metavar="N", help=about)
    regression.add_arguments(parser)
    add_device(parser)
    add_db(parser)
    add_replica(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compare; returns 0, 1 if the step fails in eager mode or with autotune, or 3 if it became slower."""
    with machine_output(args.json) as emit:
        from autotune.cli import step_verdicts

        with attached(args.db, args.db_read):  # raises UserError first if the database cannot be used
            pass
        from autotune.bench.step import AUTOTUNE, NotCompared, compare
        from autotune.device import identify, resolve_device
        from autotune.domains.fusion.program_spec import resolve, training

        device = resolve_device(args.device)
        check_modes(args.mode)
        regression.check(args)
        fn, (inputs, kwargs), label = resolve(args.target, args.inputs, device, args.matmul_precision)
        where = identify(device)
        record = regression.recorded(args, label, where)
        given = training(fn, inputs, kwargs, label, train=args.train)
        try:
            with deployment().deploying_from(args.db, args.db_read), asking(args.precision), given as (inputs, named):
                found = compare(
                    fn,
                    inputs,
                    named,
                    train=args.train,
                    device=device,
                    mode=args.mode,
                    policy=_policy(args.rounds, device),
                    say=lambda stage, seconds: print(f"{stage}: {seconds:.1f} s", file=sys.stderr, flush=True),
                )
        except NotCompared as error:
            print(f"autotune: {label} fails in eager mode: {error}", file=sys.stderr)
            return 1
        verdicts = step_verdicts.verdicts_on(args, label, device, found.modes)
        answer = _answer(args, label, device, where.label, found)
        judged = regression.judged(args, label, where, found, record)
        against = {"against": [change.to_json() for change in judged]} if judged else {}
        emit({**answer, "verdicts": [step_verdicts.to_json(verdict) for verdict in verdicts], **against})
    if not args.json:
        step = "a training step" if args.train else "a forward step"
        named_modes = f"mode{'s' if len(args.mode) > 1 else ''} {', '.join(args.mode)}"
        print(f"{label}, {step} on {where.name}, {named_modes}")
        if under := numerics.read([device]):
            print(f"with {numerics.text(under)}")
        verdict_lines = [line for verdict in verdicts for line in step_verdicts.lines(verdict)]
        below = [
            *notes(found, command_line("search", args)),
            *uncovered(found),
            *verdict_lines,
            *regression.lines(args, judged),
        ]
        print("\n".join([*table(found), *below]))
    return (
        1 if found.fastest(AUTOTUNE) is None else (regression.SLOWER if any(change.slower for change in judged) else 0)
    )


def _policy(rounds: int | None, device: str) -> Any:
    """The measurement policy, with ``--rounds`` and without a time limit if they are given."""
    policy = default_policy(device)
    return policy if rounds is None else dataclasses.replace(policy, final_rounds=rounds, final_s=math.inf)


def _answer(args: argparse.Namespace, label: str, device: str, name: str, found: Comparison) -> dict[str, Any]:
    """The JSON object; times in microseconds, speedups over ``torch.compile``."""
    from autotune.bench.step import AUTOTUNE, CONTENDERS
    from autotune.device import environment
    from autotune.files import commit

    steps = {who: {**s.to_json(), "speedup": found.over_compile(who)} for who, s in found.steps.items()}
    return {
        "target": label,
        "train": args.train,
        "device": device,
        "device_name": name,
        "modes": args.mode,
        "modes_run": list(found.modes),
        "numerics": numerics.read([device]),
        "steps": steps,
        "fastest": {kind: found.fastest(kind) for kind in CONTENDERS},
        "speedup": found.over_compile(found.fastest(AUTOTUNE)),
        "failed": dict(found.failed),
        "counters": dict(found.counters),
        "coverage": found.coverage.to_json(),
        "random": found.random,
        "changing": found.changing,
        "seconds": dict(found.seconds),
        "others_busy": round(found.others, 2),
        "commit": commit(),
        "environment": environment(device).to_json(),
    }


def table(found: Comparison) -> list[str]:
    """A line for each contender; on a GPU with the kernels that it launches."""
    from autotune.bench.step import CONTENDERS

    heads, contenders = ["", "step", "speedup"], [who for kind in CONTENDERS for who in found.of(kind)]
    rows = [[who, *_times(found, who)] for who in contenders]
    kernels = [found.steps[who].kernels if who in found.steps else None for who in contenders]
    if any(kernels):
        heads += ["kernels", "memory-intensive", "library"]
        columns = [_totals(kernels), _kinds(kernels, "memory_intensive"), _kinds(kernels, "library")]
        rows = [[*row, *cells] for row, cells in zip(rows, zip(*columns, strict=True), strict=True)]
    return aligned([heads, *rows])


def _times(found: Comparison, who: str) -> tuple[str, str]:
    step = found.steps.get(who)
    return microseconds(step.us if step else None), ratio(found.over_compile(who))


def _totals(kernels: Sequence[Mapping[str, Any] | None]) -> list[str]:
    return [str(found["memory_intensive"] + found["library"]) if found else "–" for found in kernels]


def _kinds(kernels: Sequence[Mapping[str, Any] | None], kind: str) -> list[str]:
    cells = [(str(found[kind]), microseconds(found[f"{kind}_us"])) if found else ("", "–") for found in kernels]
    wide = max(len(us) for _, us in cells)
    return [f"{count}  {us.rjust(wide)}" for count, us in cells]


def notes(found: Comparison, command: str) -> list[str]:
    """Notes below the table, one per line.

    Args:
        command: that searches regions without a schedule.
    """
    return [*_attention(found), *_regions(found, command), *_results(found), *_timing(found, command)]


def uncovered(found: Comparison) -> Iterator[str]:
    """The table of operators that Inductor compiles, between empty lines; nothing if they move no bytes."""
    if any(not row.stored for row in found.coverage.rows):
        yield from ("", *found.coverage.lines(), "")


def _attention(found: Comparison) -> Iterator[str]:
    if calls := found.counters.get("attention", 0):
        disable = "AUTOTUNE_ATTENTION=keep disables this"
        yield f"{plural(calls, 'call')} of attention rewritten as a fused kernel ({disable})"


def _regions(found: Comparison, command: str) -> Iterator[str]:
    count = found.counters.get
    out, misses = count("left", 0), count("misses", 0)
    hits = count("hits", 0) + out  # ``left``: regions left out by the step's verdict, which are not looked up
    if by_options := count("left_by_options", 0):
        from autotune.compiler.capture.options import requirements

        verb = "is" if by_options == 1 else "are"
        why = "since an option requires other results"
        yield ": ".join([f"{plural(by_options, 'region')} {verb} left to Inductor, {why}", *requirements(found.device)])
    if not hits + misses + by_options:
        yield f"the step has no region that this version can tune: {TUNABLE}"
    if not hits + misses:
        return
    every = plural(hits + misses, "region")
    line = f"{hits} of {every} {'has' if 1 in (hits, hits + misses) else 'have'} a schedule"
    if left := count("baseline_wins", 0):
        line += f", {left} of which {'runs' if left == 1 else 'run'} the code of Inductor or of eager mode"
    if out:
        line += f", {out} of which {'is' if out == 1 else 'are'} left to Inductor by the verdict on the step"
    if other := count("hits_other_rows", 0):
        line += f", {other} of which {'was' if other == 1 else 'were'} tuned for another number of rows"
    if given := count("hits_packaged", 0):
        line += f", {given} of which {'is' if given == 1 else 'are'} packaged with autotune"
    yield line
    if misses:
        were, them = ("was", "it") if misses == 1 else ("were", "them")
        yield f"{misses} of {every} {were} not searched on this device: `{command}` searches {them}"
    if failed := count("fallbacks", 0):
        yield f"{plural(failed, 'region')} ran without the stored kernel, which could not be loaded or launched"


def _results(found: Comparison) -> Iterator[str]:
    from autotune.bench.step import AUTOTUNE, COMPILE, EAGER

    if found.random:
        yield "the step draws random numbers: results are not compared"
        return
    if found.changing:
        yield "results are not compared: in eager mode each call of the step returns others (it may change its inputs)"
        return
    steps = found.steps
    both = [who for kind in (COMPILE, AUTOTUNE) for who in found.of(kind)]
    wrong = [who for who in both if who in steps and steps[who].disagrees]
    for who in wrong:
        yield f"{who}'s RESULTS ARE NOT EAGER'S: they have other shapes, or other elements are finite"
    ours, theirs = (_farthest(found, kind) for kind in (AUTOTUNE, COMPILE))
    if ours is None or wrong:
        return
    limit = LOW if theirs is None else max(ROUNDING, APART * theirs, APART * (steps[EAGER].difference or 0.0))
    if ours > limit:
        beside = "" if theirs is None else f", torch.compile's by {theirs:.1g}"
        yield f"autotune's results differ from eager's by {ours:.1g} of their root mean square{beside}"


def _farthest(found: Comparison, kind: str) -> float | None:
    apart = [found.steps[who].difference for who in found.of(kind) if who in found.steps]
    return max((d for d in apart if d is not None), default=None)


def _timing(found: Comparison, command: str) -> Iterator[str]:
    from autotune.bench.step import AUTOTUNE, COMPILE

    loose = [who for who, s in found.steps.items() if not s.captured]
    if found.device.startswith("cuda") and loose:
        yield f"{', '.join(loose)}: the step cannot be captured in a CUDA graph, so times include launches from Python"
    for who, why in found.failed.items():
        yield f"{who} failed: {why}"
    fastest = [best for kind in (COMPILE, AUTOTUNE) if (best := found.fastest(kind)) is not None]
    speedup = found.over_compile(found.fastest(AUTOTUNE))
    if speedup is not None and speedup < SLOWER:
        noise = max(found.steps[who].noise for who in fastest)
        more = "search the other regions" if found.counters.get("misses") else f"run `{command}` with more --timeout"
        if 1 / speedup - 1 < UNSURE * noise:
            doubt = f"but samples vary by {noise:.0%}: compare again with more --rounds"
            yield f"autotune was slower than torch.compile, {ratio(speedup)}, {doubt}"
        else:
            slower = f"autotune is SLOWER than torch.compile, {ratio(speedup)}"
            yield f"{slower}: {more}, or do without autotune in this step"
    if found.others > BUSY:
        yield BUSY_NOTE
