"""Replays of a captured copy whose target was freed and allocated again at the same address, each in its own process.

    python tests/gpu/graph_memory_check.py [--device cuda:0]

Prints a line for each case:

- what writes to the target: "kernel", "copy", or "peer", which is a copy from another GPU;
- torch's allocator: "segments" of ``cudaMalloc``, or "expandable" ones;
- the driver's numbers of both allocations;
- the steps that the process ended: "captured", "freed", "replayed", "destroyed";
- its exit code; -11 is a segmentation fault.

Graphs of tensor-parallel products rely on numbers that differ and are not 0. The exit code is 1 if a case of "segments"
has others.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from autotune.domains.c3.collectives.symmetric import Copies, allocation
from tests.gpu import command

NBYTES = 64 << 20
WAYS = ("kernel", "copy", "peer")
ALLOCATORS = {"segments": "expandable_segments:False", "expandable": "expandable_segments:True"}


def play(way: str, device: torch.device) -> None:
    """Capture, free, allocate, replay; prints a word after each step."""

    def tensor(on: torch.device, value: int) -> torch.Tensor:
        return torch.full((NBYTES,), value, dtype=torch.uint8, device=on)

    torch.cuda.set_device(device)
    other = torch.device("cuda", (device.index + 1) % torch.cuda.device_count())
    source, target = tensor(other if way == "peer" else device, 7), tensor(device, 0)
    address, graph = target.data_ptr(), torch.cuda.CUDAGraph()
    copies = Copies([(address, source.data_ptr(), NBYTES)])
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        if way == "kernel":
            torch.add(source, 0, out=target)
        else:
            copies(torch.cuda.current_stream().cuda_stream)
    graph.replay()
    torch.cuda.synchronize()
    assert bool(target.eq(7).all())
    print("captured", allocation(address), end=" ", flush=True)
    del target
    torch.cuda.empty_cache()
    others: list[torch.Tensor] = []
    while len(others) < 64 and (not others or others[-1].data_ptr() != address):
        others.append(tensor(device, 0))
    if others[-1].data_ptr() != address:
        print("elsewhere")
        return
    print("freed", allocation(address), end=" ", flush=True)
    graph.replay()
    torch.cuda.synchronize()
    print("replayed" if bool(others[-1].eq(7).all()) else "wrong", end=" ", flush=True)
    del graph
    torch.cuda.synchronize()
    print("destroyed", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser(__doc__)
    parser.add_argument("--way", choices=WAYS, help="of one process; the others are started with it")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    if options.way:
        play(options.way, device)
        return 0
    ways = WAYS if torch.cuda.device_count() > 1 else WAYS[:2]
    different, missing = 0, 0
    for allocator, settings in ALLOCATORS.items():
        for way in ways:
            line = [sys.executable, __file__, "--device", options.device, "--way", way]
            environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": settings, "PYTORCH_ALLOC_CONF": settings}
            done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120)
            print(f"{way:>6} {allocator:>10}  {done.stdout.strip()}  exit {done.returncode}", flush=True)
            numbers = [int(word) for word in done.stdout.split() if word.isdigit()]
            right = len(numbers) == 2 and 0 not in numbers and numbers[0] != numbers[1]
            different += right
            missing += allocator == "segments" and not right
    print(f"numbers differ: {different} of {len(ALLOCATORS) * len(ways)}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
