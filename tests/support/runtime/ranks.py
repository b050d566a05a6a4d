"""Two processes joined by gloo, which run functions of a test module together: one group serves a module's tests."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


class Ranks:
    """Use as a context manager. Environment variables and threads of the ranks are those of the parent at the start."""

    def __init__(self, folder: Path, ranks: int = 2) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(ranks):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, rank, ranks, str(folder / "rendezvous")), daemon=True)
            process.start()
            self._pipes.append(mine)
            self._processes.append(process)

    def run(self, module: str, function: str, *args: Any) -> list[Any]:
        """``module.function(rank, *args)`` on every rank; their answers, or a failure with a rank's traceback."""
        for pipe in self._pipes:
            pipe.send((module, function, args))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(200), f"rank {rank} does not answer: {function}"
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
            process.join(5)
            process.kill()


def serve(pipe: Connection, rank: int, ranks: int, rendezvous: str) -> None:
    """A rank's life."""
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    while True:
        try:
            module, function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(importlib.import_module(module), function)(rank, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
