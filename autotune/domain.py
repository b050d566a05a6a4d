"""A domain as a whole: the base class of what is searched, and how a domain is found by its name."""

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
"""A command of the command line: from the parsed arguments to the exit code."""


@dataclass(frozen=True)
class Missed:
    """What deployments missed of a domain that searches such workloads by itself.

    Attributes:
        count: of the workloads.
        search: searches them, from the parsed arguments and the seconds for all of them (None for no limit) to an
            ``autotune.cli.searched.Searched``.
    """

    count: int
    search: Callable[[argparse.Namespace, float | None], Any]


class Domain:
    """One kind of workload, and what autotune asks of it. A domain implements what it needs.

    A domain is a module that an entry point of the group ``autotune.domains`` names, and that has an instance of a
    subclass as ``DOMAIN``. Importing it is cheap, as every command does it: what is heavy its methods import.
    :meth:`open_task` and :meth:`open_bench` are needed to search; ``examples/blocked_gelu`` is a whole domain.
    """

    # What is searched

    def open_task(self, workload: Workload, device: str) -> Task:
        """The search's side of a workload.

        Raises:
            Unsupported: the workload cannot be searched.
        """
        raise NotImplementedError

    def open_bench(self, workload: Workload, device: str) -> Bench:
        """The worker's side of a workload."""
        raise NotImplementedError

    def open_measurer(self, workload: Workload, device: str, policy: Policy) -> Measurer:
        """The process, or the several, that measure: one worker with the domain's bench."""
        from autotune.measure.worker import Worker

        return Worker(workload, device, policy)

    def policy(self, device: str) -> Policy:
        """How workloads are measured on ``device`` ("cpu" or "cuda:N") unless the search says how."""
        from autotune.measure.policy import default_policy

        return default_policy(device)

    def place(self, workload: Workload, device: str) -> DeviceIdentity:
        """The device, or the devices together, that measurements of ``workload`` on ``device`` hold for."""
        from autotune.device import identify

        return identify(device)

    def devices(self, workload: Workload) -> int:
        """How many devices of one host a workload takes, for who has none of them at hand."""
        return 1

    def bytes_moved(self, workload: Workload) -> int:
        """Bytes that a perfect implementation moves, by which a search's time is shared; 0 where that is unknown."""
        return 0

    def bytes_held(self, workload: Workload) -> int:
        """Bytes of a device's memory that the workload's tensors take at least."""
        return 0

    def confined(self, workload: Workload) -> Any:
        """JSON of what confines a search beside the shipped spaces, such as choices that a user's code declares: a
        search that came to its end says nothing of another such. None where nothing does."""
        return None

    def damage(self, workload: Workload) -> str | None:
        """The reason why a workload that comes from a database may not be searched, or None."""
        return None

    def figure(self, workload: Workload, cost: float) -> tuple[float, str] | None:
        """What a latency of the workload stands for, as a number and its unit; None where it is a time."""
        return None

    # Its part of the command line

    own_missed = False
    """Whether the domain searches by itself what deployments missed of it, by :meth:`missed`, or not at all."""

    def targets(self) -> Mapping[str, str]:
        """The names that TARGET may be, and what each computes."""
        return {}

    def workloads_of(self, target: str, inputs: str | None) -> Sequence[tuple[Workload, int]]:
        """The workloads of a TARGET and its ``--inputs`` (None where there is none), and how often each occurs.

        Raises:
            UserError: there is no such target.
        """
        raise UserError(f"{target}: this domain has no targets")

    def add_arguments(self, command: str, parser: argparse.ArgumentParser) -> None:
        """Add the domain's own options to the parser of ``autotune COMMAND``, where that names this domain."""

    def command(self, name: str) -> Command | None:
        """What ``autotune NAME`` ("search", "lookup", "calibrate") calls for this domain; None for what it does for
        any, by :meth:`workloads_of`."""
        return None

    def missed(self, store: Any, device: str) -> Missed | None:
        """What deployments on a device missed, by an ``autotune.store.Store``; None where there is nothing."""
        return None

    def serves(self) -> bool:
        """Whether this process was but a helper of a command's, and has served it by now."""
        return False

    # Benchmarks and reports

    def case_problems(self, case: object) -> list[str] | None:
        """What is wrong with a case of a result file whose ``suite`` is the domain; None where any case may be."""
        return None

    def exhibits(self, workload: Workload, config: Any, schedule: Any, device: DeviceIdentity) -> Sequence[Exhibit]:
        """What a report shows of a workload on a device.

        Args:
            config: that won or was fastest; ``schedule`` is its own; either may be None.
        """
        return ()

    def case_exhibits(self, case: Mapping[str, Any]) -> Sequence[Exhibit] | None:
        """What a report shows of a case of such a result file; None where it is shown as any."""
        return None


def domain_of(kind: str) -> Domain:
    """The domain of a name.

    Raises:
        UserError: there is none, or its module has no ``DOMAIN``; one line.
        ImportError: its module cannot be imported.
    """
    module = importlib.import_module(module_of(kind))
    found = getattr(module, "DOMAIN", None)
    if not isinstance(found, Domain):
        raise UserError(f"the domain {kind!r}: {module.__name__} has no DOMAIN, an instance of autotune.domain.Domain")
    return found


def known_domain(kind: object) -> Domain | None:
    """The domain of a name that a database or a file has, and that may be unknown here."""
    return domain_of(kind) if isinstance(kind, str) and kind in domains() else None


Figure = Callable[[float], tuple[float, str]]
"""What a latency stands for, as a number and its unit."""


def has_figures(kind: str) -> bool:
    """Whether a domain, which may be unknown here, says what its latencies stand for."""
    domain = known_domain(kind)
    return domain is not None and type(domain).figure is not Domain.figure


def figure_of(workload: Workload) -> Figure | None:
    """What stands in a latency's place for ``workload``, whose domain may be unknown here; None where it is a time."""
    domain = known_domain(workload.kind)
    try:
        known = domain is not None and domain.figure(workload, 1.0) is not None
    except (KeyError, TypeError, ValueError):  # what a database says of it may be anything
        known = False
    return functools.partial(domain.figure, workload) if domain and known else None  # type: ignore[return-value]


def place(workload: Workload, device: str) -> DeviceIdentity:
    """See :meth:`Domain.place`."""
    return domain_of(workload.kind).place(workload, device)


def policy_for(workload: Workload, device: str) -> Policy:
    """See :meth:`Domain.policy`."""
    return domain_of(workload.kind).policy(device)


def open_task(workload: Workload, device: str) -> Task:
    """See :meth:`Domain.open_task`."""
    return domain_of(workload.kind).open_task(workload, device)
