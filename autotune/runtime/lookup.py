"""Look up the stored schedules of a callable without deploying them: ``autotune.lookup``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotune.device import DeviceIdentity, Environment, environment, identify, resolve_device
from autotune.errors import UserError
from autotune.runtime.deployment import deployment
from autotune.runtime.ladder import Level, Match, Outcome, Rung, on_other_devices, on_this_device
from autotune.runtime.match import exact_match, from_package, match, other_rows, packaged_readers
from autotune.runtime.settings import Settings
from autotune.store.reading import Reader
from autotune.store.records import Schedule
from autotune.workload import PRODUCT, Workload


@dataclass(frozen=True)
class RegionMatch:
    """The stored schedule for one region.

    Attributes:
        workload: the region; None if this version cannot express it as a kernel.
        level: the match level of the stored schedule.
        schedule: the schedule that a deployment would run; None at level ``none``.
        tuned: the workload that the schedule was tuned for.
        reason: the reason why there is no better match, or why the region cannot be tuned.
        count: number of occurrences of the region in the callable.
        ladder: each level of the look-up with its outcome; only with ``explain``.
    """

    workload: Workload | None
    level: Level
    schedule: Schedule | None = None
    tuned: Workload | None = None
    reason: str = ""
    count: int = 1
    ladder: tuple[Rung, ...] = ()

    @property
    def latency_us(self) -> float | None:
        """Latency of the deployed schedule in microseconds, as measured for :attr:`tuned`."""
        return self.schedule.latency_us if self.schedule else None

    @property
    def baselines(self) -> Mapping[str, float]:
        """Baseline to latency in microseconds, from the same run as :attr:`latency_us`."""
        return self.schedule.rivals if self.schedule else {}

    @property
    def speedup(self) -> float | None:
        """Fastest baseline over the deployed latency; None without a stored schedule."""
        best = min(self.baselines.values(), default=None)
        return best / self.latency_us if best and self.latency_us else None

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        schedule = self.schedule
        return {
            "workload": self.workload.fingerprint if self.workload else None,
            "label": self.workload.label if self.workload else None,
            "match": str(self.level),
            "count": self.count,
            "tuned": self.tuned.fingerprint if self.tuned else None,
            "tuned_extent": self.tuned.extent if self.tuned else None,
            "winner": schedule.winner if schedule else None,
            "config": schedule.config if schedule else None,
            "latency_us": self.latency_us,
            "baselines": {name: {"latency_us": us} for name, us in self.baselines.items()},
            "speedup": self.speedup,
            "reason": self.reason,
            **({"ladder": [step.to_json() for step in self.ladder]} if self.ladder else {}),
        }


@dataclass(frozen=True, repr=False)
class LookupResult(Sequence[RegionMatch]):
    """The stored schedules for a callable: a sequence of :class:`RegionMatch`.

    Regions with the same work are one entry with a count. Entries without a workload cannot be tuned.
    """

    regions: tuple[RegionMatch, ...]
    device: str

    @property
    def level(self) -> Level:
        """The worst level among the regions that can be tuned; ``none`` without such regions.

        ``exact`` means that all of them are tuned.
        """
        tunable = [r.level for r in self.regions if r.workload is not None]
        return max(tunable, key=lambda level: level.rank) if tunable else Level.NONE

    @property
    def hits(self) -> int:
        """Regions with a stored schedule, occurrences counted."""
        return sum(r.count for r in self.regions if r.level is not Level.NONE)

    @property
    def misses(self) -> int:
        """Regions that could be tuned and are not, occurrences counted."""
        return sum(r.count for r in self.regions if r.level is Level.NONE and r.workload is not None)

    @property
    def unsupported(self) -> int:
        """Regions that cannot be tuned, occurrences counted."""
        return sum(r.count for r in self.regions if r.workload is None)

    def __repr__(self) -> str:
        """The regions and their levels, without the schedules, which would be pages long."""
        levels = (f"{r.workload.label if r.workload else 'a region that cannot be tuned'}: {r.level}" for r in self)
        return f"LookupResult({', '.join([self.device, *levels])})"

    def __len__(self) -> int:
        return len(self.regions)

    def __iter__(self) -> Iterator[RegionMatch]:
        return iter(self.regions)

    def __getitem__(self, index: Any) -> Any:
        return self.regions[index]

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "match": str(self.level),
            "device": self.device,
            "hits": self.hits,
            "misses": self.misses,
            "unsupported": self.unsupported,
            "workloads": [r.to_json() for r in self.regions],
        }


def lookup(
    fn: Callable[..., Any],
    inputs: Any = (),
    *,
    kwargs: Mapping[str, Any] | None = None,
    db: str | None = None,
    device: str | None = None,
    strict: bool = False,
    explain: bool = False,
    label: str = "",
) -> LookupResult:
    """Look up the stored schedules for the regions of a callable; records nothing and compiles no kernel.

    Products of the domain "product" are among them where ``AUTOTUNE_PRODUCTS`` asks for them.

    Args:
        fn: function or ``nn.Module``. Its backward is looked up too if inputs or parameters require grad.
        inputs: a tuple or list of positional example inputs, or a single one. Only their shapes, strides and types
            matter.
        kwargs: keyword example inputs.
        db: snapshot, database file or URL. None for the snapshot of ``autotune.load``, else $AUTOTUNE_DB, else the
            default file.
        device: "cpu", "cuda" or "cuda:N"; None for that of the first tensor.
        strict: match the software environment exactly, in place of the setting.
        explain: fill in the ``ladder`` of each region: the schedules at each level, and the fields that do not match.
        label: name of the callable in errors; by default its own name.

    Raises:
        UserError: missing device, unusable database, or a callable that cannot be captured.
    """
    from autotune.compiler.capture.recording import capture_for_user
    from autotune.compiler.lower.facts import GraphFacts
    from autotune.compiler.regions.find import regions_from
    from autotune.runtime.inductor.product_call import searched_products

    args = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    name = resolve_device(device or _device_of(fn, args, kwargs or {}))
    captured = capture_for_user(
        fn,
        args,
        kwargs,
        label=label or getattr(fn, "__name__", type(fn).__name__),
        fuse_attention=deployment().settings.attention == "fuse",
    )
    found = list[tuple[Workload | None, str]]()
    for graph in captured:
        facts = GraphFacts(graph.module.graph, name.partition(":")[0])
        regions = regions_from(facts)
        found += [(region.workload, region.reason) for region in regions]
        found += [(product.workload, "") for product in searched_products(facts, regions)]
    with deployment().opened(db) as store:
        return _matched(found, store, name, _rules(strict), explained=explain)


def _rules(strict: bool) -> Settings:
    rules = deployment().settings
    return replace(rules, environment="strict") if strict else rules


ID = re.compile("[0-9a-f]{8,64}")
"""The form of a stored workload's fingerprint or of its beginning."""


