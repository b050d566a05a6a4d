"""Commands for users' own kernels: ``search`` and ``lookup``, and their printed output."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autotune.cli.commands.lookup import check_target
from autotune.cli.commands.search import SearchHooks
from autotune.cli.commands.search import search as search_with
from autotune.cli.output import console, figure_text, is_busy, machine_output, print_busy_note, ratio
from autotune.domain import figure_of, identity_of
from autotune.domains.kernel.declare import is_declared, read_shapes, resolve
from autotune.domains.kernel.kernel import Kernel, words
from autotune.domains.kernel.space import config_words
from autotune.domains.kernel.tunable import find
from autotune.errors import UserError
from autotune.store import attached
from autotune.workload import Workload

if TYPE_CHECKING:
    from autotune.cli.searching import SearchOutcome
    from autotune.store import Store


def search(args: argparse.Namespace) -> int:
    """Search a kernel's keys, for the user's shapes or for those of missed look-ups."""
    if not args.target:
        missed = " --missed" if args.missed else ""
        raise UserError(f"name the kernel: autotune search kernel package.module:function{missed}")
    if args.inputs:
        raise UserError("--inputs does not go with kernels: the declaration has inputs=, and --shapes their arguments")
    if args.missed and args.shapes:
        raise UserError("--missed takes the shapes from the database: leave out --shapes")
    own = argparse.Namespace(**vars(args))
    own.kernel_missed, own.missed = args.missed, False
    return search_with(own, KernelHooks())


class KernelHooks(SearchHooks):
    """Hooks of the search of a kernel's keys."""

    def check(self, args: argparse.Namespace, devices: Sequence[str]) -> None:
        if args.shapes:  # report an error in the file before any process starts
            read_shapes(args.shapes)

    def capture(
        self, args: argparse.Namespace, device: str, store: Store
    ) -> tuple[Sequence[tuple[Workload, int]], Mapping[str, Any]]:
        from autotune.domains.kernel.task import workloads_of

        declared = is_declared(args.target)
        kernel = resolve(args.target, "" if declared else args.space or "")
        if declared and args.space:
            resolve(args.target, args.space)  # report an error in the file before any process starts
        elif args.space:
            args.space = None  # the file declares the full space; it does not narrow one
        counts: list[int] = []
        shapes = read_shapes(args.shapes) if args.shapes else None
        if args.kernel_missed:
            shapes, counts = _missed(kernel, store, device)
        workloads = workloads_of(kernel, args.target, shapes, device)
        if len(counts) != len(workloads):
            counts = [1] * len(workloads)
        return list(zip(workloads, counts, strict=True)), {"kernel": kernel.name}

    def finish(
        self, args: argparse.Namespace, device: str, store: Store, searched: SearchOutcome, command: str
    ) -> SearchOutcome:
        return replace(searched, answer=with_figures(searched.answer, args.target, store), show=print_search)


def _missed(kernel: Kernel, store: Store, device: str) -> tuple[list[dict[str, Any]], list[int]]:
    """The shapes and counts of missed look-ups; the inputs factory's parameters are names in the key."""

    from autotune.device import identify

    if not callable(kernel.inputs):
        raise UserError(
            f"{kernel.name}: inputs= is a list, so --missed cannot make inputs of other keys: give a callable"
        )
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
        hint = f"; {left} are of an earlier version, or their keys lack {', '.join(names)}" if left else ""
        raise UserError(f"{store.name} has no missed key of {kernel.name} on this device{hint}")
    return shapes, counts


def lookup(args: argparse.Namespace) -> int:
    """Print the configurations that calls of a kernel would run; returns 0 at every match level."""
    check_target(args)
    with machine_output(args.json) as emit:
        from autotune.device import environment, resolve_device
        from autotune.domains.kernel.task import workloads_of

        device = resolve_device(args.device)
        kernel = resolve(args.target, "" if is_declared(args.target) else args.space or "")
        shapes = read_shapes(args.shapes) if args.shapes else None
        workloads, found = workloads_of(kernel, args.target, shapes, device, reference=False), []
        with attached(args.db, args.db_read) as store:
            for workload in workloads:
                where, key = identity_of(workload, device), dict(workload.spec["key"])
                match = find(kernel, key, store, where, environment(device), strict=args.strict)
                found.append(
                    {
                        "workload": workload.fingerprint,
                        "label": workload.label,
                        "key": key,
                        "match": str(match.level),
                        "config": match.config,
                        "tuned": None if match.tuned is None else dict(match.tuned),
                        "tuned_words": words(match.tuned or {}),
                        "distance": match.distance,
                        "latency_us": None if kernel.objective else match.latency_us,
                        "figure": figure_text(figure_of(workload), match.latency_us),
                        "winner": match.schedule.winner if match.schedule else None,
                        "baselines": dict(match.schedule.baselines) if match.schedule else {},
                        "changed": match.changed,
                        "reason": match.reason,
                    }
                )
        answer: dict[str, Any] = {"target": args.target, "kernel": kernel.name, "device": device, "keys": found}
        emit(answer)
        if not args.json:
            print_lookup(answer)
    return 0


def with_figures(answer: Mapping[str, Any], target: str, store: Store) -> dict[str, Any]:
    """The answer of a search, with figures in the kernel's unit added to the latencies."""
    regions = []
    for region in answer["workloads"]:
        workload = store.get_workload(region["workload"])
        spec = workload.spec if workload is not None else {}
        unit = figure_of(workload) if workload is not None else None
        default = region["baselines"].get("default", {}).get("latency_us") or region["default_us"]
        costs = {"best": region["deployed_us"] or (region["best"] or {}).get("latency_us"), "default": default}
        figures = {name: figure_text(unit, cost) for name, cost in costs.items()}
        more = {"key": spec.get("key"), "figures": figures}
        if unit is not None:
            more["objective"] = spec["objective"]
        regions.append({**region, **more})
    return {**answer, "target": target, "workloads": regions}


def print_search(answer: Mapping[str, Any]) -> None:
    """Print the searched keys as a table on stdout.

    ``best`` is the deployed figure, ``speedup`` the ratio of the default's figure to it, ``runs`` the configuration
    that calls run from now on.
    """
    from rich.table import Table

    names = list(dict.fromkeys(name for region in answer["workloads"] for name in region["metrics"]))
    table = Table(box=None, pad_edge=False)
    table.add_column("key", overflow="fold", min_width=12)
    for title in ("tried", "failed", "default", "best", "speedup", *names):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("runs", overflow="fold")
    for region in answer["workloads"]:
        figures = region["figures"]
        table.add_row(
            region["label"],
            str(region["measured"] + region["reused"]),
            str(sum(region["failed"].values()) or "–"),
            figures["default"],
            figures["best"],
            ratio(region["speedup"]),
            *(f"{region['metrics'][name]:.4g}" if name in region["metrics"] else "–" for name in names),
            _runs(region),
        )
    console().print(table)
    print_busy_note(answer["workloads"])


def _runs(region: Mapping[str, Any]) -> str:
    if region["best"] is None:
        return "default (nothing could be measured)"
    if region["winner"] == "default":
        return "default"
    return config_words(region["best"]["config"]) + (" (busy)" if is_busy(region) else "")


def print_lookup(answer: Mapping[str, Any]) -> None:
    """Print the configurations of calls as a table on stdout, with the reason if a match is not exact."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("key", "match", "measured", "runs", "why"):
        table.add_column(title, overflow="fold", no_wrap=title == "match")
    for found in answer["keys"]:
        table.add_row(
            found["label"], found["match"], found["figure"], config_words(found["config"]), found["reason"] or "–"
        )
    console().print(table)
