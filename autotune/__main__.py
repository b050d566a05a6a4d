"""Entry point of the command ``autotune``: Ctrl-C prints one line, also while torch is imported.

``python -m autotune`` runs it too, for installations whose script is not on the path.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def main() -> int:
    """Run the command; see :func:`autotune.cli.app.main`."""
    signal.signal(signal.SIGINT, _interrupted)
    os.environ.pop("AUTOTUNE_RUN", None)  # it is for programs, and a command compares with Inductor
    from autotune.cli import app

    return app.main()


def _interrupted(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, or exit at once if the exception would not be reported.

    That is before the command line is parsed, and during the import of torch, which takes an exception for a missing
    package.
    """
    for name in ("autotune.cli.app", "torch"):
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if getattr(spec, "_initializing", False) or (spec is None and name != "torch"):
            os.write(2, b"autotune: interrupted; nothing was begun\n")
            os._exit(130)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
