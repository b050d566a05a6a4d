"""The base class of domains, and their look-up by name."""

from __future__ import annotations

import argparse
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotune.errors import UserError
from autotune.task import Bench, Task, domains, module_of
from autotune.workload import Workload

if TYPE_CHECKING:
    from autotune.charts import Exhibit
    from autotune.device import DeviceIdentity
    from autotune.measure.policy import Policy
    from autotune.measure.worker import Measurer

Command = Callable[[argparse.Namespace], int]
"""A command of the command line: takes the parsed arguments, returns the exit code."""


@dataclass(frozen=True)
class Missed:
    """Workloads of one domain that deployments missed, for a domain with its own search of missed workloads.

    Attributes:
        count: number of workloads.
        search: takes the parsed arguments and the seconds for all of them (None for no limit), and returns an
            ``autotune.cli.searching.SearchOutcome``.
    """

    count: int
    search: Callable[[argparse.Namespace, float | None], Any]


class Domain:
    """One kind of workload. A subclass overrides the methods it needs; each has a default.

    An entry point of the group ``autotune.domains`` names a module, whose ``DOMAIN`` is an instance of a subclass.
    Every command imports the module: keep that cheap, and import torch inside of methods. A search needs
    :meth:`open_task` and :meth:`open_bench`. ``examples/blocked_gelu`` is a complete domain.
    """

    def __init_subclass__(cls) -> None:
        if "place" in vars(cls):  # the name of ``identity`` until release 0.4
            cls.identity = vars(cls)["place"]  # type: ignore[method-assign]

    # Searching

    def open_task(self, workload: Workload, device: str) -> Task:
        """The search's side of a workload.

        Raises:
            Unsupported: the workload cannot be searched.
        """
        raise NotImplementedError

    def open_bench(self, workload: Workload, device: str) -> Bench:
        """The worker's side of a workload."""
        raise NotImplementedError

    def compile_baselines(self, workload: Workload, device: str) -> None:
        """Compile the baselines of :meth:`autotune.task.Bench.baselines` into caches on disk, without running them.

        A separate process calls this while the worker measures. Exceptions are ignored: the bench will raise them too.
        """

    def open_measurer(self, workload: Workload, device: str, policy: Policy) -> Measurer:
        """Start the process, or several, that measure; by default one worker with the domain's bench."""
        from autotune.measure.worker import Worker

        return Worker(workload, device, policy)

    def policy(self, device: str) -> Policy:
        """The measurement policy on ``device`` ("cpu" or "cuda:N"), for searches whose options have none."""
        from autotune.measure.policy import default_policy

        return default_policy(device)

    def identity(self, workload: Workload, device: str) -> DeviceIdentity:
        """The device, or the devices together, that measurements of ``workload`` on ``device`` hold for."""
        from autotune.device import identify

        return identify(device)

    def devices(self, workload: Workload) -> int:
        """Number of devices of one host that a workload needs. Also called on hosts without a device."""
        return 1

    def bytes_moved(self, workload: Workload) -> int:
        """Bytes that a perfect implementation moves, which divide a search's time among workloads; 0 if unknown."""
        return 0

    def bytes_saved(self, workload: Workload) -> float:
        """Bytes whose time a search usually saves in one call, which order a short search's workloads."""
        return float(self.bytes_moved(workload))

    def alike(self, workload: Workload) -> str:
        """A name that workloads share if the best schedule of one is that of the others: a search tries no other."""
        return workload.fingerprint

    def bytes_held(self, workload: Workload) -> int:
        """Least bytes of device memory that the workload's tensors need."""
        return 0

    def sample(self, number: int) -> Workload | None:
        """One of many small workloads, whose search imports what each process needs; None if the domain has none."""
        return None

    def confined(self, workload: Workload) -> Any:
        """JSON of further limits on a search, such as choices that the user's code declares; None for none.

        A finished search is reused only under equal limits.
        """
        return None

    def damage(self, workload: Workload) -> str | None:
        """The reason not to search a workload that comes from a database, or None."""
        return None

    def figure(self, workload: Workload, cost: float) -> tuple[float, str] | None:
        """Convert ``cost`` to a number and a unit, if the workload is measured in something other than time."""
        return None

    # Command line

    own_missed = False
    """True if `search --missed` leaves this domain's workloads to :meth:`missed`."""

    def targets(self) -> Mapping[str, str]:
        """Built-in targets: name to a description."""
        return {}

    def workloads_of(self, target: str, inputs: str | None) -> Sequence[tuple[Workload, int]]:
        """The workloads of TARGET with ``--inputs`` (None if not given), each with its number of occurrences.

        Raises:
            UserError: unknown target.
        """
        raise UserError(f"{target}: this domain has no targets")

    def add_arguments(self, command: str, parser: argparse.ArgumentParser) -> None:
        """Add the domain's own options to the parser of ``autotune COMMAND``, if the command line names the domain."""

    def command(self, name: str) -> Command | None:
        """The domain's own ``autotune NAME``, of "search", "lookup" and "calibrate"; None for the general command,
        which calls :meth:`workloads_of`."""
        return None

    def missed(self, store: Any, device: str) -> Missed | None:
        """Workloads that deployments on a device missed, from an ``autotune.store.Store``; None if there are none."""
        return None

    def serves(self) -> bool:
        """True if this process only serves another process that runs the command, and has finished."""
        return False

    # Reports

    def exhibits(self, workload: Workload, config: Any, schedule: Any, device: DeviceIdentity) -> Sequence[Exhibit]:
        """Sections of a report's page about a workload on a device.

        Args:
            config: the winner's or the fastest configuration, or None.
            schedule: the stored schedule, or None.
        """
        return ()


