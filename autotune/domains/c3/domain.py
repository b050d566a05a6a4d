"""The C3 domain: a computation and a collective that run concurrently on the same devices."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autotune.charts import Exhibit
from autotune.device import DeviceIdentity
from autotune.domain import Command, Domain, Missed
from autotune.domains.c3 import task
from autotune.domains.c3.results import exhibits
from autotune.domains.c3.scenario import Scenario, named_scenarios
from autotune.errors import Unsupported, UserError
from autotune.measure.policy import Policy
from autotune.task import Bench
from autotune.workload import Workload

if TYPE_CHECKING:
    from autotune.measure.worker import Measurer


class C3(Domain):
    """See :class:`autotune.domain.Domain`."""

    own_missed = True

    def open_task(self, workload: Workload, device: str) -> task.C3Task:
        return task.C3Task(workload, device)

    def open_bench(self, workload: Workload, device: str) -> Bench:
        raise Unsupported("a C3 scenario is measured by several ranks: see autotune.domains.c3.measuring.ranks")

    def open_measurer(self, workload: Workload, device: str, policy: Policy) -> Measurer:
        task.check_devices(self.devices(workload), device)
        from autotune.domains.c3.measuring.ranks import Ranks

        return Ranks(workload, device, policy)

    def policy(self, device: str) -> Policy:
        return task.policy(device)

    def identity(self, workload: Workload, device: str) -> DeviceIdentity:
        return task.identity_of(workload, device)

    def devices(self, workload: Workload) -> int:
        return int(workload.spec["ranks"])

    def bytes_held(self, workload: Workload) -> int:
        return Scenario.from_json(workload.spec).bytes_held

    def damage(self, workload: Workload) -> str | None:
        from autotune.domains.c3.cli import check_program

        try:
            check_program(Scenario.from_json(workload.spec))
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError, UserError) as error:
            return str(error)
        return None

    def targets(self) -> Mapping[str, str]:
        return {name: entry.label for name, entry in named_scenarios().items()}

    def add_arguments(self, command: str, parser: argparse.ArgumentParser) -> None:
        from autotune.domains.c3.cli import add_scenario

        if command in ("search", "lookup"):
            add_scenario(parser)

    def command(self, name: str) -> Command | None:
        from autotune.domains.c3 import cli

        return {"search": cli.search, "lookup": cli.lookup}.get(name)

    def missed(self, store: Any, device: str) -> Missed | None:
        from autotune.domains.c3 import cli

        found = cli.missed(store, device)

        def searched(args: argparse.Namespace, timeout: float | None) -> Any:
            return cli.search_scenarios(args, device, store, "missed scenarios", found, timeout)

        return Missed(len(found), searched) if found else None

    def serves(self) -> bool:
        from autotune.domains.c3.cli import serves

        return serves()

    def exhibits(self, workload: Workload, config: Any, schedule: Any, device: DeviceIdentity) -> Sequence[Exhibit]:
        return exhibits(workload, config, schedule)


DOMAIN = C3()
