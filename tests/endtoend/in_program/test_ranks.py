"""Ranks of one program: each workload is searched by one of them, and all run what it found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runtime.ranks import Ranks


@pytest.mark.parametrize("together", [False, True])
def test_two_ranks(db: str, tmp_path: Path, together: bool) -> None:
    with Ranks(tmp_path) as ranks:
        one, other = ranks.run("tests.support.runtime.search_checks", "step", db, together)
    searched = [*one["searched"], *other["searched"]]
    assert searched
    assert len(searched) == len(set(searched)), "no workload is searched twice"
    assert one["hits"] == other["hits"] > 0
    assert one["found"] == pytest.approx(other["found"], rel=1e-6)
