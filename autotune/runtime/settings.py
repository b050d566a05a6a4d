"""How deployment behaves: ``autotune.configure``, or environment variables of the same meaning.

The variables are read once a process, when they are first needed.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from autotune.errors import UserError
from autotune.runtime.background import tune_beside
from autotune.store.reading import Match

OtherDevice = Literal["refuse", "warn"]
Packaged = Literal["use", "refuse"]
Attention = Literal["fuse", "keep"]
Verify = Literal["auto", "first", "always", "never"]

_ALLOWED: dict[str, tuple[str, ...]] = {
    "environment": get_args(Match),
    "other_device": get_args(OtherDevice),
    "packaged": get_args(Packaged),
    "verify": get_args(Verify),
    "attention": get_args(Attention),
}


@dataclass(frozen=True)
class Settings:
    """How deployment behaves.

    Attributes:
        environment: whether a schedule may have been tuned with other software ($AUTOTUNE_ENVIRONMENT). "strict" wants
            equal versions of everything. "loose" is content with equal minor versions of torch and CUDA, prefers equal
            software, and warns once of what differs. "ignore" takes any and says nothing.
        other_device: what becomes of a schedule that was tuned on another device of the same architecture
            ($AUTOTUNE_OTHER_DEVICE). "refuse" uses none: the region is a miss, which a search can measure here. "warn"
            uses it, warns once, and records the miss all the same.
        packaged: whether schedules that come with autotune for the very device at hand stand in where the database has
            no answer ($AUTOTUNE_PACKAGED): "use" or "refuse". They were measured on another such device, as regions
            alone, and nobody measured them in the step at hand. Versions of torch and CUDA matter there with "strict"
            alone. The miss is recorded all the same.
        rows: the largest ratio of the rows at hand to those that a schedule was tuned for, either way
            ($AUTOTUNE_ROWS).
        verify: when a stored kernel's results are compared with those of the region's own operators
            ($AUTOTUNE_VERIFY). "first": at its first call in a process. "always": at every call. "never". "auto": at
            its first call, where it was tuned under other conditions (rows, device or software) than it meets here.
        attention: whether calls of ``scaled_dot_product_attention`` are rewritten so that a fused kernel takes them
            ($AUTOTUNE_ATTENTION): "fuse" or "keep". A search obeys it too. Rules:
            :mod:`autotune.compiler.capture.attention`.
    """

    environment: Match = "loose"
    other_device: OtherDevice = "refuse"
    packaged: Packaged = "use"
    rows: float = 16.0
    verify: Verify = "auto"
    attention: Attention = "fuse"


_given: dict[str, Any] = {}
_known: Settings | None = None
_lock = threading.Lock()
_changes = 0


def configure(
    *,
    environment: Match | None = None,
    other_device: OtherDevice | None = None,
    packaged: Packaged | None = None,
    rows: float | None = None,
    verify: Verify | None = None,
    attention: Attention | None = None,
    background: bool | str | None = None,
) -> Settings:
    """Change how deployment behaves in this process, for what is compiled from now on; see :class:`Settings`.

    ::

        autotune.configure(environment="strict", verify="first")

    Args:
        environment, other_device, packaged, rows, verify, attention: None leaves it as it is.
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
        "attention": attention,
    }  # fmt: skip
    checked = {name: _value(name, value, name) for name, value in new.items() if value is not None}
    if background is not None:
        tune_beside(background)
    with _lock:
        _given.update(checked)
    _forget()
    return settings()


def settings() -> Settings:
    """What holds now.

    Raises:
        UserError: an environment variable has a value that its setting does not.
    """
    global _known
    found = _known
    if found is None:
        read = {f.name: os.environ.get(f"AUTOTUNE_{f.name.upper()}") for f in fields(Settings)}
        told = {name: _value(name, text, f"AUTOTUNE_{name.upper()}") for name, text in read.items() if text}
        found = _known = replace(Settings(), **{**told, **_given})
    return found


def changes() -> int:
    """How often settings were changed: what was decided by earlier ones is to be decided again."""
    return _changes


def reset_settings() -> None:
    """Forget what :func:`configure` was told, and read the environment variables anew."""
    with _lock:
        _given.clear()
    _forget()


def _forget() -> None:
    global _known, _changes
    _known = None
    _changes += 1


def _value(name: str, value: Any, what: str) -> Any:
    if name == "rows":
        try:
            ratio = float(value)
        except (TypeError, ValueError):
            ratio = 0.0
        if not ratio >= 1.0:
            raise UserError(f"{what}: {value!r} is no ratio of rows: give a number of 1 or more, such as 16, or inf")
        return ratio
    if value not in _ALLOWED[name]:
        raise UserError(f"{what}: {value!r} is none of {', '.join(_ALLOWED[name])}")
    return value


__all__ = [
    "Attention",
    "OtherDevice",
    "Packaged",
    "Settings",
    "Verify",
    "changes",
    "configure",
    "reset_settings",
    "settings",
]
