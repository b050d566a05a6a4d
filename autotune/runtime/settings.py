"""Settings and counters of deployment, for ``autotune.configure`` and ``autotune.counters``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from autotune.errors import UserError
from autotune.store.reading import Match

OtherDevice = Literal["refuse", "warn"]
Packaged = Literal["use", "refuse"]
Attention = Literal["fuse", "keep"]
Unsearched = Literal["default", "leave"]
Products = Literal["search", "leave"]
Verify = Literal["auto", "first", "always", "never"]

_ALLOWED: dict[str, tuple[str, ...]] = {
    "environment": get_args(Match),
    "other_device": get_args(OtherDevice),
    "packaged": get_args(Packaged),
    "verify": get_args(Verify),
    "attention": get_args(Attention),
    "unsearched": get_args(Unsearched),
    "products": get_args(Products),
}


@dataclass(frozen=True)
class Settings:
    """The settings of deployment.

    Attributes:
        environment: whether a schedule may have been tuned with other software ($AUTOTUNE_ENVIRONMENT). "strict"
            requires equal versions of everything. "loose" accepts equal minor versions of torch and CUDA, prefers equal
            software, and warns once of each difference. "ignore" accepts any software without a warning.
        other_device: use of a schedule that was tuned on another device of the same architecture
            ($AUTOTUNE_OTHER_DEVICE). "refuse" uses none: the region is a miss, which a search can measure here. "warn"
            uses it, warns once, and still records the miss.
        packaged: use of shipped schedules if the database has no match ($AUTOTUNE_PACKAGED): "use" or "refuse". They
            are for this device, or else for a GPU of the same architecture. They were measured on another device, as
            separate regions, and not in the user's step. Versions of torch and CUDA only matter for them with "strict".
            The miss is still recorded.
        rows: the largest ratio between the actual number of rows and the tuned one, in either direction
            ($AUTOTUNE_ROWS).
        verify: when a stored kernel's results are compared with those of the region's own operators
            ($AUTOTUNE_VERIFY). "first": at its first call in a process. "always": at every call. "never". "auto": at
            its first call, if it was tuned under other conditions (rows, device or software) than the current ones.
        attention: whether calls of ``scaled_dot_product_attention`` are rewritten so that a fused kernel runs them
            ($AUTOTUNE_ATTENTION): "fuse" or "keep". It applies to searches too. Rules:
            :mod:`autotune.compiler.capture.attention`.
        unsearched: code for a region without a search ($AUTOTUNE_UNSEARCHED, and ``options={"unsearched": ...}``
            of ``torch.compile``). "default": the schedule that cost models and stored measurements predict to be best,
            if it is correct and faster than Inductor's code when both are timed once. "leave": Inductor's code.
        products: search and deploy matrix products with algorithms and epilogues of cuBLASLt
            ($AUTOTUNE_PRODUCTS): "search" or "leave".
    """

    environment: Match = "loose"
    other_device: OtherDevice = "refuse"
    packaged: Packaged = "use"
    rows: float = 16.0
    verify: Verify = "auto"
    attention: Attention = "fuse"
    unsearched: Unsearched = "leave"
    products: Products = "leave"

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Settings:
        """The given settings, else those of the environment, else the defaults.

        Raises:
            UserError: invalid value of an environment variable.
        """
        variables = {f.name: f"AUTOTUNE_{f.name.upper()}" for f in fields(cls)}
        texts = {name: text for name, variable in variables.items() if (text := os.environ.get(variable))}
        return cls(**{**{name: checked(name, text, variables[name]) for name, text in texts.items()}, **given})


def checked(name: str, value: Any, what: str) -> Any:
    """Check and convert a value of setting ``name`` of :class:`Settings`.

    Args:
        what: name of the setting in errors.

    Raises:
        UserError: invalid value.
    """
    if name == "rows":
        try:
            ratio = float(value)
        except (TypeError, ValueError):
            ratio = 0.0
        if not ratio >= 1.0:
            raise UserError(f"{what}: {value!r} must be a ratio of rows of 1 or more, such as 16 or inf")
        return ratio
    if value not in _ALLOWED[name]:
        raise UserError(f"{what}: {value!r} must be one of {', '.join(_ALLOWED[name])}")
    return value


COUNTERS = (
    "graphs",
    "hits",
    "hits_other_rows",
    "hits_packaged",
    "hits_predicted",
    "predicted",
    "predicted_wrong",
    "baseline_wins",
    "misses",
    "left",
    "left_by_options",
    "unsupported",
    "fallbacks",
    "wrong_results",
    "misaligned",
    "restrided",
    "products",
    "attention",
    "overlaps",
    "overlap_hits",
    "overlap_faults",
)


class Counters(Mapping[str, int]):
    """A snapshot of the counters: a read-only mapping whose items are also attributes (``counters().hits``).

    A warm start from Inductor's cache looks up no graph. Kernels that it loads count as ``hits``.

    ==================  ============================================================================================
    ``graphs``          aten graphs looked up (forward, backward and inference each count)
    ``hits``            regions with a stored winner, at any match level, including baselines
    ``hits_other_rows`` hits whose schedule was tuned for another number of rows; with dynamic shapes, one for each
                        number of rows called
    ``hits_packaged``   hits whose schedule is shipped with autotune; the miss is still recorded
    ``hits_predicted``  hits whose schedule was predicted and timed once, not searched
    ``predicted``       workloads whose predicted schedule was faster than Inductor's code when it was tried
    ``predicted_wrong`` workloads whose predicted schedule was tried and was not faster
    ``baseline_wins``   hits whose stored winner is a baseline
    ``misses``          regions that could be tuned and are not
    ``left``            regions left to Inductor, since that made their whole step measurably faster
    ``left_by_options`` regions left to Inductor, since an option of Inductor's requires results that stored kernels do
                        not compute; a warning names the option
    ``unsupported``     regions this version cannot express as a kernel, or not for unknown sizes
    ``fallbacks``       different regions whose stored kernel could not be loaded or launched, or was wrong; their own
                        operators run instead
    ``wrong_results``   fallbacks whose kernels disagreed with the region's operators
    ``misaligned``      inputs copied because their address is not aligned for the kernel's vector loads
    ``restrided``       inputs copied because another compiler passed them with other strides
    ``products``        products computed by a stored algorithm of cuBLASLt, with the operators fused into them
    ``attention``       calls of ``scaled_dot_product_attention`` rewritten so that a fused kernel runs them
    ``overlaps``        scenarios looked up by ``autotune.overlap``
    ``overlap_hits``    scenarios that were tuned, or one near them
    ``overlap_faults``  strategies that could not run on this machine or group and were replaced by the default
    ==================  ============================================================================================
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, int]) -> None:
        self._values = {name: int(values.get(name, 0)) for name in COUNTERS}

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
            raise AttributeError(f"no counter is called {name!r}; there are {', '.join(COUNTERS)}") from None

    def __repr__(self) -> str:
        return "Counters(" + ", ".join(f"{k}={v}" for k, v in self._values.items() if v) + ")"
