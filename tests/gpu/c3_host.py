"""Shared parts of the scripts that check C3 on a GPU host: arguments, the ranks, and the file of results."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from autotune.device import environment, resolve_device
from autotune.domain import identity_of
from autotune.domains.c3 import task
from autotune.domains.c3.measuring.ranks import Ranks
from autotune.domains.c3.scenario import Gemm, Scenario
from autotune.errors import UserError
from benchmarks import form


def parser(about: str) -> argparse.ArgumentParser:
    """A parser with the common options of the scripts."""
    made = argparse.ArgumentParser(allow_abbrev=False, description=about)
    made.add_argument("--ranks", type=int, metavar="N", help="processes, one GPU each (default: all GPUs)")
    made.add_argument("--device", default="cuda:0", metavar="cuda:N|cpu", help="of rank 0 (default: %(default)s)")
    made.add_argument("--seed", type=int, default=0, metavar="N", help="of all that is drawn (default: %(default)s)")
    made.add_argument("--out", type=Path, metavar="FILE", help="write the results there, as JSON")
    return made


def open_ranks(options: argparse.Namespace) -> tuple[Ranks, str]:
    """The ranks of the options, and the device of the first.

    Raises:
        UserError: there are no such devices, or too few.
    """
    device = resolve_device(options.device)
    count = options.ranks
    if count is None:
        import torch

        first = int(device.partition(":")[2] or 0)
        count = 2 if device == "cpu" else torch.cuda.device_count() - first
    if count < 2:
        raise UserError(f"C3 needs 2 ranks or more, not {count}; --device cpu takes any number of ranks")
    task.check_devices(count, device)
    return Ranks(None, device, task.policy(device), ranks=count), device


def write(out: Path | None, ranks: int, device: str, cases: dict[str, int], result: dict[str, Any]) -> None:
    """Write a result file (:mod:`benchmarks.form`) where one is wanted.

    Args:
        cases: by name, how often each was checked.
        result: further fields of the file.
    """
    if out is None:
        return
    any_scenario = Scenario(Gemm(64, 64, 64, "f32"), "all_gather", 4 * ranks, ranks, "f32")
    env = environment(device)
    form.write(
        out,
        identity_of(any_scenario.workload(), device).label,
        [{"name": name, "checked": count} for name, count in cases.items()] or [{"name": "nothing", "checked": 0}],
        {name: str(v) for name, v in (("cuda", env.cuda), ("driver", env.driver)) if v},
        command=" ".join([os.path.relpath(sys.argv[0]), *sys.argv[1:]]),
        extra={"suite": Path(sys.argv[0]).stem, "ranks": ranks, **result},
    )
    print(f"written to {out}")
