"""The state of deployment in a process: settings, sources of schedules, misses, failures.

:func:`deployment` returns it. Its methods never stop the user's model: an error of a database logs one warning, and the
model runs as without autotune.
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
from autotune.ir.nodes import asked
from autotune.runtime.background import Background
from autotune.runtime.coverage import Coverage, Row
from autotune.runtime.database import Database, PackagedSnapshots
from autotune.runtime.savings import Savings
from autotune.runtime.settings import COUNTERS, Counters, Settings
from autotune.task import Status, config_key

if TYPE_CHECKING:
    from autotune.device import DeviceIdentity
    from autotune.runtime.ladder import Difference, Match
    from autotune.runtime.launch.prepared import Prepared
    from autotune.store import Reader, Saving, Schedule, Store
    from autotune.store.snapshot import Snapshot
    from autotune.workload import Workload

log = logging.getLogger("autotune")

_MOST_FOUND = 100_000
"""Maximum number of cached matches of a loaded snapshot."""


@dataclass
class Counted:
    """Counters by name, and rows of the coverage."""

    counts: dict[str, int]
    rows: list[Row]


class Deployment:
    """Settings, sources of schedules, and the record of look-ups. Any thread may call any method.

    :func:`deployment` returns the process's instance. A new instance has the state of a new process.

    Attributes:
        background: the search that is started for misses.
        changes: number of changes of settings, sources or usable schedules, any of which may change look-ups.
        calls: the functions that Inductor's code calls for regions, by the text of the region's call.
        loading: lock held while a call is built.
        prepared: the launches of CUDA regions in this process, by the schedule's workload, the region and its tensors.
        misfits: reasons why schedules for other rows do not fit workloads, cached so that a process plans each once.
        packaged: snapshots shipped with autotune.
        savings: the steps that ran stored kernels.
    """

    def __init__(self) -> None:
        self.forget_threads()
        self.background = Background()
        self.changes = 0
        self.calls: dict[str, Callable[..., None]] = {}
        self.prepared: dict[Any, Prepared] = {}
        self.misfits: dict[Any, str] = {}
        self.packaged = PackagedSnapshots(self.warn_once)
        self.savings = Savings(self.record_savings)
        self._given: dict[str, Any] = {}
        self._settings: Settings | None = None
        self._sources: list[Snapshot | None] = [None]
        """The stack of sources; look-ups use the last one. None is the database named in the environment: at the
        bottom, and again for each open :meth:`deploying_from`. A loaded snapshot is between them."""
        self._databases: dict[str, Database] = {}
        self._warned: set[str] = set()
        self._unrecorded: list[dict[str, tuple[str, Workload]]] = []  # misses in each open :meth:`unrecorded`
        self._failed: dict[tuple[str, str], str] = {}  # the reason, by workload and configuration
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._covered: list[Row] = []
        self._apart: list[Counted] = []
        self._state = b""
        self._kept: dict[tuple[str, str], Match] = {}
        self._found: dict[tuple[str, str, bool], Match] = {}
        self._found_at = -1

    def forget_threads(self) -> None:
        """Make new locks: in the child of a fork, the threads that hold the old ones do not run."""
        self.loading, self._lock, self._counting = threading.RLock(), threading.RLock(), threading.Lock()

    def close(self) -> None:
        """Close every database."""
        self.savings.end()
        with self._lock:
            for database in self._databases.values():
                database.close()

    # Settings, counters, warnings

    @property
    def settings(self) -> Settings:
        """The current settings. Environment variables are read at the first use.

        Raises:
            UserError: invalid value of an environment variable.
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
        """The current counters."""
        with self._counting:
            every = [self._counts, *(apart.counts for apart in self._apart)]
            return Counters({name: sum(counts[name] for counts in every) for name in COUNTERS})

    def reset_counters(self) -> None:
        """Set every counter to zero, and clear the coverage."""
        with self._counting:
            self._counts = dict.fromkeys(COUNTERS, 0)
            self._covered = []
            self._apart = []

    @contextlib.contextmanager
    def counting_apart(self) -> Iterator[Counted]:
        """Context manager that keeps counters and coverage separate; :meth:`count_again` adds them to the others.

        It is used for code that will be replaced, whose misses do not describe the final code.
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
        """Add separate counts. A later change of ``apart`` changes the sums, until they are reset."""
        with self._counting:
            self._apart.append(apart)

    def cover(self, rows: Iterable[Row]) -> None:
        """Add the rows of a graph that was looked up."""
        with self._counting:
            self._covered = list(Coverage([*self._covered, *rows]).rows)

    def coverage(self) -> Coverage:
        """The rows of all graphs that were looked up."""
        with self._counting:
            return Coverage([*self._covered, *(row for apart in self._apart for row in apart.rows)])

    def warn_once(self, key: str, text: str) -> None:
        """Log a warning once for each ``key``."""
        with self._lock:
            if key in self._warned:
                return
            self._warned.add(key)
        log.warning("%s", text)

    def warn_differences(self, found: Sequence[Difference], *, other_device: bool) -> None:
        """Warn once if a schedule in use was tuned under other conditions."""
        if not found:
            return
        fields = ", ".join(map(str, found))
        if other_device:
            why = "`autotune search --missed` searches on this device; AUTOTUNE_OTHER_DEVICE=refuse disables this"
            self.warn_once(
                f"differs {fields}", f"autotune: schedules tuned on another device are used: {fields} ({why})"
            )
        elif self.settings.environment == "loose":
            why = "AUTOTUNE_ENVIRONMENT=strict disables this, =ignore only the warning"
            self.warn_once(
                f"differs {fields}", f"autotune: schedules tuned with other software are used: {fields} ({why})"
            )

    # What is deployed from

    def deploy_from(self, snapshot: Snapshot | None) -> None:
        """Deploy from a snapshot, or with None from the database named in the environment."""
        with self._lock:  # an earlier snapshot may be in use by another thread, and is closed after that
            named = [source for source in self._sources[1:] if source is None]
            self._sources = [None, *([] if snapshot is None else [snapshot]), *named]
            self.changes += 1

    @contextlib.contextmanager
    def deploying_from(self, db: str | None, replica: str | None = None) -> Iterator[None]:
        """Context manager in which this process and its new children deploy from ``db``; None changes nothing.

        Args:
            replica: a copy of ``db`` to read. None for no copy, or, if ``db`` is None, for the current one.
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
        """Context manager that opens a database or snapshot; None if the database does not exist.

        Args:
            db: a snapshot or as in ``Store.open``. None for the loaded snapshot, else $AUTOTUNE_DB, else the default
                file.

        Raises:
            UserError: the database cannot be used.
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
        """The database of ``url``. None is the one named in the environment, which may change between two models."""
        own = os.environ.get("AUTOTUNE_DB") or "\0" + os.environ.get("XDG_DATA_HOME", "")
        key = url or f"{own}\0{os.environ.get('AUTOTUNE_DB_READ', '')}"
        found = self._databases.get(key)
        if found is None:
            found = self._databases[key] = Database(url, key, self.warn_once)
        return found

    def store(self, url: str | None = None) -> Reader | None:
        """The database or snapshot of look-ups; None without a usable one (logs one warning).

        Args:
            url: as in ``Store.open``. None for the loaded snapshot, else $AUTOTUNE_DB, else the default file.
        """
        loaded = self._sources[-1]
        if url is None and loaded is not None:
            return None if loaded.lost else loaded
        with self._lock:
            return self._database(url).reader()

    @property
    def is_loaded(self) -> bool:
        """True if look-ups use a loaded snapshot."""
        return self._sources[-1] is not None

    def is_shut(self, url: str | None = None) -> bool:
        """True if :meth:`store` returns None for a database that exists: its verdicts are unknown, and not replaced."""
        loaded = self._sources[-1]
        if url is None and loaded is not None:
            return bool(loaded.lost)
        with self._lock:
            return self._database(url).is_shut

    def packaged_refused(self, store: Reader | None) -> str:
        """The reason to use no shipped snapshot, given the user's own database; "" for none.

        Raises:
            UserError: invalid value of a setting.
        """
        from autotune.store.opening import pinned_key

        if self.settings.packaged == "refuse":
            return "AUTOTUNE_PACKAGED is refuse"
        if pinned_key(None) is not None or (store is not None and store.trusted):
            return "a key requires signed schedules, and packaged ones are not signed"
        return "" if store is None else store.lost

    def state(self, url: str | None = None, *, code: str = "") -> bytes:
        """A digest of the schedules that look-ups find: code compiled with them is valid while the digest is equal.

        Args:
            code: a name (:mod:`autotune.runtime.inductor.code`) in place of the database's digest.
        """
        store = None if code else self.store(url)
        if store is None and self.is_shut(url):
            return b"none"
        try:
            own = code or ("none" if store is None else store.state())
            packaged = "" if self.packaged_refused(store) else self.packaged.state()
            return f"{own}{packaged}{asked()}{self.settings}".encode()
        except Exception as e:
            self._warn_of("state", url, f"cannot read the state of the database: {e}")
            if store is not None and store.lost:
                return b"none"  # look-ups do not use the database either
            return os.urandom(16)  # misses every cache

    def _warn_of(self, what: str, url: str | None, text: str) -> None:
        self.warn_once(f"{what} {self._database(url).key}", f"autotune: {text}")

    # What was missed, what failed

    @contextlib.contextmanager
    def unrecorded(self) -> Iterator[Mapping[str, tuple[str, Workload]]]:
        """Context manager in which no thread records a miss or creates a database for it.

        Yields the misses during the context: fingerprint to device and workload.
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
        """Record workloads that could be tuned and are not, each once, for ``autotune search --missed``. Never raises.

        Args:
            missed: workloads and the reasons why no schedule fits.
            device: "cpu" or "cuda:N".
            identity: of the devices that miss them together, if more than ``device``.

        Returns:
            Number of records written.
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
                    break  # the database is locked or lost, and the others would wait as long
                written += 1
            if written:
                self.background.begin(device, url)
        except Exception as e:
            self._warn_of("misses", url, f"misses are not recorded: {e}")
        return written

    def record_failure(self, schedule: Schedule, device: str, status: Status, reason: str) -> bool:
        """Record in the database that a stored kernel failed, so that look-ups under these conditions skip its
        schedule. Never raises. ``autotune db forget`` removes the record.

        Args:
            device: "cpu" or "cuda:N", equal to the one that the schedule was tuned on.
            status: ``wrong_result`` or ``launch_error``.

        Returns:
            True if it was written; a snapshot cannot be.
        """
        try:
            with self._lock:
                store = cast("Store | None", None if self._unrecorded else self.store())
                if store is None or store.readonly:
                    return False
            env = environment(device)
            store.put_environment(env)
            key = replace(schedule.key, environment=env.strict)
            return store.put_failure(key, schedule.config or {}, status, reason)
        except Exception as e:
            self._warn_of("failure", None, f"what failed is not recorded: {e}")
            return False

    def record_savings(self, counted: Mapping[str, Sequence[Saving]]) -> bool:
        """Add counts of steps to the database, by "cpu" or "cuda:N". Never raises.

        Returns:
            True if they were written.
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
        """Exclude a failed schedule from look-ups; False if it was excluded before."""
        name = schedule.key.workload, config_key(schedule.config or {})
        with self._lock:
            if name in self._failed:
                return False
            self._failed[name] = why
            self.changes += 1
            return True

    def disabled(self, schedule: Schedule) -> str:
        """The reason why a schedule is excluded from look-ups; "" if it is not."""
        if not self._failed:
            return ""
        return self._failed.get((schedule.key.workload, config_key(schedule.config or {})), "")

    # What was looked up and loaded

    def keep_match(self, device: str, found: Match) -> None:
        """Keep a match for the code that this process is about to load."""
        assert found.tuned is not None
        key = found.tuned.fingerprint, device
        with self.loading:
            known = self._kept.get(key)
            if known is not None and known.schedule != found.schedule:
                self.calls.clear()  # some run the earlier schedule
                self.prepared.clear()
            self._kept[key] = found

    def kept_match(self, tuned: str, device: str) -> Match | None:
        """The match from :meth:`keep_match` for the workload that a schedule was tuned for."""
        return self._kept.get((tuned, device))

    def kept_matches(self) -> dict[tuple[str, str], Match]:
        """All matches from :meth:`keep_match`, by workload and device."""
        with self.loading:
            return dict(self._kept)

    def load_from(self, state: bytes) -> None:
        """Discard loaded calls if look-ups have other results now, after a change of the database or of a setting.

        A graph from Inductor's caches refers to its regions by name, and a name may refer to another schedule now.

        Args:
            state: result of :meth:`state`.
        """
        with self.loading:
            if state != self._state:
                self.calls.clear()
                self.prepared.clear()
                self._kept.clear()
                self._state = state

    def cached_match(self, key: tuple[str, str, bool]) -> Match | None:
        """The match from :meth:`cache_match`, if nothing changed since."""
        return self._found.get(key) if self._found_at == self.changes else None

    def cache_match(self, key: tuple[str, str, bool], found: Match, changes: int) -> None:
        """Cache the result of a look-up in a snapshot, which does not change.

        Args:
            key: workload, device, and True if shipped snapshots were included.
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
    """The process's state of deployment, for all threads."""
    return _current


def use(new: Deployment) -> None:
    """Replace the process's state, and close the old one. ``use(Deployment())`` has the state of a new process."""
    global _current
    before, _current = _current, new
    if before is not new:
        before.close()


os.register_at_fork(after_in_child=lambda: _current.forget_threads())
