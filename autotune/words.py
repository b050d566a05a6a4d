"""Words about numbers, for people."""

from __future__ import annotations


def plural(n: int, what: str) -> str:
    """Such as ``1 kernel`` and ``2 kernels``."""
    return f"{n} {what}" + ("" if n == 1 else "s")
