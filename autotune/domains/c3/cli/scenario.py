"""The C3 scenario that a command line describes, and this process's part where torchrun started several."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from autotune.domains.c3.cli.arguments import SCENARIO
from autotune.errors import UserError

if TYPE_CHECKING:
    from autotune.domains.c3.scenario import Compute, Scenario


def scenario_of(args: argparse.Namespace, device: str) -> tuple[Scenario, str]:
    """The scenario, and what to call it.

    Args:
        device: as resolved.

    Raises:
        UserError: it is described twice or not at all, or it cannot be.
    """
    from autotune.domains.c3.named import find
    from autotune.domains.c3.scenario import Scenario, parse_bytes

    if args.target is not None:
        given = [f"--{name}" for name in (*SCENARIO, "inputs") if name != "dtype" and getattr(args, name) is not None]
        if given:
            raise UserError(f"{args.target} is a scenario by name: leave out {', '.join(given)}")
        entry = find(args.target)
        return entry.scenario(ranks_of(args, device), args.dtype or entry.dtype or _dtype(device)), args.target
    if args.gemm is None and args.compute is None:
        raise UserError("name a scenario (`autotune workloads` lists them), or give --gemm, --collective and --bytes")
    missing = [f"--{name}" for name in ("collective", "bytes") if getattr(args, name) is None]
    if missing:
        raise UserError(f"a scenario needs {' and '.join(missing)} too")
    dtype = args.dtype or _dtype(device)
    compute, nbytes = _compute(args, dtype), parse_bytes(args.bytes)
    scenario = Scenario(compute, args.collective, nbytes, ranks_of(args, device), dtype)
    return scenario, scenario.label


def ranks_of(args: argparse.Namespace, device: str) -> int:
    """How many processes take part.

    Raises:
        UserError: fewer than 2, more than there are GPUs on this host, or not as many as torchrun started.
    """
    world = int(os.environ.get("WORLD_SIZE", "1")) if _under_torchrun() else 0
    if world and args.ranks not in (None, world):
        raise UserError(f"--ranks {args.ranks}: torchrun started {world} processes")
    ranks: int = args.ranks or world
    if device.startswith("cuda"):
        import torch

        count = torch.cuda.device_count()
        ranks = ranks or count
        if not world and ranks > count:
            raise UserError(f"--ranks {ranks}: this machine has {count} GPU{'s' if count > 1 else ''}")
    ranks = ranks or 2
    if ranks < 2:
        raise UserError(f"a collective needs 2 ranks or more, not {ranks}; --device cpu can have any number of them")
    return ranks


def serves() -> bool:
    """Under torchrun, in all processes but the first: do that one's work until it has finished.

    Returns:
        Whether this process has served and is done.
    """
    if not _under_torchrun():
        return False
    from autotune.domains.c3.measuring.agents import serve_agent

    return serve_agent()


def _under_torchrun() -> bool:
    if "RANK" not in os.environ:
        return False
    from autotune.domains.c3.measuring.agents import under_torchrun

    return under_torchrun()


def _dtype(device: str) -> str:
    return "bf16" if device.startswith("cuda") else "f32"


def _compute(args: argparse.Namespace, dtype: str) -> Compute:
    from autotune.domains.c3.scenario import Program, parse_gemm

    if args.gemm is not None:
        if args.compute is not None or args.inputs is not None:
            raise UserError(f"--gemm and {'--compute' if args.compute is not None else '--inputs'} exclude each other")
        return parse_gemm(args.gemm, dtype, args.layout or "nn")
    if args.layout is not None:
        raise UserError("--layout goes with --gemm")
    if ":" in args.compute:
        from autotune.domains.fusion.program_spec import load_callable

        load_callable(args.compute, args.inputs)  # what is wrong with it is told before anything is started
    else:
        from autotune.domains.fusion.builtin import BUILTIN

        if args.compute not in BUILTIN or args.inputs is not None:
            raise UserError(
                f"--compute {args.compute}: name a built-in fusion workload (`autotune workloads` lists them), or"
                " your own package.module:callable with --inputs"
            )
    return Program(args.compute, args.inputs or "")
