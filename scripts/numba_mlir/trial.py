"""Compile kernels of every scheme by numba-cuda and by numba-cuda-mlir, and compare what they become.

Needs no GPU. The two packages are in two environments; the second needs ``numba-cuda-mlir[cu13]`` and this repository
on ``PYTHONPATH``, and no torch::

    python scripts/numba_mlir/trial.py sources kernels.json           # the environment of the repository
    python scripts/numba_mlir/trial.py compile kernels.json old.json
    python scripts/numba_mlir/trial.py compile kernels.json new.json --mlir     # the other environment
    python scripts/numba_mlir/trial.py compare old.json new.json
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TARGET, MULTIPROCESSORS = "sm_90", 132
CASES = {
    "scatter": ("scatter_tied", {}),
    "transpose": ("transposed_types", {}),
    "flat": ("rope", {}),
    "columns": ("layer_norm_backward", {}),
    "outer": ("outer_softmax_bf16", {}),
    "tile": ("tile_scaling", {}),
    "rows": ("ln_bf16", {}),
    "rows, cluster": ("ln_long", {"cluster": 4}),
    "outer, copied ahead": ("outer_softmax", {"keep": "shared", "prefetch": True}),
}
"""A function of the tests' zoo for every scheme, and changes of its default configuration."""


def kernels(case: str, changes: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The kernels of a function of the zoo, before they are compiled."""
    from autotune.compiler.assemble import draft
    from autotune.compiler.planner.groups import group_configs
    from autotune.domains.fusion.task import FusionTask
    from tests.support.zoo import workloads

    for workload in workloads(case):
        task = FusionTask(workload, "cuda:0", target=TARGET, sms=MULTIPROCESSORS)
        config = task.default() | changes
        if (reason := task.reject(config)) is not None:
            raise SystemExit(f"{case} with {changes}: {reason}")
        drafts, _ = draft(task.graph, task.plan, group_configs(task.plan, config), MULTIPROCESSORS, workload.source)
        for d in drafts:
            fields = {f.name: getattr(d.source, f.name) for f in dataclasses.fields(d.source) if f.name != "body"}
            yield {"case": case, "text": d.source.text} | fields


def sources(every: bool) -> list[dict[str, Any]]:
    """The kernels of every scheme, or of all defaults of the zoo."""
    if not every:
        return [{"scheme": name} | k for name, case in CASES.items() for k in kernels(*case)]
    from tests.support.zoo import BY_NAME

    return [{"scheme": ""} | k for case in BY_NAME for k in kernels(case, {})]


def compiled(kernel: dict[str, Any], target: str) -> dict[str, Any]:
    """Resources, processor time and PTX of one kernel; the reason where it does not compile."""
    from autotune.compiler.targets.cuda.compile import _sections, build, compile_ptx
    from autotune.errors import BuildError

    source: Any = SimpleNamespace(**kernel)
    begun = time.process_time()
    try:
        ptx, entry = compile_ptx(source, target)
        seconds = time.process_time() - begun
        built = build(source, target)
    except BuildError as error:
        return {"error": str(error)}
    code = next(size for name, _, _, size in _sections(built.code) if name == f".text.{entry}")
    digest = hashlib.sha256(built.code).hexdigest()
    return {"seconds": seconds, "ptx": ptx, "cubin": digest, "machine_instructions": code // 16, **built.resources}


def opcodes(ptx: str) -> Counter[str]:
    """Count the instructions of a kernel's PTX, inline assembly included, other functions not."""
    body = re.split(r"\n}\n", ptx[ptx.index(".entry") :])[0]
    lines = re.sub(r"//.*", "", body).replace("{", "\n").replace("}", "\n").replace(";", "\n").splitlines()
    words = (re.match(r"\s*(?:@!?[%\w]+\s+)?([a-z][\w.:]*)\s", line + " ") for line in lines)
    return Counter(m[1] for m in words if m)


def compare(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> Iterator[str]:
    """A table, old / new, and after it the instructions whose number differs."""
    columns = ("registers", "stack", "shared", "blocks_per_sm", "machine_instructions")
    yield "| scheme | kernel | " + " | ".join((*columns, "PTX instructions", "seconds")) + " |"
    yield "|---" * (len(columns) + 4) + "|"
    notes = []
    for a, b in zip(old, new, strict=True):
        head = f"| {a['scheme']} | {a['case']}: {a['name']} |"
        if "error" in a or "error" in b:
            yield f"{head} {a.get('error', 'compiles')} / {b.get('error', 'compiles')} |"
            continue
        x, y = opcodes(a["ptx"]), opcodes(b["ptx"])
        cells = [f"{a[c]} / {b[c]}" for c in columns]
        yield f"{head} {' | '.join(cells)} | {x.total()} / {y.total()} | {a['seconds']:.2f} / {b['seconds']:.2f} |"
        same = "equal" if a["cubin"] == b["cubin"] else "other"
        other = {k: f"{x[k]}/{y[k]}" for k in sorted(x | y) if x[k] != y[k]}
        notes.append(f"{a['case']}: {a['name']}: {same} cubins, {other}")
    yield from ("", *notes)


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("sources", "compile", "compare"))
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--every", action="store_true", help="sources: all defaults of the tests' zoo")
    parser.add_argument("--mlir", action="store_true", help="compile: by numba-cuda-mlir")
    parser.add_argument("--target", default=TARGET, help="compile: what for")
    parser.add_argument("--reverse", action="store_true", help="compile: the last kernel first")
    given = parser.parse_args()
    if given.action == "sources":
        given.files[0].write_text(json.dumps(sources(given.every)))
    elif given.action == "compare":
        print(*compare(*(json.loads(f.read_text()) for f in given.files)), sep="\n")
    else:
        if given.mlir:
            from builder import install

            number = int(given.target.removeprefix("sm_"))
            install((number // 10, number % 10))
        work = json.loads(given.files[0].read_text())
        if given.reverse:
            work.reverse()
        compiled(work[0], given.target)  # imports and the first use of the compilers
        results = []
        for kernel in work:
            results.append({k: kernel[k] for k in ("scheme", "case", "name")} | compiled(kernel, given.target))
            print(kernel["case"], kernel["name"], results[-1].get("error", "compiles"), file=sys.stderr)
        if given.reverse:
            results.reverse()
        given.files[1].write_text(json.dumps(results))


if __name__ == "__main__":
    main()
