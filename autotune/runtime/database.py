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
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from autotune.device import environment, identify
from autotune.ir.precision import asked
from autotune.runtime import background
from autotune.runtime.launch.given_up import allow_again
from autotune.runtime.settings import reset_settings, settings
from autotune.task import Status

if TYPE_CHECKING:
    from autotune.device import DeviceIdentity
    from autotune.store import Reader, Schedule, Store
    from autotune.store.snapshots.reader import Snapshot
    from autotune.workload import Workload

log = logging.getLogger("autotune")

RETRY_S = 300.0
"""Seconds for which a server that was lost is left alone."""

_lock = threading.RLock()
_stores: dict[str, Reader] = {}
_loaded: Snapshot | None = None
"""What :func:`load` opened: it stands before $AUTOTUNE_DB."""
_deploying: list[str] = []
"""What :func:`deploying_from` names: it stands before both."""
_lost: dict[str, float] = {}
"""Databases whose server was lost, and when (by the monotonic clock) to try again."""
_shut: set[str] = set()
"""Databases that were there when this process first looked, and could not be opened when that was tried last."""
_absent: set[str] = set()
"""Databases that were not there. One that appears since, as another rank makes it for its misses, has decided nothing
yet: that it cannot be opened for a moment changes no answer."""
_packaged: dict[Path, Snapshot | None] = {}
"""What comes with autotune, as far as it was asked for; None where it cannot be opened."""
_digests: dict[Path, str] = {}
_warned: set[str] = set()
_recorded: set[tuple[str, str, str]] = set()
_unrecorded: list[dict[str, tuple[str, Workload]]] = []
"""What was missed since each :func:`unrecorded` that is open."""


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
    if new:
        _deploying.append(db or "")
        _changed()
    try:
        yield
    finally:
        if new:
            _deploying.pop()
            _changed()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def load(path: str | os.PathLike[str], *, key: str | os.PathLike[str] | None = None) -> Snapshot:
    """Deploy from a snapshot, in this process, from now on.

    ::

        autotune.load("schedules.atdb")
        model = torch.compile(model, backend="autotune")

    ``torch.compile``, :func:`autotune.lookup` and ``autotune.overlap`` look up in it, unless they are given another
    database. Code that was compiled before stays as it is.

    Args:
        path: what ``autotune export`` wrote, or ``package:h200``, which comes with autotune.
        key: file of the public key (PEM, Ed25519) that it must be signed with, or the key's text; None for
            $AUTOTUNE_KEY, or any snapshot.

    Raises:
        UserError: in one line: it is not there, no snapshot, of another version, damaged, or not signed so. What was
            deployed from before stays.
    """
    from autotune.store.opening import pinned_key
    from autotune.store.snapshots.packaged import path_of
    from autotune.store.snapshots.reader import Snapshot

    snapshot = Snapshot(path_of(path), key=pinned_key(key))
    global _loaded
    with _lock:
        _loaded = snapshot  # an earlier one may be in use by another thread, and closes when it is not
        _changed()
    return snapshot


@contextlib.contextmanager
def opened(db: str | os.PathLike[str] | None = None) -> Iterator[Reader | None]:
    """What to look up in, for one question; None where nothing was ever tuned.

    Args:
        db: a snapshot or as in ``Store.open``; None for what was loaded, else $AUTOTUNE_DB, or else the default file.

    Raises:
        UserError: it cannot be used.
    """
    if db is None and _loaded is not None and not _deploying:
        yield _loaded
        return
    from autotune.store import attach

    store = attach(db)
    try:
        yield store
    finally:
        if store is not None:
            store.close()


def unload() -> None:
    """Deploy from $AUTOTUNE_DB or the default database again."""
    global _loaded
    with _lock:
        _loaded = None
        _changed()


def _changed() -> None:
    global _changes
    _changes += 1


_changes = 0


def is_loaded() -> bool:
    """Whether look-ups without a database of their own go to what :func:`load` opened."""
    return _loaded is not None and not _deploying


def changes() -> int:
    """How often what is deployed from was changed by this process."""
    return _changes


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


def deploy_store(url: str | None = None) -> Reader | None:
    """The database or the snapshot to look schedules up in, or None where there is none that can be used (told once).

    Args:
        url: as in ``Store.open``; None for what was loaded, else $AUTOTUNE_DB, or else the default file.
    """
    if url is None and _loaded is not None and not _deploying:
        return None if _loaded.lost else _loaded
    where = _where(url)
    with _lock:
        if _is_lost(where):
            return None
        store = _stores.get(where)
        if store is not None:
            return store
        from autotune.store import attach

        try:
            store = attach(url)
        except Exception as e:
            if type(e).__name__ == "LostConnection":  # importing its module would load SQLAlchemy
                _lost[where] = time.monotonic() + RETRY_S
            warn_once(f"open {where}", f"autotune: {e}; nothing is looked up and models run as without autotune")
            if where not in _absent:
                _shut.add(where)
            return None
        _shut.discard(where)
        if store is None:  # one that is not there yet may come: a search may be running
            _absent.add(where)
        else:
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


def is_shut(url: str | None = None) -> bool:
    """Whether :func:`deploy_store` gives None for a database that is there: what it decided is not known then, and
    nothing stands in for it."""
    if url is None and _loaded is not None and not _deploying:
        return bool(_loaded.lost)
    return _where(url) in _shut or _where(url) in _lost


