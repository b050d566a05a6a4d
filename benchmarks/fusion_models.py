"""Whole models: torch.compile at its best against the same with tuned regions, both as one CUDA graph a step.

    python -m benchmarks.fusion_models --device cuda:0 --db models.db --out benchmarks/results/h200/models.json

For each model of ``examples.models``: a search of ``--search`` seconds as a user would run it, then a process of its
own measures a step (forward, or forward and backward) of eager, ``torch.compile(mode=...)`` and
``torch.compile(mode=..., backend="autotune")``, captured, interleaved, medians. The same process counts the kernels
that each launches for memory-intensive operators, and what they take in a replay: all but those of libraries for
matrix products, convolutions and attention, and copies. Times of a case are those of a step; ``floor_us`` is what its
regions' bytes take at the copy bandwidth, without the library calls.

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
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import form
from examples.models import DEPTHS, NAMES, SIZES

if TYPE_CHECKING:
    from autotune.bench.turns import Turns
    from examples.models import Example

CONTENDERS = ("eager", "inductor", "autotune")


# In the measuring process


def step_of(run: Callable[..., Any], example: Example) -> Callable[[], object]:
    """One step: the forward, or the loss and its gradients by parameters and inputs."""
    import torch

    if not example.train:

        def infer() -> object:
            with torch.no_grad():
                return run(*example.inputs)

        return infer
    wanted = [t for t in (*example.module.parameters(), *example.inputs) if t.requires_grad]

    def train() -> object:
        loss = run(*example.inputs)
        return loss.detach(), torch.autograd.grad(loss, wanted, allow_unused=True)

    return train


class Watched:
    """A step that remembers whether it could be captured in a CUDA graph."""

    def __init__(self, step: Callable[[], object]) -> None:
        self.step, self.refused = step, False

    def __call__(self) -> object:
        import torch

        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        try:
            return self.step()
        except Exception:
            self.refused = self.refused or capturing
            raise


def largest(result: object) -> float:
    """Largest magnitude of the first tensor in a step's result: the loss in training."""
    import torch
    from torch.utils import _pytree as pytree

    first = next(t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor))
    return float(first.abs().max())


def difference(got: object, want: object) -> float:
    """Root mean square of the difference of the first tensors over that of ``want``'s."""
    import torch
    from torch.utils import _pytree as pytree

    a, b = (next(t for t in pytree.tree_leaves(r) if isinstance(t, torch.Tensor)).double() for r in (got, want))
    return float((a - b).norm() / b.norm().clamp_min(1e-30))


def regions_of(example: Example) -> dict[str, Any]:
    """Regions of a step: how many, how many different ones, the bytes that perfect kernels for them move, and what is
    in no region: operators with how often each occurs.
    """
    from autotune.fusion.capture import capture
    from autotune.fusion.graph import Graph
    from autotune.fusion.regions import find_regions
    from autotune.fusion.rules import GENERATORS, VIEWS
    from autotune.fusion.translate import op_name

    captured = capture(example.module, example.inputs, grad=example.train)
    found, outside = [], Counter[str]()
    for g in captured.graphs:
        regions = [r for r in find_regions(g.module) if r.workload is not None]
        found += [r.workload for r in regions]
        inside = {n for r in regions for n in r.nodes}
        names = [
            op_name(n) or str(n.target) for n in g.module.graph.nodes if n.op == "call_function" and n not in inside
        ]
        outside.update(n for n in names if n not in VIEWS and n not in GENERATORS and n != "getitem")
    moved = sum(Graph.from_json(w.spec).bytes_moved for w in found)
    different = len({w.fingerprint for w in found})
    return {"regions": len(found), "different_regions": different, "bytes": moved, "outside": dict(outside)}


def kernels_of(steps: Mapping[str, Callable[[], object]]) -> dict[str, dict[str, Any]]:
    """Kernels of a step, as its CUDA graph replays them, by contender: memory-intensive ones and library ones, what
    they take, and the former by name. What a kernel reads lies in the caches where the step leaves it.
    """
    import torch

    from autotune.bench.kernels import _record
    from autotune.measure.timer import capture
    from benchmarks.kernel_names import is_library

    found = {}
    for name, step in steps.items():
        run = capture(step)
        spans: list[Any] = []
        for _ in range(3):  # a process's first trace may come out empty, and the second replay is a warm one

            def work(run: Callable[[], object] = run) -> None:
                run()
                torch.cuda.synchronize()

            spans = [s for s in _record(work) if s[2]] or spans
        found[name] = summed([(begin, end, kernel) for begin, end, _, kernel in spans], is_library)
    return found


def summed(spans: Sequence[tuple[float, float, str]], is_library: Callable[[str], bool]) -> dict[str, Any]:
    """Counts and microseconds of kernels (begin, end, name), as the result file has them."""
    us: dict[str, float] = {}
    count: Counter[str] = Counter()
    library = []
    for begin, end, kernel in spans:
        if is_library(kernel):
            library.append(end - begin)
            continue
        count[kernel] += 1
        us[kernel] = us.get(kernel, 0.0) + end - begin
    return {
        "memory_intensive": count.total(),
        "library": len(library),
        "memory_intensive_us": round(sum(us.values()), 1),
        "library_us": round(sum(library), 1),
        "names": dict(count.most_common(40)),
        "names_us": {k: round(us[k], 1) for k, _ in count.most_common(40)},
    }


