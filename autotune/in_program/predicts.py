"""The option "unsearched" of ``torch.compile``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.errors import UserError
from autotune.runtime.deployment import deployment
from autotune.runtime.settings import checked

OPTION = "unsearched"


def predicts(options: Mapping[str, Any]) -> tuple[bool, dict[str, Any]]:
    """True if unsearched regions get predicted schedules, and the options without autotune's own.

    Args:
        options: ``mode`` and ``options`` as the user gave them to ``torch.compile``.

    Raises:
        UserError: invalid value of the option. An invalid variable only logs one warning.
    """
    own = dict(options.get("options") or {})
    if OPTION in own:
        asked = checked(OPTION, own.pop(OPTION), f"options[{OPTION!r}]")
        return asked == "default", {**options, "options": own}
    try:
        return deployment().settings.unsearched == "default", dict(options)
    except UserError as error:
        deployment().warn_once("settings", f"autotune: no schedule is predicted: {error}")
        return False, dict(options)


__all__ = ["OPTION", "predicts"]