def packaged_refused(store: Reader | None) -> str:
    """Why nothing that comes with autotune is used beside the user's own database; "" where it is.

    Raises:
        UserError: a setting has a value that it does not take.
    """
    from autotune.store.opening import pinned_key

    if settings().packaged == "refuse":
        return "AUTOTUNE_PACKAGED is refuse"
    if pinned_key(None) is not None or (store is not None and store.trusted):
        return "a key is pinned, and nobody signed what comes with autotune"
    return "" if store is None else store.lost


def packaged_snapshot(path: Path) -> Snapshot | None:
    """A snapshot that comes with autotune, opened when it is first asked for; None where it cannot be (told once)."""
    with _lock:
        if path not in _packaged:
            from autotune.store.snapshots.reader import Snapshot

            try:
                _packaged[path] = Snapshot(path)
            except Exception as e:
                warn_once(f"open {path}", f"autotune: {e}; nothing that comes with autotune is used")
                _packaged[path] = None
        return _packaged[path]


def _packaged_state(store: Reader | None) -> str:
    """What identifies the schedules that come with autotune, as :func:`state_of_store` does all of them."""
    if packaged_refused(store):
        return ""
    from autotune.store.snapshots.packaged import digests

    if not _digests:
        _digests.update(digests())
    lost = [path.name for path, found in _packaged.items() if found is None or found.lost]
    return " ".join([*_digests.values(), *lost])


def state_of_store(url: str | None = None) -> bytes:
    """What identifies the schedules that look-ups find now: code compiled with them is right as long as it is equal."""
    store = deploy_store(url)
    if store is None and is_shut(url):
        return b"none"
    try:
        own = "none" if store is None else store.state()
        return f"{own}{_packaged_state(store)}{asked()}{settings()}".encode()
    except Exception as e:
        warn_once(f"state {_where(url)}", f"autotune: the database does not tell what it holds: {e}")
        if store is not None and store.lost:
            return b"none"  # look-ups do without it, too
        return os.urandom(16)  # nothing is found in a cache


@contextlib.contextmanager
def unrecorded() -> Iterator[Mapping[str, tuple[str, Workload]]]:
    """While open, in any thread, nothing that is missed is recorded, and no database is made for it.

    Gives what was missed meanwhile: by fingerprint, the device and the workload.
    """
    missed: dict[str, tuple[str, Workload]] = {}
    with _lock:
        _unrecorded.append(missed)
    try:
        yield missed
    finally:
        with _lock:
            _unrecorded[:] = [one for one in _unrecorded if one is not missed]


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
            for found in _unrecorded:
                found.update({w.fingerprint: (device, w) for w, _ in missed})
            if _unrecorded:
                return 0
            of = identity.fingerprint
            new = {w.fingerprint: (w, why) for w, why in missed if (where, w.fingerprint, of) not in _recorded}
            if not new:
                return 0
            store = cast("Store | None", deploy_store(url) or _create(url))
            if store is None or store.readonly:
                return 0
            _recorded.update((where, fingerprint, of) for fingerprint in new)
        store.put_device(identity)
        store.put_environment(environment(device))
        for workload, reason in new.values():
            if not store.add_miss(workload, of, reason):
                break  # the others would wait as long for a database that is locked or gone
            written += 1
        if written:
            background.begin(device, url)
    except Exception as e:
        warn_once(f"misses {_where(url)}", f"autotune: misses are not recorded: {e}")
    return written


def record_failure(schedule: Schedule, device: str, status: Status, reason: str, url: str | None = None) -> bool:
    """Note in the database that a stored kernel failed here, so that later look-ups under these conditions pass its
    schedule over (``autotune db forget`` undoes that). Never fails.

    Args:
        device: "cpu" or "cuda:N", equal to the one that it was tuned on.
        status: ``wrong_result`` or ``launch_error``.

    Returns:
        Whether it is written; a snapshot is not.
    """
    try:
        with _lock:
            store = cast("Store | None", None if _unrecorded else deploy_store(url))
            if store is None or store.readonly:
                return False
        env = environment(device)
        store.put_environment(env)
        return store.put_failure(replace(schedule.key, environment=env.strict), schedule.config or {}, status, reason)
    except Exception as e:
        warn_once(f"failure {_where(url)}", f"autotune: what failed is not recorded: {e}")
        return False


def _create(url: str | None) -> Store | None:
    """A new database, if there is none; one that is there and cannot be used is left alone."""
    where = _where(url)
    if _loaded is not None and url is None and not _deploying:
        return None
    if f"open {where}" in _warned or where in _lost:
        return None
    from autotune.store import Store

    store = Store.open(url, timeout_s=1.0)
    if url is not None or os.environ.get("AUTOTUNE_DB"):  # who names one may expect it to be there
        warn_once(f"new {where}", f"autotune: {store.name} is a new database: nothing is tuned in it yet")
    _stores[where] = store
    return store


def forget_stores() -> None:
    """Close every database and forget what was warned of and recorded: the next look-up starts afresh."""
    with _lock:
        for store in _stores.values():
            store.close()
        _stores.clear()
        _packaged.clear()
        _digests.clear()
        _shut.clear()
        _absent.clear()
        _lost.clear()
        _warned.clear()
        _recorded.clear()
        allow_again()
        reset_settings()
        unload()
