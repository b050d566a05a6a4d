"""What deployment asks of whatever holds schedules: a database (``Store``) or a frozen file (``Snapshot``)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, Protocol

from autotune.device import DeviceIdentity, Environment
from autotune.store.records import Schedule, Verdict
from autotune.workload import Workload

Match = Literal["strict", "loose", "ignore"]
"""How the software that a schedule was tuned with must match that at hand: "strict" wants equal versions of all of it,
"loose" equal minor versions of torch and CUDA, "ignore" takes any. Equal software is preferred in each case, then
equal minor versions."""


class Near(NamedTuple):
    """A workload of a family that was tuned, its rows, and when its newest schedule was decided; in a snapshot, a
    number that is another one in another snapshot."""

    workload: str
    extent: int
    when: float


class Reader(Protocol):
    """Everything that a look-up reads. Fingerprints are those of workloads, devices and (strict) environments."""

    readonly: bool
    lost: str
    """Why it is given up, once it is; nothing more is asked of it then."""

    @property
    def name(self) -> str:
        """For messages."""
        ...

    @property
    def trusted(self) -> bool:
        """Whether it was signed by whom the deployer trusts: what is in it was checked when it was written."""
        ...

    def get_schedule(
        self, workload: str, device: str, environment: Environment | str | None = None, *, match: Match = "strict"
    ) -> Schedule | None:
        """The schedule to deploy for a workload on a device, its artifact loaded and every SHA-256 checked."""
        ...

    def family_schedules(
        self,
        family: str,
        device: str,
        environment: Environment | str | None = None,
        *,
        match: Match = "strict",
        artifacts: bool = True,
        extents: tuple[float, float] | None = None,
    ) -> list[Schedule]:
        """The schedule of each workload of a family on a device, by row extent."""
        ...

    def nearest(
        self, family: str, device: str, environment: Environment, extent: int, *, match: Match = "strict", limit: int
    ) -> list[Near]:
        """The tuned workloads of a family with the nearest numbers of rows by ratio, nearest first."""
        ...

    def schedules(
        self, device: str | None = None, *, workload: str | None = None, artifacts: bool = False
    ) -> list[Schedule]:
        """Every schedule of a device and a workload (fingerprints; None for all)."""
        ...

    def places(self, workload: str) -> list[tuple[str, str]]:
        """Device and (strict) environment of every schedule of a workload, in no order."""
        ...

    def get_workload(self, fingerprint: str) -> Workload | None: ...

    def get_workloads(self, fingerprints: Iterable[str]) -> dict[str, Workload]: ...

    def fingerprints(self, prefix: str, limit: int) -> list[str]:
        """Those of the workloads' fingerprints that begin so, ``limit`` at most."""
        ...

    def get_device(self, fingerprint: str) -> DeviceIdentity | None: ...

    def get_environment(self, fingerprint: str) -> Environment | None: ...

    def get_verdict(
        self, graph: str, device: str, environment: Environment, mode: str, *, match: Match = "loose"
    ) -> Verdict | None:
        """The verdict on a graph's step to obey, or None."""
        ...

    def state(self) -> str:
        """A digest of what is deployed."""
        ...

    def close(self) -> None: ...
