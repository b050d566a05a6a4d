"""Train Llama-70B layers with FSDP2, their parameters gathered as a search found best, beside stock FSDP2.

    autotune search c3 --gemm 8192x104448x8192 --collective all_gather --bytes 1671200KiB --ranks 8 --db c3.db
    python examples/fsdp_overlap.py --ranks 8 --layers 8 --db c3.db --out fsdp.json

(or ``torchrun --nproc-per-node 8 examples/fsdp_overlap.py ...``). While a layer computes, the next one's parameters are
gathered: one scenario of the C3 domain, the layer's matrix products, taken as one of equally many operations, beside an
all-gather of the layer's bytes. The example prints it. The strategy stored for it, or for a scenario near it, or else
the default, decides who moves the data and how (engine, ctas), and whether the
gather is issued before the layer's computation (order). FSDP's streams and its eager calls stay as they are, so
priority and reserve play no part.

Steps of these are timed in turns, each of a model and an optimizer of its own that are equal, on equal data:

- ``fsdp2``: stock; always there, as what the others are compared with.
- ``fsdp2_prefetch``: stock, told to issue a layer's gather before the computation of the layer before.
- ``autotune``: our gather through ``FSDPModule.set_custom_all_gather``.
- ``fsdp2_copy``: torch's own copy-engine option, ``FSDPModule.set_symm_mem_for_comm`` with NCCL's zero-CTA policy. A
  process has symmetric memory of one kind, and this is another than ours: so it has processes of its own, with stock
  again beside it. Under torchrun give ``--modes fsdp2_copy``.

All must have the same losses, and in the end gather every parameter bit by bit, or the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository, where `examples` is

MODES = ("fsdp2", "fsdp2_prefetch", "autotune", "fsdp2_copy")
ALONE = "fsdp2_copy"
"""The mode that cannot share a process with ``autotune``."""
_OURS = "FSDP_OVERLAP_STARTED"
"""In the environment of ranks that this script started: it tells what came of them, not they."""


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--ranks", type=int, help="processes (default: one a GPU, 2 on CPUs)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--inner", type=int, default=28672, help="width of the feed-forward part")
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--batch", type=int, default=1, help="sequences a rank")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a sequence")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "f32"))
    parser.add_argument("--optimizer", default="adamw", choices=("adamw", "sgd"))
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each mode")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--db", help="database URL or SQLite file (default: $AUTOTUNE_DB, else the user's own)")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="change the strategy: engine=nccl")
    parser.add_argument("--profile", action="store_true", help="record who moved the data, in one step more (CUDA)")
    parser.add_argument("--out", type=Path, help="write the result to this JSON file")
    args = parser.parse_args(argv)
    if args.hidden % args.heads or args.hidden // args.heads % 2 or args.heads % args.kv_heads:
        parser.error("--hidden must be an even multiple of --heads, and --heads a multiple of --kv-heads")
    if min(args.layers, args.steps, args.batch, args.length) < 1 or args.warmup < 0:
        parser.error("--layers, --steps, --batch and --length are 1 or more, --warmup 0 or more")
    return args


def start_ranks(ranks: int, modes: Sequence[str], argv: Sequence[str]) -> dict[str, Any]:
    """Train ``modes`` beside stock in processes of their own; the result, empty where they failed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [__file__, *argv, "--modes", *modes, "--out", str(out)]
        # A stream that waits for a peer must not hold back another that shares a hardware queue with it.
        own = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))}
        if sys.platform == "linux":
            own["GLOO_SOCKET_IFNAME"] = "lo"  # the host's name may lead nowhere
        done = subprocess.run(command, env=own | os.environ | {_OURS: "1"}, check=False)
        found: dict[str, Any] = json.loads(out.read_text()) if done.returncode == 0 and out.exists() else {}
        return found


def show(result: Mapping[str, Any]) -> None:
    told = result["strategy"]
    print(f"{result['ranks']} x {result['device']}, {result['model']['layers']} layers; scenario {told['scenario']}")
    print(f"strategy ({told['level']}): " + " ".join(f"{k}={v}" for k, v in told["config"].items()))
    if told["reason"]:
        print(f"  {told['reason']}")
    for name, m in result["modes"].items():
        times = f"{m['ms']:9.2f} ms a step ({m['min_ms']:.2f} to {m['max_ms']:.2f})"
        print(f"{name:15s}{times}, {m['speedup']:.3f} times as fast as stock, last loss {m['losses'][-1]:.5f}")
        for what, times_run in m["launched"].items():
            print(f"{'':15s}{times_run:5d} x {what[:90]}")
    for name, why in result["skipped"].items():
        print(f"{name:15s}left out: {why}")
    if not result["agree"]:
        what = f"{', '.join(result['wrong'])} gathered wrong parameters" if result["wrong"] else "losses do not agree"
        print(f"error: {what}", file=sys.stderr)


def keep(out: Path, result: Mapping[str, Any]) -> None:
    """Write the result file: the modes are its cases."""
    from autotune.bench import form

    cases = [{"name": name, **mode} for name, mode in result["modes"].items()]
    rest = {k: v for k, v in result.items() if k not in ("device", "torch", "modes")}
    form.write(out, f"{result['ranks']} x {result['device']}", cases, extra={"suite": "fsdp", **rest})


def finish(args: argparse.Namespace, result: dict[str, Any], skipped: Mapping[str, str]) -> int:
    result["skipped"] = {**skipped, **result["skipped"]}
    if _OURS in os.environ:
        if args.out:
            args.out.write_text(json.dumps(result))
        return 0
    if args.out:
        keep(args.out, result)
    show(result)
    return 0 if result["agree"] else 1


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    args = arguments(argv)

    import torch

    from autotune.errors import UserError
    from examples.fsdp_training import changes, run_rank, scenario_of, unavailable

    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    gpus = torch.cuda.device_count() if args.device == "cuda" else 0
    ranks = int(os.environ.get("WORLD_SIZE", 0)) or args.ranks or (gpus if args.device == "cuda" else 2)
    try:
        if args.device == "cuda" and ranks > gpus:
            raise UserError(f"{ranks} ranks need a GPU each, and there are {gpus}: use --ranks or --device cpu")
        changes(args, args.device)
        scenario_of(args, ranks)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    skipped = {name: why for name in args.modes if (why := unavailable(name, args.device == "cuda"))}
    wanted = [name for name in args.modes if name != "fsdp2" and name not in skipped]
    if "RANK" in os.environ:  # one of the ranks, started by torchrun or below
        if ALONE in wanted and "autotune" in wanted:
            wanted.remove(ALONE)
            skipped[ALONE] = "it cannot share processes with autotune"
        args.modes = ["fsdp2", *wanted]
        found = run_rank(args)
        return finish(args, found, skipped) if found else 0
    together = [name for name in wanted if name != ALONE]
    sets = [["fsdp2", *together]] if together or ALONE not in wanted else []
    sets += [["fsdp2", ALONE]] if ALONE in wanted else []
    result: dict[str, Any] = {}
    for names in sets:
        found = start_ranks(ranks, names, argv)
        if not found:
            skipped |= dict.fromkeys(names[1:] or names, "its processes failed")
        elif not result:
            result = found
        else:
            result["modes"][ALONE] = found["modes"][ALONE]
            result["agree"] = result["agree"] and found["agree"]
            result["wrong"] += found["wrong"]
    if not result:
        print("error: no mode could be run", file=sys.stderr)
        return 1
    return finish(args, result, skipped)


if __name__ == "__main__":
    sys.exit(main())
