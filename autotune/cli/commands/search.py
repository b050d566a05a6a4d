"""``autotune search``: search a target's workloads on this machine and store the results."""

from __future__ import annotations

import argparse
import copy
import shlex
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from autotune.cli.options import (
    DEFAULT,
    add_db,
    add_device,
    add_json,
    add_target,
    command_of,
    every_domain,
    natural_int,
    positive_int,
    seconds,
)
from autotune.cli.output import machine_output, microseconds, print_table, total
from autotune.cli.searching import (
    SearchOutcome,
    add_ray,
    call_on_node,
    conclude,
    describe_nodes,
    given_options,
    joined_cluster,
    not_begun,
    reason,
    tune,
    warn,
)
from autotune.domain import domain_of
from autotune.errors import UserError, safe_line
from autotune.tuner.result import Result
from autotune.tuner.samplers import DEFAULT as SAMPLER
from autotune.tuner.samplers import SAMPLERS
from autotune.words import plural
from autotune.workload import Workload

if TYPE_CHECKING:
    from autotune.store import Store
    from autotune.tuner.cluster.cluster import Cluster, Kind

    Counted = Sequence[tuple[Workload, int]]
    """Workloads, and how often each occurs."""


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "search",
        command="search",
        help="search a target's workloads on this machine and store schedules",
        description="Search the configurations of a target's workloads on this machine: verify and time each candidate,"
        " and store all measurements and the best schedules. After an interruption, run the same command again: it"
        " continues the search.",
    )
    add_target(parser, required=False)
    more = "; several equal GPUs, such as cuda:0,cuda:1 or cuda:all, search different workloads at the same time"
    add_device(parser, more)
    add_ray(parser)
    add_db(parser)
    about = "candidates to measure per workload (default: as long as they bring a gain, at most 256)"
    parser.add_argument("--trials", type=positive_int, metavar="N", help=about)
    about = (
        "seconds for the whole search, shared among its workloads, the most expensive first; run the same command again"
        " to search workloads that it did not begin"
    )
    parser.add_argument("--timeout", type=seconds, metavar="S", help=about)
    parser.add_argument(
        "--sampler", choices=SAMPLERS, default=SAMPLER, help="proposes candidates (default: %(default)s)"
    )
    parser.add_argument("--seed", type=natural_int, default=0, metavar="N", help="seed of the sampler (default: 0)")
    about = "search space: a copy of search_spaces/DOMAIN.toml with fewer choices"
    parser.add_argument("--space", metavar="FILE", help=about)
    about = (
        "search another target in the same run, with its own --inputs; workloads of several targets are searched once;"
        " may be repeated"
    )
    parser.add_argument("--also", nargs="+", action="append", default=[], metavar=("TARGET", "INPUTS"), help=about)
    about = (
        "instead of a target, search the missed workloads that the database has recorded, of DOMAIN or of all domains"
    )
    parser.add_argument("--missed", action="store_true", help=about)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Search; returns 0, 1 if nothing could be measured, or 130 if it was interrupted."""
    own = command_of(args.domain, "search")
    return own(args) if own is not None else search(args, SearchHooks())


def time_line(captured_s: float, searched_s: float, rest_s: float, baselines_s: Sequence[float]) -> str:
    """Seconds of a search's parts, and which of them --timeout does not limit; "" if every part took less than one.

    Args:
        baselines_s: seconds of the kernels' search that prepared each workload's baselines.
    """
    parts = ("capture", captured_s), ("kernels", searched_s), ("the rest", rest_s)
    spent = ", ".join(f"{name} {taken:.0f} s" for name, taken in parts if taken >= 1)
    long = [taken for taken in baselines_s if taken >= 1]
    free = ["in capture and the rest"] if captured_s >= 1 else []
    free += [f"for the baselines of {plural(len(long), 'workload')} ({sum(long):.0f} s of kernels)"] if long else []
    cut = f"; --timeout does not limit torch's compilation {' and '.join(free)}" if free else ""
    return f"autotune: time: {spent}{cut}" if spent else ""


class SearchHooks:
    """Parts of a search that depend on a domain's own options. These are the defaults, for a domain without options.

    With a cluster, :meth:`capture` and :meth:`finish` are called on a node that has the device.
    """

    def check(self, args: argparse.Namespace, devices: Sequence[str]) -> None:
        """Check the options against the devices; raises UserError."""

    def confines(self, args: argparse.Namespace) -> bool:
        """Return True if the options limit ``--missed``, which names no domain, to this one."""
        return False

    def capture(self, args: argparse.Namespace, device: str, store: Store) -> tuple[Counted, Mapping[str, Any]]:
        """The target's workloads with their numbers of occurrences, and notes for the run."""
        return domain_of(args.domain).workloads_of(args.target, args.inputs), {}

    def captured(
        self, args: argparse.Namespace, device: str, store: Store
    ) -> tuple[Counted, Mapping[str, Any], str | None]:
        """The result of :meth:`capture`, and the space file, which it may have changed."""
        return (*self.capture(args, device, store), args.space)

    def options(self, args: argparse.Namespace, device: str) -> Mapping[str, Any]:
        """Further arguments of :func:`autotune.api.tune_workloads`."""
        return {}

    def reserved_s(self, args: argparse.Namespace) -> float:
        """Seconds of ``--timeout`` reserved for :meth:`finish`."""
        return 0.0

    def finish(
        self, args: argparse.Namespace, device: str, store: Store, searched: SearchOutcome, command: str
    ) -> SearchOutcome:
        """Finish a target after its search; returns the result to print."""
        return searched

    def advice(self, args: argparse.Namespace) -> str:
        """A line on the use of the results."""
        return ""

    def words(self, args: argparse.Namespace) -> list[str]:
        """The options as words of the command line, for the run's record."""
        return []


