"""Names in generated CUDA source, beside those of storage types (``ir.graph.SHORT``): of cache hints; and tuples."""

from __future__ import annotations

from collections.abc import Sequence

HINTS = {
    "default": "d",
    "streaming": "s",
    "no_allocate": "n",
    "prefetch": "p",
    "evict_first": "e",
    "evict_last": "l",
    "coherent": "c",
}


def tuple_of(items: Sequence[str]) -> str:
    """Source of a tuple. Python builds one of over 30 items through a list, which Numba cannot follow everywhere."""
    parts = [items[k : k + 16] for k in range(0, len(items), 16)]
    return " + ".join(f"({', '.join(part)},)" for part in parts)
