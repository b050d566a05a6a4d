"""Ranks with different databases deploy nothing in graphs with collectives, and everything where no rank waits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autotune.store import Store
from autotune.store.snapshot_writer import export_snapshot
from tests.support.deployment import Tune
from tests.support.runtime.agreement_checks import softmax
from tests.support.runtime.ranks import Ranks


@pytest.mark.parametrize("equal", [True, False])
def test_two_ranks(tune: Tune, db: str, tmp_path: Path, equal: bool) -> None:
    tune(softmax, (torch.randn(32, 48),))
    dbs = [str(tmp_path / "one.atdb"), str(tmp_path / "two.atdb")]
    with Store.open(db) as store:
        export_snapshot(store, dbs[0])
    Path(dbs[1]).write_bytes(Path(dbs[0]).read_bytes())
    if not equal:
        dbs[1] = str(tmp_path / "empty.db")
    with Ranks(tmp_path) as ranks:
        beside = ranks.run("tests.support.runtime.agreement_checks", "deploy", dbs, True)
        alone = ranks.run("tests.support.runtime.agreement_checks", "deploy", dbs, False)
    assert all(found["right"] for found in (*beside, *alone))
    assert [found["hits"] for found in beside] == ([1, 1] if equal else [0, 0])
    assert [found["hits"] for found in alone] == ([1, 1] if equal else [1, 0])
