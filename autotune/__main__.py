"""Where the command ``autotune`` begins: Ctrl-C is one line from here on, also while torch is imported.

``python -m autotune`` begins here too, where its script is not on the path.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def main() -> int:
    """Run the command; see :func:`autotune.cli.app.main`."""
    signal.signal(signal.SIGINT, _interrupted)
    from autotune.cli import app

    return app.main()


def _interrupted(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; end at once while nothing would tell of it.

    That is before the command is read, and while torch is imported, which takes an exception for a missing package.
    """
    for name in ("autotune.cli.app", "torch"):
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if getattr(spec, "_initializing", False) or (spec is None and name != "torch"):
            os.write(2, b"autotune: interrupted; nothing was begun\n")
            os._exit(130)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
