"""Regression test of a step against its record, with a bounded rate of false alarms.

A comparison times its contenders in turn, so sample ``i`` of each is of the same round. The statistic is the lower
quartile of a step's times, since other load on the machine only adds to them. With ``relative``, it is the ratio to
eager's lower quartile in the same rounds, which cancels effects on both.

The lower bound of the change is from a circular block bootstrap over rounds (Politis and Romano 1992), which preserves
the correlation of neighbouring samples. The test raises an alarm if the bound exceeds the tolerance. For an unchanged
step, that happens in at most :data:`ALPHA` of the runs. This assumes that other effects (another buffer address, a
clock) change its times by no more than the tolerance.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from autotune.errors import UserError, quoted_command

ALPHA = 0.01
"""Share of false alarms, one-sided."""

TOLERANCE = 0.03
"""Allowed relative difference of two runs of an unchanged step, for effects that samples of one run do not show."""

FEWEST = 5
"""Minimum number of samples for a test."""

_DRAWS = 2000
_FORM = "autotune step record 1"
_STORED_ROUNDS = 25
"""Assumed number of samples of a verdict in a database, which has only their median and spread."""


@dataclass(frozen=True)
class Change:
    """Change of one contender.

    Attributes:
        was_us, now_us: lower quartiles; ``was_us`` is None if the record has no time for it.
        change: relative change, 0.1 for 10% slower; ``low`` its lower bound.
        over: the contender whose time divides the others, "" if times are compared.
    """

    contender: str
    was_us: float | None
    now_us: float
    change: float
    low: float
    tolerance: float = TOLERANCE
    over: str = ""

    @property
    def slower(self) -> bool:
        return self.low > self.tolerance

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "slower": self.slower}


Samples = Sequence[Sequence[float]]
"""A contender's times in microseconds, optionally followed by eager's times of the same rounds as the denominator."""

_Array = np.ndarray[Any, np.dtype[np.float64]]


def bounded(record: Samples, now: Samples) -> tuple[float, float]:
    """Return the relative change of the lower quartile, and its lower bound.

    Raises:
        UserError: too few samples.
    """
    then, later = _together(record), _together(now)
    fewest = min(then.shape[1], later.shape[1])
    if fewest < FEWEST:
        raise UserError(f"{fewest} samples are too few for a comparison: give more --rounds")
    chance = np.random.default_rng(0)
    moved = _resampled(later, chance) - _resampled(then, chance)
    change = float(_level(later) - _level(then))
    return math.expm1(change), math.expm1(float(np.quantile(moved, ALPHA)))


def _together(samples: Samples) -> _Array:
    """Return logarithms of the samples, shape (contenders, rounds)."""
    rounds = min(map(len, samples))
    return np.log(np.array([taken[:rounds] for taken in samples], dtype=np.float64))


def _level(logs: _Array) -> _Array:
    """Return the first contender's lower quartile minus that of the second, if given; over the last axis."""
    quartiles = np.quantile(logs, 0.25, axis=-1)
    found: _Array = quartiles[0] - (quartiles[1] if len(quartiles) > 1 else 0.0)
    return found


def _resampled(logs: _Array, chance: np.random.Generator) -> _Array:
    """Return levels of block resamples; the block length is the cube root of the number of rounds."""
    n = logs.shape[1]
    block = max(1, round(n ** (1 / 3)))
    starts = chance.integers(0, n, size=(_DRAWS, -(-n // block)))
    places = ((starts[:, :, None] + np.arange(block)) % n).reshape(_DRAWS, -1)[:, :n]
    return _level(logs[:, places])


# Files --------------------------------------------------------------------------------------------


def name_of(target: str, inputs: str, train: bool) -> str:
    """Return the key of a step's record in a file."""
    return f"{target}({inputs})" + (" training" if train else "")


def save(file: Path, name: str, record: Mapping[str, Any]) -> None:
    """Write a step's record into a file; records of other steps stay.

    Raises:
        UserError: the file has another format, or cannot be written.
    """
    from autotune.files import whole_file

    found = read(file) if file.exists() else {}
    found[name] = {**record, "when": datetime.now(UTC).isoformat(timespec="seconds")}
    data = {"form": _FORM, "steps": dict(sorted(found.items()))}
    try:
        with whole_file(file) as out:
            out.write((json.dumps(data, indent=1, allow_nan=False) + "\n").encode())
    except OSError as error:
        raise UserError(f"--save {file}: {error.strerror}") from None


def read(file: Path) -> dict[str, dict[str, Any]]:
    """Return the records in a file, by name.

    Raises:
        UserError: the file does not exist, or has another format.
    """
    try:
        if file.exists() and not file.is_dir() and not file.is_file():
            raise UserError(f"{file} is a device or a pipe, not a file")
        data = json.loads(file.read_text())
        if data["form"] != _FORM:
            raise ValueError(data["form"])
        for record in data["steps"].values():
            samples = record["samples"].values()
            if not all(math.isfinite(us) and us > 0 for taken in samples for us in taken):
                raise ValueError("samples")
            str(record["device"])
        return dict(data["steps"])
    except FileNotFoundError:
        raise UserError(f"{file}: no such file: write one with {quoted_command('--save', str(file))}") from None
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{file} is not a file that `autotune compare --save` wrote") from None


def changes(
    record: Mapping[str, Any],
    now: Mapping[str, Sequence[float]],
    subjects: Sequence[str],
    *,
    relative: bool,
    tolerance: float,
) -> list[Change]:
    """Return the change of each subject against its record.

    Args:
        record: a record of a file; ``now``: samples by contender, including eager's.
        subjects: contenders to test.

    Raises:
        UserError: the record lacks one of them.
    """
    from autotune.bench.step import EAGER

    found, then = [], record["samples"]
    for name in subjects:
        if name not in then or (relative and EAGER not in then):
            raise UserError(f"the record has no samples of {name}: replace it with --save and the same --mode")
        used = (name, EAGER) if relative else (name,)
        change, low = bounded([then[who] for who in used], [now[who] for who in used])
        was_us, now_us = (float(np.quantile(samples[name], 0.25)) for samples in (then, now))
        found.append(Change(name, was_us, now_us, change, low, tolerance, EAGER if relative else ""))
    return found


def against_verdict(
    verdict: Mapping[str, Any], name: str, now: Mapping[str, Sequence[float]], peer: str, tolerance: float
) -> Change | None:
    """Return the change of a subject's time over ``torch.compile``'s against a stored verdict's medians and spread.

    Returns:
        None if the verdict has no time for autotune, since everything was left to Inductor.
    """
    ratio, noise = verdict.get("ratio"), verdict.get("noise")
    was = verdict.get("autotune_us")
    numbers = all(isinstance(v, (int, float)) and math.isfinite(v) and v > 0 for v in (ratio, was))
    if not numbers or not isinstance(noise, (int, float)) or ratio is None or was is None:
        return None
    # Normal samples with the stored medians and interquartile range replace the original ones, which were not stored.
    steps = np.arange(1, _STORED_ROUNDS + 1) / (_STORED_ROUNDS + 1)
    normal = np.array([NormalDist().inv_cdf(float(p)) for p in steps]) * max(float(noise), 0.0) / 1.349
    shuffled = np.random.default_rng(0).permutation(normal)
    before = [list(was * np.exp(normal)), list(was * ratio * np.exp(shuffled))]
    change, low = bounded(before, [now[name], now[peer]])
    return Change(name, float(was), float(np.quantile(now[name], 0.25)), change, low, tolerance, peer)
