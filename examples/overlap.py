"""Gather a tensor from all ranks while a layer computes: one after the other, and by a stored strategy.

autotune search c3 --gemm 512x512x512 --layout nt --collective all_gather --bytes 4MiB --ranks 2 --device cpu --db c3.db
python examples/overlap.py --db c3.db
torchrun --nproc-per-node 8 examples/overlap.py --gemm 8192x8192x8192 --bytes 512MiB --db c3.db
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence

ROUNDS = 20


def rank_main(rank: int, ranks: int, args: argparse.Namespace, init_method: str) -> None:
    """The loop of every rank: each step has other tensors, and both ways are timed in turn."""
    import torch
    import torch.distributed as dist

    import autotune
    from autotune.domains.c3.scenario import parse_bytes, parse_gemm

    cuda = args.device == "cuda"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", init_method, rank=rank, world_size=ranks)
    dtype = torch.bfloat16 if cuda else torch.float32
    gemm, nbytes = parse_gemm(args.gemm), parse_bytes(args.bytes)

    torch.manual_seed(rank)
    layer = torch.nn.Linear(gemm.k, gemm.n, bias=False, device=device, dtype=dtype)
    batches = [torch.randn(gemm.m, gemm.k, device=device, dtype=dtype) for _ in range(4)]
    shards = [torch.randn(nbytes // dtype.itemsize // ranks, device=device, dtype=dtype) for _ in range(4)]
    whole = torch.empty(shards[0].numel() * ranks, device=device, dtype=dtype)

    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renamed it
    op = autotune.overlap(layer, "all_gather", like=shards[0], inputs=batches[0])
    times: dict[str, list[float]] = {"one after the other": [], "overlapped": []}
    with torch.no_grad():
        for step in range(ROUNDS + 3):
            x, shard = batches[step % 4], shards[step % 4]
            for name, samples in times.items():
                if cuda:
                    torch.cuda.synchronize()
                dist.barrier()
                start = time.perf_counter()
                if name == "overlapped":
                    out, gathered = op(x, shard)
                else:
                    expected = layer(x)
                    gather(whole, shard)
                if cuda:
                    torch.cuda.synchronize()
                if step >= 3:
                    samples.append(time.perf_counter() - start)
            torch.testing.assert_close(out, expected)
            assert torch.equal(gathered, whole), "the ranks' shards are not where they belong"
    slowest = torch.tensor([statistics.median(s) for s in times.values()], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if rank == 0 and op.match is not None:
        print(f"{op.scenario.label if op.scenario else ''}: {op.match.level}, {op.match.label}")
        print(f"  {op.match.reason}" if op.match.reason else "  tuned here")
        for name, seconds in zip(times, slowest.tolist(), strict=True):
            print(f"  {name}: {seconds * 1e3:.3f} ms")
    op.close()
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Gather a tensor while a layer computes.")
    parser.add_argument("--gemm", default="512x512x512", help="MxNxK of the layer (default: %(default)s)")
    parser.add_argument("--bytes", default="4MiB", help="size of what is gathered (default: %(default)s)")
    parser.add_argument("--ranks", type=int, help="processes to start (default: all GPUs, or 2); not under torchrun")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--db", help="database URL or SQLite file (default: $AUTOTUNE_DB, else the user's own)")
    args = parser.parse_args(argv)
    if args.db:
        os.environ["AUTOTUNE_DB"] = args.db

    import torch

    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if "RANK" in os.environ:
        rank_main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), args, "env://")
        return 0
    ranks = args.ranks or (torch.cuda.device_count() if args.device == "cuda" else 2)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (ranks, args, f"file://{folder}/ranks"), ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