def lookup_stored(
    name: str, *, db: str | None = None, device: str = "auto", strict: bool = False, explain: bool = False
) -> LookupResult:
    """As :func:`lookup`, for a stored workload, which needs no capture, and on a CPU no torch.

    Args:
        name: at least the first eight hexadecimal digits of its fingerprint, as ``autotune show`` prints them.

    Raises:
        UserError: no stored region or several have such a fingerprint; or as :func:`lookup`.
    """
    device = resolve_device(device)
    with deployment().opened(db) as store:
        readers = [*([] if store is None else [store]), *packaged_readers(store, identify(device))]
        reader, found = next(((r, names) for r in readers if (names := r.fingerprints(name, 2))), (None, []))
        workload = reader.get_workload(found[0]) if reader is not None and len(found) == 1 else None
        if workload is None or workload.kind != "fusion":
            if store is not None and store.lost:
                raise UserError(store.lost)
            if not readers:
                raise UserError(f"{name}: no database to look it up in: name one with --db")
            why = "several stored workloads have this prefix" if len(found) > 1 else "no stored region has this id"
            raise UserError(f"{name}: {why}: `autotune show` lists the ids")
        return _matched([(workload, "")], store, device, _rules(strict), explained=explain)


def _matched(
    regions: Iterable[tuple[Workload | None, str]],
    store: Reader | None,
    device: str,
    rules: Settings,
    *,
    explained: bool,
) -> LookupResult:
    """Look up regions, equal ones once. A region that cannot be tuned has a reason instead of a workload."""
    identity, env = identify(device), environment(device)
    counts = Counter[str]()
    known: dict[str, Workload] = {}
    others: list[RegionMatch] = []
    for workload, reason in regions:
        if workload is None:
            others.append(RegionMatch(None, Level.NONE, reason=reason))
        else:
            counts[workload.fingerprint] += 1
            known.setdefault(workload.fingerprint, workload)
    tunable = []
    for name, w in known.items():
        found = match(w, store, identity, env, rules=rules)
        if found.level is Level.NONE and w.kind != PRODUCT:  # the packaged snapshots have none
            found, _ = from_package(w, found, store, identity, env, rules=rules)
        ladder = _ladder(w, found, store, identity, env, rules) if explained else ()
        tunable.append(RegionMatch(w, found.level, found.schedule, found.tuned, found.reason, counts[name], ladder))
    return LookupResult((*tunable, *others), device)


