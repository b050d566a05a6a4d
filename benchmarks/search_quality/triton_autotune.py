"""One Triton kernel, one list of configurations: ``triton.autotune``'s exhaustive run against a search of autotune.

    python -m benchmarks.search_quality.triton_autotune triton_autotune.json

Every figure is of a separate process. Triton's first call compiles and times each configuration of the list, from an
empty cache. The search has a separate empty cache. It reaches the same result when it has measured a candidate
within 3% of Triton's choice. autotune's measurements decide both, and are completed afterwards. Then
processes that find everything in caches call the kernel: by Triton's own cache of results, by a look-up here, and with
a configuration that is written in the call.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.replay.regret import NEAR

TARGET = "benchmarks.search_quality.triton_product:ours"
ROUNDS, CALLS = 30, 100
"""Of timing a call: how often, and how many calls are made without waiting for the device."""
LIMIT_S = 100.0
"""For one process."""


def main() -> int:
    """All parts in turn, and a file with their results; a failed part is in it as a text."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--side", type=int, default=4096, help="of the matrices")
    parser.add_argument("--part", choices=PARTS, help="one process's part, which writes its figures to OUT")
    args = parser.parse_args()
    if args.part:
        args.out.write_text(json.dumps(PARTS[args.part](args.device, args.side)))
        return 0
    found: dict[str, Any] = {"side": args.side, "configurations": None}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for name, told in measure(Path(folder), args.device, args.side):
            found[name] = told
            args.out.write_text(json.dumps(found, indent=1) + "\n")  # kept if a later part fails
            print(line(name, told), flush=True)
    return 1 if any("failed" in part for part in found.values() if isinstance(part, dict)) else 0


def measure(folder: Path, device: str, side: int) -> Iterator[tuple[str, Any]]:
    """Every part's name and figures."""
    theirs, ours, db, shapes = folder / "theirs", folder / "ours", folder / "search.db", folder / "shapes.jsonl"
    shapes.write_text(json.dumps({"m": side, "n": side, "k": side}) + "\n")
    kept = {"TRITON_CACHE_DIR": str(theirs), "TRITON_CACHE_AUTOTUNING": "1"}
    exhaustive = _part("theirs", folder, device, side, kept)
    yield "exhaustive", exhaustive
    command = [sys.executable, "-m", "autotune", "search", "kernel", TARGET, "--device", device]
    began = time.time()
    search = _command([*command, "--shapes", str(shapes), "--db", str(db)], {"TRITON_CACHE_DIR": str(ours)})
    yield "search", search
    mine = {"TRITON_CACHE_DIR": str(ours), "AUTOTUNE_DB": str(db)}
    every = _part("record", folder, device, side, mine)
    yield "all", every
    if "latency_us" in every:
        yield "configurations", len(every["latency_us"])
        yield "search", {**search, **judged(search, every, exhaustive.get("best"), began)}
    yield "triton again", _part("theirs", folder, device, side, kept)
    yield "look-up", _part("ours", folder, device, side, mine)
    yield "plain", _part("plain", folder, device, side, {"TRITON_CACHE_DIR": str(theirs)})
    yield "triton again, no cache of results", _part("theirs", folder, device, side, {**kept, **_NO_RESULTS})


_NO_RESULTS = {"TRITON_CACHE_AUTOTUNING": "0"}


def judged(
    search: Mapping[str, Any], every: Mapping[str, Any], chosen: Mapping[str, Any] | None, began: float
) -> dict[str, Any]:
    """Seconds from the command's start until the search had measured a candidate within 3% of Triton's choice.

    Args:
        every: latency and time of measuring, by the text of a configuration; those of the search come first.
        chosen: Triton's configuration.
        began: when the command did, in seconds since the epoch.
    """
    latency, when = every["latency_us"], every["when"]
    mine = {key: us for key, us in latency.items() if us is not None and when[key] <= began + search["seconds"]}
    best = min(mine, key=mine.__getitem__)
    told = {"measured": len([k for k in when if when[k] <= began + search["seconds"]]), "best": json.loads(best)}
    told |= {"best_us": mine[best], "least_us": min(us for us in latency.values() if us is not None)}
    if chosen is None or latency.get(key_of(chosen)) is None:
        return told
    limit = latency[key_of(chosen)] * (1 + NEAR)
    near = [when[key] - began for key, us in mine.items() if us <= limit]
    return told | {"chosen_us": latency[key_of(chosen)], "near_s": round(min(near), 2) if near else None}


def key_of(config: Mapping[str, Any]) -> str:
    return json.dumps(dict(config), sort_keys=True)


def _part(name: str, folder: Path, device: str, side: int, env: Mapping[str, str]) -> dict[str, Any]:
    """The figures of one process, and how long it took as a whole."""
    out = folder / "part.json"
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.search_quality.triton_autotune", str(out), "--part", name]
    told = _command([*command, "--device", device, "--side", str(side)], env)
    return told | (json.loads(out.read_text()) if out.exists() else {})


