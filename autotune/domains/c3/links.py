"""How the GPUs of this machine are joined, in a word: "NV18", "PIX", "P2P", "none"."""

from __future__ import annotations

import os
import re
import subprocess
from functools import lru_cache

_JOINED = re.compile(r"NV\d+|PIX|PXB|PHB|NODE|SYS")


@lru_cache(maxsize=16)
def links(device: str, ranks: int) -> str:
    """The kinds of links between ``ranks`` GPUs from ``device`` on, as nvidia-smi names them ("NV18"; "NV4+SYS" where
    they differ); "P2P" or "none" where it does not tell. Never fails."""
    first = int(device.partition(":")[2] or 0)
    try:
        text = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=True, timeout=30
        ).stdout
        found = parse_topology(text, visible(os.environ.get("CUDA_VISIBLE_DEVICES"), first, ranks))
    except (OSError, subprocess.SubprocessError):
        found = ""
    return found or _peers(first, ranks)


def visible(setting: str | None, first: int, ranks: int) -> list[int] | None:
    """The machine's numbers of the ``ranks`` GPUs that this process counts from ``first``; None where that is not
    known (they are named by UUID, or each rank sees its own only)."""
    if setting is None:
        return list(range(first, first + ranks))
    names = [name.strip() for name in setting.split(",")]
    if not all(name.isdecimal() for name in names) or len(names) < first + ranks:
        return None
    return [int(name) for name in names[first : first + ranks]]


def parse_topology(text: str, chosen: list[int] | None) -> str:
    """The kinds of links in a matrix of ``nvidia-smi topo -m`` between the ``chosen`` GPUs, or all where it lacks some;
    empty where it has none."""
    rows: dict[int, list[str]] = {}
    columns = 0
    for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines():
        words = line.split()
        if words and re.fullmatch(r"GPU\d+", words[0]):
            if words[1:] and re.fullmatch(r"GPU\d+", words[1]):  # the head of the table
                columns = sum(bool(re.fullmatch(r"GPU\d+", w)) for w in words)
            else:
                rows[int(words[0][3:])] = words[1 : 1 + columns]
    among = chosen if chosen and all(gpu in rows for gpu in chosen) else sorted(rows)
    kinds = {
        rows[a][b]
        for a in among
        for b in among
        if a != b and b < len(rows.get(a, [])) and _JOINED.fullmatch(rows[a][b])
    }
    return "+".join(sorted(kinds))


def _peers(first: int, ranks: int) -> str:
    """Whether the GPUs reach each other's memory, as far as this process sees them."""
    try:
        import torch

        last = min(first + ranks, torch.cuda.device_count())
        pairs = [(a, b) for a in range(first, last) for b in range(first, last) if a != b]
        return "P2P" if pairs and all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs) else "none"
    except Exception:  # a name for what nobody could tell
        return "none"
