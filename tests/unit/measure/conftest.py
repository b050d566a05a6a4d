"""A clock of our own in place of ``time``, and the toy domain's policy."""

from __future__ import annotations

import pytest

from autotune.measure.policy import Policy
from autotune.measure.timing import rotate, timer
from tests.support.clock import Clock
from tests.support.toy.policy import QUICK


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (timer, rotate):
        monkeypatch.setattr(module, "time", made)
    return made


@pytest.fixture
def policy() -> Policy:
    return QUICK
