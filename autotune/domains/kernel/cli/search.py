"""``autotune search kernel``: the keys of a kernel, from the shapes that the user names or that calls missed."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autotune.cli.commands.search import Steps, search
from autotune.errors import UserError

if TYPE_CHECKING:
    from autotune.cli.searching import Searched
    from autotune.domains.kernel.kernel import Kernel
    from autotune.store import Store
    from autotune.workload import Workload


def run(args: argparse.Namespace) -> int:
    """Search; returns 0, 1 if nothing could be measured, or 130 if it was interrupted."""
    if not args.target:
        missed = " --missed" if args.missed else ""
        raise UserError(f"name the kernel: autotune search kernel package.module:function{missed}")
    if args.inputs:
        raise UserError("--inputs is of other domains: a kernel's declaration names its inputs, --shapes what they are")
    if args.missed and args.shapes:
        raise UserError("--missed takes the shapes from the database: leave --shapes out")
    own = argparse.Namespace(**vars(args))
    own.kernel_missed, own.missed = args.missed, False
    return search(own, KernelSteps())


class KernelSteps(Steps):
    """The steps of a search of a kernel's keys."""

    def check(self, args: argparse.Namespace, devices: Sequence[str]) -> None:
        if args.shapes:  # a mistake in the file is told before anything is started
            from autotune.domains.kernel.declare import read_shapes

            read_shapes(args.shapes)

    def capture(
        self, args: argparse.Namespace, device: str, store: Store
    ) -> tuple[Sequence[tuple[Workload, int]], Mapping[str, Any]]:
        from autotune.domains.kernel.declare import read_shapes
        from autotune.domains.kernel.task import is_declared, resolve
        from autotune.domains.kernel.workloads import workloads_of

        declared = is_declared(args.target)
        kernel = resolve(args.target, "" if declared else args.space or "")
        if declared and args.space:
            resolve(args.target, args.space)  # a mistake in the file is told now
        elif args.space:
            args.space = None  # it is the whole of the space, no part of one
        counts: list[int] = []
        shapes = read_shapes(args.shapes) if args.shapes else None
        if args.kernel_missed:
            shapes, counts = _missed(kernel, store, device)
        workloads = workloads_of(kernel, args.target, shapes, device)
        if len(counts) != len(workloads):
            counts = [1] * len(workloads)
        return list(zip(workloads, counts, strict=True)), {"kernel": kernel.name}

    def finish(self, args: argparse.Namespace, device: str, store: Store, searched: Searched, command: str) -> Searched:
        from autotune.domains.kernel.cli.report import print_search, with_figures

        return replace(searched, answer=with_figures(searched.answer, args.target, store), show=print_search)


def _missed(kernel: Kernel, store: Store, device: str) -> tuple[list[dict[str, Any]], list[int]]:
    """The shapes of keys that calls looked up in vain, and how often: a key's names are the factory's arguments."""
    import inspect

    from autotune.device import identify

    if not callable(kernel.inputs):
        raise UserError(f"{kernel.name}: its inputs are a list, so that other keys cannot be made")
    parameters = inspect.signature(kernel.inputs).parameters.values()
    names = [p.name for p in parameters if p.name not in ("device", "seed")]
    shapes, counts, left = [], [], 0
    for miss in store.misses(identify(device).fingerprint):
        workload = store.get_workload(miss.workload)
        if workload is None or workload.kind != "kernel" or workload.spec.get("kernel") != kernel.name:
            continue
        key = workload.spec.get("key")
        if workload.spec.get("source") != kernel.source or not isinstance(key, dict) or not key.keys() >= set(names):
            left += 1
            continue
        shapes.append({name: key[name] for name in names})
        counts.append(miss.count)
    if not shapes:
        hint = f"; {left} are of an earlier version, or have keys without {', '.join(names)}" if left else ""
        raise UserError(f"{store.name} has no missed key of {kernel.name} on this device{hint}")
    return shapes, counts
