"""The arguments of ``triton.autotune`` as a space: by fakes of Triton's objects, which need no Triton.

``tests/process/domains/test_kernel_triton.py`` runs Triton's own kernels with its interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from autotune.domains.kernel.bench import same
from autotune.domains.kernel.kernel import Kernel
from autotune.domains.kernel.space import KernelSpace
from autotune.domains.kernel.triton import converted
from autotune.errors import UserError


@dataclass
class Config:
    """As ``triton.Config`` has them."""

    kwargs: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    num_ctas: int = 1
    maxnreg: int | None = None
    pre_hook: Any = None
    ir_override: Any = field(default=None)


CONFIGS = [Config({"B": 16}, num_warps=2), Config({"B": 32}), Config({"B": 64}, num_stages=2)]
POINTS = (
    {"B": 16, "num_warps": 2, "num_stages": 3},
    {"B": 32, "num_warps": 4, "num_stages": 3},
    {"B": 64, "num_warps": 4, "num_stages": 2},
)


def test_a_list_of_configurations_is_a_space_of_points() -> None:
    found = converted(CONFIGS, ["n"], None, ["y"], ["z"])
    assert found.points == POINTS
    assert (found.key, found.reset, found.restore, found.prune) == (("n",), ("y",), ("z",), None)
    clustered = converted([Config({"B": 16}, num_ctas=2), Config({"B": 16})], ["n"])
    assert [p["num_ctas"] for p in clustered.points] == [2, 1]


class Launched:
    """Triton's compiled kernel: launched as ``kernel[grid](...)``, which returns itself."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> Launched:
            self.calls.append((grid, args, kwargs))
            return self

        return launch


def test_triton_launch_returns_none() -> None:
    compiled = Launched()
    kernel = Kernel(compiled, KernelSpace.__new__(KernelSpace), name="k", grid=(4,))
    assert kernel.launch((1,), {"n": 2}, {"B": 16}) is None
    assert compiled.calls == [((4,), (1,), {"n": 2, "B": 16})]
    assert kernel.launch((), {}, {}) is None


def test_comparison_of_incomparable_results_fails_in_one_line() -> None:
    class OnADevice:
        def __array__(self, *_: Any, **__: Any) -> Any:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")

    verdict = same(OnADevice(), OnADevice(), 8, None, "result")
    assert (verdict.ok, verdict.detail) == (False, "result: a OnADevice that differs")


def test_early_pruning_keeps_the_returned_configurations() -> None:
    def early(configs: list[Config], arguments: dict[str, Any], **_: Any) -> list[Config]:
        return [c for c in configs if c.kwargs["B"] <= arguments["n"]]

    prune = converted(CONFIGS, ["n"], {"early_config_prune": early}).prune
    assert prune is not None
    assert prune({"n": 40}, [dict(p) for p in POINTS]) == list(POINTS[:2])
    with pytest.raises(UserError, match="prune_configs_by returned no configuration"):
        prune({"n": 4}, [dict(p) for p in POINTS])
    with pytest.raises(UserError, match="prune_configs_by failed: KeyError"):
        prune({}, [dict(p) for p in POINTS])


@pytest.mark.parametrize(("top", "left"), [(1, [2]), (2, [2, 1]), (0.34, [2]), (0.0, [2]), (1.0, [2, 1, 0])])
def test_a_performance_model_leaves_its_best(top: float, left: list[int]) -> None:
    def model(n: int, B: int, num_warps: int, **_: Any) -> float:
        return n / B / num_warps

    prune = converted(CONFIGS, ["n"], {"perf_model": model, "top_k": top}).prune
    assert prune is not None
    assert prune({"n": 40}, [dict(p) for p in POINTS]) == [POINTS[i] for i in left]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"configs": [Config({"B": 1}, pre_hook=print)]}, "configuration 1 has a pre_hook"),
        ({"configs": [Config({"B": 1}, ir_override="x.ttir")]}, "configuration 1 has an ir_override"),
        ({"configs": [3]}, "configuration 1 is 3"),
        ({"pre_hook": print}, "pre_hook and post_hook are not supported"),
        ({"post_hook": print}, "pre_hook and post_hook are not supported"),
        ({"prune_configs_by": {"worst": print}}, "prune_configs_by has 'worst'"),
    ],
)
def test_unsupported_triton_arguments_are_refused_in_one_line(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        converted(**{"configs": CONFIGS, "key": ["n"], **arguments})
