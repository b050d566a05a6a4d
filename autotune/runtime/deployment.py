"""The state of deployment in a process: settings, sources of schedules, misses, failures. :func:`deployment` gives it.

Its methods are never in the way of the user's model: what is wrong with a database gives one warning, and the model
runs as without autotune.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from autotune.device import environment, identify
from autotune.errors import first_line
from autotune.ir.precision import asked
from autotune.runtime.background import Background
from autotune.runtime.coverage import Coverage, Row
from autotune.runtime.database import Database, PackagedSnapshots
from autotune.runtime.savings import Savings
from autotune.runtime.settings import COUNTERS, Counters, Settings
from autotune.task import Status, config_key

if TYPE_CHECKING:
    from autotune.device import DeviceIdentity
    from autotune.runtime.ladder import Difference, Match
    from autotune.store import Reader, Saving, Schedule, Store
    from autotune.store.snapshots.reader import Snapshot
    from autotune.workload import Workload

log = logging.getLogger("autotune")

_MOST_FOUND = 100_000
"""Matches that are kept of a loaded snapshot."""


@dataclass
class Counted:
    """Counters by name, and rows of the coverage."""

    counts: dict[str, int]
    rows: list[Row]


class Deployment:
    """Settings, sources of schedules, and the record of look-ups. Any thread may call any method.

    :func:`deployment` gives the one that holds for the process. A new one begins as a new process does.

    Attributes:
        background: the search that is started for misses.
        changes: how often settings, sources or usable schedules changed, so that look-ups may find something else.
        calls: what Inductor's code calls in the place of each region, by the text of the region's call.
        loading: held while a call is made.
        misfits: why a schedule for other rows does not fit a workload, so that a process plans that once.
        packaged: snapshots that come with autotune.
        savings: the steps that ran stored kernels.
    """

    def __init__(self) -> None:
        self.background = Background()
        self.changes = 0
        self.calls: dict[str, Callable[..., None]] = {}
        self.loading = threading.RLock()
        self.misfits: dict[Any, str] = {}
        self.packaged = PackagedSnapshots(self.warn_once)
        self.savings = Savings(self.record_savings)
        self._lock = threading.RLock()
        self._given: dict[str, Any] = {}
        self._settings: Settings | None = None
        self._sources: list[Snapshot | None] = [None]
        """What is looked up in; the last one counts. None is the database that the environment names: at the bottom,
        and again for each open :meth:`deploying_from`. A loaded snapshot is between them."""
        self._databases: dict[str, Database] = {}
        self._warned: set[str] = set()
        self._unrecorded: list[dict[str, tuple[str, Workload]]] = []  # misses of each open :meth:`unrecorded`
        self._failed: dict[tuple[str, str], str] = {}  # why, by workload and configuration
        self._counting = threading.Lock()
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._covered: list[Row] = []
        self._state = b""
        self._kept: dict[tuple[str, str], Match] = {}
        self._found: dict[tuple[str, str, bool], Match] = {}
        self._found_at = -1

    def close(self) -> None:
        """Close every database."""
        self.savings.end()
        with self._lock:
            for database in self._databases.values():
                database.close()

    # Settings, counters, warnings

    @property
    def settings(self) -> Settings:
        """The settings now. Environment variables are read when they are first needed.

        Raises:
            UserError: an environment variable has a value that its setting does not.
        """
        found = self._settings
        if found is None:
            found = self._settings = Settings.read(self._given)
        return found

    def configure(self, given: Mapping[str, Any]) -> None:
        """Change settings to checked values, by name."""
        with self._lock:
            self._given.update(given)
            self._settings = None
            self.changes += 1

    def count(self, name: str, n: int = 1) -> None:
        """Add ``n`` to a counter."""
        with self._counting:
            self._counts[name] += n

    def counters(self) -> Counters:
        """The counters now."""
        with self._counting:
            return Counters(self._counts)

    def reset_counters(self) -> None:
        """Set every counter to zero, and forget the coverage."""
        with self._counting:
            self._counts = dict.fromkeys(COUNTERS, 0)
            self._covered = []

    @contextlib.contextmanager
    def counting_apart(self) -> Iterator[Counted]:
        """While open, keep counters and coverage apart; :meth:`count_again` adds them to the others.

        Code that other code replaces is compiled so: its misses say nothing of the code that runs.
        """
        apart = Counted(dict.fromkeys(COUNTERS, 0), [])
        with self._counting:
            before = Counted(self._counts, self._covered)
            self._counts, self._covered = apart.counts, apart.rows
        try:
            yield apart
        finally:
            with self._counting:
                apart.counts, apart.rows = self._counts, self._covered
                self._counts, self._covered = before.counts, before.rows

    def count_again(self, apart: Counted) -> None:
        """Add what was counted apart."""
        for name, count in apart.counts.items():
            self.count(name, count)
        self.cover(apart.rows)

    def cover(self, rows: Iterable[Row]) -> None:
        """Add the rows of a graph that was looked up."""
        with self._counting:
            self._covered = list(Coverage([*self._covered, *rows]).rows)

    def coverage(self) -> Coverage:
        """The rows of all graphs that were looked up."""
        with self._counting:
            return Coverage(self._covered)

    def warn_once(self, key: str, text: str) -> None:
        """Log a warning the first time that ``key`` is given."""
        with self._lock:
            if key in self._warned:
                return
            self._warned.add(key)
        log.warning("%s", text)

    def warn_differences(self, found: Sequence[Difference], *, other_device: bool) -> None:
        """Warn once of the conditions at hand that a schedule in use was not tuned under."""
        if not found:
            return
        told = ", ".join(map(str, found))
        if other_device:
            why = "AUTOTUNE_OTHER_DEVICE=refuse does not use them; `autotune search --missed` measures them here"
            self.warn_once(f"differs {told}", f"autotune: schedules tuned on another device are used: {told} ({why})")
        elif self.settings.environment == "loose":
            why = "AUTOTUNE_ENVIRONMENT=strict refuses them, ignore says nothing"
            self.warn_once(f"differs {told}", f"autotune: schedules tuned with other software are used: {told} ({why})")

    # What is deployed from

    def deploy_from(self, snapshot: Snapshot | None) -> None:
        """Deploy from a snapshot, or with None from the database that the environment names."""
        with self._lock:  # an earlier one may be in use by another thread, and closes when it is not
            named = [source for source in self._sources[1:] if source is None]
            self._sources = [None, *([] if snapshot is None else [snapshot]), *named]
            self.changes += 1

    @contextlib.contextmanager
    def deploying_from(self, db: str | None, replica: str | None = None) -> Iterator[None]:
        """While open, deployment looks up in ``db``, in processes started meanwhile too; None leaves it as it is.

        Args:
            replica: a copy of it to read; None for none, or where ``db`` is None for the one that was.
        """
        new = {} if db is None else {"AUTOTUNE_DB": db, "AUTOTUNE_DB_READ": ""}
        new |= {} if replica is None else {"AUTOTUNE_DB_READ": replica}
        if not new:
            yield
            return
        before = {name: os.environ.get(name) for name in new}
        os.environ.update(new)
        with self._lock:
            self._sources.append(None)
            self.changes += 1
        try:
            yield
        finally:
            with self._lock:
                self._sources.pop()
                self.changes += 1
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    @contextlib.contextmanager
    def opened(self, db: str | os.PathLike[str] | None = None) -> Iterator[Reader | None]:
        """A database or snapshot for one question; None where nothing was ever tuned.

        Args:
            db: a snapshot or as in ``Store.open``; None for what was loaded, else $AUTOTUNE_DB, or else the default
                file.

        Raises:
            UserError: it cannot be used.
        """
        loaded = self._sources[-1]
        if db is None and loaded is not None:
            yield loaded
            return
        from autotune.store import attach

        store = attach(db)
        try:
            yield store
        finally:
            if store is not None:
                store.close()

    def _database(self, url: str | None) -> Database:
        """The database that ``url`` names; None for that of the environment, which may change between two models."""
        own = os.environ.get("AUTOTUNE_DB") or "\0" + os.environ.get("XDG_DATA_HOME", "")
        key = url or f"{own}\0{os.environ.get('AUTOTUNE_DB_READ', '')}"
        found = self._databases.get(key)
        if found is None:
            found = self._databases[key] = Database(url, key, self.warn_once)
        return found

    def store(self, url: str | None = None) -> Reader | None:
        """The database or snapshot of look-ups; None where there is nothing that can be used (one warning).

        Args:
            url: as in ``Store.open``; None for what was loaded, else $AUTOTUNE_DB, or else the default file.
        """
        loaded = self._sources[-1]
        if url is None and loaded is not None:
            return None if loaded.lost else loaded
        with self._lock:
            return self._database(url).reader()

    def is_shut(self, url: str | None = None) -> bool:
        """True where :meth:`store` gives None for a database that exists: nothing replaces its unknown decisions."""
        loaded = self._sources[-1]
        if url is None and loaded is not None:
            return bool(loaded.lost)
        with self._lock:
            return self._database(url).is_shut

    def packaged_refused(self, store: Reader | None) -> str:
        """The reason to use no snapshot that comes with autotune, given the user's own database; "" for none.

        Raises:
            UserError: a setting has a value that it does not take.
        """
        from autotune.store.opening import pinned_key

        if self.settings.packaged == "refuse":
            return "AUTOTUNE_PACKAGED is refuse"
        if pinned_key(None) is not None or (store is not None and store.trusted):
            return "a key is pinned, and nobody signed what comes with autotune"
        return "" if store is None else store.lost

    def state(self, url: str | None = None) -> bytes:
        """A digest of the schedules that look-ups find now: code compiled with them is right as long as it is equal."""
        store = self.store(url)
        if store is None and self.is_shut(url):
            return b"none"
        try:
            own = "none" if store is None else store.state()
            packaged = "" if self.packaged_refused(store) else self.packaged.state()
            return f"{own}{packaged}{asked()}{self.settings}".encode()
        except Exception as e:
            self._warn_of("state", url, f"the database does not tell what it holds: {e}")
            if store is not None and store.lost:
                return b"none"  # look-ups do without it, too
            return os.urandom(16)  # nothing is found in a cache

    def _warn_of(self, what: str, url: str | None, text: str) -> None:
        self.warn_once(f"{what} {self._database(url).key}", f"autotune: {text}")

    # What was missed, what failed

    @contextlib.contextmanager
    def unrecorded(self) -> Iterator[Mapping[str, tuple[str, Workload]]]:
        """While open, in any thread, nothing that is missed is recorded, and no database is made for it.

        Gives what was missed meanwhile: by fingerprint, the device and the workload.
        """
        missed: dict[str, tuple[str, Workload]] = {}
        with self._lock:
            self._unrecorded.append(missed)
        try:
            yield missed
        finally:
            with self._lock:
                self._unrecorded[:] = [one for one in self._unrecorded if one is not missed]

    def record_misses(
        self,
        missed: Sequence[tuple[Workload, str]],
        device: str,
        url: str | None = None,
        *,
        identity: DeviceIdentity | None = None,
    ) -> int:
        """Record what could be tuned and is not, for ``autotune search --missed``; each once. Never fails.

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
            of = identity.fingerprint
            with self._lock:
                for found in self._unrecorded:
                    found.update({w.fingerprint: (device, w) for w, _ in missed})
                if self._unrecorded:
                    return 0
                database = self._database(url)
                new = {w.fingerprint: (w, why) for w, why in missed if (w.fingerprint, of) not in database.recorded}
                if not new:
                    return 0
                store = cast("Store | None", self.store(url))
                if store is None and (url is not None or self._sources[-1] is None):
                    store = database.create()
                if store is None or store.readonly:
                    return 0
                database.recorded.update((fingerprint, of) for fingerprint in new)
            store.put_device(identity)
            store.put_environment(environment(device))
            for workload, reason in new.values():
                if not store.add_miss(workload, of, reason):
                    break  # the others would wait as long for a database that is locked or gone
                written += 1
            if written:
                self.background.begin(device, url)
        except Exception as e:
            self._warn_of("misses", url, f"misses are not recorded: {e}")
        return written

    def record_failure(
        self, schedule: Schedule, device: str, status: Status, reason: str, url: str | None = None
    ) -> bool:
        """Note in the database that a stored kernel failed here, so that later look-ups under these conditions pass its
        schedule over (``autotune db forget`` undoes that). Never fails.

        Args:
            device: "cpu" or "cuda:N", equal to the one that it was tuned on.
            status: ``wrong_result`` or ``launch_error``.

        Returns:
            Whether it is written; a snapshot is not.
        """
        try:
            with self._lock:
                store = cast("Store | None", None if self._unrecorded else self.store(url))
                if store is None or store.readonly:
                    return False
            env = environment(device)
            store.put_environment(env)
            key = replace(schedule.key, environment=env.strict)
            return store.put_failure(key, schedule.config or {}, status, reason)
        except Exception as e:
            self._warn_of("failure", url, f"what failed is not recorded: {e}")
            return False

    def record_savings(self, counted: Mapping[str, Sequence[Saving]]) -> bool:
        """Add counts of steps to the database, by "cpu" or "cuda:N". Never fails.

        Returns:
            True where they are written.
        """
        try:
            with self._lock:
                store = cast("Store | None", self.store())
                if store is None and self._sources[-1] is None:
                    store = self._database(None).create()
            if store is None or store.readonly:
                self._warn_of("savings", None, "savings are not recorded: the database cannot be written")
                return False
            rows: list[Saving] = []
            for device, found in counted.items():
                where = store.put_device(identify(device)), store.put_environment(environment(device))
                rows += [replace(one, device=where[0], environment=where[1]) for one in found]
            store.put_savings(rows)
        except Exception as e:
            self._warn_of("savings", None, f"savings are not recorded: {first_line(e)}")
            return False
        return True

    def disable(self, schedule: Schedule, why: str) -> bool:
        """Let no look-up find a schedule again, since it failed; False where that was done before."""
        name = schedule.key.workload, config_key(schedule.config or {})
        with self._lock:
            if name in self._failed:
                return False
            self._failed[name] = why
            self.changes += 1
            return True

    def disabled(self, schedule: Schedule) -> str:
        """Why a schedule is not used any more; "" where it is."""
        if not self._failed:
            return ""
        return self._failed.get((schedule.key.workload, config_key(schedule.config or {})), "")

    # What was looked up and loaded

    def keep_match(self, device: str, found: Match) -> None:
        """Keep a match that was just found for the code that is about to be loaded in this process."""
        assert found.tuned is not None
        key = found.tuned.fingerprint, device
        with self.loading:
            known = self._kept.get(key)
            if known is not None and known.schedule != found.schedule:
                self.calls.clear()  # some run what was stored before
            self._kept[key] = found

    def kept_match(self, tuned: str, device: str) -> Match | None:
        """The match that :meth:`keep_match` has for the workload that a schedule was tuned for."""
        return self._kept.get((tuned, device))

    def load_from(self, state: bytes) -> None:
        """Forget what was loaded where look-ups find something else now: another database, or another setting.

        A graph from Inductor's caches names its regions, and the same name may mean another schedule by now.

        Args:
            state: of :meth:`state`.
        """
        with self.loading:
            if state != self._state:
                self.calls.clear()
                self._kept.clear()
                self._state = state

    def cached_match(self, key: tuple[str, str, bool]) -> Match | None:
        """The match that :meth:`cache_match` has, if nothing changed since."""
        return self._found.get(key) if self._found_at == self.changes else None

    def cache_match(self, key: tuple[str, str, bool], found: Match, changes: int) -> None:
        """Note what a look-up found, where that is a snapshot's, which does not change.

        Args:
            key: workload, device, and whether what comes with autotune was asked.
            changes: :attr:`changes` before the look-up.
        """
        if self._sources[-1] is None:
            return
        with self.loading:
            if changes != self._found_at or len(self._found) >= _MOST_FOUND:
                self._found.clear()
                self._found_at = changes
            self._found[key] = found


_current = Deployment()


def deployment() -> Deployment:
    """The process's own, in every thread."""
    return _current


def use(new: Deployment) -> None:
    """Make ``new`` the process's own, and close the one before. ``use(Deployment())`` is as a new process begins."""
    global _current
    before, _current = _current, new
    if before is not new:
        before.close()
