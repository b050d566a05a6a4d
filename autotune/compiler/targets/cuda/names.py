"""Short names in generated CUDA source: of storage types, and of cache hints."""

from __future__ import annotations

from collections.abc import Sequence

NAMES = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
    "bool": "b1",
}
HINTS = {
    "default": "d",
    "streaming": "s",
    "no_allocate": "n",
    "prefetch": "p",
    "evict_first": "e",
    "evict_last": "l",
}


def tuple_of(items: Sequence[str]) -> str:
    """Source of a tuple. Python builds one of over 30 items through a list, which Numba cannot follow everywhere."""
    parts = [items[k : k + 16] for k in range(0, len(items), 16)]
    return " + ".join(f"({', '.join(part)},)" for part in parts)