def search(args: argparse.Namespace, hooks: SearchHooks) -> int:
    """Search a target's workloads, or what deployments missed; returns the exit code."""
    if args.also and not args.target:
        raise UserError("--also adds a target: name the first one as TARGET")
    if args.missed and (args.target or args.inputs):
        raise UserError("--missed takes its workloads from the database: leave out TARGET and --inputs")
    if not args.missed and not args.target:
        raise UserError("name a target: autotune search DOMAIN TARGET (`autotune workloads` lists built-in targets)")
    domain = args.domain or (DEFAULT if hooks.confines(args) else None)
    with machine_output(args.json) as emit, joined_cluster(args) as cluster:
        from autotune.device import resolve_devices
        from autotune.store import Store

        devices = [cluster.device] if cluster else resolve_devices(args.device)
        hooks.check(args, devices)
        if domain is None and any(other.serves() for other in every_domain().values()):
            return 0
        with Store.open(args.db, existing=bool(args.missed and args.db)) as store:
            own = Search(args, devices, store, hooks, cluster)
            done = own.missed(domain) if args.missed else own.targets()
        # One JSON object: the answers of further domains or kinds of devices are entries under their names.
        first, *others = done
        emit({**done[first].answer, **{name: done[name].answer for name in others}})
    return conclude(list(done.values()), args.json, hooks.advice(args))


