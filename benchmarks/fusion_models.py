"""Whole models: torch.compile at its best against the same with tuned regions, both as one CUDA graph a step.

    python -m benchmarks.fusion_models --device cuda:0 --db models.db --out benchmarks/results/h200/models.json

For each model of ``examples.models``: a search of ``--search`` seconds as a user would run it, then a process of its
own measures a step (forward, or forward and backward) of eager, ``torch.compile(mode=...)`` and
``torch.compile(mode=..., backend="autotune")``, captured, interleaved, medians; in each of ``--mode``'s modes (a case's
``modes``), of which the fastest counts, for both. The same process counts the kernels of memory-intensive operators
in each, and their time in a replay: all but those of libraries for matrix products,
convolutions and attention, and copies. Times of a case are those of a step; ``floor_us`` is what its regions' bytes
take at the copy bandwidth, without the library calls.

A model that exceeds ``--timeout`` is stopped and left out (exit code 1). The file is written after every model;
``--resume`` keeps those that are in it. ``--layers 2`` shortens the deep models and ``--steps 8``
the recurrent ones: layers and steps repeat. With ``--jobs N`` that many models are under way at a time, half as many of
them searching while Inductor compiles others; whatever is timed, by Inductor too, is timed alone.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import form
from examples.models import DEPTHS, NAMES, SIZES

if TYPE_CHECKING:
    from examples.models import Example

CONTENDERS = ("eager", "inductor", "autotune")
"""Those of :mod:`autotune.bench.step`, as result files call them."""
PEERS = CONTENDERS[1:]


# In the measuring process


def regions_of(example: Example) -> dict[str, Any]:
    """Regions of a step: how many, how many different ones, the bytes that perfect kernels for them move, and what is
    in no region: operators with how often each occurs.
    """
    from autotune.compiler.capture.recording import capture
    from autotune.compiler.lower.facts import GraphFacts
    from autotune.compiler.regions.find import outside, regions_from
    from autotune.ir.graph import Graph

    captured = capture(example.module, example.inputs, grad=example.train)
    found, left = [], Counter[str]()
    for g in captured:
        facts = GraphFacts(g.module.graph)
        regions = [r for r in regions_from(facts) if r.workload is not None]
        found += [r.workload for r in regions]
        left.update(facts[n].operator or str(n.target) for n in outside(facts, regions))
    moved = sum(Graph.from_json(w.spec).bytes_moved for w in found)
    different = len({w.fingerprint for w in found})
    return {"regions": len(found), "different_regions": different, "bytes": moved, "outside": dict(left)}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Everything about one model; runs in a process of its own, and times only while it has the device to itself."""
    import dataclasses

    import torch

    from autotune.bench import step
    from autotune.bench.contenders import ProcessLock
    from autotune.measure.policy import default_policy
    from benchmarks.fusion.floor import copy_bandwidth
    from examples.models import make

    name = args.measure
    if args.device.startswith("cuda"):
        torch.cuda.set_device(args.device)

    def say(stage: str, seconds: float) -> None:
        print(f"  {name}: {stage} {seconds:.1f} s", file=sys.stderr, flush=True)

    begin = time.monotonic()
    example = make(name, args.device, args.size, **depth(args))
    found = regions_of(example)
    seconds = {"capture": round(time.monotonic() - begin, 1)}
    say("capture", seconds["capture"])
    base = default_policy(args.device)
    policy = dataclasses.replace(base, final_rounds=args.rounds, final_s=args.seconds)
    compared = step.compare(
        example.module, example.inputs, train=example.train, device=args.device, mode=args.mode, policy=policy, say=say
    )
    for contender, why in compared.failed.items():
        print(f"{name}: {contender} left out: {why}", file=sys.stderr)
    fastest = {who: compared.fastest(kind) for who, kind in zip(CONTENDERS, step.CONTENDERS, strict=True)}
    if missing := [who for who, contender in fastest.items() if contender is None]:
        raise SystemExit(f"{name}: no figures of {', '.join(missing)}")
    with ProcessLock(args.device, base.lock_s).exclusive():
        bandwidth = copy_bandwidth(dataclasses.replace(base, final_rounds=10, final_s=5.0), args.device)
    steps = {who: compared.steps[contender] for who, contender in fastest.items() if contender is not None}
    modes = {
        mode: {f"{who}_us": compared.steps[c].us for who, c in zip(PEERS, both, strict=True) if c in compared.steps}
        for mode, *both in zip(compared.modes, compared.of(step.COMPILE), compared.of(step.AUTOTUNE), strict=True)
    }
    for contender in (who for who in PEERS if steps[who].disagrees):
        raise SystemExit(f"{contender}: results of other shapes than eager's, or finite in other places")
    kernels = {who: s.kernels for who, s in steps.items() if s.kernels}
    checks = {f"{who}_{what}": getattr(steps[who], what) for who in PEERS for what in ("difference", "largest")}
    return {
        "name": name,
        **found,
        "floor_us": round(found["bytes"] / bandwidth, 3),
        "eager_us": steps["eager"].us,
        "inductor_us": modes.get("default", {}).get("inductor_us"),
        "inductor_best_us": steps["inductor"].us,
        "xla_us": None,
        "autotune_us": steps["autotune"].us,
        "mode": ",".join(compared.modes),
        "modes": modes,
        "size": args.size,
        **dict.fromkeys(DEPTHS, 0) | depth(args),
        "graph": {who: s.captured for who, s in steps.items()},
        "counters": dict(compared.counters),
        "kernels": kernels if len(kernels) == len(steps) else None,
        "seconds": seconds | {f"compile_{who}": steps[who].prepare_s for who in PEERS} | dict(compared.seconds),
        **checks,
    }


