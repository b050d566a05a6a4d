"""Does a search survive kernels that hang, write out of bounds, are wrong or cannot be launched? Run it on a GPU host.

    python tests/gpu/bad_candidates.py [--dry] [--device cuda:0] [--timeout 3]

A search of the domain in ``faulty_domain.py``, through the real tuner, compile pool, worker and database. Prints what
the database names each candidate and a last line "N statuses, bad M"; exit code 1 if one is not as expected, or if the
best is not the right kernel. Writes ``$OUT/bad_candidates.json`` if OUT is set. ``--dry`` only compiles, without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from autotune import api
from autotune import task as tasks
from autotune.errors import BuildError
from autotune.measure.policy import Policy, default_policy
from autotune.store import Store
from tests.gpu import faulty_domain
from tests.gpu.faulty_domain import EXPECTED, KIND, FaultyTask, workload


def dry(device: str) -> int:
    """Compile every candidate; returns how many did not do what they should."""
    os.environ.setdefault("AUTOTUNE_CUDA_TARGET", "sm_90:132")
    task, bad = FaultyTask(workload(), device), 0
    for config in [task.default(), *task.seeds()]:
        try:
            (kernel,) = task.build(config).kernels
            got = f"compiles: {kernel.resources}"
        except BuildError as error:
            got = f"refused: {error}"
        wrong = got.startswith("refused") != (EXPECTED[str(config["how"])] == "compile_error")
        bad += wrong
        print(f"{'BAD ' if wrong else 'ok  '}{config['how']:14s} {got}")
    return bad


def search(device: str, policy: Policy, folder: str) -> dict[str, Any]:
    """Run the search and read the database's rows back."""
    tasks.DOMAINS[KIND] = faulty_domain.__name__
    work = workload()
    seeds = FaultyTask(work, device).seeds()
    begin = time.monotonic()
    url = f"sqlite:///{Path(folder) / 'bad_candidates.db'}"
    with Store.open(url) as store:
        (result,) = api.tune_workloads(
            [work],
            device,
            store,
            trials=len(seeds) + 1,
            patience=0,
            policy=policy,
            progress=lambda p: print(f"{time.monotonic() - begin:6.1f} s  {p.phase} {p.measured}", flush=True),
        )
    with Store.open(url) as store:  # opened again, as another process would
        rows = [
            {"how": str(m.config["how"]), "status": str(m.status), "reason": m.reason, "latency_us": m.latency_us}
            for m in store.measurements(workload=work.fingerprint, stage="screen")
        ]
        schedules = [{"winner": s.winner, "config": s.config} for s in store.schedules()]
    return {"rows": rows, "schedules": schedules, "result": result.to_json(), "seconds": time.monotonic() - begin}


def judge(found: dict[str, Any]) -> list[str]:
    """The unexpected results, one a line."""
    wrong: list[str] = []
    by_how = {row["how"]: row for row in found["rows"]}
    for how, status in EXPECTED.items():
        got = by_how.get(how)
        if got is None:
            wrong.append(f"{how}: was not measured")
        elif got["status"] != status:
            wrong.append(f"{how}: {got['status']} ({got['reason']}) instead of {status}")
        elif status != "ok" and not got["reason"]:
            wrong.append(f"{how}: no reason was stored")
    best = found["result"]["best"]
    if best is None or best["config"]["how"] != "good":
        wrong.append(f"the best is {best}")
    if len(found["schedules"]) != 1:
        wrong.append(f"{len(found['schedules'])} schedules were stored")
    elif found["schedules"][0]["config"] not in (None, best and best["config"]):
        wrong.append(f"what would be deployed is {found['schedules'][0]}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="compile only, without a GPU")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--timeout", type=float, default=3.0, help="seconds a candidate may take")
    options = parser.parse_args()
    if options.dry:
        bad = dry(options.device)
        print(f"compiled {len(EXPECTED)} bad {bad}")
        return int(bad > 0)
    policy = replace(
        default_policy(options.device), timeout_s=options.timeout, load_s=10.0, final_rounds=20, cold_bytes=64 << 20
    )
    with tempfile.TemporaryDirectory() as folder:
        found = search(options.device, policy, folder)
    wrong = judge(found)
    for row in found["rows"]:
        time_ = "" if row["latency_us"] is None else f"{row['latency_us']:.1f} us"
        print(f"{row['how']:14s} {row['status']:14s} {time_}{row['reason']}")
    for line in wrong:
        print("WRONG", line)
    if os.environ.get("OUT"):
        path = Path(os.environ["OUT"]) / "bad_candidates.json"
        path.write_text(json.dumps({**found, "wrong": wrong}, indent=1) + "\n")
    print(f"{len(EXPECTED)} statuses, bad {len(wrong)}, {found['seconds']:.0f} s")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
