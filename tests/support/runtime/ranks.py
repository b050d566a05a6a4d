"""Two processes joined by gloo, which run functions of a test module together: one group serves a module's tests.

``python -m tests.support.runtime.ranks ADDRESS RANK RANKS RENDEZVOUS DEVICE`` is one of them.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
import tempfile
import traceback
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from tests.support import ROOT, SOCKETS, forks


class Ranks:
    """Use as a context manager. Environment variables and threads of the ranks are those of the parent at the start.

    Args:
        first_imports: whether rank 0 is a new interpreter, for functions that look at what it has imported.
        device: "cpu", or "cuda" for a GPU for each rank, which NCCL joins.
    """

    def __init__(self, folder: Path, ranks: int = 2, *, first_imports: bool = False, device: str = "cpu") -> None:
        self._pipes: list[Connection] = []
        self._processes = []
        with tempfile.TemporaryDirectory(dir=SOCKETS) as sockets, Listener(f"{sockets}/ranks") as listener:
            for rank in range(ranks):
                words = [str(listener.address), str(rank), str(ranks), str(folder / "rendezvous"), device]
                with forks.new_interpreters() if first_imports and rank == 0 else contextlib.nullcontext():
                    self._processes.append(subprocess.Popen([sys.executable, "-m", __name__, *words], cwd=ROOT))
                self._pipes.append(listener.accept())

    @property
    def pids(self) -> list[int]:
        """The processes, by rank."""
        return [process.pid for process in self._processes]

    def run(self, module: str, function: str, *args: Any, lost: int | None = None, timeout_s: float = 200) -> list[Any]:
        """``module.function(rank, *args)`` on every rank; their answers, or a failure with a rank's traceback.

        Args:
            lost: a rank that dies, of which no answer is expected.
            timeout_s: the most that an answer may take.
        """
        for pipe in self._pipes:
            pipe.send((module, function, args))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if rank == lost:
                continue
            assert pipe.poll(timeout_s), f"rank {rank} does not answer: {function}"
            answers.append(pipe.recv())
        for rank, (ok, answer) in enumerate(answers):
            assert ok, f"rank {rank}:\n{answer}"
        return [answer for _, answer in answers]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def main(address: str, rank: int, ranks: int, rendezvous: str, device: str) -> None:
    """A rank's life."""
    import torch
    import torch.distributed as dist

    pipe = Client(address)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    while True:
        try:
            module, function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(importlib.import_module(module), function)(rank, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