# In the parent, and shared by both


def depth(args: argparse.Namespace) -> dict[str, int]:
    """The depth of models that are cut."""
    return {name: n for name in DEPTHS if (n := getattr(args, name))}


def environment(args: argparse.Namespace) -> dict[str, str]:
    found = {**os.environ, "EXAMPLE_SIZE": args.size, "AUTOTUNE_DB": args.db}
    for name in DEPTHS:
        found.pop(f"EXAMPLE_{name.upper()}", None)
    return found | {f"EXAMPLE_{name.upper()}": str(n) for name, n in depth(args).items()}


def run(command: Sequence[str], args: argparse.Namespace, limit: float) -> tuple[int, str]:
    """(exit code, stdout) of a command; its stderr is passed on. It is stopped after ``limit`` seconds (code 124)."""
    process = subprocess.Popen(command, cwd=form.ROOT, env=environment(args), stdout=subprocess.PIPE, text=True)
    try:
        out, _ = process.communicate(timeout=max(limit, 1.0))
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        return 124, ""
    return process.returncode, out


def search(name: str, args: argparse.Namespace, limit: float) -> dict[str, Any]:
    """Search as a user would; what it took and found."""
    model, _, kind = name.rpartition("_")
    target = f"examples.models.{model}:{kind}"
    command = [sys.executable, "-m", "autotune", "search", "fusion", target, "--inputs", f"{target}_inputs"]
    command += ["--device", args.device, "--db", args.db, "--timeout", str(args.search), "--json"]
    command += ["--caches", args.caches] if args.caches != "cold" else []
    command += ["--train"] if kind == "train" else []
    command += ["--trials", str(args.trials)] if args.trials else []
    begin = time.monotonic()
    code, _ = run(command, args, limit)
    took = round(time.monotonic() - begin, 1)
    if code:
        print(f"{name}: the search ended with {code} after {took} s; what it has stored is used", file=sys.stderr)
    return {"search_s": took, "search_code": code}


def measured(name: str, args: argparse.Namespace, searched: Mapping[str, Any], end: float) -> dict[str, Any] | None:
    """A case of the result file; None if the model could not be measured until ``end``."""
    command = [sys.executable, "-m", "benchmarks.fusion_models", "--measure", name, "--device", args.device]
    command += [
        "--size",
        args.size,
        "--mode",
        ",".join(args.mode),
        "--rounds",
        str(args.rounds),
        "--seconds",
        str(args.seconds),
    ]
    command += [text for name, n in depth(args).items() for text in (f"--{name}", str(n))]
    code, out = run(command, args, end - time.monotonic())
    if code:
        why = f"took more than {args.timeout:.0f} s" if code == 124 else f"ended with {code}"
        print(f"{name}: left out, {why}", file=sys.stderr)
        return None
    now = datetime.now(UTC).isoformat(timespec="seconds")
    own = {"commit": form.commit(), "when": now}  # those of the file are of its last model
    return {**json.loads(out.splitlines()[-1]), **searched, **own}


def ratio(case: Mapping[str, Any]) -> float:
    return float(case["inductor_best_us"] / case["autotune_us"])


def kernel_counts(case: Mapping[str, Any], kind: str) -> tuple[int, int] | None:
    """(Inductor's, ours): kernels of a step; ``kind`` is "memory_intensive" or "library"."""
    found = case.get("kernels")
    return (found["inductor"][kind], found["autotune"][kind]) if found else None


