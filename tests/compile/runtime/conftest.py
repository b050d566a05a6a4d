"""Each test counts from zero."""

from __future__ import annotations

import pytest

from autotune.runtime.counters import reset_counters


@pytest.fixture(autouse=True)
def from_zero() -> None:
    reset_counters()
