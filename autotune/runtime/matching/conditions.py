"""Warnings where a schedule was tuned under other conditions than those at hand."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.runtime.database import warn_once
from autotune.runtime.matching.ladder import Difference
from autotune.runtime.settings import settings


def tell_differences(found: Sequence[Difference], *, other_device: bool) -> None:
    """Warn once of what the conditions of a schedule that is used differ in from those at hand."""
    if not found:
        return
    told = ", ".join(map(str, found))
    if other_device:
        why = "AUTOTUNE_OTHER_DEVICE=refuse does not use them; `autotune search --missed` measures them here"
        warn_once(f"differs {told}", f"autotune: schedules tuned on another device are used: {told} ({why})")
    elif settings().environment == "loose":
        why = "AUTOTUNE_ENVIRONMENT=strict refuses them, ignore says nothing"
        warn_once(f"differs {told}", f"autotune: schedules tuned with other software are used: {told} ({why})")


__all__ = ["tell_differences"]