def table(cases: Sequence[Mapping[str, Any]]) -> str:
    """A line a model, then the means."""
    heads = f"{'eager us':>10s} {'inductor':>10s} {'autotune':>10s} {'speedup':>8s} {'kernels':>16s} {'hits':>7s}"
    lines = [f"{'model':18s} {heads}"]
    for c in cases:
        counts, library = kernel_counts(c, "memory_intensive"), kernel_counts(c, "library")
        launched = f"{counts[0]}+{library[0]} -> {counts[1]}+{library[1]}" if counts and library else "-"
        times = " ".join(f"{c[k]:10.1f}" for k in ("eager_us", "inductor_best_us", "autotune_us"))
        hits = f"{c['counters'].get('hits', 0)}/{c['regions']}"
        lines.append(f"{c['name']:18s} {times} {ratio(c):7.3f}x {launched:>16s} {hits:>7s}")
    if cases:
        mean = math.exp(sum(math.log(ratio(c)) for c in cases) / len(cases))
        worst = min(cases, key=ratio)
        lines.append(f"geometric mean {mean:.3f}x; slowest {worst['name']} {ratio(worst):.3f}x")
        sums = {}
        for kind in ("memory_intensive", "library"):
            counted = [k for c in cases if (k := kernel_counts(c, kind))]
            sums[kind] = [sum(k[i] for k in counted) for i in (0, 1)]
        (theirs, ours), library = sums["memory_intensive"], sums["library"]
        if theirs:
            also = f"with those of libraries {ours + library[1]} of {theirs + library[0]}"
            lines.append(f"kernels for memory-intensive operators: {ours} of Inductor's {theirs}; {also}")
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--size", choices=SIZES, default="gpu")
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(NAMES), help="by comma")
    parser.add_argument("--layers", type=int, default=0, help="layers of the deep models (default: the model's own)")
    parser.add_argument("--steps", type=int, default=0, help="steps of the recurrent models (default: the model's own)")
    parser.add_argument("--search", type=float, default=60.0, help="seconds to search for each model; 0: no search")
    parser.add_argument("--trials", type=int, default=0, help="candidates for each region at most")
    parser.add_argument("--caches", choices=("cold", "warm"), default="cold", help="of the search, not of the step")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for a model, search included")
    about = "of torch.compile, by comma (default: default,max-autotune; on a CPU default); the fastest counts, of both"
    parser.add_argument("--mode", type=lambda text: text.split(","), help=about)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=10.0, help="of interleaved timing")
    parser.add_argument("--db", help="database (default: a new one, thrown away)")
    parser.add_argument("--out", type=Path, help="result file to write")
    parser.add_argument("--resume", action="store_true", help="keep the models that --out holds")
    parser.add_argument("--jobs", type=int, default=1, help="models under way at a time (default: 1; on a CPU always)")
    parser.add_argument("--measure", choices=NAMES, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.mode = args.mode or (["default", "max-autotune"] if args.device.startswith("cuda") else ["default"])
    if args.jobs < 1 or (args.jobs > 1 and not args.device.startswith("cuda")):
        parser.error("--jobs is 1 or more, and 1 on a CPU: what is timed there is what the others would use")
    if unknown := [m for m in args.models if m not in NAMES]:
        parser.error(f"unknown models {', '.join(unknown)}; there are {', '.join(NAMES)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.measure:
        print(json.dumps(measure(args)))
        return 0
    with tempfile.TemporaryDirectory(prefix="autotune-models-") as folder:
        args.db = args.db or os.path.join(folder, "models.db")
        return measure_all(args)


def measure_all(args: argparse.Namespace) -> int:
    from autotune.device import environment as software
    from autotune.device import identify

    identity, env = identify(args.device), software(args.device)
    versions = {k: str(v) for k, v in (("cuda", env.cuda), ("driver", env.driver)) if v}
    kept = form.read(args.out)["cases"] if args.resume and args.out and args.out.exists() else []
    done: dict[str, Mapping[str, Any]] = {c["name"]: c for c in kept}
    left = [name for name in args.models if name not in done]
    writing, searching = threading.Lock(), threading.Semaphore(max(1, args.jobs // 2))

    def model(name: str) -> bool:
        with searching:
            begin = time.monotonic()
            searched = search(name, args, args.timeout * 0.7) if args.search > 0 else {}
        case = measured(name, args, searched, begin + args.timeout)
        if case is None:
            return False
        with writing:
            done[name] = case
            print(f"{name}: {ratio(case):.3f}x in {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
            if args.out:
                form.write(args.out, identity.label, list(done.values()), versions)
        return True

    with ThreadPoolExecutor(args.jobs) as pool:
        finished = list(pool.map(model, left))
    print(table(list(done.values())))
    return 0 if done and all(finished) else 1


if __name__ == "__main__":
    raise SystemExit(main())
