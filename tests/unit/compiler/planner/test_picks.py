"""The cost model's picks, and the caches of their planning: the same results as without caches."""

from __future__ import annotations

import math
import pickle
import random
import zlib
from collections.abc import Iterator

import pytest

from autotune.compiler.planner.groups import group_configs
from autotune.compiler.schedules.cuda import scheme_of
from autotune.compiler.targets.cuda.device import shared_bytes
from autotune.domains.fusion.task import FusionTask
from autotune.errors import Unsupported
from autotune.ir.graph import Graph, Output, Value
from autotune.task import Config, config_key
from autotune.tuner import seeds
from autotune.workload import Workload
from tests.support.zoo import workloads

MODELLED = ["relu_statistics", "layer_norm_backward", "momentum", "transposed", "rope"]
"""Workloads whose schemes have a cost model."""
CASES = [*MODELLED, "outer_softmax", "tile_scaling", "scatter_tied"]


def tasks(names: list[str]) -> Iterator[tuple[Workload, FusionTask]]:
    for name in names:
        for work in workloads(name):
            whole = FusionTask(work, "cuda:0", "sm_90", 132).under("", {})
            parts = {p.fingerprint: p for c in whole.compositions(2) for p in c.parts}
            for part in (work, *parts.values()):
                yield part, FusionTask(part, "cuda:0", "sm_90", 132).under("", {})


def plain_picks(task: FusionTask, seed: int) -> list[Config]:
    """The definition of :func:`autotune.tuner.seeds.picks`, a candidate at a time."""
    space, rng = task.space(), random.Random(seed)
    drawn = [task.normalize(space.sample(rng)) for _ in range(min(seeds._DRAWS, 2 * space.size))]
    every = {config_key(c): c for c in (task.default(), *task.seeds(), *drawn)}.values()
    left = [(math.log(us), c) for c in every if (us := task.predict(c))]
    left.sort(key=lambda found: found[0])
    picked: list[Config] = []

    def alike(config: Config) -> float:
        shares = (len(config.items() & other.items()) / max(len(config), len(other)) for other in picked)
        return max(shares, default=0.0)

    while left and len(picked) < seeds.PICKS:
        best = min(left, key=lambda found: found[0] + seeds._ALIKE * alike(found[1]))
        left.remove(best)
        if task.reject(best[1]) is None:
            picked.append(best[1])
    return picked


@pytest.mark.parametrize("name", MODELLED)
def test_the_picks_are_those_of_their_definition(name: str) -> None:
    count = 0
    for _, task in tasks([name]):
        chosen = seeds.picks(task, task.space(), 7)
        assert chosen == plain_picks(task, 7)
        count += len(chosen)
    assert count >= seeds.PICKS


@pytest.mark.parametrize("name", CASES)
def test_blocks_do_not_depend_on_hints_and_register_caps(name: str) -> None:
    """They are cached without those parameters; here each kernel is built with them."""
    rng = random.Random(zlib.crc32(name.encode()))
    built = 0
    for _, task in tasks([name]):
        for _ in range(16):
            config = task.space().sample(rng)
            for group, part in zip(task.plan.groups, group_configs(task.plan, config), strict=True):
                scheme = scheme_of(group.graph)
                why = ""
                try:
                    source = scheme.main(group.graph, part)
                except Unsupported as error:
                    why = str(error)
                if why:
                    assert scheme.block(group.graph, part) == why
                    assert scheme.reject(group.graph, part) == why
                    continue
                shared = int(source.launch["shared"]) + shared_bytes(source.body)
                assert scheme.block(group.graph, part) == (source.block, shared)
                assert source.max_registers == part["max_registers"]
                built += 1
    assert built


def of_constant(number: float | int | bool) -> Graph:
    values = (
        Value("load", axes=(0,), slot=0, strides=(1,)),
        Value("const", number=number),
        Value("add", (0, 1), (0,)),
    )
    return Graph((64,), values, ("float32",), (Output(2, (0,), (1,), "float32"),))


def test_graphs_differ_by_the_sign_and_type_of_a_constant() -> None:
    assert of_constant(0.0) == of_constant(0.0)
    assert hash(of_constant(0.0)) == hash(of_constant(0.0))
    assert of_constant(0.0) != of_constant(-0.0)
    assert of_constant(1.0) != of_constant(True)
    assert of_constant(0.0) != "a graph"


def test_a_pickled_graph_has_no_hash() -> None:
    """Hashes of strings differ between processes."""
    graph = of_constant(2.0)
    hash(graph)
    again = pickle.loads(pickle.dumps(graph))
    assert again == graph
    assert set(vars(pickle.loads(pickle.dumps(graph)))) == {"extents", "values", "inputs", "outputs", "precision"}
