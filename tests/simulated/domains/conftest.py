"""Fake devices for the tests of messages between ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.c3.fake_driver import Device


@pytest.fixture
def device() -> Iterator[Device]:
    """Ranks whose memory, streams and driver are fake."""
    with pytest.MonkeyPatch.context() as patch:
        yield Device(patch)