@dataclass(frozen=True)
class Search:
    """One search of the command line.

    Attributes:
        devices: at most one is used per workload.
        cluster: its devices replace ``devices``.
    """

    args: argparse.Namespace
    devices: Sequence[str]
    store: Store
    hooks: SearchHooks
    cluster: Cluster | None = None

    def targets(self) -> dict[str, SearchOutcome]:
        """Search TARGET and those of ``--also``; a workload of several targets is searched once."""
        each, begin = {of.target: of for of in _each_target(self.args)}, time.monotonic()
        captured: dict[str, Counted] = {}
        notes: list[Mapping[str, Any]] = []
        for name, of in each.items():
            given = (of, self.devices[0], self.store)
            captured[name], noted, self.args.space = call_on_node(self.cluster, self.hooks.captured, *given)
            notes.append(noted)
        counts: Counter[str] = Counter()
        workloads: dict[str, Workload] = {}
        for counted in captured.values():
            for workload, count in counted:
                workloads.setdefault(workload.fingerprint, workload)
                counts[workload.fingerprint] += count
        every = [(workload, counts[fingerprint]) for fingerprint, workload in workloads.items()]
        one = len(each) == 1
        about = notes[0] if one else {"captures": [noted["capture"] for noted in notes if "capture" in noted]}
        # Settings of torch from each target's module stay in force, so all are measured under the last target's.
        about = {**about, "numerics": notes[-1].get("numerics", {})}
        captured_s, limit = time.monotonic() - begin, self.args.timeout
        if limit is not None:
            limit = max(1.0, limit - sum(map(self.hooks.reserved_s, each.values())))
        done = self.run(", ".join(each), every, limit, about)
        searched_s = time.monotonic() - begin - captured_s
        finished: dict[str, SearchOutcome] = {}
        for i, (name, searched) in enumerate(done.items()):
            kind = self.cluster.kinds[i] if self.cluster else None
            for target, of in each.items():
                own = self._finished(of, searched if one else _part(searched, target, captured[target]), kind)
                finished[name if one else name.replace(str(of.domain), f"{of.domain} {target}", 1)] = own
        if limit is not None:
            results = [result for searched in done.values() for result in searched.results if result.begun]
            rest_s = time.monotonic() - begin - captured_s - searched_s
            if line := time_line(captured_s, searched_s, rest_s, [result.baseline_s for result in results]):
                print(line, file=sys.stderr)
        return finished

    def _finished(self, args: argparse.Namespace, searched: SearchOutcome, kind: Kind | None) -> SearchOutcome:
        """The result of a target on a kind of device, after :meth:`SearchHooks.finish` on such a device."""
        given = (self.hooks.finish, args, self.devices[0], self.store, searched, _command(args, self.hooks))
        try:
            found: SearchOutcome = call_on_node(self.cluster, *given, kind=kind)
        except UserError as error:
            if self.cluster is None:
                raise
            warn(f"the search is stored, but the step was not timed: {error}")
            return searched
        return found

    def missed(self, domain: str | None) -> dict[str, SearchOutcome]:
        """Search missed workloads of ``domain``, or of all; domains with their own search of misses come last."""
        begin, device, args = time.monotonic(), self.devices[0], self.args
        counted = call_on_node(self.cluster, _missed, args, device, self.store)
        own = every_domain() if domain is None and self.cluster is None else {}
        others = {name: found for name, other in own.items() if (found := other.missed(self.store, device))}
        if not counted and not others:
            how = "backend='autotune'" if domain else "backend='autotune' or autotune.overlap"
            raise UserError(f"{self.store.name} has no missed workload of this device: first run the model with {how}")
        done: dict[str, SearchOutcome] = {}
        left = len(counted) + sum(found.count for found in others.values())

        def granted(count: int) -> float | None:
            """Seconds for ``count`` of the workloads left."""
            if args.timeout is None:
                return None
            rest = args.timeout - (time.monotonic() - begin) if done else args.timeout
            return float(max(1.0, rest) * count / left)

        if counted:
            done = self.run("missed workloads", counted, granted(len(counted)))
            left -= len(counted)
        for name, found in others.items():
            if not any(searched.interrupted for searched in done.values()):
                done[name] = found.search(args, granted(found.count))
                left -= found.count
        return done

    def in_step(self, searched: SearchOutcome, workloads: Sequence[Workload]) -> Sequence[Result]:
        """Search regions with another memory layout in a target's step than the search saw, and print their results.

        Args:
            searched: the target's search. Each region gets the share of ``--timeout`` that it would have got there.
        """
        from autotune.api import time_weights

        counted = [(workload, 1) for workload in workloads]
        timeout = self.args.timeout
        if timeout is not None:
            every = [(workload, 1) for workload in self.store.get_workloads(searched.captured).values()]
            of = sum(time_weights(every).values())
            timeout *= min(1.0, sum(time_weights(counted).values()) / of) if of else 1.0
        (more,) = self.run("regions with the step's memory layout", counted, timeout).values()
        for result in more.results:
            if result.winner and result.begun:
                took = f"{microseconds(result.deployed_us)} by {result.winner}"
                print(f"autotune: {result.label}, with the step's memory layout: {took}", file=sys.stderr)
        return more.results

    def run(
        self, name: str, counted: Counted, timeout: float | None, notes: Mapping[str, Any] | None = None
    ) -> dict[str, SearchOutcome]:
        """Search workloads that are measured on one device each, with the options of the command.

        Args:
            name: of all workloads together.
            timeout: seconds for all workloads.
            notes: of the run; its ``numerics`` are those of the targets' program.

        Returns:
            Results by domain; on a cluster, by domain and kind of device.
        """
        from autotune.api import time_weights
        from autotune.device import identify

        args, cluster, devices = self.args, self.cluster, self.devices[: len(counted)]
        many, kind = plural(len(counted), "workload"), args.domain or DEFAULT
        if cluster:
            label = describe_nodes(cluster)
        else:
            where = identify(devices[0])
            label = replace(where, count=len(devices)).label
        print(f"{name}: {many} on {label}, stored in {self.store.name}", file=sys.stderr)
        if not cluster and command_of(kind, "calibrate") and not self.store.get_calibration(where.fingerprint, kind):
            hint = f"`autotune calibrate {kind}` measures this device in about a minute"
            print(f"cost models: built-in figures; {hint}", file=sys.stderr)
        results = tune(
            args,
            devices,
            self.store,
            [workload for workload, _ in counted],
            timeout,
            _command(args, self.hooks),
            weights=time_weights(counted),
            notes=notes,
            numerics=notes.get("numerics") if notes else None,
            cluster=cluster,
            **self.hooks.options(args, devices[0]),
        )
        if cluster is None:
            return {kind: self._searched(name, ",".join(devices), where.fingerprint, counted, results)}
        done = {}
        for met in cluster.kinds:
            own = [result for result in results if result.device == met.label]
            done[f"{kind} on {met.label}"] = self._searched(name, met.label, met.device, counted, own)
        return done

    def _searched(
        self, name: str, device: str, fingerprint: str, counted: Counted, results: Sequence[Result]
    ) -> SearchOutcome:
        """The outcome on one kind of device with this name and fingerprint."""
        reasons = {result.workload: reason(self.store, result) for result in results if not result.ok}
        if self.args.missed:
            for result in results:
                if result.winner and result.begun:
                    self.store.clear_miss(result.workload, fingerprint)
        captured = frozenset(workload.fingerprint for workload, _ in counted)
        return SearchOutcome(_answer(name, device, counted, results), results, reasons, print_table, captured)


