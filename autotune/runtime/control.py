"""Functions for users: ``autotune.load``, ``configure`` and ``counters``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from autotune.runtime.coverage import Coverage
from autotune.runtime.deployment import deployment
from autotune.runtime.settings import (
    Attention,
    Counters,
    OtherDevice,
    Packaged,
    Products,
    Settings,
    Unsearched,
    Verify,
    checked,
)
from autotune.store.reading import Match

if TYPE_CHECKING:
    from autotune.store.snapshots.reader import Snapshot


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
    deployment().deploy_from(snapshot)
    return snapshot


def unload() -> None:
    """Deploy from $AUTOTUNE_DB or the default database again."""
    deployment().deploy_from(None)


def configure(
    *,
    environment: Match | None = None,
    other_device: OtherDevice | None = None,
    packaged: Packaged | None = None,
    rows: float | None = None,
    verify: Verify | None = None,
    attention: Attention | None = None,
    unsearched: Unsearched | None = None,
    products: Products | None = None,
    background: bool | str | None = None,
) -> Settings:
    """Change how deployment behaves in this process, for later compilations; see
    :class:`autotune.runtime.settings.Settings`.

    ::

        autotune.configure(environment="strict", verify="first")

    Args:
        environment, other_device, packaged, rows, verify, attention, unsearched, products: None leaves it as it is.
        background: whether what is missed is tuned beside this process, while the device is idle
            ($AUTOTUNE_BACKGROUND); the name of an idle equal device to do that on, such as "cuda:3". None leaves it as
            it is. See :mod:`autotune.runtime.background`.

    Returns:
        All settings, as they are now.

    Raises:
        UserError: a value that is none of those that a setting has.
    """
    new = {
        "environment": environment, "other_device": other_device, "packaged": packaged, "rows": rows, "verify": verify,
        "attention": attention, "unsearched": unsearched, "products": products,
    }  # fmt: skip
    given = {name: checked(name, value, name) for name, value in new.items() if value is not None}
    own = deployment()
    if background is not None:
        own.background.wish(background)
    own.configure(given)
    return own.settings


def counters() -> Counters:
    """Counts of deployment's work in this process, since it started or since they were reset."""
    return deployment().counters()


def coverage() -> Coverage:
    """What runs by stored kernels in this process, what Inductor compiles, and why: ``print(autotune.coverage())``.

    Graphs that come from Inductor's caches are not looked up, and add nothing.
    """
    return deployment().coverage()
