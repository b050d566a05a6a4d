"""The distribution of a search's time over regions of different size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autotune import api
from autotune.cli.app import build_parser
from autotune.cli.commands import search
from autotune.domains.fusion.program_spec import workloads_of
from autotune.ir.graph import Graph
from autotune.store import Store
from autotune.workload import Workload
from tests.support.toy.toy_domain import workload


def softmax(rows: int) -> Workload:
    ((found, _),) = workloads_of(lambda x: torch.softmax(x, -1), (torch.zeros(rows, 1024),))
    return found


def test_time_goes_where_bytes_are_and_small_regions_keep_a_share() -> None:
    large, small, tiny = softmax(8192), softmax(512), softmax(2)
    assert Graph.from_json(large.spec).bytes_moved == 2 * 8192 * 1024 * 4
    weights = api.time_weights([(large, 1), (small, 3), (tiny, 2), (workload(), 5)])
    assert weights == {
        large.fingerprint: 8.0,  # the root of 64 MiB
        small.fingerprint: 3 * 2.0,
        tiny.fingerprint: 2.0,
        workload().fingerprint: 5.0,
    }


def test_both_ways_to_start_a_search_share_so(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(api, "tune_workloads", lambda *a, **options: seen.append(options) or [])
    large, tiny = softmax(8192), softmax(2)
    api.search([large, tiny], device="cpu", db=url)
    api.search(lambda x: torch.softmax(x, -1), torch.zeros(8192, 1024), device="cpu", db=url)
    api.search([large], device="cpu", db=url, weights={"mine": 2.0})
    args = build_parser().parse_args(["search", "--missed", "--device", "cpu", "--trials", "1"])
    with Store.open(url) as store:
        search.Search(args, ["cpu"], store, search.SearchHooks()).run("missed workloads", [(large, 2), (tiny, 1)], None)
    assert [options["weights"] for options in seen] == [
        {large.fingerprint: 8.0, tiny.fingerprint: 1.0},
        {large.fingerprint: 8.0},
        {"mine": 2.0},
        {large.fingerprint: 16.0, tiny.fingerprint: 1.0},
    ]
