"""The options of C3 scenarios, the scenario that they describe, and this process's part under torchrun."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from autotune.cli.options import positive_int
from autotune.errors import UserError

if TYPE_CHECKING:
    from autotune.domains.c3.scenario import Compute, Scenario

SCENARIO = ("gemm", "compute", "collective", "bytes", "dtype", "layout")
"""Options that say what a C3 scenario is, beside the number of ranks."""


def add_scenario(parser: argparse.ArgumentParser) -> None:
    """What describes a C3 scenario in the place of ``TARGET``."""
    group = parser.add_argument_group("c3", "a scenario without a name: a computation beside a collective")
    group.add_argument("--gemm", metavar="MxNxK", help="the computation: a matrix product, such as 8192x28672x8192")
    about = "another computation: a built-in fusion workload or package.module:callable, the latter with --inputs"
    group.add_argument("--compute", metavar="SPEC", help=about)
    group.add_argument("--collective", metavar="NAME", help="all_gather, all_to_all, reduce_scatter or all_reduce")
    about = "of the larger of a rank's two buffers, such as 512MiB"
    group.add_argument("--bytes", metavar="SIZE", help=about)
    add_ranks(group)
    about = "of both: bf16, f16 or f32 (default: that of a name; else bf16 on GPUs, f32 on a CPU)"
    group.add_argument("--dtype", metavar="TYPE", help=about)
    about = "of the GEMM's matrices, n as named or t transposed, such as nt for a linear layer (default: nn)"
    group.add_argument("--layout", metavar="nn|nt|tn|tt", help=about)


def add_ranks(parser: argparse._ActionsContainer) -> None:
    """``--ranks``."""
    about = "processes, one device each (default: all GPUs, or 2 on a CPU; under torchrun its processes)"
    parser.add_argument("--ranks", type=positive_int, metavar="N", help=about)


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
