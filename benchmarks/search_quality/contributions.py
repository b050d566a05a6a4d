"""The contributions of seeds, cost model, neighbours, pruning and the sampler, in candidates and in seconds.

    python -m benchmarks.search_quality.contributions benchmarks/recordings --seeds 30 --out FILE

Searches every recording with the default, with each part left out, and with other samplers. Kernel Tuner's recordings
have neither seeds nor a cost model: searches there begin at a random candidate.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from autotune.device import identify
from autotune.tuner import samplers
from benchmarks.form import write
from benchmarks.replay.recording import Recording, load_all
from benchmarks.replay.regret import NEAR, Regret
from benchmarks.replay.search import HELP, search

BUDGETS = (10, 20, 40, 60)
FOREIGN = "kernel_tuner"
"""Kind of the workloads of recordings that have no seeds of ours."""

NOTHING = tuple(HELP)
VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "default": ("tpe", ()),
    "without default and heuristics": ("tpe", ("seeds",)),
    "without cost model": ("tpe", ("model", "pruning")),
    "without pruning": ("tpe", ("pruning",)),
    "without any seed": ("tpe", ("seeds", "model", "pruning")),
    "without neighbours": ("tpe", ("neighbours",)),
    "random in TPE's place": ("guided random", ()),
    "GP in TPE's place": ("guided gp", ()),
    "NSGA-II in TPE's place": ("guided nsga2", ()),
    "TPE alone": ("tpe", NOTHING),
    "GP alone": ("gp", NOTHING),
    "NSGA-II alone": ("nsga2", NOTHING),
    "random alone": ("random", NOTHING),
    "brute alone": ("brute", NOTHING),
}
"""Name to sampler, and what is left out."""


def more_samplers() -> None:
    """Samplers that ``--sampler`` does not offer, for comparison."""
    from optuna.samplers import GPSampler, NSGAIISampler

    offered: Any = samplers.SAMPLERS
    gp = samplers.Sampler(lambda seed: GPSampler(seed=seed))
    nsga2 = samplers.Sampler(lambda seed: NSGAIISampler(population_size=12, seed=seed))
    offered |= {
        "gp": gp,
        "guided gp": replace(gp, guided=True),
        "nsga2": nsga2,
        "guided nsga2": replace(nsga2, guided=True),
        "guided random": replace(offered["random"], guided=True),
    }


def measure(
    recording: Recording, name: str, seeds: int, budgets: Sequence[int] = BUDGETS, processes: int | None = None
) -> dict[str, Any]:
    """One variant in one recording; what is counted until the best is near ends at the budget where it never is."""
    sampler, without = VARIANTS[name]
    if recording.workload.kind == FOREIGN:
        without = tuple({*without, "seeds", "model", "pruning"})
    most = budgets[-1]
    traces = [
        search(recording, sampler, candidates=most, seed=k, without=without, processes=processes) for k in range(seeds)
    ]
    found = Regret.of(recording, traces)
    limit = recording.optimum_us * (1 + NEAR)
    near = [next((k for k, us in enumerate(t.best_us) if us <= limit), None) for t in traces]
    firsts = [len(t.best_us) - 1 if k is None else k for t, k in zip(traces, near, strict=True)]
    return {
        "regret": [round(found.at(n), 5) for n in budgets],
        "candidates": round(statistics.fmean(k + 1 for k in firsts), 1),
        "near": " ".join("-" if k is None else str(k + 1) for k in near),
        "seconds": round(statistics.fmean(t.seconds[k] for t, k in zip(traces, firsts, strict=True)), 2),
        "proposing_ms": round(1e3 * found.proposing_s, 2),
        "seeds": seeds,
    }


def main() -> None:
    """All recordings, and a file."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("recordings", nargs="+", type=Path)
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--budgets", default=",".join(map(str, BUDGETS)), help="candidates; the last ends a search")
    parser.add_argument("--processes", type=int, help="that compile ahead; left out, the recording machine's")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    more_samplers()
    budgets = [int(n) for n in args.budgets.split(",")]
    cases = []
    for recording in load_all(args.recordings):
        found = {
            name: measure(recording, name, args.seeds, budgets, args.processes) for name in args.variants.split(",")
        }
        cases.append({"name": recording.workload.label, "optimum_us": recording.optimum_us, "searches": found})
        for name, told in found.items():
            print(f"{recording.workload.label} {name}: {told}", flush=True)
    about = f"Medians of regret after {budgets} candidates; means of candidates and seconds until within {NEAR:.0%}."
    about += " near: candidates until then for each seed, - where the last budget ends a search before."
    versions = {name: metadata.version(name) for name in ("optuna",)}
    extra = {"suite": "search_contributions", "budgets": budgets, "processes": args.processes, "about": about}
    write(args.out, identify("cpu").label, cases, versions, extra=extra)


if __name__ == "__main__":
    main()
