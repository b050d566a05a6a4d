"""The database as deployment sees it: opened once a process, never in the way of the user's model.

Whatever is wrong with it (missing, broken, of another version, locked) is told once as a warning; look-ups then find
nothing and the model runs as it would have without autotune. A server that cannot be reached, or does not answer, costs
a few seconds once: it is not asked again for :data:`RETRY_S` seconds.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from autotune.device import environment, identify
from autotune.ir.precision import asked

if TYPE_CHECKING:
    from autotune.device import DeviceIdentity
    from autotune.store import Store
    from autotune.workload import Workload

log = logging.getLogger("autotune")

RETRY_S = 300.0
"""Seconds for which a server that was lost is left alone."""

_lock = threading.RLock()
_stores: dict[str, Store] = {}
_lost: dict[str, float] = {}
"""Databases whose server was lost, and when (by the monotonic clock) to try again."""
_warned: set[str] = set()
_recorded: set[tuple[str, str, str]] = set()
_silent = 0


@contextlib.contextmanager
def deploying_from(db: str | None, replica: str | None = None) -> Iterator[None]:
    """While open, deployment looks up in ``db``, in processes started meanwhile too; None leaves it as it is.

    Args:
        replica: a copy of it to read; None for none, or where ``db`` is None for the one that was.
    """
    new = {} if db is None else {"AUTOTUNE_DB": db, "AUTOTUNE_DB_READ": ""}
    new |= {} if replica is None else {"AUTOTUNE_DB_READ": replica}
    before = {name: os.environ.get(name) for name in new}
    os.environ.update(new)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def warn_once(key: str, text: str) -> None:
    """Log a warning the first time ``key`` comes up in this process."""
    with _lock:
        if key in _warned:
            return
        _warned.add(key)
    log.warning("%s", text)


def _where(url: str | None) -> str:
    """What names the database now: the user's environment may change between two models."""
    own = os.environ.get("AUTOTUNE_DB") or "\0" + os.environ.get("XDG_DATA_HOME", "")
    return url or f"{own}\0{os.environ.get('AUTOTUNE_DB_READ', '')}"


def deploy_store(url: str | None = None) -> Store | None:
    """The database to look schedules up in, or None where there is none that can be used (told once).

    Args:
        url: as in ``Store.open``; None for $AUTOTUNE_DB, or else the default file.
    """
    where = _where(url)
    with _lock:
        if _is_lost(where):
            return None
        store = _stores.get(where)
        if store is not None:
            return store
        from autotune.store import LostConnection, Store

        try:
            store = Store.attach(url)
        except Exception as e:
            if isinstance(e, LostConnection):
                _lost[where] = time.monotonic() + RETRY_S
            warn_once(f"open {where}", f"autotune: {e}; nothing is looked up and models run as without autotune")
            return None
        if store is not None:  # one that is not there yet may come: a search may be running
            _stores[where] = store
        return store


def _is_lost(where: str) -> bool:
    """Whether the server of a database was lost lately; one that a look-up has just found lost is closed."""
    store = _stores.get(where)
    if store is not None and store.lost:
        del _stores[where]
        store.close()
        _lost[where] = time.monotonic() + RETRY_S
    if where in _lost and time.monotonic() >= _lost[where]:
        del _lost[where]
    return where in _lost


def state_of_store(url: str | None = None) -> bytes:
    """What identifies the schedules that look-ups find now: code compiled with them is right as long as it is equal."""
    store = deploy_store(url)
    try:
        return b"none" if store is None else f"{store.state()}{asked()}".encode()
    except Exception as e:
        warn_once(f"state {_where(url)}", f"autotune: the database does not tell what it holds: {e}")
        if store is not None and store.lost:
            return b"none"  # look-ups do without it, too
        return os.urandom(16)  # nothing is found in a cache


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """While open, in any thread, nothing that is missed is recorded, and no database is made for it."""
    global _silent
    with _lock:
        _silent += 1
    try:
        yield
    finally:
        with _lock:
            _silent -= 1


def record_misses(
    missed: list[tuple[Workload, str]], device: str, url: str | None = None, *, identity: DeviceIdentity | None = None
) -> int:
    """Record what could be tuned and is not, for ``autotune search --missed``; each once a process. Never fails.

    Args:
        missed: workloads and why nothing fitted them.
        device: "cpu" or "cuda:N".
        identity: of the devices that they are missed on together, where that is more than ``device``.

    Returns:
        How many were written.
    """
    written = 0
    try:
        identity = identity or identify(device)
        where = _where(url)
        with _lock:
            if _silent:
                return 0
            new = [(w, why) for w, why in missed if (where, w.fingerprint, identity.fingerprint) not in _recorded]
            if not new:
                return 0
            store = deploy_store(url) or _create(url)
            if store is None or store.readonly:
                return 0
            _recorded.update((where, w.fingerprint, identity.fingerprint) for w, _ in new)
        store.put_device(identity)
        store.put_environment(environment(device))
        for workload, reason in new:
            if not store.add_miss(workload, identity.fingerprint, reason):
                break  # the others would wait as long for a database that is locked or gone
            written += 1
    except Exception as e:
        warn_once(f"misses {_where(url)}", f"autotune: misses are not recorded: {e}")
    return written


def _create(url: str | None) -> Store | None:
    """A new database, if there is none; one that is there and cannot be used is left alone."""
    where = _where(url)
    if f"open {where}" in _warned or where in _lost:
        return None
    from autotune.store import Store

    store = Store.open(url, timeout_s=1.0)
    _stores[where] = store
    return store


def forget_stores() -> None:
    """Close every database and forget what was warned of and recorded: the next look-up starts afresh."""
    with _lock:
        for store in _stores.values():
            store.close()
        _stores.clear()
        _lost.clear()
        _warned.clear()
        _recorded.clear()
