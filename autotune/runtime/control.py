"""Functions for users: ``autotune.load``, ``configure``, ``counters`` and ``coverage``."""

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
    from autotune.store.snapshot import Snapshot


def load(path: str | os.PathLike[str], *, key: str | os.PathLike[str] | None = None) -> Snapshot:
    """Deploy from a snapshot in this process, from now on.

    ::

        autotune.load("schedules.atdb")
        model = torch.compile(model, backend="autotune")

    ``torch.compile``, :func:`autotune.lookup` and ``autotune.overlap`` use the snapshot, unless they are given another
    database. Code that was compiled before does not change.

    Args:
        path: a file of ``autotune export``, or ``package:h200``, which is shipped with autotune.
        key: file of the public key (PEM, Ed25519) that the snapshot must be signed with, or the key's text; None for
            $AUTOTUNE_KEY, or any snapshot.

    Raises:
        UserError: the file is missing, not a snapshot, of another version, damaged, or not signed with the key; one
            line. Deployment continues from the earlier source.
    """
    from autotune.store.opening import path_of, pinned_key
    from autotune.store.snapshot import Snapshot

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
    """Change the settings of deployment in this process, for later compilations.

    :class:`autotune.runtime.settings.Settings` documents the settings.

    ::

        autotune.configure(environment="strict", verify="first")

    Args:
        environment, other_device, packaged, rows, verify, attention, unsearched, products: None leaves it unchanged.
        background: True searches missed regions in another process while the device is idle ($AUTOTUNE_BACKGROUND). A
            name, such as "cuda:3", searches on that idle equal device. None leaves it unchanged. See
            :mod:`autotune.runtime.background`.

    Returns:
        All current settings.

    Raises:
        UserError: invalid value of a setting.
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
    """Counters of deployment in this process, since its start or their last reset."""
    return deployment().counters()


def coverage() -> Coverage:
    """Operators that stored kernels run in this process, those that Inductor compiles, and the reasons.

    ``print(autotune.coverage())`` shows them as a table. Graphs from Inductor's caches are not looked up, and do not
    count.
    """
    return deployment().coverage()
