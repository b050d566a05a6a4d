"""Equality of workloads."""

from __future__ import annotations

from autotune.workload import Workload


def test_kind_and_spec_are_the_identity_and_nothing_else_is() -> None:
    one = Workload("fusion", {"rows": 8}, family="f", extent=8, label="a", source={"calls": []})
    assert one == Workload("fusion", {"rows": 8})
    assert one != Workload("c3", {"rows": 8})
    assert one != Workload("fusion", {"rows": 9})
