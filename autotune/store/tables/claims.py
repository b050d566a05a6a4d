"""Leases on candidates, so that two searches never measure the same one at the same time.

A claim lives in the database until its measurement is stored (the same transaction drops it), it is released, its lease
runs out, or its owner is found dead. Hosts that share a server are taken to agree on the time to within a lease.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from functools import lru_cache
from typing import Any

import sqlalchemy as sa

from autotune.store.codec import key_values
from autotune.store.connection.engine import Database
from autotune.store.health.damage import LATEST
from autotune.store.models import ClaimRow, MeasurementRow
from autotune.store.records import Key
from autotune.task import Config, config_key


def owner_name() -> str:
    """A new name for one owner of claims in this process: ``host:pid:uuid``.

    "host" carries the PID namespace where there is one: processes in two containers may share a host's name and see
    each other's database, but never each other's process numbers.
    """
    return f"{_host()}:{os.getpid()}:{uuid.uuid4().hex}"


@lru_cache(maxsize=1)
def _host() -> str:
    host = socket.gethostname().replace(":", "_")
    try:
        return f"{host}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return host


def owner_is_dead(owner: str) -> bool:
    """Whether ``owner`` names a process of this host that is no more; False where that cannot be known."""
    host, _, rest = owner.rpartition(":")[0].rpartition(":")
    if host not in (_host(), socket.gethostname()) or not rest.isdecimal():
        return False
    import psutil

    try:
        return bool(psutil.Process(int(rest)).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False


class Claims(Database):
    """The store's claims."""

    def claim(self, key: Key, config: Config, stage: str, owner: str, lease_s: float) -> bool:
        """Take the exclusive right to measure ``config`` at ``stage`` for ``lease_s`` seconds. Atomic.

        Claiming again what ``owner`` holds renews the lease.

        Args:
            owner: who claims, as :func:`owner_name` makes it. A claim of a process of this host that has died counts
                as run out.

        Returns:
            False when it is measured already, or another owner's lease is live.
        """
        row = {**key_values(key), "config": config_key(config), "stage": stage}
        held = _same(ClaimRow, row)
        new = {"owner": owner, "expires": time.time() + lease_s}
        with self.writing() as c:
            if not self._take(c, row, held, new):
                return False
            # Only now look for a measurement: with the claim in hand, nobody who holds to the protocol can add one.
            if c.execute(sa.select(MeasurementRow.id).where(*_same(MeasurementRow, row))).first() is None:
                return True
            c.execute(sa.delete(ClaimRow).where(*held))
            return False

    def _take(self, c: sa.Connection, row: dict[str, Any], held: list[Any], new: dict[str, Any]) -> bool:
        insert = self.insert(ClaimRow).values(**row, **new).on_conflict_do_nothing()
        while not self.changed(c, insert):
            other = c.execute(sa.select(ClaimRow.owner, ClaimRow.expires).where(*held).with_for_update()).first()
            if other is None:  # given up between the two statements
                continue
            if other.owner != new["owner"] and _is_live(other.expires) and not owner_is_dead(str(other.owner)):
                return False
            c.execute(sa.update(ClaimRow).where(*held).values(**new))
            return True
        return True

    def release(self, key: Key, config: Config, stage: str, owner: str) -> bool:
        """Give up a claim without a measurement. False when ``owner`` does not hold it."""
        row = {**key_values(key), "config": config_key(config), "stage": stage, "owner": owner}
        with self.writing() as c:
            return self.changed(c, sa.delete(ClaimRow).where(*_same(ClaimRow, row)))

    def release_all(self, owner: str) -> int:
        """Give up every claim of ``owner``; returns how many."""
        with self.writing() as c:
            return int(c.execute(sa.delete(ClaimRow).where(ClaimRow.owner == owner)).rowcount)

    def renew(self, owner: str, lease_s: float) -> int:
        """Extend every claim of ``owner`` to ``lease_s`` seconds from now; returns how many it still holds."""
        with self.writing() as c:
            update = sa.update(ClaimRow).where(ClaimRow.owner == owner).values(expires=time.time() + lease_s)
            return int(c.execute(update).rowcount)


def _is_live(expires: Any) -> bool:
    """True for a lease that has not run out; a damaged one has."""
    return isinstance(expires, (int, float)) and time.time() < expires <= LATEST


def _same(model: Any, values: dict[str, Any]) -> list[Any]:
    return [getattr(model, name) == value for name, value in values.items()]