def _ladder(
    workload: Workload, found: Match, store: Reader | None, device: DeviceIdentity, env: Environment, rules: Settings
) -> tuple[Rung, ...]:
    """Each level of the ladder above and below the match ``found``, and the reason for using its schedule or not."""
    if workload.kind == PRODUCT:  # it has no rows to vary, and holds for one device and library
        if found.level is Level.EXACT:
            return (Rung("exact", Outcome.TAKEN, "tuned for it on this device", found.differences),)
        if store is None:
            return (Rung("exact", Outcome.EMPTY, found.reason),)
        return (on_this_device(workload, store, device, env, found.reason),)
    packaged, last = Rung("packaged", Outcome.NOT_ASKED), Rung("none", Outcome.NOT_ASKED)
    if found.level in (Level.PACKAGED, Level.NONE):
        _, packaged = from_package(workload, found, store, device, env, rules=rules)
    if found.level is Level.NONE:
        last = Rung("none", Outcome.TAKEN, "Inductor compiles a region without a schedule")
    heuristic = _heuristic(found)
    if store is None:
        return (Rung("exact", Outcome.EMPTY, "there is no database"), packaged, last)
    how = rules.environment
    exact = Rung("exact", Outcome.TAKEN, "tuned for it on this device", found.differences)
    rows, elsewhere = Rung("other_rows", Outcome.NOT_ASKED), Rung("other_device", Outcome.NOT_ASKED)
    if found.level is Level.HEURISTIC:
        exact = Rung("exact", Outcome.EMPTY, "not searched on this device")
    elif found.level is not Level.EXACT:
        exact = on_this_device(workload, store, device, env, exact_match(workload, store, device, env, how)[1])
    if found.level is Level.OTHER_ROWS and found.tuned is not None:
        why = f"tuned for {found.tuned.extent} rows, the nearest to {workload.extent} that fit"
        rows = Rung("other_rows", Outcome.TAKEN, why, found.differences)
    elif found.level not in (Level.EXACT, Level.HEURISTIC):
        _, refused = other_rows(workload, store, device, env, how, rules.rows)
        rows = Rung("other_rows", Outcome.EMPTY, "no other number of rows is tuned on this device")
        if refused:
            rows = Rung("other_rows", Outcome.REFUSED, "".join(refused).removeprefix("; "))
        elsewhere = on_other_devices(workload, store, device, found.level is Level.OTHER_DEVICE, rules.other_device)
    return (exact, heuristic, rows, elsewhere, packaged, last)


def _heuristic(found: Match) -> Rung:
    """The step of predicted schedules, with the prediction's outcome."""
    if found.level is Level.EXACT:
        return Rung("heuristic", Outcome.NOT_ASKED)
    if found.level is not Level.HEURISTIC or found.schedule is None:
        return Rung("heuristic", Outcome.EMPTY, "no schedule was predicted (AUTOTUNE_UNSEARCHED=default predicts some)")
    schedule = found.schedule
    if schedule.config is None:
        why = f"the prediction was wrong: Inductor's code was as fast, {schedule.latency_us:.1f} us"
    else:
        rivals = ", ".join(f"{name} {us:.1f} us" for name, us in sorted(schedule.rivals.items()))
        why = f"predicted and timed once, {schedule.latency_us:.1f} us ({rivals}); nobody searched it"
    return Rung("heuristic", Outcome.TAKEN, why, found.differences)


def _device_of(fn: Any, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    import torch
    from torch.utils._pytree import tree_leaves

    tensors = [t for t in tree_leaves((list(inputs), dict(kwargs))) if isinstance(t, torch.Tensor)]
    if isinstance(fn, torch.nn.Module):
        tensors += [*fn.parameters(), *fn.buffers()]
    if not tensors:
        raise UserError("a callable without tensors has no device: give device=")
    return str(tensors[0].device)
