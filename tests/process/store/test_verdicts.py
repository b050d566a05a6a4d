"""Verdicts on whole steps, as they are stored."""

from __future__ import annotations

import dataclasses

import pytest

from autotune.store import Key, Store, Verdict
from tests.support.rows import ENVIRONMENT, FAR, GPU, NEAR, OTHER_GPU, put_key

GRAPH = "a" * 64


@pytest.fixture
def verdict(store: Store, key: Key) -> Verdict:
    made = Verdict(GRAPH, key.device, key.environment, "default", ("w" * 64,), {"compile_us": 2.0}, 5.0)
    store.put_verdicts([made])
    return made


def test_a_verdict_is_of_a_graph_a_device_and_a_mode(store: Store, verdict: Verdict) -> None:
    device = GPU.fingerprint
    assert store.get_verdict(GRAPH, device, ENVIRONMENT, "default") == verdict
    assert store.get_verdict("b" * 64, device, ENVIRONMENT, "default") is None
    assert store.get_verdict(GRAPH, OTHER_GPU.fingerprint, ENVIRONMENT, "default") is None
    assert store.get_verdict(GRAPH, device, ENVIRONMENT, "max-autotune-no-cudagraphs") is None


def test_software_may_differ_as_for_schedules_and_equal_software_goes_first(store: Store, verdict: Verdict) -> None:
    assert store.get_verdict(GRAPH, GPU.fingerprint, NEAR, "default") == verdict
    assert store.get_verdict(GRAPH, GPU.fingerprint, FAR, "default") is None
    near = dataclasses.replace(verdict, environment=put_key(store, env=NEAR).environment, left=(), when=1.0)
    store.put_verdicts([near])
    assert store.get_verdict(GRAPH, GPU.fingerprint, NEAR, "default") == near
    assert store.get_verdict(GRAPH, GPU.fingerprint, ENVIRONMENT, "default") == verdict


def test_a_new_verdict_replaces_the_old_one_and_code_compiled_with_that_is_not_used(
    store: Store, verdict: Verdict
) -> None:
    before = store.state()
    store.put_verdicts([dataclasses.replace(verdict, left=(), when=6.0)])
    (found,) = store.verdicts()
    assert (found.left, found.when) == ((), 6.0)
    after = store.state()
    assert before != after
    assert store.state() == after


def test_a_step_of_several_graphs_is_stored_whole_or_not_at_all(store: Store, key: Key) -> None:
    good = Verdict(GRAPH, key.device, key.environment, "default")
    with pytest.raises(ValueError, match="before it"):
        store.put_verdicts([good, dataclasses.replace(good, graph="b" * 64, device="nowhere")])
    assert store.verdicts() == []