def domain_of(kind: str) -> Domain:
    """The domain named ``kind``.

    Raises:
        UserError: unknown name, or its module has no ``DOMAIN``; one line.
        ImportError: its module cannot be imported.
    """
    module = importlib.import_module(module_of(kind))
    found = getattr(module, "DOMAIN", None)
    if not isinstance(found, Domain):
        raise UserError(
            f"the module {module.__name__} of the domain {kind!r} needs DOMAIN, an instance of autotune.domain.Domain"
        )
    return found


def alike_of(workload: Workload) -> str:
    """The workload's kind and :meth:`Domain.alike`; a workload that the domain cannot read is like no other."""
    try:
        name = domain_of(workload.kind).alike(workload)
    except Exception:  # its task raises the error again
        name = workload.fingerprint
    return f"{workload.kind} {name}"


def known_domain(kind: object) -> Domain | None:
    """The domain named in a database or a file; None if it is unknown here."""
    return domain_of(kind) if isinstance(kind, str) and kind in domains() else None


Figure = Callable[[float], tuple[float, str]]
"""Converts a latency to the number and unit to print."""


def has_figures(kind: str) -> bool:
    """Return True if the domain is known here and overrides :meth:`Domain.figure`."""
    domain = known_domain(kind)
    return domain is not None and type(domain).figure is not Domain.figure


def figure_of(workload: Workload) -> Figure | None:
    """Conversion of the workload's latencies; None if they are times or its domain is unknown here."""
    domain = known_domain(workload.kind)
    try:
        known = domain is not None and domain.figure(workload, 1.0) is not None
    except (KeyError, TypeError, ValueError):  # a stored spec may be damaged
        known = False
    return functools.partial(domain.figure, workload) if domain and known else None  # type: ignore[return-value]


def identity_of(workload: Workload, device: str) -> DeviceIdentity:
    """See :meth:`Domain.identity`."""
    return domain_of(workload.kind).identity(workload, device)


place = identity_of
"""The name until release 0.4."""


def policy_for(workload: Workload, device: str) -> Policy:
    """See :meth:`Domain.policy`."""
    return domain_of(workload.kind).policy(device)


def open_task(workload: Workload, device: str) -> Task:
    """See :meth:`Domain.open_task`."""
    return domain_of(workload.kind).open_task(workload, device)