def templates_in_threads() -> None:
    """Let Inductor compile the templates of matrix products in threads of this process; what it chooses is the same.

    In its compiling processes (torch 2.11) their results do not reach this one: each of the twenty of a product is
    compiled again when it is timed, one after the other, 10 s a product where threads take 2. All its other kernels
    stay with the processes: compiled in this one they were most of the time.
    """
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    AsyncCompile.wait_pool_ready()  # until it is, everything compiles here, one kernel after the other
    begin = AlgorithmSelectorCache.make_precompile_fn

    def in_threads(*args: Any, **kwargs: Any) -> Any:
        with config.patch(compile_threads=1):
            return begin(*args, **kwargs)

    AlgorithmSelectorCache.make_precompile_fn = in_threads  # type: ignore[method-assign]
    if hasattr(config, "autotune_num_choices_displayed"):
        config.autotune_num_choices_displayed = 0  # a table for each product


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Everything about one model; runs in a process of its own."""
    from autotune.bench.turns import Turns, inductor_takes_turns
    from autotune.measure.policy import default_policy

    turns = Turns(args.device, default_policy(args.device).lock_s)
    with inductor_takes_turns(turns):
        return measure_in_turns(args, turns)


def measure_in_turns(args: argparse.Namespace, turns: Turns) -> dict[str, Any]:
    """What :func:`measure` returns; times something only while ``turns`` is held."""
    import dataclasses

    import torch

    import autotune
    from autotune.bench.floor import copy_bandwidth
    from autotune.measure.policy import default_policy
    from autotune.measure.timer import interleave
    from autotune.runtime.counters import reset_counters
    from examples.models import make

    name, cuda = args.measure, args.device.startswith("cuda")
    if cuda:
        torch.cuda.set_device(args.device)
        templates_in_threads()
    seconds: dict[str, float] = {}
    begin = time.monotonic()

    def took(stage: str) -> None:
        nonlocal begin
        seconds[stage] = round(time.monotonic() - begin, 1)
        begin = time.monotonic()
        print(f"  {name}: {stage} {seconds[stage]:.1f} s", file=sys.stderr, flush=True)

    example = make(name, args.device, args.size, **depth(args))
    found = regions_of(example)
    torch._dynamo.reset()
    reset_counters()
    took("capture")
    options = {} if args.mode == "default" else {"mode": args.mode}
    steps = {"eager": Watched(step_of(example.module, example))}
    results = {"eager": steps["eager"]()}
    for contender, run in (
        ("inductor", torch.compile(example.module, dynamic=False, **options)),
        ("autotune", autotune.compile(example.module, dynamic=False, **options)),
    ):
        steps[contender] = Watched(step_of(run, example))
        results[contender] = steps[contender]()
        took(f"compile_{contender}")
    counted = {k: v for k, v in dict(autotune.counters()).items() if v}
    checks = {
        f"{contender}_{what}": value
        for contender in ("inductor", "autotune")
        for what, value in (
            ("difference", difference(results[contender], results["eager"])),
            ("largest", largest(results[contender])),
        )
    }
    results.clear()
    base = default_policy(args.device)
    policy = dataclasses.replace(base, final_rounds=args.rounds, final_s=args.seconds)
    with turns.mine():
        begin = time.monotonic()
        samples = interleave(steps, policy, args.device)
        took("timing")
        kernels = kernels_of(steps) if cuda else None
        bandwidth = copy_bandwidth(dataclasses.replace(base, final_rounds=10, final_s=5.0), args.device)
        took("kernels")
    us = {k: round(statistics.median(v), 3) for k, v in samples.items()}
    return {
        "name": name,
        **found,
        "floor_us": round(found["bytes"] / bandwidth, 3),
        "eager_us": us["eager"],
        "inductor_us": us["inductor"] if args.mode == "default" else None,
        "inductor_best_us": us["inductor"],
        "xla_us": None,
        "autotune_us": us["autotune"],
        "mode": args.mode,
        "size": args.size,
        **dict.fromkeys(DEPTHS, 0) | depth(args),
        "graph": {k: cuda and not s.refused for k, s in steps.items()},
        "counters": counted,
        "kernels": kernels,
        "seconds": seconds,
        **checks,
    }


# In the parent, and what both need


def depth(args: argparse.Namespace) -> dict[str, int]:
    """How deep models are to be, where not as deep as they are."""
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
    command += ["--size", args.size, "--mode", args.mode, "--rounds", str(args.rounds), "--seconds", str(args.seconds)]
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--size", choices=SIZES, default="gpu")
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(NAMES), help="by comma")
    parser.add_argument("--layers", type=int, default=0, help="layers of the deep models (default: the model's own)")
    parser.add_argument("--steps", type=int, default=0, help="steps of the recurrent models (default: the model's own)")
    parser.add_argument("--search", type=float, default=60.0, help="seconds to search for each model; 0: no search")
    parser.add_argument("--trials", type=int, default=0, help="candidates for each region at most")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for a model, search included")
    parser.add_argument("--mode", help="of torch.compile (default: max-autotune-no-cudagraphs; on a CPU default)")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=10.0, help="of interleaved timing")
    parser.add_argument("--db", help="database (default: a new one, thrown away)")
    parser.add_argument("--out", type=Path, help="result file to write")
    parser.add_argument("--resume", action="store_true", help="keep the models that --out holds")
    parser.add_argument("--jobs", type=int, default=1, help="models under way at a time (default: 1; on a CPU always)")
    parser.add_argument("--measure", choices=NAMES, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    # The step is captured as a whole here; Inductor's own CUDA graphs would be graphs within it.
    args.mode = args.mode or ("max-autotune-no-cudagraphs" if args.device.startswith("cuda") else "default")
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
