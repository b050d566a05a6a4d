"""The output of the demo's last command."""

from __future__ import annotations

import pytest

import autotune
from autotune.runtime.settings import Counters
from examples import residual_norms


@pytest.mark.parametrize(
    ("counted", "code", "said"),
    [
        (Counters({"graphs": 2, "hits": 3, "left": 11}), 0, ""),
        (Counters({"graphs": 2, "left": 14}), 0, "Inductor runs all of it"),
        (Counters({"graphs": 2, "misses": 14}), 1, "nothing was found in the database"),
    ],
)
def test_regions_left_to_inductor_were_found(
    counted: Counters, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(residual_norms, "train", lambda model, step, given: [1.0, 0.9])
    monkeypatch.setattr(autotune, "counters", lambda: counted)
    assert residual_norms.main(["--device", "cpu"]) == code
    out, err = capsys.readouterr()
    last = (out + err).splitlines()[-1]
    assert said in last
    assert bool(err) == bool(code)