def _command(command: list[str], env: Mapping[str, str]) -> dict[str, Any]:
    clock = time.perf_counter()
    try:
        done = subprocess.run(command, env={**os.environ, **env}, timeout=LIMIT_S, capture_output=True, text=True)
        failed = "" if done.returncode == 0 else (done.stderr.strip() or done.stdout.strip())[-2000:]
    except subprocess.TimeoutExpired:
        failed = f"not done after {LIMIT_S:.0f} s"
    told: dict[str, Any] = {"seconds": round(time.perf_counter() - clock, 2)}
    return told | ({"failed": failed} if failed else {})


def _record(device: str, side: int) -> dict[str, Any]:
    """Measure what is left of the list in $AUTOTUNE_DB."""
    from autotune.domain import policy_for
    from autotune.domains.kernel.declare import resolve
    from autotune.domains.kernel.task import workloads_of
    from autotune.store import Store
    from autotune.tuner.context import Context
    from autotune.tuner.threads import Lease
    from benchmarks.replay.record import record

    shape = {"m": side, "n": side, "k": side}
    with Store.open(os.environ["AUTOTUNE_DB"]) as store:
        workload = workloads_of(resolve(TARGET), TARGET, [shape], device)[0]
        context = Context(store, device, policy_for(workload, device))
        with closing(context), context.interrupt, Lease(store, context.owner):
            made = record(context, workload)
        if isinstance(made, str):
            raise RuntimeError(made)
        key = context.key(workload)
        rows = store.measurements(key.workload, key.device, key.environment, key.policy)
        screens = [m for m in rows if m.stage == "screen"]
        return {
            "latency_us": {key_of(m.config): m.latency_us for m in screens},
            "when": {key_of(m.config): m.when for m in screens},
        }


def _theirs(device: str, side: int) -> dict[str, Any]:
    """The first call, which chooses, and then a call."""
    from autotune.domains.kernel.triton import point_of
    from benchmarks.search_quality.triton_product import grid, theirs

    inputs = _inputs(device, side)
    first_s = _first(lambda: theirs[grid](**inputs), device)
    best = _without_ctas(point_of(theirs.best_config, 0))
    times = getattr(theirs, "configs_timings", None) or {}
    known = {key_of(_without_ctas(point_of(c, 0))): _milliseconds(t) for c, t in times.items()}
    return {"first_s": first_s, "best": best, "ms": known, "call_us": _call_us(lambda: theirs[grid](**inputs), device)}


def _without_ctas(point: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in point.items() if name not in ("num_ctas", "maxnreg")}


def _milliseconds(timing: Any) -> float | None:
    """The median of Triton's timing; None if the configuration did not run."""
    found = float(timing[0] if isinstance(timing, (list, tuple)) else timing)
    return found if found < float("inf") else None


def _ours(device: str, side: int) -> dict[str, Any]:
    """The first call, which looks up, and then a call."""
    from benchmarks.search_quality.triton_product import grid, ours

    inputs = _inputs(device, side)
    first_s = _first(lambda: ours[grid](**inputs), device)
    match = ours.lookup(**inputs)
    return {
        "first_s": first_s,
        "level": str(match.level),
        "config": dict(match.config),
        "call_us": _call_us(lambda: ours[grid](**inputs), device),
    }


def _plain(device: str, side: int) -> dict[str, Any]:
    """A configuration that is written in the call."""
    from benchmarks.search_quality.triton_product import CONFIGS, grid, theirs

    inputs, kernel, config = _inputs(device, side), theirs.fn, CONFIGS[0].all_kwargs()
    first_s = _first(lambda: kernel[grid](**inputs, **config), device)
    return {"first_s": first_s, "call_us": _call_us(lambda: kernel[grid](**inputs, **config), device)}


def _inputs(device: str, side: int) -> dict[str, Any]:
    """Also has the device awake."""
    from benchmarks.search_quality.triton_product import make_inputs

    made = make_inputs(side, side, side, device)
    made["a"] @ made["b"]
    _wait(device)
    return made


def _wait(device: str) -> None:
    import torch

    if device != "cpu":
        torch.cuda.synchronize()


def _first(call: Callable[[], object], device: str) -> float:
    began = time.perf_counter()
    call()
    _wait(device)
    return round(time.perf_counter() - began, 4)


def _call_us(call: Callable[[], object], device: str) -> float:
    """Microseconds of the host for a call, the device not waited for; the median of rounds."""
    found = []
    for _ in range(ROUNDS):
        _wait(device)
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        found.append(1e6 * (time.perf_counter() - began) / CALLS)
    _wait(device)
    return round(statistics.median(found), 2)


PARTS = {"theirs": _theirs, "ours": _ours, "plain": _plain, "record": _record}


def line(name: str, told: Any) -> str:
    """A part's result as a line."""
    if not isinstance(told, dict):
        return f"{name}: {told}"
    if why := told.get("failed"):
        return f"{name}: FAILED: {why.splitlines()[-1]}"
    wanted = ("seconds", "first_s", "near_s", "measured", "best_us", "chosen_us", "least_us", "level", "call_us")
    return f"{name}: " + ", ".join(f"{k} {told[k]}" for k in wanted if k in told)


if __name__ == "__main__":
    sys.exit(main())
