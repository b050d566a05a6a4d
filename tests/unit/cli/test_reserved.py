"""The seconds of ``--timeout`` that a program's step gets."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from autotune.cli.step_verdicts import LIMIT_S, STEP_SHARE, reserved_s


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, STEP_SHARE * 60),
        ({"mode": ["default", "max-autotune"]}, STEP_SHARE * 60),
        ({"timeout": 10_000.0}, LIMIT_S),
        ({"timeout": 10_000.0, "mode": ["default", "max-autotune"]}, 2 * LIMIT_S),
        ({"timeout": None}, 0.0),
        ({"step_timeout": 5.0}, 0.0),
    ],
)
def test_a_program_s_step_gets_a_share_unless_its_seconds_are_given(changes: dict[str, Any], expected: float) -> None:
    args = argparse.Namespace(**{"mode": ["default"], "timeout": 60.0, "step_timeout": None, **changes})
    assert reserved_s(args) == pytest.approx(expected)
