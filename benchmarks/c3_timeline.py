"""Limits of a strategy: times of several strategies of one scenario in turn, and a table of the events in each.

    python -m benchmarks.c3_timeline --gemm 8192x8192x8192 --collective reduce_scatter --bytes 512MiB \\
        "copy gemm_first ctas=128" "sm comm_first ctas=24"

A strategy is a label, as tables of ``benchmarks.c3`` have it. Both parts alone, the copy engines alone and NCCL alone
are timed with them. The table has rank 0's kernels and copies by the profiler; copies to several peers of one chunk
follow each other. ``--out`` takes both as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import BuildError, Unsupported, UserError
from autotune.task import Artifact, Config
from benchmarks.c3.families import from_label

if TYPE_CHECKING:
    from autotune.domains.c3.group import Group
    from autotune.domains.c3.measuring.bench import Run

_CALL_S = 120.0
ALONE = ("gemm alone", "copies alone", "nccl alone")


def times(
    group: Group, scenario: Mapping[str, Any], configs: Mapping[str, Config], rounds: int, budget_s: float
) -> dict[str, Any]:
    """Verify and time strategies in turn. A collective call, as of ``Ranks.call``.

    Returns:
        ``us``: each one's samples, of the slowest rank; ``failed``: why others have none.
    """
    from autotune.domains.c3.measuring.bench import open_bench
    from autotune.domains.c3.measuring.timing import time_ranks
    from autotune.domains.c3.scenario import Scenario
    from autotune.domains.c3.task import policy

    bench = open_bench(Scenario.from_json(scenario), group)
    runs: dict[str, Run] = {}
    failed: dict[str, str] = {}
    kernels: dict[str, Artifact] = {}
    try:
        for name, config in configs.items():
            run, why = None, ""
            try:
                artifact = _built(kernels, bench.scenario, config, str(bench.device))
                run = bench.load(config, artifact, compute=name not in ALONE[1:], comm=name != ALONE[0])
            except (BuildError, Unsupported) as error:
                why = str(error)
            why = next((w for w in group.gather(why) if w), "")
            if run is not None and not why:
                verdict = bench.verify(run, 1)
                why = next((w for w in group.gather("" if verdict.ok else verdict.detail) if w), "")
            if run is None or why:
                failed[name] = why
            else:
                runs[name] = run
        how = policy(str(bench.device))
        samples = time_ranks(runs, group, how, rounds=rounds, budget_s=budget_s)
    finally:
        bench.close()
    return {"us": samples, "failed": failed}


def _built(kernels: dict[str, Artifact], scenario: Any, config: Config, device: str) -> Artifact:
    """The artifact of a strategy; strategies with equal kernels share one."""
    from autotune.domains.c3.strategy import form_of, kernel_of
    from autotune.domains.c3.task import build

    key = form_of(config) if kernel_of(config, scenario.collective) else "none"
    if key not in kernels:
        kernels[key] = build(scenario, config, device)
    return kernels[key]


def show_times(found: Mapping[str, Any]) -> None:
    """Print medians, slowdowns over the longer part, and shares of the ideal."""
    from autotune.domains.c3.results import Isolated

    alone = {"compute": ALONE[0], "comm:copy": ALONE[1], "comm:nccl": ALONE[2]}
    parts = Isolated.of({name: min(found["us"][own]) for name, own in alone.items() if own in found["us"]})
    for name, samples in found["us"].items():
        us = statistics.median(samples)
        figures = "" if parts is None or name in ALONE else _figures(parts.figures(us))
        print(f"{us:9.1f} us  {name:60s} {figures}", flush=True)
    for name, why in found["failed"].items():
        print(f"   failed     {name:60s} {why}", flush=True)


def _figures(figures: Mapping[str, Any]) -> str:
    share = figures["fraction"]
    return f"x{figures['t_over_max']:.3f} of the longer" + (f", {share:.0%} of the ideal" if share is not None else "")


def show_line(name: str, line: Mapping[str, Any]) -> None:
    """Print a time line, a kernel or a copy a row."""
    print(f"\n{name}: {line['us']:.0f} us, rank 0")
    print("   begin     end      us  what")
    for span in line["spans"]:
        end = span["start_us"] + span["us"]
        print(f"{span['start_us']:8.1f} {end:7.1f} {span['us']:7.1f}  {span['row']}: {span['name']}")


def main(argv: Sequence[str] | None = None) -> int:
    from autotune.device import resolve_device
    from autotune.domains.c3.cli import add_ranks, ranks_of
    from autotune.domains.c3.measuring.ranks import Ranks
    from autotune.domains.c3.scenario import COLLECTIVES, Scenario, parse_bytes, parse_gemm
    from autotune.domains.c3.strategy import normalize
    from autotune.domains.c3.task import check_devices, policy
    from autotune.measure.worker import WorkerFault

    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("strategies", nargs="+", metavar="STRATEGY", help='such as "copy gemm_first ctas=128"')
    parser.add_argument("--gemm", default="8192x8192x8192", metavar="MxNxK")
    parser.add_argument("--collective", default="reduce_scatter", choices=COLLECTIVES)
    parser.add_argument("--bytes", default="512MiB", help="of the larger of a rank's two buffers")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=20.0, help="of timing, at most about")
    parser.add_argument("--no-lines", action="store_true", help="times alone")
    parser.add_argument("--out", type=Path, metavar="FILE")
    add_ranks(parser)
    args = parser.parse_args(argv)
    try:
        device = resolve_device(args.device)
        ranks = ranks_of(args, device)
        check_devices(ranks, device)
        side = device.partition(":")[0]
        dtype = "bf16" if side == "cuda" else "f32"
        scenario = Scenario(parse_gemm(args.gemm, dtype), args.collective, parse_bytes(args.bytes), ranks, dtype)
    except UserError as mistake:
        print(f"c3_timeline: {mistake}", file=sys.stderr)
        return 2
    configs = {name: normalize(from_label(name, side), scenario, side) for name in args.strategies}
    nccl = "nccl" if side == "cuda" else "gloo"
    labels = (f"{nccl} sequential", "copy sequential" + (" ctas=128" if side == "cuda" else ""), f"{nccl} sequential")
    alone = {
        name: normalize(from_label(label, side), scenario, side) for name, label in zip(ALONE, labels, strict=True)
    }
    told = {"scenario": scenario.to_json(), "configs": alone | configs, "rounds": args.rounds, "budget_s": args.seconds}
    out: dict[str, Any] = {"scenario": scenario.label}
    print(f"{scenario.label}, {ranks} ranks on {device}", flush=True)
    with Ranks(None, device, policy(device), ranks=ranks) as group:
        try:
            out |= group.call("benchmarks.c3_timeline:times", told, _CALL_S)[0]
            show_times(out)
            if not args.no_lines:
                left = {name: config for name, config in configs.items() if name in out["us"]}
                asked = {"scenario": scenario.to_json(), "configs": left}
                out["lines"] = group.call("benchmarks.c3.timeline:record", asked, _CALL_S)[0]
                for name, line in out["lines"].items():
                    show_line(name, line)
        except WorkerFault as fault:
            print(f"c3_timeline: {fault}", file=sys.stderr)
        finally:
            if args.out:
                args.out.write_text(json.dumps(out))
    return 0 if "us" in out and not out["failed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