def _each_target(args: argparse.Namespace) -> list[argparse.Namespace]:
    """The command's arguments for each target by itself.

    Raises:
        UserError: a target is given twice, or with more than its inputs.
    """
    found = [args]
    for words in args.also:
        if len(words) > 2:
            raise UserError(f"--also {shlex.join(words)}: give one target and at most one SPEC of its inputs")
        own = copy.copy(args)
        own.target, own.inputs = words[0], words[1] if len(words) == 2 else None
        if any(own.target == other.target for other in found):
            raise UserError(f"--also {own.target}: this target is given twice")
        found.append(own)
    return found


def _part(searched: SearchOutcome, target: str, counted: Counted) -> SearchOutcome:
    own = frozenset(workload.fingerprint for workload, _ in counted)
    results = [result for result in searched.results if result.workload in own]
    answer = _answer(target, searched.answer["device"], counted, results)
    return replace(searched, answer=answer, results=results, captured=own)


def _missed(args: argparse.Namespace, device: str, store: Store) -> list[tuple[Workload, int]]:
    """Missed workloads on this device: of the named domain, or of all without their own search of misses.

    Another program may have written them: damaged ones are left out with a warning.
    """
    from autotune.device import identify

    known, found = [name for name, domain in every_domain().items() if not domain.own_missed], []
    for miss in store.misses(identify(device).fingerprint):
        workload = store.get_workload(miss.workload)
        if workload is None or workload.kind not in known or args.domain not in (None, workload.kind):
            continue
        if why := domain_of(workload.kind).damage(workload):
            hint = "run the model again to store an undamaged one"
            warn(f"the missed workload {workload.fingerprint[:12]} is skipped: {safe_line(why, 500)}; {hint}")
        else:
            found.append((workload, miss.count))
    return found


def _command(args: argparse.Namespace, hooks: SearchHooks) -> str:
    """The command line for the run's record, without the database's URL, which may hold a password."""
    words = ["autotune", "search", *(["--missed"] if args.missed else [args.domain, args.target])]
    words += given_options(args, ("inputs", "device", "trials", "timeout", "sampler", "seed", "space"))
    words += ["--ray", args.ray] if args.ray else []
    words += [word for also in args.also for word in ("--also", *also)]
    return shlex.join([*words, *hooks.words(args)])


def _answer(name: str, device: str, counted: Counted, results: Sequence[Result]) -> dict[str, Any]:
    counts = {workload.fingerprint: count for workload, count in counted}
    regions = [
        {**result.to_json(), "count": counts[result.workload], "match": "exact" if result.winner else "none"}
        for result in results
    ]
    return {**total(name, device, regions), "not_begun": not_begun(len(counts), results)}
