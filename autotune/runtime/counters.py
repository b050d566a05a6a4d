"""What deployment did in this process, counted.

Regions are counted when a graph is compiled; fall-backs and clones of misaligned inputs when they happen.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

NAMES = (
    "graphs",
    "hits",
    "hits_other_rows",
    "hits_packaged",
    "baseline_wins",
    "misses",
    "left",
    "left_by_options",
    "unsupported",
    "fallbacks",
    "wrong_results",
    "misaligned",
    "restrided",
    "attention",
    "overlaps",
    "overlap_hits",
    "overlap_faults",
)


class Counters(Mapping[str, int]):
    """A snapshot: a read-only mapping whose items are attributes too (``counters().hits``).

    A warm start from Inductor's cache looks up no graph. It counts the kernels that it loads as ``hits``.

    ==================  ============================================================================================
    ``graphs``          aten graphs looked up (forward, backward and inference each count)
    ``hits``            regions with a stored winner, whatever its level and whoever won
    ``hits_other_rows`` those of them whose schedule was tuned for another number of rows; of dynamic shapes, each
                        number of rows that came
    ``hits_packaged``   those of them whose schedule comes with autotune; their miss is noted all the same
    ``baseline_wins``   those of them where the stored winner is what the user had
    ``misses``          regions that could be tuned and are not
    ``left``            regions left to Inductor, since their whole step was measured to be faster so
    ``left_by_options`` regions left to Inductor, since an option of Inductor's requires results that stored kernels do
                        not compute; a warning names the option
    ``unsupported``     regions this version cannot express as a kernel, or not for sizes that are unknown
    ``fallbacks``       regions whose stored kernel could not be loaded or launched; they run as the user had them
    ``wrong_results``   those of them whose kernels computed something else than the region's operators
    ``misaligned``      inputs copied because their address did not suit the kernel's vector loads
    ``restrided``       inputs copied because another compiler handed them over in other strides
    ``attention``       calls of ``scaled_dot_product_attention`` rewritten so that a fused kernel takes them
    ``overlaps``        scenarios looked up by ``autotune.overlap``
    ``overlap_hits``    those of them that were tuned, or one near them
    ``overlap_faults``  strategies that could not be run on this machine or group; the default took their place
    ==================  ============================================================================================
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, int]) -> None:
        self._values = {name: int(values.get(name, 0)) for name in NAMES}

    def __getitem__(self, name: str) -> int:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __getattr__(self, name: str) -> int:
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(f"no counter is called {name!r}; there are {', '.join(NAMES)}") from None

    def __repr__(self) -> str:
        return "Counters(" + ", ".join(f"{k}={v}" for k, v in self._values.items() if v) + ")"


_lock = threading.Lock()
_counts = dict.fromkeys(NAMES, 0)


def count(name: str, n: int = 1) -> None:
    """Add ``n`` to a counter."""
    with _lock:
        _counts[name] += n


def counters() -> Counters:
    """What deployment has done in this process since it started or since :func:`reset_counters`."""
    with _lock:
        return Counters(_counts)


def reset_counters() -> None:
    """Set every counter to zero."""
    with _lock:
        for name in NAMES:
            _counts[name] = 0
