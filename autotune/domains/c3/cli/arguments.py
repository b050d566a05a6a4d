"""The options of C3 scenarios, and of what is done with them."""

from __future__ import annotations

import argparse

from autotune.cli.options import positive_int
from autotune.errors import UserError

SCENARIO = ("gemm", "compute", "collective", "bytes", "dtype", "layout")
"""Arguments that say what a C3 scenario is, beside the number of ranks."""


def add_scenario(parser: argparse.ArgumentParser) -> None:
    """What describes a C3 scenario in the place of ``TARGET``; read by :mod:`autotune.domains.c3.cli.scenario`."""
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


def add_arguments(command: str, parser: argparse.ArgumentParser) -> None:
    """Add what ``command`` takes for C3."""
    if command in ("search", "lookup"):
        add_scenario(parser)


def refuse(command: str, args: argparse.Namespace) -> None:
    """For a command on another domain: raises UserError where an option of C3 is given."""
    if command in ("search", "lookup"):
        given = [f"--{name}" for name in (*SCENARIO, "ranks") if getattr(args, name) is not None]
        if given:
            raise UserError(f"{', '.join(given)}: only of c3 scenarios")
