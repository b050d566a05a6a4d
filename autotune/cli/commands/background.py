"""``autotune background``: search missed regions while the device is idle and programs keep running."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from autotune.cli.options import add_db, add_device, seconds
from autotune.device import DeviceIdentity
from autotune.errors import UserError, safe_line
from autotune.words import plural

_LOOK_S = 1.0
"""Seconds between checks of the processors, and of the program's existence."""
_LOOKS = 3
"""Consecutive failures to read the database after which the command gives up."""
_STOP_S = 40.0
"""Seconds for a search to end after Ctrl-C, in which it stores its results."""


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "background",
        help="search missed regions while the device is idle",
        description="Wait for misses, and search the missed regions while the device is idle, at the lowest priority."
        " On a CPU a search stops as soon as other programs compute, and the next one continues it. A program uses the"
        " results when it compiles next. Stop with Ctrl-C. AUTOTUNE_BACKGROUND=1 starts this command from a program.",
    )
    add_device(parser)
    add_db(parser)
    about = (
        "the most that other programs may use of an idle device: processors of a CPU, or a share of a GPU's time"
        " (default: 0.25)"
    )
    parser.add_argument("--busy", type=seconds, default=0.25, metavar="N", help=about)
    about = "search even if the device is not idle"
    parser.add_argument("--always", action="store_true", help=about)
    about = "seconds of one search; the device must be idle again before the next one (default: 120)"
    parser.add_argument("--timeout", type=seconds, default=120.0, metavar="S", help=about)
    about = "seconds between checks of the database for misses (default: 10)"
    parser.add_argument("--interval", type=seconds, default=10.0, metavar="S", help=about)
    parser.add_argument("--once", action="store_true", help="exit when no miss is left")
    parser.add_argument("--with-parent", action="store_true", help="exit when the parent process exits")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Search misses until interrupted; returns 0, or 130 after Ctrl-C."""
    from autotune.device import identify, resolve_device
    from autotune.measure.quiet import be_nice, idle

    parent = os.getppid()
    signal.signal(signal.SIGTERM, _end)
    device = resolve_device(args.device)
    if not args.always:
        idle(device, args.busy, 0.0)  # raises UserError at once if idleness cannot be measured
    where = identify(device)
    be_nice()

    def alone() -> bool:
        return args.with_parent and os.getppid() != parent

    with _only_one(device, alone) as is_only:
        if not is_only:
            return 0
        print(f"autotune: waiting for misses on {where.label}", file=sys.stderr, flush=True)
        return _watch(args, device, where, alone)


def _end(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def _only_one(device: str, alone: Callable[[], bool]) -> Any:
    """Hold the lock of this user's background searches on a device; yields False if ``alone`` is True first."""
    from autotune.measure.quiet import device_lock

    while not alone():
        with device_lock(f"background-{device}", _LOOK_S) as held:
            if held:
                yield True
                return
    yield False


def _watch(args: argparse.Namespace, device: str, where: DeviceIdentity, alone: Callable[[], bool]) -> int:
    from autotune.measure.quiet import idle

    given_up: frozenset[tuple[str, int]] = frozenset()
    faults = 0
    while not alone():
        try:
            found = _missed(args.db, where.fingerprint, wait=not args.once)
            faults = 0
        except UserError as e:
            faults += 1
            if args.once or faults == _LOOKS:
                raise
            _say(e)
            found = frozenset()
        if not found and args.once:
            return 0
        if found and found != given_up and (args.always or idle(device, args.busy)):
            print(f"autotune: searching {plural(len(found), 'missed region')}", file=sys.stderr, flush=True)
            code = _search(args, device, alone)
            left = _missed(args.db, where.fingerprint)
            # Regions that failed are not retried until a further miss of them or of others is recorded.
            given_up = left if code != 130 and left == found else frozenset()
            if code in (1, 2) and left == found and args.once:
                return code
            continue
        until = time.monotonic() + args.interval
        while time.monotonic() < until and not alone():
            time.sleep(min(_LOOK_S, args.interval))
    return 0


def _missed(db: str | None, device: str, wait: bool = True) -> frozenset[tuple[str, int]]:
    """The regions that are missed on a device, with their numbers of misses.

    Args:
        wait: return none if the database does not exist yet or its server is unreachable.

    Raises:
        UserError: the database cannot be read.
    """
    from autotune.store import Store
    from autotune.store.connection.faults import LostConnection
    from autotune.store.connection.urls import is_missing, no_database, parse_url

    if wait and is_missing(url := parse_url(db)):
        _say(no_database(str(url.database)))
        return frozenset()
    try:
        with Store.open(db, migrate=False, readonly=True) as store:
            found = store.misses(device)
            names = store.names(m.workload for m in found)
    except LostConnection as e:
        if not wait:
            raise
        _say(e)
        return frozenset()
    return frozenset((m.workload, m.count) for m in found if names.get(m.workload, ("", ""))[1] == "fusion")


_printed: set[str] = set()


def _say(error: UserError | str) -> None:
    text = safe_line(error)
    if text not in _printed:
        print(f"autotune: {text}", file=sys.stderr, flush=True)
    _printed.add(text)


def _search(args: argparse.Namespace, device: str, alone: Callable[[], bool]) -> int:
    """Run one search of missed regions; returns its exit code, 130 if it was interrupted."""
    from autotune.measure.child import interpreter
    from autotune.measure.quiet import Meter

    python, environ = interpreter()
    # In the environment: all users can read a command line, which may have a password.
    env = {**environ, "AUTOTUNE_BACKGROUND": "0", **({"AUTOTUNE_DB": args.db} if args.db else {})}
    # A new session: the search gets Ctrl-C only from this process, once.
    with subprocess.Popen(
        [*python, *_arguments(args, device)], env=env, start_new_session=True, stdout=subprocess.DEVNULL
    ) as child:
        meter = Meter(family=True)
        try:
            while child.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(2 * _LOOK_S)
                why = "the program has ended" if alone() else ""
                if not why and device == "cpu" and not args.always and meter.lap() > args.busy + 0.25:
                    why = "other programs compute"
                if why:
                    print(f"autotune: {why}: the search is interrupted", file=sys.stderr, flush=True)
                    _stop(child)
                    return 130
        finally:
            _stop(child)
        return child.returncode


def _arguments(args: argparse.Namespace, device: str) -> list[str]:
    words = ["-m", "autotune", "search", "fusion", "--missed", "--device", device]
    return [*words, "--timeout", str(args.timeout)]


def _stop(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is not None:
        return
    child.send_signal(signal.SIGINT)
    try:
        child.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
