"""Memory of grid barriers: a piece a stream, a new one for each capture, and captures alone do not exhaust it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from autotune.runtime import state

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def capturing(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bool]]:
    now = {"capturing": False}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now["capturing"])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda d: SimpleNamespace(synchronize=lambda: None))
    for name in ("_pools", "_by_stream"):
        monkeypatch.setattr(state, name, {})
    monkeypatch.setattr(state, "_captured", [])
    return now


def test_streams_have_their_own_and_keep_it() -> None:
    one, two = state.state_for(CPU, 1, 64), state.state_for(CPU, 2, 64)
    assert one.data_ptr() == state.state_for(CPU, 1, 64).data_ptr()
    assert abs(one.data_ptr() - two.data_ptr()) >= 256
    assert not one.any()


def test_each_capture_takes_a_new_piece(capturing: dict[str, bool]) -> None:
    own = state.state_for(CPU, 1, 64).data_ptr()
    capturing["capturing"] = True
    taken = {state.state_for(CPU, 1, 64).data_ptr() for _ in range(100)}
    assert len(taken) == 100
    assert own not in taken


def test_captures_between_launches_do_not_run_out(capturing: dict[str, bool]) -> None:
    for _ in range(40):
        capturing["capturing"] = False
        state.state_for(CPU, 1, 64)
        capturing["capturing"] = True
        for _ in range(100):
            state.state_for(CPU, 1, 64)


def test_the_first_launch_is_not_captured(capturing: dict[str, bool]) -> None:
    capturing["capturing"] = True
    with pytest.raises(RuntimeError, match="before it ran"):
        state.state_for(CPU, 1, 64)
