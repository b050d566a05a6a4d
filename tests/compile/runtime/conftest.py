"""Each test counts from zero."""

from __future__ import annotations

import pytest

from autotune.runtime.deployment import deployment


@pytest.fixture(autouse=True)
def from_zero() -> None:
    deployment().reset_counters()
