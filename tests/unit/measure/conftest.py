"""A clock of our own in place of ``time``, and the toy domain's policy."""

from __future__ import annotations

import pytest

from autotune.measure.policy import Policy
from tests.support.clock import Clock, read_samples
from tests.support.toy.policy import QUICK


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    read_samples(made, monkeypatch.setattr)
    return made


@pytest.fixture
def policy() -> Policy:
    return QUICK
